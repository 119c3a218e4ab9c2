"""`run.json`: a run's code, the keys of its stages, and what its training continues.

Together with `config.json`, it is all that a run needs to continue: `specrl resume` computes no keys. Both change only
on request, by `specrl resume --set`, `--steps` or `--new-code`.
"""

from __future__ import annotations

import json
import re
import secrets
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from specrl.artifacts import Artifact, read_file, read_object, write_json, write_text
from specrl.config import STAGES, ConfigError, StageName

RUN_FILE = "run.json"
MANIFEST, BEST_FILE = "manifest.json", "best.json"
"""The last file of a complete checkpoint, and the file that names the step of the best one."""
CODE_DIR = "code"  # a run's folder of source copies, each named by its digest
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,127}")
"""The names of files and folders allowed in a record: none leads out of its folder."""
PlainName = Annotated[str, Field(pattern=f"^{PLAIN_NAME.pattern}$")]


class Continuation(Artifact):
    """The checkpoint of another train stage from which a train stage starts."""

    run: str
    key: PlainName  # the key of the stage that wrote it
    step: int  # the number of RL steps completed at the checkpoint
    stage_dir: Path  # the folder with `checkpoints/step=NNNNNN`; in `run.json` it may be relative to the run's folder
    counts_on: bool
    """Whether step numbers continue from the checkpoint, with the earlier steps' records and rollouts; otherwise they
    start at 0."""

    num_prompts: int = 0
    """The number of prompts in the earlier steps, if numbers continue; files continue with the next row."""
    has_drafter: bool = True  # whether the drafter, if trained, also continues from the checkpoint

    @property
    def checkpoint_dir(self) -> Path:
        return self.stage_dir / "checkpoints" / f"step={self.step:06d}"

    @property
    def checkpoint_dirs(self) -> list[Path]:
        """The folder of the checkpoint and, if step numbers continue, of the earlier ones, newest first."""
        earlier = [step for step in saved_steps(self.stage_dir) if step < self.step] if self.counts_on else []
        return [self.model_copy(update={"step": step}).checkpoint_dir for step in (self.step, *reversed(earlier))]

    @property
    def words(self) -> str:
        return f"step {self.step} of {self.key} of run {self.run}"

    @property
    def content(self) -> tuple[str, int, bool]:
        """Everything that affects a result, for the stage's key."""
        return self.key, self.step, self.counts_on

    def in_run(self, run_dir: Path) -> Continuation:
        return self.model_copy(update={"stage_dir": run_dir / self.stage_dir})


class RunRecord(Artifact):
    """The contents of `run.json`."""

    code: PlainName  # digest of the sources that the run's new jobs import; it names their copy below `code/`
    id: str = ""
    """Random digits for the names of its jobs, independent of the folder's path."""
    settings: dict[str, Any]
    """The resolved configuration; `config.json` is a copy for readers, because two files cannot change atomically."""
    files: dict[str, str]
    """The digests of the user's files that the configuration names, by key; see `keys.named_files`."""
    stage_keys: dict[StageName, PlainName]
    """The key of each stage. Stages that a change left as they were keep the keys of earlier settings."""
    origin: Continuation | None = None
    """The checkpoint of another run from which this run's policy and drafter start; None if `model.source` is the
    policy."""
    continues: Continuation | None = None
    """What the train stage continues; None if it starts from the results of earlier stages."""

    @field_validator("origin", "continues")
    @classmethod
    def _lies_in_the_run(cls, start: Continuation | None) -> Continuation | None:
        if start is not None and (start.stage_dir.is_absolute() or ".." in start.stage_dir.parts):
            raise ValueError(f"{start.stage_dir} does not lie in the run's folder")
        return start

    def start_of(self, stage: StageName) -> Continuation | None:
        """The checkpoint that a stage reads in addition to its inputs."""
        if stage == "train":
            return self.continues
        return self.origin if stage in ("prepare", "pretrain") else None

    def code_dir(self, run_dir: Path) -> Path:
        return run_dir / CODE_DIR / self.code


def write_record(run_dir: Path, record: RunRecord) -> None:
    write_text(run_dir / RUN_FILE, record.model_dump_json(indent=2) + "\n")


def read_record(run_dir: Path) -> RunRecord | None:
    """Read a run's record, or None if there is none; a ConfigError if it is from another version of specrl."""
    path = run_dir / RUN_FILE
    if not path.exists():
        return None
    try:
        return RunRecord.model_validate_json(read_file(path))
    except ValueError as error:
        code_of(run_dir)  # reports damage
        raise ConfigError(
            f"{path} is not of this version of specrl; continue the run with its own code: specrl resume {run_dir.name}"
        ) from error


def readable_record(run_dir: Path) -> dict[str, Any]:
    """The record of a run that may be somebody else's or of another version, unchecked; empty if damaged."""
    return read_object(run_dir / RUN_FILE)


def code_of(run_dir: Path) -> str | None:
    """The digest of a run's sources, from a record of any version of specrl; a ConfigError if it is damaged."""
    path = run_dir / RUN_FILE
    if not path.exists():
        return None
    code = readable_record(run_dir).get("code")
    if not isinstance(code, str) or not PLAIN_NAME.fullmatch(code):
        raise ConfigError(f"{path} is damaged: it names no copy of the code; specrl rm {run_dir.name} removes the run")
    return code


def run_id(run_dir: Path) -> str:
    """A run's own random digits; empty if no flow has started the run, or this copy of it."""
    return "" if is_copy(run_dir) else str(readable_record(run_dir).get("id") or "")


def is_copy(run_dir: Path) -> bool:
    """Whether a folder is a copy of a run whose original still exists, not the original moved or by another path."""
    record = readable_record(run_dir)
    settings = record.get("settings")
    if not record.get("id") or not isinstance(settings, dict):
        return False
    began = Path(str(settings.get("runs_dir")), str(settings.get("name")))
    if began == run_dir.absolute() or readable_record(began).get("id") != record["id"]:
        return False
    # Two mounts may differ in st_dev, and the files of `cp -al` in nothing.
    states = [(folder.stat(), (folder / RUN_FILE).stat()) for folder in (run_dir, began)]
    own, other = ((folder.st_ino, file.st_ino, file.st_mtime_ns) for folder, file in states)
    return own != other


def own_copy(run_dir: Path) -> None:
    """Turn a copy into a run of its own, with its own jobs."""
    record = readable_record(run_dir)
    settings = {**record["settings"], "name": run_dir.name, "runs_dir": str(run_dir.absolute().parent)}
    write_json(run_dir / RUN_FILE, {**record, "id": new_run_id(), "settings": settings})


def new_run_id() -> str:
    return secrets.token_hex(4)


def readable_keys(run_dir: Path) -> dict[StageName, str] | None:
    """The keys of a run's stages, if any; the run may be somebody else's or of another version."""
    keys = readable_record(run_dir).get("stage_keys")
    if not isinstance(keys, dict):
        return None
    return {stage: keys[stage] for stage in STAGES if PLAIN_NAME.fullmatch(str(keys.get(stage, "")))}


def newest_whole_step(stage_dir: Path, last: int | None = None) -> int | None:
    """The steps, at most `last`, completed at a train stage's newest apparently complete checkpoint, or None."""
    for step in reversed(saved_steps(stage_dir)):
        if (last is None or step <= last) and _seems_whole(stage_dir / "checkpoints" / f"step={step:06d}"):
            return step
    return None


def _seems_whole(checkpoint_dir: Path) -> bool:
    try:
        files = json.loads((checkpoint_dir / MANIFEST).read_text())["files"]
        return all((checkpoint_dir / file["name"]).stat().st_size == file["size"] for file in files)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def saved_steps(stage_dir: Path) -> list[int]:
    """The numbers of steps completed at a train stage's complete checkpoints, in order."""
    found = (stage_dir / "checkpoints").glob(f"step=*/{MANIFEST}")
    return sorted(int(path.parent.name.partition("=")[2]) for path in found)
