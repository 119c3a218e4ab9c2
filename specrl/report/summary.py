"""`summary.json`, which other tools read, the tables at the end of a run, and its description in MLflow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich.console import Console

from specrl.artifacts import (
    ExactnessResult,
    ExportResult,
    ParityCounts,
    PrecisionReport,
    PrepareResult,
    SetScore,
    TrainResult,
    ValidateResult,
    read_curve,
    write_json,
)
from specrl.config import STAGES, Config
from specrl.events import SIGNAL, read_events
from specrl.export.card import data_name, learner, serve_command
from specrl.lifetime.segments import read_segments
from specrl.lineage.history import CHANGES
from specrl.report.results import (
    find_stages,
    finished_steps,
    job_id_of,
    read_config,
    readable,
    readable_config,
    seconds_of,
)
from specrl.report.tables import print_line, print_table
from specrl.tracking.sender import registered_version

SUMMARY_FILE = "summary.json"
SOURCES = {
    "drafter": "the drafter's",
    "own": "generated earlier with the same seed, verified ahead",
    "replay": "stored for the prompt",
    "recent": "from recent rollouts",
    "continued": "the drafter's, continued by text",
}
POSITIONS_SHOWN = 8  # draft positions shown; `summary.json` has all
FIRST = ("accuracy, held out", "reward, training", "acceptance length")  # of the description, with the speedups


@dataclass(frozen=True)
class Results:
    """The results of a run, perhaps somebody else's; None for a stage that is unfinished or cannot be read."""

    run_dir: Path
    config: Config
    stages: dict[str, Path]
    prepare: PrepareResult | None
    train: TrainResult | None
    validate: ValidateResult | None
    export: ExportResult | None
    curve: list[SetScore]  # scores of all policy versions validated so far, ordered by step
    events: list[dict[str, Any]]
    """What happened in the stages, in order: the fields of an `Event`, and the name of the `stage`."""

    @classmethod
    def read(cls, run_dir: Path) -> Results:
        stages = find_stages(run_dir)
        events = [{"stage": stage, **asdict(event)} for stage in stages for event in read_events(stages[stage])]
        return cls(
            run_dir,
            readable_config(run_dir),
            stages,
            readable(stages, "prepare", PrepareResult),
            readable(stages, "train", TrainResult),
            readable(stages, "validate", ValidateResult),
            readable(stages, "export", ExportResult),
            read_curve(stages["train"]) if "train" in stages else [],
            sorted(events, key=lambda event: event["time"]),
        )


def write_summary(run_dir: Path, mlflow_run_id: str | None) -> Path:
    """Write `summary.json` and return its path."""
    path = run_dir / SUMMARY_FILE
    write_json(path, build_summary(run_dir, mlflow_run_id))
    return path


def build_summary(run_dir: Path, mlflow_run_id: str | None) -> dict[str, Any]:
    """The contents of `summary.json`. Other tools read it, so the names below must stay.

    A section whose stage has not finished is null.

    `validate` measures `speculation` on held-out prompts; `generation_speedup` maps each batch size to the median ratio
    of matched pairs, whose plain side is the same engine with k = 0, and `decode_step_reduction` is the mean over these
    batch sizes of 1 - speculative / plain decoding steps. The pairs use the requests of the training step that would
    come next, and draft from the text that would be available to it.
    """
    found = Results.read(run_dir)
    config, stages, train, export = found.config, found.stages, found.train, found.export
    return {
        "run": config.name,
        "mlflow_run_id": mlflow_run_id,
        "stages": {
            stage: {"key": folder.name, "seconds": seconds_of(folder), "job_id": job_id_of(found.run_dir, folder.name)}
            for stage, folder in stages.items()
        },
        "validation": _validation(found.validate, found.curve),
        "speculation": found.validate and _speculation(config, found.validate),
        "segments": {
            stage: {"number": len(segments), "reasons": [segment.reason for segment in segments]}
            for stage, segments in ((stage, read_segments(folder)) for stage, folder in stages.items())
        },
        "data": found.prepare and _pick(found.prepare, "prompts_seen", "prompts_overlong"),
        "events": found.events,
        "best": train and train.best and train.best.model_dump(mode="json", exclude={"drafter_dir"}),
        "train": train
        and _pick(
            train,
            *("steps", "step_seconds_median", "timing_share", "reward_first", "reward_last", "reward_parts"),
        ),
        "mismatch": train and train.mismatch,
        "precision": train and train.precision.model_dump(),
        "refit": train
        and {
            "checks": train.refit_checks,
            "failures": train.refit_failures,
            "max_abs_logprob_diff": train.refit_max_abs_logprob_diff,
            "drafter_events": train.drafter_events,
        },
        "export": export
        and {
            **_pick(export, "drafter_dir", "vllm_acceptance_length"),
            "model_version": registered_version(stages["export"], f"{config.name}-drafter"),
        },
    }


def _pick(result: PrepareResult | TrainResult | ValidateResult | ExportResult, *names: str) -> dict[str, Any]:
    return result.model_dump(mode="json", include=set(names))


def _validation(validation: ValidateResult | None, curve: Sequence[SetScore]) -> dict[str, Any] | None:
    if validation is None and not curve:
        return None
    names = ("accuracy_before", "accuracy_after", "num_prompts", "exactness")
    measured = dict.fromkeys(names) if validation is None else _pick(validation, *names)
    kept = {"step", "set", "accuracy", "avg_at_k", "pass_at_k", "ci"}
    return {**measured, "curve": [score.model_dump(mode="json", include=kept) for score in curve]}


def _speculation(config: Config, validation: ValidateResult) -> dict[str, Any]:
    reductions = [pair.decode_step_reduction for pair in validation.speed]
    return {
        "method": config.speculation.method,
        "k": config.speculation.k,
        "acceptance_length": validation.acceptance_length,
        "acceptance_rate_per_pos": validation.acceptance_rate_per_pos,
        "generation_speedup": {str(pair.batch): pair.speedup for pair in validation.speed},
        "decode_step_reduction": fmean(reductions) if reductions else None,
        "token_share": {str(pair.batch): pair.token_share for pair in validation.speed},
        "text": validation.text and validation.text.model_dump(),
    }


def render_summary(run_dir: Path, console: Console | None = None) -> None:
    """Print the results of a run, which may be somebody else's, from its finished stages."""
    found = Results.read(run_dir)
    for table in summary_tables(found):
        print_table(*table, console)
    if (serving := exported(found)) is not None:
        drafter_dir, command = serving
        print_line(f"drafter: {drafter_dir}\nserve both: specrl serve-model {run_dir}, that is\n  {command}", console)


class SummaryTable(NamedTuple):
    """A table of results; a column whose name begins with `>` is aligned to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def summary_tables(found: Results) -> list[SummaryTable]:
    """The tables of a run's results, and of where its time went."""
    tables = [
        SummaryTable(f"Run {found.config.name}", ("what", "result"), result_rows(found)),
        SummaryTable("Where the time went", ("stage", ">seconds", ">share", "job"), _stage_times(found)),
    ]
    if found.train is not None:
        shares = sorted(found.train.timing_share.items(), key=lambda item: -item[1])
        rows = [(name, f"{share:.1%}") for name, share in shares]
        tables.append(SummaryTable("Where the time of a training step went", ("part", ">share"), rows))
    return tables


def event_table(found: Results) -> SummaryTable:
    """The table of what happened in the stages, in order."""
    names = ("stage", "step", "kind", "text")
    rows = [["" if event[name] is None else str(event[name]) for name in names] for event in found.events]
    return SummaryTable("Events", ("stage", ">step", "kind", "what"), rows)


def headlines(found: Results) -> list[tuple[str, str]]:
    """The few figures that people look for first, each with its meaning."""
    validation, train, figures = found.validate, found.train, []
    if validation is not None:
        accuracy = f"{validation.accuracy_before:.0%} \u2192 {validation.accuracy_after:.0%}"
        figures.append((accuracy, f"accuracy on {validation.num_prompts} held-out prompts"))
        if found.config.speculation.method != "none":
            for pair in validation.speed:
                words = f"generation at batch {pair.batch}, against plain decoding, matched"
                figures.append((f"{pair.speedup:.2f}x", words))
            figures.append((f"{validation.acceptance_length:.2f}", "tokens an iteration, drafts and one more"))
    if train is not None:
        figures.append((f"{train.step_seconds_median:.1f} s", f"a step, median of {train.steps}"))
    return figures


def exported(found: Results) -> tuple[str, str] | None:
    """The exported drafter's folder, and the command that serves it with its policy."""
    export, config, inside = found.export, found.config, found.run_dir.resolve()
    if not (export and export.drafter_dir):
        return None
    if not all(path.resolve().is_relative_to(inside) for path in (export.drafter_dir, export.policy_dir)):
        return None
    command = serve_command(export.policy_dir, export.drafter_dir, config.speculation.k, config)
    return str(export.drafter_dir), command


def result_rows(found: Results) -> list[tuple[str, str]]:
    """The rows of results, name and value, from the finished stages."""
    config, stages, events, export = found.config, found.stages, found.events, found.export
    rows = [] if found.validate is None else _accuracy_rows(found.validate)
    rows += curve_rows(found.curve)
    if found.train is not None:
        rows += _train_rows(found.train)
    elif steps := finished_steps(stages):
        rows.append(("training", f"{steps} of {config.train.num_steps} steps"))
    rows += [(f"from step {event['step']} on", event["text"]) for event in events if event["kind"] in CHANGES]
    rows += [(f"step {event['step']}", event["text"]) for event in events if event["kind"] == SIGNAL]
    if found.validate is not None and config.speculation.method != "none":
        rows += _speculation_rows(config, found.validate)
    if export is not None and export.vllm_acceptance_length is not None:
        rows.append(("acceptance length, exported drafter", f"{export.vllm_acceptance_length:.2f}"))
    unfinished = [stage for stage in STAGES if stage not in stages or not seconds_of(stages[stage])]
    return [*rows, ("not finished", ", ".join(unfinished))] if unfinished else rows


def by_set(curve: Sequence[SetScore]) -> dict[str, list[SetScore]]:
    found: dict[str, list[SetScore]] = {}
    for score in curve:
        found.setdefault(score.set, []).append(score)
    return found


def curve_rows(curve: Sequence[SetScore]) -> list[tuple[str, str]]:
    """Make a row per held-out set, such as `23.4% -> 50.8% at step 8 (42.2% to 59.3%; best 52.3% at step 6)`."""
    rows = []
    for name, scores in by_set(curve).items():
        first, last = scores[0], scores[-1]
        best = max(scores, key=lambda score: score.accuracy)
        low, high = last.ci.get("accuracy", (nan, nan))
        extent = f"{low:.1%} to {high:.1%}; best {best.accuracy:.1%} at step {best.step}"
        text = f"{first.accuracy:.1%} -> {last.accuracy:.1%} at step {last.step} ({extent})"
        if last.k > 1:
            text += f", pass@{last.k} {first.pass_at_k:.1%} -> {last.pass_at_k:.1%}"
        rows.append((f"validation, {name}", text))
    return rows


def _accuracy_rows(found: ValidateResult) -> list[tuple[str, str]]:
    def row(name: str, before: float, after: float, num_prompts: int) -> tuple[str, str]:
        return f"accuracy, {name}", f"{before:.1%} -> {after:.1%} ({_count(num_prompts, 'prompt')})"

    rows = [row("held out", found.accuracy_before, found.accuracy_after, found.num_prompts)]
    if found.exactness is not None:
        rows += _exactness_rows(found.exactness)
    others = zip(found.before[1:], found.after[1:], strict=True)
    return [*rows, *(row(after.set, before.accuracy, after.accuracy, after.num_prompts) for before, after in others)]


def _exactness_rows(exactness: ExactnessResult) -> list[tuple[str, str]]:
    return [
        ("exactness, sampled", _near_ties(exactness.sampled)),
        ("exactness, greedy", _near_ties(exactness.greedy)),
        (
            "exactness, drafts compared",
            f"{exactness.num_accepted_tokens} of {_count(exactness.num_draft_tokens, 'drafted token')} accepted",
        ),
    ]


def _near_ties(counts: ParityCounts) -> str:
    text = f"{_count(counts.num_differences, 'difference')} in {_count(counts.num_tokens, 'token')}"
    distance = f"largest distance {counts.largest_distance:.2g} nats, limit {counts.limit:.2g}"
    return f"{text}, all near-ties: {distance}" if counts.num_differences else text


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _train_rows(train: TrainResult) -> list[tuple[str, str]]:
    rows = []
    if (best := train.best) is not None:
        taken = "; validated and exported" if train.policy_dir == best.policy_dir else ""
        rows.append(("best policy", f"step {best.step}, {best.metric} {best.value:.3f}{taken}: {best.policy_dir}"))
    if train.stopped_early:
        rows.append(("training", f"ended early: {train.stopped_early}"))
    rows += [
        ("precision", _precision_words(train.precision)),
        ("reward, training", f"{train.reward_first:.3f} -> {train.reward_last:.3f} ({_count(train.steps, 'step')})"),
        *[(f"its part {name}", f"{first:.3f} -> {last:.3f}") for name, (first, last) in train.reward_parts.items()],
        ("step, median", f"{train.step_seconds_median:.1f} s"),
    ]
    difference = f"largest |log-prob difference| {train.refit_max_abs_logprob_diff:.3f}"
    rows.append(("refit parity", f"{train.refit_checks} checks, {train.refit_failures} failures, {difference}"))
    return [*rows, *(("drafter", event) for event in train.drafter_events)]


def _precision_words(precision: PrecisionReport) -> str:
    engines = [("generation", precision.generation, precision.generation_mode)]
    engines.append(("training", precision.training, precision.training_mode))
    words = ", ".join(f"{name} {kind}" + (f" ({mode})" if kind == "fp8" else "") for name, kind, mode in engines)
    if "fp8" not in (precision.generation, precision.training, precision.kv_cache):
        return words
    total = precision.fp8_layers + len(precision.bf16_layers)
    return f"{words}; FP8 in {precision.fp8_layers} of {total} linear layers, KV cache {precision.kv_cache}"


def _speculation_rows(config: Config, found: ValidateResult) -> list[tuple[str, str]]:
    rates_shown, text = found.acceptance_rate_per_pos[:POSITIONS_SHOWN], found.text
    by_position = "; by position " + " / ".join(f"{rate:.2f}" for rate in rates_shown) if rates_shown else ""
    name = f"{config.speculation.method}, k = {config.speculation.k}"
    rows = [("acceptance length", f"{found.acceptance_length:.2f} ({name}{by_position})")]
    if text is not None:
        stored = f"{_count(text.num_stored, 'pre-generated response')} ({_count(text.stored_tokens, 'token')})"
        recent = f"{_count(text.num_recent, 'recent rollout')} ({_count(text.recent_tokens, 'token')})"
        rows.append((f"text that step {text.step} would find", f"{stored} for its {text.num_responses}, {recent}"))
    for pair in found.speed:
        spread = f"{pair.speedup_min:.2f} to {pair.speedup_max:.2f}"
        rates = f"{pair.plain_tokens_per_s:.0f} -> {pair.speculative_tokens_per_s:.0f} tokens/s"
        equal = f"{pair.tokens_equal:.0%} of responses the same"
        rows.append((f"speedup, batch {pair.batch}", f"{pair.speedup:.2f}x ({spread}; {rates}; {equal})"))
        if text is not None:
            shares = sorted(pair.token_share.items(), key=lambda item: -item[1])
            words = ", ".join(f"{share:.0%} {SOURCES.get(source, source)}" for source, share in shares)
            rows.append((f"accepted drafts, batch {pair.batch}", f"of all tokens, {words}" if words else "none"))
    if found.speed:
        rows.append(("decoding steps saved", f"{fmean(pair.decode_step_reduction for pair in found.speed):.0%}"))
    return rows


def _jobs(run_dir: Path, stage_dir: Path) -> str:
    job = job_id_of(run_dir, stage_dir.name) or ""
    reasons = [segment.reason or "running" for segment in read_segments(stage_dir)]
    return job if len(reasons) < 2 else f"{job} ({len(reasons)} times: {', '.join(reasons)})"


def _stage_times(found: Results) -> list[tuple[str, str, str, str]]:
    times = {stage: seconds_of(folder) or 0.0 for stage, folder in found.stages.items()}
    total, rows = sum(times.values()), []
    for stage in STAGES:
        seconds, folder = times.get(stage), found.stages.get(stage)
        numbers = (f"{seconds:.0f}", f"{seconds / total:.0%}") if seconds else ("-", "-")
        rows.append((stage, *numbers, "" if folder is None else _jobs(found.run_dir, folder)))
    return [*rows, ("all", f"{total:.0f}", "", "")]


def describe(run_dir: Path) -> str:
    """Describe a run in Markdown for its page in MLflow: its results so far, and where to find more."""
    config, found = read_config(run_dir), Results.read(run_dir)
    lines, rows = [headline(config), ""], result_rows(found)
    short = {what: result.partition(" (")[0] for what, result in rows if what in FIRST or what.startswith("speedup")}
    shown = [f"{what} {result}" for what, result in short.items()]
    if shown:  # MLflow's page shows three lines until it is expanded
        lines += [f"**{'; '.join(shown)}**", ""]
    if rows:
        cells = [f"| {what} | {result.replace('|', '\\|')} |" for what, result in rows]
        lines += ["| what | result |", "|---|---|", *cells, ""]
    lines += ["Stages are runs nested below this one. Artifacts include `summary.json`, `report.html` and `logs/`."]
    if found.export is not None:
        names = [f"{config.name}-policy", *([f"{config.name}-drafter"] if found.export.drafter_dir else [])]
        lines += ["", f"Registered models: {', '.join(f'[{name}](#/models/{name})' for name in names)}."]
    if (serving := exported(found)) is not None:
        lines += ["", "    " + serving[1]]
    return "\n".join([*lines, "", f"Folder: `{run_dir}`"])


def headline(config: Config) -> str:
    """Say in one sentence what is trained on what."""
    return (
        f"RL post-training of {learner(config)} on `{data_name(config)}`, {config.train.num_steps} steps of "
        f"{config.train.prompts_per_step} prompts x {config.train.samples_per_prompt} responses, drafts by "
        f"`{config.speculation.method}`."
    )
