"""A file system that takes no more: nothing is half-written, and one line says which it is and what to do."""

from __future__ import annotations

import errno
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from slurm.backend import Record, State
from slurm.failures import explain, first_error, write_error
from slurm.local import LocalJob
from specrl.artifacts import append_line, read_lines, write_json
from specrl.checks.file_systems import FULL, lack_of_room
from specrl.config import Config
from specrl.context import StageContext
from specrl.models.hf_io import write_tensors
from specrl.schemas import Rollout, read_rollouts, write_rollouts

SMALL = 128 * 2**10
"""The bytes of the file system, and of the longest file."""

REMEDY = {errno.ENOSPC: "make room", errno.EFBIG: "raise that limit"}


@pytest.fixture(params=["ENOSPC", "EFBIG"])
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A folder that takes few bytes, and the error with which it refuses more."""
    folder = tmp_path / "small"
    folder.mkdir()
    if request.param == "ENOSPC":
        mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL}", "none", str(folder)]
        if subprocess.run(mount, check=False, capture_output=True).returncode:
            pytest.skip("no file system can be mounted here: a full one was not tested")
        yield folder, errno.ENOSPC
        subprocess.run(["umount", str(folder)], check=True)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, hard))
    yield folder, errno.EFBIG
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def rollouts(length: int) -> list[Rollout]:
    return [Rollout(0, 0, 0, 0, 0, 0, 0, [5], [1] * length, [0.0] * length, "", "", "stop")]


WRITERS: dict[str, Callable[[Path, int], None]] = {
    "rollouts.arrow": lambda path, size: write_rollouts(path, rollouts(size)),
    "model.safetensors": lambda path, size: write_tensors(path, {"weight": torch.zeros(size)}),
    "record.json": lambda path, size: write_json(path, ["x" * size]),
    "events.jsonl": lambda path, size: append_line(path, f'"{"x" * size}"'),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_was_there_stays_as_it_was_and_the_error_names_the_file(name: str, full: tuple[Path, int]) -> None:
    folder, number = full
    path, write = folder / name, WRITERS[name]
    write(path, 10)
    before = path.read_bytes()
    with pytest.raises(OSError, match=name) as raised:
        write(path, 2 * SMALL)
    assert raised.value.errno == number
    assert str(folder) in str(raised.value.filename)
    assert path.read_bytes() == before
    assert list(folder.iterdir()) == [path]
    write(path, 20)
    assert path.read_bytes() != before
    if name.endswith(".arrow"):
        assert len(read_rollouts(path)[0].response_tokens) == 20
    if name.endswith(".jsonl"):
        assert read_lines(path) == ["x" * 10, "x" * 20]


def test_a_line_of_another_process_is_not_removed_with_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    append_line(path, '"first"')

    def fail(_: int) -> None:
        append_line(path, '"other"', flush=False)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        append_line(path, '"own"')
    assert read_lines(path) == ["first", "own", "other"]


def failed(run_dir: Path) -> tuple[LocalJob, StageContext]:
    config = Config(name=run_dir.name, runs_dir=run_dir.parent)
    context = StageContext(config, "prepare", "prepare-0", run_dir / "stages" / "prepare-0", {}, "")
    folder = run_dir / "jobs" / "prepare-0"
    folder.mkdir(parents=True)
    return LocalJob(Record("local", "1", None, "host"), folder, attached=False), context


def test_a_rank_whose_file_system_took_no_more_ends_with_one_line_that_says_what_to_do(
    full: tuple[Path, int], tmp_path: Path
) -> None:
    folder, number = full
    job, context = failed(tmp_path / "own")
    with pytest.raises(OSError, match="record") as raised:
        write_json(folder / "record.json", ["x" * 2 * SMALL])
    write_error(context.run_dir / "jobs" / "prepare-0", 0, raised.value)
    line = explain(job, context, State("ended", "exit code 1", failed=True))
    assert "\n" not in line
    where = f"{folder} (tmpfs)" if number == errno.ENOSPC else ""
    assert f"record.json'; the file system {where}" in line
    assert f"{FULL[number]}: {REMEDY[number]}, and go on with specrl resume own (rank 0); log: " in line


def test_a_rank_that_could_not_even_leave_its_error_is_explained_by_the_full_disk(
    full: tuple[Path, int], tmp_path: Path
) -> None:
    folder, number = full
    job, context = failed(folder / "own")
    assert first_error(context.run_dir / "jobs" / "prepare-0", 1) is None
    line = explain(job, context, State("ended", "exit code 1", failed=True))
    assert f"{FULL[number]}: {REMEDY[number]}, and go on with specrl resume own; log: " in line


def test_a_used_up_quota_is_told_from_a_full_disk_and_other_errors_are_neither(tmp_path: Path) -> None:
    found = lack_of_room(OSError(errno.EDQUOT, "Disk quota exceeded", str(tmp_path / "x")))
    assert found.startswith("the file system /") and found.endswith("no room left for you: your quota is used up")
    assert lack_of_room(OSError(errno.ENOSPC, "No space left on device", 5)).startswith("the file system /")
    assert lack_of_room(OSError(errno.EACCES, "Permission denied", "/x")) == lack_of_room(ValueError("full")) == ""
