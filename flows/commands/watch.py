"""`specrl watch`: a live view of a run, from its files and its scheduler."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live

from flows.commands.options import AsJson, RunName, RunsDir
from flows.folder import find_run_to_read, is_trusted, is_worked_on, outcome_of
from slurm.backend import FLOW_KEY, JobError, JobKey, Record, SilentSchedulerError
from slurm.slurm_backend import SlurmJob
from slurm.submit import find_now
from specrl.artifacts import RESULT_FILE, read_object
from specrl.config import STAGES, Config, ConfigError, StageName
from specrl.events import Event, read_events
from specrl.lifetime.segments import read_segments
from specrl.lineage.record import readable_keys
from specrl.progress import clock, read_progress, words
from specrl.report.results import readable_config, seconds_of
from specrl.report.tables import drawn_table, print_line, print_table

LOOK_SECONDS = 2.0  # between checks of the run's files
ASK_SECONDS = 5.0  # at least, between scheduler queries
LINE_SECONDS = 10.0  # at least, between plain lines about a stage in an unchanged state
RECENT_STEPS = 10  # recent steps from which the duration of a step is estimated
SHOWN = ("timing/step_s", "reward/mean", "spec/acceptance_length", "performance/generation_tokens_per_s")
"""The displayed metrics of a step."""
LAST_TIME = 2**32  # the Unix time of the latest event
UNKNOWN = "unknown"
NUM_EVENTS = 5  # recent events that are shown


@dataclass(frozen=True)
class StageView:
    """The current state of one stage."""

    stage: StageName
    state: str  # `finished`, `waits`, or the state of its job
    detail: str  # the stage's last report
    is_live: bool = False  # whether a job of the stage is pending or running, as far as known
    has_failed: bool = False  # whether its last job failed


@dataclass(frozen=True)
class RunView:
    """Everything that is shown of a run."""

    run: str
    stages: list[StageView]
    training: dict[str, float]  # from the records of recent steps; empty before the first
    events: list[tuple[Event, StageName]]
    has_flow: bool  # whether a flow works on the run
    outcome: dict[str, str]  # `state` and `error` of the last flow; empty while one runs, or if it was killed

    @property
    def is_over(self) -> bool:
        """Whether nothing works on the run."""
        return not self.has_flow and not any(view.is_live for view in self.stages)

    @property
    def state(self) -> str:
        """The run's state in one word: running, finished, failed, stopped, or unknown if its scheduler is silent."""
        if not self.is_over:
            live = [view for view in self.stages if view.is_live]
            mute = not self.has_flow and all(view.state.startswith(UNKNOWN) for view in live)
            return UNKNOWN if mute else "running"
        if all(view.state == "finished" for view in self.stages):
            return "finished"
        return self.outcome.get("state") or ("failed" if any(view.has_failed for view in self.stages) else "stopped")

    @property
    def end(self) -> str:
        """How the run ended, with what to do next."""
        if self.state == "finished":
            return f"run {self.run} has finished: specrl show {self.run}"
        error = f"the flow failed: {self.outcome['error']}\n" if self.state == "failed" and self.outcome else ""
        return f"{error}nothing works on run {self.run}; continue it with: specrl resume {self.run}"

    def as_json(self) -> str:
        """The whole view in one line of JSON."""
        events = [{"stage": stage, **asdict(event)} for event, stage in self.events]
        return json.dumps({**asdict(self), "state": self.state, "events": events})


class Watcher:
    """Observes a run periodically."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        self.run_dir, self.config = run_dir, config
        self._is_trusted = is_trusted(run_dir)
        self._asked: dict[str, tuple[float, tuple[str, bool]]] = {}

    def look(self) -> RunView:
        """The current view, from files and scheduler."""
        has_flow, outcome = is_worked_on(self.run_dir), outcome_of(self.run_dir)
        keys = readable_keys(self.run_dir) or {}
        folders = {stage: self.run_dir / "stages" / key for stage, key in keys.items()}
        views, is_next = [], True
        for stage in STAGES:
            views.append(self._stage(stage, folders.get(stage), is_next=is_next))
            is_next = is_next and views[-1].state == "finished"
        if (self.run_dir / "jobs" / FLOW_KEY).is_dir():
            state, is_live = self._job(FLOW_KEY)
            last = next(reversed(read_segments(self.run_dir / "stages" / FLOW_KEY)), None)
            if not is_live and last is not None and last.has_failed and not outcome:
                outcome = {"state": "failed", "error": f"specrl logs {self.run_dir.name} --stage flow says why"}
            views = [StageView("flow", state, "", is_live), *views] if is_live else views
        events = sorted(
            ((event, stage) for stage, folder in folders.items() for event in read_events(folder)),
            key=lambda entry: entry[0].time,
        )
        training = training_of(folders["train"], self.config) if "train" in folders else {}
        return RunView(self.run_dir.name, views, training, events, has_flow, outcome)

    def views(self) -> Iterator[RunView]:
        """Yield a view every `LOOK_SECONDS` until the run is over, including that last one."""
        while True:
            view = self.look()
            yield view
            if view.is_over:
                return
            time.sleep(LOOK_SECONDS)

    def _stage(self, stage: StageName, folder: Path | None, *, is_next: bool) -> StageView:
        if folder is None or not is_next:
            return StageView(stage, "waits", "")
        before = earlier_jobs(folder)
        if (folder / RESULT_FILE).exists():
            seconds = seconds_of(folder)
            return StageView(stage, "finished", f"{'' if seconds is None else clock(seconds)}{before}")
        state, is_live = self._job(folder.name)
        progress = read_progress(folder)
        detail = before.strip()
        if progress is not None:
            ago = clock(max(time.time() - progress.updated_at, 0.0))
            detail = f"{words(progress)}  (said {ago} ago){before}"
        last = next(reversed(read_segments(folder)), None)
        return StageView(stage, state, detail, is_live, last is not None and last.has_failed)

    def _job(self, key: str) -> tuple[str, bool]:
        asked_at, answer = self._asked.get(key, (float("-inf"), ("", False)))
        job_key = JobKey(self.config, key)
        pause = job_key.cluster.ask_seconds if job_key.cluster.backend == SlurmJob.backend else ASK_SECONDS
        if time.monotonic() - asked_at >= pause:
            answer = _ask(job_key, is_trusted=self._is_trusted)
            self._asked[key] = time.monotonic(), answer
        return answer


def _ask(key: JobKey, *, is_trusted: bool) -> tuple[str, bool]:
    try:
        job = find_now(key) if is_trusted else _recorded(key)
        if job is None:
            return "no job", False
        if isinstance(job, Record):
            return f"{job.backend} job {job.job_id}", False
        state = job.state()
    except (JobError, SilentSchedulerError, ConfigError) as error:  # a local job on another host, or an unknown class
        return f"{UNKNOWN}: {error}", is_trusted
    where = f"{job.backend} job {job.job_id}"
    if state.phase == "pending":
        if state.never:
            return f"can never start ({state.detail}: {state.never}), {where}", True
        return f"in the queue ({state.detail}), {where}", True
    return f"{'runs' if state.phase == 'running' else 'ended'}, {where}", state.phase == "running"


def _recorded(key: JobKey) -> SlurmJob | Record | None:
    """The job named by somebody else's run; only Slurm is asked, since nothing is imported for such a run."""
    with suppress(ValueError):
        record = Record.read(key.record_path)
        if record is not None and record.backend == SlurmJob.backend and record.job_id.isdecimal():
            return SlurmJob(record.job_id, key.folder, attached=True)
        return record
    return None


def earlier_jobs(stage_dir: Path) -> str:
    """How the jobs before the last one ended; empty for a stage with one job."""
    reasons = Counter(segment.reason or "unknown" for segment in read_segments(stage_dir)[:-1])
    counted = ", ".join(f"{number} x {reason}" for reason, number in reasons.items())
    return f"  (job {reasons.total() + 1}; before it: {counted})" if reasons else ""


def training_of(stage_dir: Path, config: Config) -> dict[str, float]:
    """The state of the training from the records of recent steps; empty before the first."""
    paths = [path for path in (stage_dir / "steps").glob("step=*.json") if path.stem.partition("=")[2].isdecimal()]
    last = [metrics for path in sorted(paths)[-RECENT_STEPS:] if (metrics := _metrics(path)) is not None]
    if not last:
        return {}
    done, step_s = int(max(paths).stem.partition("=")[2]) + 1, median(metrics["timing/step_s"] for metrics in last)
    return {
        "steps": done,
        "num_steps": config.train.num_steps,
        "num_recent": len(last),
        "reward_mean_recent": fmean(metrics["reward/mean"] for metrics in last),
        "step_s_recent": step_s,
        "eta_s": (config.train.num_steps - done) * step_s,
        **{name: last[-1][name] for name in SHOWN},
    }


def training_rows(now: Mapping[str, float]) -> list[tuple[str, str]]:
    """The state of the training as table rows."""
    if not now:
        return []
    recent = f"mean of {now['num_recent']} steps {now['reward_mean_recent']:.3f}"
    rows = [
        ("step", f"{now['steps']}/{now['num_steps']}"),
        ("reward", f"{now['reward/mean']:.3f} ({recent})"),
        ("acceptance length", f"{now['spec/acceptance_length']:.2f}"),
        ("generation", f"{now['performance/generation_tokens_per_s']:.0f} tokens/s"),
        ("time of a step", f"{now['step_s_recent']:.1f} s"),
    ]
    return [*rows, ("ETA of training", clock(now["eta_s"]))] if now["eta_s"] > 0 else rows


def _metrics(path: Path) -> Mapping[str, float] | None:
    metrics = read_object(path).get("metrics")
    known = isinstance(metrics, dict) and all(isinstance(metrics.get(name), int | float) for name in SHOWN)
    return metrics if known else None


def event_line(event: Event, stage: StageName) -> str:
    """Describe an event in one line."""
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(event.time if 0 <= event.time < LAST_TIME else 0))
    step = "" if event.step is None else f" step {event.step}"
    return f"{when}  {stage}{step}  {event.kind}: {event.text}"


def watch(
    name: RunName,
    once: Annotated[bool, typer.Option("--once", help="Show the current state, and return.")] = False,
    as_json: AsJson = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Watch a run: stages, training, queue and latest events.

    It ends when the run has no jobs left. Ctrl-C ends the watching, not the run. You can also watch from another
    machine that sees the run's folder. With --json, print the whole state in one line whenever it changes.
    """
    run_dir = find_run_to_read(name, runs_dir)
    watcher = Watcher(run_dir, readable_config(run_dir))
    view = watcher.look()
    if as_json:
        said = ""
        for now in [view] if once else watcher.views():
            if (line := now.as_json()) != said:
                print(line, flush=True)
            said = line
    elif once or view.is_over:
        for title, columns, rows in _tables(view):
            print_table(title, columns, rows)
        if view.is_over:
            print_line(view.end)
    else:
        try:
            view = (_watch_live if Console().is_terminal else _watch_lines)(watcher.views())
        except KeyboardInterrupt:
            print_line(f"run {run_dir.name} goes on")
            return
        print_line(view.end)


def _tables(view: RunView) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    rows = [(stage.stage, stage.state, stage.detail) for stage in view.stages]
    yield f"Run {view.run}", ("stage", "state", "progress"), rows
    if view.training:
        yield "Training", ("what", "now"), training_rows(view.training)
    if view.events:
        yield "Events", ("latest",), [(event_line(*event),) for event in view.events[-NUM_EVENTS:]]


def _watch_live(views: Iterator[RunView]) -> RunView:
    """Show the tables of each view, and return the last one."""
    with Live(auto_refresh=False) as live:
        for view in views:
            live.update(Group(*(drawn_table(*table) for table in _tables(view))), refresh=True)
    return view


def _watch_lines(views: Iterator[RunView]) -> RunView:
    """Print the news of each view, and return the last one."""
    said: dict[str, tuple[float, str, str]] = {}
    num_events: int | None = None
    for view in views:
        for event in view.events[-NUM_EVENTS if num_events is None else num_events :]:
            print_line(event_line(*event))
        num_events = len(view.events)
        for stage in view.stages:
            said_at, state, detail = said.get(stage.stage, (float("-inf"), "waits", ""))
            is_old = time.monotonic() - said_at >= LINE_SECONDS
            if stage.state != state or (stage.detail != detail and is_old and stage.is_live):
                said[stage.stage] = time.monotonic(), stage.state, stage.detail
                print_line(f"{stage.stage:9}  {stage.state}  {stage.detail}".rstrip())
    return view
