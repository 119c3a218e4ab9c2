"""Somebody else's folder: nothing in it is executed, nothing outside of it is read, sent or removed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows.execute import continue_with_own_code
from slurm import trust
from slurm.access import check_access
from slurm.backend import StageRequest
from slurm.commands import python_command
from slurm.environment import job_environment, snapshot_code
from specrl.config import ClusterConfig, ConfigError
from specrl.context import StageContext
from tests.security.hostile import (
    COMMANDS,
    NOBODY,
    READING,
    WORDS,
    Attacked,
    Ended,
    attacked,
    edit,
    in_fork,
    line_of,
    rename_code,
    specrl,
)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to somebody else")
TAKES_RUN = pytest.mark.parametrize(("command", "option"), COMMANDS, ids=[" ".join(path) for path, _ in COMMANDS])


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder that other users may enter, as they may not enter pytest's."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def give_away(run: Attacked) -> None:
    run.give_to(NOBODY)


def open_the_folder(run: Attacked) -> None:
    run.run_dir.chmod(0o775)


def open_a_source(run: Attacked) -> None:
    next(run.run_dir.glob("code/*/specrl/loop.py")).chmod(0o664)


def open_the_record(run: Attacked) -> None:
    (run.run_dir / "run.json").chmod(0o666)


def give_a_source_away(run: Attacked) -> None:
    os.chown(next(run.run_dir.glob("code/*/specrl/loop.py")), NOBODY, NOBODY)


def open_a_context(run: Attacked) -> None:
    next(run.run_dir.glob("jobs/*/context.json")).chmod(0o666)


def open_the_place(run: Attacked) -> None:
    run.config.runs_dir.chmod(0o777)


def give_the_place_away(run: Attacked) -> None:
    os.chown(run.config.runs_dir, NOBODY, NOBODY)


HOLES = [
    pytest.param(give_away, marks=as_root),
    open_the_folder,
    open_a_source,
    open_the_record,
    pytest.param(give_a_source_away, marks=as_root),
    open_a_context,
    open_the_place,
    pytest.param(give_the_place_away, marks=as_root),
]


@pytest.mark.parametrize("hole", [pytest.param(give_away, marks=as_root), open_the_place])
@TAKES_RUN
def test_a_run_that_somebody_else_can_change_is_looked_at_or_refused(
    command: tuple[str, ...], option: str | None, hole: Callable[[Attacked], None], tmp_path: Path
) -> None:
    run = attacked(tmp_path)
    edit(run.run_dir / "run.json", settings={"unheard_of": 1})
    hole(run)
    before = run.contents()
    ended = specrl(*line_of(command, option, run, tmp_path), folder=tmp_path)
    assert not run.marker.exists()
    assert run.contents() == before
    if command[0] in READING:
        assert ended.code in (0, 2), ended.text
        assert "Traceback" not in ended.text
        return
    assert_refused(ended)


def assert_refused(ended: Ended) -> None:
    assert ended.code == 2, ended.text
    (line,) = ended.text.splitlines()
    assert re.search(r"^specrl: .*(belongs to user|others can write to|everybody can write to)", line)


@pytest.mark.parametrize("hole", HOLES)
def test_there_is_no_hole_that_is_not_seen(hole: Callable[[Attacked], None], tmp_path: Path) -> None:
    run = attacked(tmp_path)
    hole(run)
    before = run.contents()
    assert_refused(specrl("stop", "run", "--runs-dir", str(run.config.runs_dir)))
    assert run.contents() == before


@as_root
@pytest.mark.parametrize("command", [["show", "run"], ["watch", "run", "--once"], ["ls"]])
def test_a_run_of_a_colleague_is_looked_at_with_the_present_code(command: list[str], tmp_path: Path) -> None:
    run = attacked(tmp_path, train={"num_steps": 8})
    before = run.contents()
    ended = specrl(*command, "--runs-dir", str(run.config.runs_dir), user=NOBODY)
    assert ended.code == 0, ended.text
    assert "run" in ended.text
    if command[0] == "watch":
        assert "123 tokens/s" in ended.text
    assert not run.marker.exists()
    assert run.contents() == before


def test_a_run_of_ones_own_goes_on_with_its_own_code(tmp_path: Path) -> None:
    run = attacked(tmp_path)
    specrl("resume", str(run.run_dir), "--dry-run")
    assert run.marker.exists()  # so the marker of the other tests says something


@pytest.mark.parametrize("hole", [open_the_folder, open_a_source, open_the_record, open_a_context, open_the_place])
def test_what_a_refusal_advises_closes_the_hole(hole: Callable[[Attacked], None], tmp_path: Path) -> None:
    run = attacked(tmp_path)
    for path in run.run_dir.rglob("*"):
        path.chmod(path.stat().st_mode | 0o020)  # as a copy with another umask leaves it
    hole(run)
    for _ in range(2):
        with pytest.raises(ConfigError) as refused:
            check_access(run.run_dir, ClusterConfig())
        advice = re.search(r"run `(chmod [^`]*)`", str(refused.value))
        assert advice is not None
        subprocess.run(advice[1].split(), check=True)
        if hole is not open_the_place:
            break
    if hole is open_the_place:
        assert not run.config.runs_dir.stat().st_mode & 0o002
    assert check_access(run.run_dir, ClusterConfig()) == []
    assert not [path for path in run.run_dir.rglob("*") if path.stat().st_mode & 0o022]


@as_root
def test_a_project_folder_is_said_once_and_trusted_by_name(tmp_path: Path) -> None:
    run = attacked(tmp_path)
    os.chown(run.config.runs_dir, 0, 12345)
    run.config.runs_dir.chmod(0o2775)
    (line,) = check_access(run.run_dir, ClusterConfig())
    assert str(run.config.runs_dir) in line and 'cluster.trusted_groups = ["12345"]' in line
    trusted = ClusterConfig(trusted_groups=("12345",))
    assert check_access(run.run_dir, trusted) == []
    os.chown(run.config.runs_dir, NOBODY, 12345)  # of whoever leads the project
    with pytest.raises(ConfigError, match=r"belongs to user 65534, who can put .*cluster.trusted_groups"):
        check_access(run.run_dir, ClusterConfig())
    assert check_access(run.run_dir, trusted) == []
    with pytest.raises(ConfigError, match="this machine knows no such group"):
        check_access(run.run_dir, ClusterConfig(trusted_groups=("no-such-group",)))


@as_root
def test_a_run_does_not_say_itself_whom_to_trust(tmp_path: Path) -> None:
    run = attacked(tmp_path, cluster={"trusted_groups": [str(NOBODY)]})
    run.give_to(NOBODY)
    assert specrl("stop", "run", "--runs-dir", str(run.config.runs_dir)).code == 2
    assert not (run.run_dir / "stop").exists()


@as_root
def test_a_link_on_the_way_to_a_run_is_nobody_elses(tmp_path: Path) -> None:
    run = attacked(tmp_path)
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o1777)
    (place / "link").symlink_to(run.run_dir)
    assert check_access(place / "link", ClusterConfig()) == []
    os.chown(place / "link", NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        check_access(place / "link", ClusterConfig())
    hidden = tmp_path / "theirs"  # the link of a link lies where somebody else can replace it
    hidden.mkdir()
    (hidden / "middle").symlink_to(run.run_dir)
    os.chown(hidden, NOBODY, NOBODY)
    (tmp_path / "outer").symlink_to(hidden / "middle")
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        check_access(tmp_path / "outer", ClusterConfig())


def edit_a_source(run: Attacked, code: Path) -> None:
    with (code / "specrl" / "loop.py").open("a") as file:
        file.write("# edited\n")


def add_a_module(run: Attacked, code: Path) -> None:
    (code / "json.py").write_text("raise SystemExit(0)\n")


def add_bytecode(run: Attacked, code: Path) -> None:
    (code / "flows" / "__pycache__").mkdir()
    (code / "flows" / "__pycache__" / f"cli.{sys.implementation.cache_tag}.pyc").write_bytes(b"anything")


def link_a_folder(run: Attacked, code: Path) -> None:
    (code / "torch").symlink_to(run.marker.parent)


def link_the_code(run: Attacked, code: Path) -> None:
    code.rename(run.marker.parent / "elsewhere")
    code.symlink_to(run.marker.parent / "elsewhere")


def add_a_pipe(run: Attacked, code: Path) -> None:
    os.mkfifo(code / "specrl" / "pipe.py")


CHANGES = [edit_a_source, add_a_module, add_bytecode, link_a_folder, link_the_code, add_a_pipe]


@pytest.mark.parametrize("change", CHANGES)
def test_code_that_is_not_what_was_copied_is_not_run(change: Callable[[Attacked, Path], None], tmp_path: Path) -> None:
    run = attacked(tmp_path)
    (code,) = (run.run_dir / "code").iterdir()
    change(run, code)
    ended = specrl("resume", str(run.run_dir), "--dry-run")
    assert ended.code == 2, ended.text
    (line,) = ended.text.splitlines()
    assert "specrl resume run --new-code" in line
    assert not run.marker.exists()


@pytest.mark.parametrize("code", ["../../evil", "/evil", "..", ".", "", "a/b", 7, None, ["x"], "x\0y", "a" * 300])
def test_a_record_names_no_code_outside_of_its_run(code: object, tmp_path: Path) -> None:
    run = attacked(tmp_path)
    (folder,) = (run.run_dir / "code").iterdir()
    folder.rename(tmp_path / "evil")
    edit(run.run_dir / "run.json", code=str(tmp_path / "evil") if code == "/evil" else code)
    ended = specrl("resume", str(run.run_dir), "--dry-run")
    assert ended.code == 2, ended.text
    assert "is damaged" in ended.text
    assert not run.marker.exists()


@pytest.mark.parametrize("start", ["../../other", "/other", "stages/../../other"])
def test_a_record_names_no_checkpoint_outside_of_its_run(start: str, tmp_path: Path) -> None:
    run = attacked(tmp_path)
    continues = {"run": "run", "key": "train-0", "step": 2, "stage_dir": start, "counts_on": True}
    edit(run.run_dir / "run.json", continues=continues)
    ended = specrl("sync", str(run.run_dir))
    assert ended.code == 2, ended.text
    assert "is not of this version of specrl" in ended.text


def rank_of(run: Attacked) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a rank, as its job's script has them."""
    (code,) = (run.run_dir / "code").iterdir()
    config = run.config.model_copy(update={"cluster": ClusterConfig(backend="slurm")})
    context = StageContext(config, "prepare", "prepare-0", run.stage("prepare"), {}, "")
    request = StageRequest(context, "no.such:module", code)
    command = [*python_command(config, "prepare"), *request.arguments]
    assert code.name in command
    return command, {**os.environ, **job_environment(code)}


def starts(command: list[str], environment: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_rank_imports_the_code_that_was_copied(tmp_path: Path) -> None:
    run = attacked(tmp_path)
    command, environment = rank_of(run)
    starts(command, environment, tmp_path)
    assert run.marker.exists()
    assert not list(run.run_dir.rglob("__pycache__"))  # or the next rank would find what was not copied


@pytest.mark.parametrize("change", CHANGES)
def test_a_rank_imports_nothing_of_code_that_was_changed_while_its_job_waited(
    change: Callable[[Attacked, Path], None], tmp_path: Path
) -> None:
    run = attacked(tmp_path)
    command, environment = rank_of(run)
    change(run, next((run.run_dir / "code").iterdir()))
    done = starts(command, environment, tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("specrl: ")
    assert not run.marker.exists()


@pytest.mark.parametrize("hole", HOLES)
def test_a_rank_imports_nothing_of_a_folder_that_somebody_else_can_change(
    hole: Callable[[Attacked], None], tmp_path: Path
) -> None:
    run = attacked(tmp_path)
    command, environment = rank_of(run)
    hole(run)
    done = starts(command, environment, tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("specrl: ")
    assert not run.marker.exists()


@as_root
def test_a_folder_that_was_put_in_the_place_of_a_waiting_run_is_not_imported(tmp_path: Path) -> None:
    run = attacked(tmp_path)
    command, environment = rank_of(run)
    run.config.runs_dir.chmod(0o777)

    def replace() -> int:
        os.umask(0)
        run.run_dir.rename(run.config.runs_dir / ".moved")
        code = Path(environment["PYTHONPATH"].split(os.pathsep)[0])
        (code / "slurm").mkdir(parents=True)
        (code / "slurm" / "__init__.py").touch()
        (code / "slurm" / "entry.py").write_text(f"open({str(run.marker)!r}, 'w')\n")
        return 0

    assert in_fork(replace, NOBODY).code == 0
    done = starts(command, environment, tmp_path)
    assert done.returncode == 1
    assert "belongs to user 65534" in done.stderr
    assert not run.marker.exists()
    run.config.runs_dir.chmod(0o755)  # the place alone does not tell any more
    for path in (run.run_dir, *run.run_dir.rglob("*")):
        os.chown(path, 0, 0)
        path.chmod(path.stat().st_mode & ~0o022)
    done = starts(command, environment, tmp_path)
    assert "not those that were copied there" in done.stderr
    assert not run.marker.exists()


def test_a_copy_of_the_code_that_was_changed_is_made_anew(tmp_path: Path) -> None:
    code = snapshot_code(tmp_path)
    (code / "json.py").write_text("")
    assert snapshot_code(tmp_path) == code
    assert not (code / "json.py").exists()
    trust.check_code(code, code.name)


def test_the_name_of_a_copy_is_too_long_to_be_met_by_other_files(tmp_path: Path) -> None:
    assert len(snapshot_code(tmp_path).name) == 32
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    digest = trust.sources_digest(tmp_path, ["a", "b"])
    (tmp_path / "a").write_text("2")
    (tmp_path / "b").write_text("1")
    assert trust.sources_digest(tmp_path, ["a", "b"]) != digest


@as_root
def test_a_scheduled_run_runs_no_code_of_a_folder_that_was_there_before(tmp_path: Path) -> None:
    run = attacked(tmp_path)
    run.give_to(NOBODY)
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        continue_with_own_code(run.run_dir, ["resume"])


def test_every_word_that_a_command_is_given_here_is_still_of_one() -> None:
    assert set(WORDS) <= {path for path, _ in COMMANDS}
    assert {path for path, _ in COMMANDS} >= {("run",), ("resume",), ("stop",), ("rm",), ("sync",), ("export",)}


def test_the_record_of_the_marker_is_valid(tmp_path: Path) -> None:
    run = attacked(tmp_path)
    code = rename_code(run)
    assert json.loads((run.run_dir / "run.json").read_text())["code"] == code.name
