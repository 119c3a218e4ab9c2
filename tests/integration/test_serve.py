"""`specrl serve` registers a schedule with Prefect; each of its flow runs is a run of its own."""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from flows.server import PrefectServer
from tests.integration.pipeline_runs import SMOKE, specrl
from tests.prefect_api import request


def call(url: str, *, seconds: float = 120, **body: Any) -> Any:
    """What Prefect's server answers; while its database is busy that is 503, and one asks again, as its client does."""
    question = request(url, body)
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(question, timeout=60) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def first_with(url: str, key: str, values: tuple[str, ...], seconds: float = 240, **filters: Any) -> Any:
    """The first entry of a listing whose `key` is one of `values`, once there is one; the server may be others' too."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := [entry for entry in call(f"{url}/filter", **filters) if entry[key] in values]:
            return found[0]
        time.sleep(0.3)
    raise AssertionError(f"no {key} of {values} in {url} after {seconds} s")


def test_a_served_configuration_runs_when_prefect_says_so(tmp_path: Path) -> None:
    problems, runs = tmp_path / "problems.jsonl", tmp_path / "runs"
    problems.write_text("".join(json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(80)))
    data = {"source": "file", "path": str(problems), "reward": "exact_match"}
    settings = [f"--set=data.{key}={value}" for key, value in data.items()]
    with PrefectServer(runs) as server:
        server.wait()
        with pytest.raises(urllib.error.HTTPError, match="401"):  # as another user of this machine would
            urllib.request.urlopen(f"{server.url}/admin/version", timeout=60)
        process = specrl("serve", str(SMOKE), "--cron", "0 3 1 1 *", f"--set=runs_dir={runs}", *settings)
        try:
            deployment = first_with(f"{server.url}/deployments", "name", ("smoke",))
            assert [schedule["schedule"]["cron"] for schedule in deployment["schedules"]] == ["0 3 1 1 *"]
            problems.unlink()
            made = call(f"{server.url}/deployments/{deployment['id']}/create_flow_run")
            own = {"id": {"any_": [made["id"]]}}
            ended = ("FAILED", "CRASHED", "COMPLETED")
            failed = first_with(f"{server.url}/flow_runs", "state_type", ended, flow_runs=own)
        finally:
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=120)
    # What a run needs is looked at again at its own time, and a run that cannot start leaves nothing behind.
    assert f"{problems}: there is no such file" in failed["state"]["message"]
    assert not list(runs.glob("smoke*"))
    assert "Traceback" not in output, output
