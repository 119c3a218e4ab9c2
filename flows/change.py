"""Change an existing run: say what stays, what continues and what is redone, and write its new record."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from flows.folder import anchor, only_flow, write_config
from flows.preflight import check
from slurm.access import restrict
from slurm.environment import ROOT, present_code, snapshot_code
from slurm.submit import live_jobs
from specrl.config import Config, ConfigError, change_config
from specrl.keys import code_digest, named_files
from specrl.lineage.history import begin_continuation
from specrl.lineage.record import Continuation, read_record, write_record
from specrl.lineage.revision import Revision, config_changes, file_changes
from specrl.report.results import read_config
from specrl.report.tables import print_line, print_table

MOST_SHOWN = 8  # the largest number of differences that an error message names


def change_run(
    run_dir: Path,
    overrides: Sequence[str],
    console: Console,
    *,
    new_code: bool = False,
    restart: bool = False,
    dry_run: bool = False,
) -> Revision:
    """Print what a change means for each stage and, except in a dry run, write it; a ConfigError if it is refused."""
    cluster = read_config(run_dir).cluster
    restrict(cluster)
    with nullcontext() if dry_run else only_flow(run_dir, cluster):
        revision = _plan(run_dir, overrides, new_code=new_code, restart=restart)
        _print(run_dir, revision, console)
        for line in _jobs_in_the_way(run_dir, revision):
            if not dry_run:
                raise ConfigError(line)
            print_line(line, console)
        if not dry_run:
            _write(run_dir, revision)
    return revision


def refuse_other(run_dir: Path, config: Config, origin: Continuation | None = None) -> None:
    """Raise a ConfigError if a folder holds a run with different settings or code."""
    record = read_record(run_dir)
    if record is None:
        return
    changes = config_changes(read_config(run_dir), config) + file_changes(record.files, named_files(config), config)
    starts = [start and start.words for start in (record.origin, origin)]
    found = [*map(str, changes), *([f"--from {starts[0]} -> {starts[1]}"] if starts[0] != starts[1] else [])]
    if record.code != present_code() and _stage_code(record.code_dir(run_dir)) != _stage_code(ROOT):
        found.append("other code")
    if found:
        more = f" and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
        name = run_dir.name
        raise ConfigError(
            f"run {name} exists and differs: {', '.join(found[:MOST_SHOWN])}{more}. Continue it as it was started: "
            f"specrl resume {name}; change it: specrl resume {name} --set KEY=VALUE or --new-code; or give the new run "
            "another name: --set name=NAME"
        )


def note_edited_files(config: Config, console: Console) -> None:
    """Print a line for each of the user's files modified since the run was started or last changed."""
    record = read_record(config.run_dir)
    for change in file_changes(record.files, named_files(config), config) if record is not None else []:
        print_line(
            f"note: {change}; stages that start from now on read it as it is, under the keys of before. To make that a "
            f"change: specrl resume {config.name} --new-code",
            console,
        )


def _plan(run_dir: Path, overrides: Sequence[str], *, new_code: bool, restart: bool) -> Revision:
    old = read_config(run_dir)
    record = read_record(run_dir)
    if record is None:
        raise ConfigError(f"run {run_dir.name} has not begun, so nothing of it can change; begin it with: specrl run")
    new = anchor(change_config(old, list(overrides)))
    if (new.name, new.runs_dir) != (old.name, old.runs_dir):
        raise ConfigError(f"--set: name and runs_dir of run {run_dir.name} cannot change; move its folder instead")
    changes = config_changes(old, new)
    keys = {change.key for change in changes}
    if lines := new.unused_after(keys):
        raise ConfigError("\n".join(lines))
    check(new)
    files = named_files(new)
    changes += [change for change in file_changes(record.files, files, new) if change.key not in keys]
    before = _stage_code(record.code_dir(run_dir))
    stage_code, code = (_stage_code(ROOT), present_code()) if new_code else (before, record.code)
    changed = record.model_copy(update={"settings": new.settings, "files": files, "code": code})
    return Revision(run_dir, changed, old, new, changes, stage_code, new_code=stage_code != before, restart=restart)


def _stage_code(root: Path) -> str:
    return code_digest(root / "specrl")


def _print(run_dir: Path, revision: Revision, console: Console) -> None:
    rows = [(plan.stage, plan.action, plan.reason) for plan in revision.stages]
    print_table(f"Run {run_dir.name}", ("stage", "what happens", ""), rows, console)
    lines = [str(change) for change in revision.changes]
    if revision.new_code:
        lines.append(f"stages that have not finished run the present code, {revision.record.code}")
    for line in lines or ["nothing changes"]:
        print_line(line, console)


def _jobs_in_the_way(run_dir: Path, revision: Revision) -> list[str]:
    name, keys = run_dir.name, revision.record.stage_keys.values()
    return [
        f"{job.backend} job {job.job_id} of run {name} is at work on a stage that changes: end it first, after its "
        f"step with specrl stop {name} --wait, or at once with specrl cancel {name}"
        for key, job in live_jobs(read_config(run_dir)).items()
        if key not in keys
    ]


def _write(run_dir: Path, revision: Revision) -> None:
    """Write everything that the new record names, then the record."""
    record = revision.record
    if not record.code_dir(run_dir).is_dir():
        snapshot_code(run_dir)
    if revision.continued is not None:
        new, old = (run_dir / "stages" / key for key in (record.stage_keys["train"], revision.previous))
        begin_continuation(new, old, revision.continued.step, revision.events)
    write_record(run_dir, record)
    write_config(read_config(run_dir))
