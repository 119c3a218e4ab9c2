"""Who may write to a run, and who may use the servers that `specrl` starts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from flows.change import change_run
from flows.folder import LOCK_FILE, only_flow, write_config
from flows.mlflow_ui import TokenGuard
from slurm.access import UMASKS, check_access, restrict
from specrl.config import ClusterConfig, Config, ConfigError
from specrl.processes import is_locked


@pytest.fixture(autouse=True)
def umask() -> Any:
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.mark.parametrize(("access", "mode"), [("owner", 0o700), ("group", 0o750)])
def test_a_new_run_is_readable_to_those_whom_the_configuration_names(tmp_path: Path, access: Any, mode: int) -> None:
    restrict(ClusterConfig(access=access))
    with only_flow(tmp_path / "runs" / "run", ClusterConfig()):
        assert (tmp_path / "runs" / "run").stat().st_mode & 0o777 == mode
    assert UMASKS[access] & 0o022 == 0o022


def test_a_run_is_seen_to_be_worked_on_by_those_who_may_only_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o755)
    monkeypatch.chdir(run_dir)  # the folders above it are closed to others
    lock = Path(LOCK_FILE)
    with only_flow(run_dir, ClusterConfig()):
        lock.chmod(0o444)
        assert as_reader(lambda: is_locked(lock))
    assert not as_reader(lambda: is_locked(lock))


def as_reader(look: Callable[[], bool]) -> bool:
    """Look as a user who may not write, which for root is another one."""
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        return look()
    finally:
        os.seteuid(user)


def test_what_a_change_writes_is_as_private_as_the_run(tmp_path: Path) -> None:
    config = Config(name="run", runs_dir=tmp_path)
    write_config(config)
    with pytest.raises(ConfigError, match="has not begun"):
        change_run(config.run_dir, (), Console(), dry_run=True)
    assert os.umask(0o002) == UMASKS["owner"]


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_run_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    check_access(tmp_path, ClusterConfig())
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match=f"others can write to .*mode {mode:o}.*chmod -R go-w"):
        check_access(tmp_path, ClusterConfig())
    with pytest.raises(ConfigError, match="others can write"), only_flow(tmp_path, ClusterConfig()):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_a_run_of_somebody_else_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        check_access(tmp_path, ClusterConfig())


async def application(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"secret"})


def ask(path: str, **headers: str) -> httpx.Response:
    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(app=TokenGuard(application, "right"))
        async with httpx.AsyncClient(transport=transport, base_url="http://ui") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(answer())


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/", {}, 403),
        ("/?token=wrong", {}, 403),
        ("/ajax-api/2.0/mlflow/experiments/search", {"authorization": "Bearer wrong"}, 403),
        ("/", {"cookie": "specrl-ui-token=wrong"}, 403),
        ("/health", {}, 200),
        ("/", {"authorization": "Bearer right"}, 200),
        ("/", {"cookie": "other=1; specrl-ui-token=right"}, 200),
    ],
)
def test_the_pages_need_the_token(path: str, headers: dict[str, str], status: int) -> None:
    answer = ask(path, **headers)
    assert answer.status_code == status
    assert ("secret" in answer.text) == (status == 200)


def test_the_printed_address_leaves_its_token_in_a_cookie() -> None:
    answer = ask("/?token=right")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert ask("/", cookie=answer.headers["set-cookie"].partition(";")[0]).status_code == 200
