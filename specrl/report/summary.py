"""`summary.json`, which other tools read, and the table at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich.console import Console

from specrl.artifacts import (
    ExportResult,
    PrepareResult,
    SetScore,
    SpeedPair,
    TrainResult,
    ValidateResult,
    write_json,
)
from specrl.config import STAGES, Config
from specrl.events import SIGNAL, read_events
from specrl.export.card import serve_command
from specrl.lifetime.segments import read_segments
from specrl.lineage.history import CHANGES
from specrl.report.curve import curve_of, curve_rows
from specrl.report.results import (
    find_stages,
    finished_steps,
    job_id_of,
    readable,
    readable_config,
    seconds_of,
)
from specrl.report.tables import print_line, print_table
from specrl.tracking import registered_version

SUMMARY_FILE = "summary.json"
SOURCES = {"drafter": "the drafter's", "replay": "pre-generated", "recent": "from recent rollouts"}
"""Drafts of a user's own source have its name."""
POSITIONS_SHOWN = 8  # draft positions; the summary has all


def write_summary(run_dir: Path, stages: Mapping[str, Path], mlflow_run_id: str | None) -> Path:
    """Write `summary.json` and return its path. A section whose stage has not finished is null."""
    path = run_dir / SUMMARY_FILE
    write_json(path, build_summary(run_dir, stages, mlflow_run_id))
    return path


def build_summary(run_dir: Path, stages: Mapping[str, Path], mlflow_run_id: str | None) -> dict[str, Any]:
    """The contents of `summary.json`. Other tools read it, so that the names below must stay.

    `speculation` is measured on held-out prompts by `validate`; `generation_speedup` maps batch size to the median
    ratio of matched pairs, whose plain side is the same engine with k = 0, and `decode_step_reduction` is the mean over
    those batch sizes of 1 - speculative / plain decoding steps. The pairs take the requests of the training step that
    would come next, and draft from the text that it would find. In `train`, `speedup_estimate` has the medians over the
    steps of what the cost model says of plain decoding.
    """
    config = readable_config(run_dir)
    prepare = readable(stages, "prepare", PrepareResult)
    train = readable(stages, "train", TrainResult)
    validation = readable(stages, "validate", ValidateResult)
    export = readable(stages, "export", ExportResult)
    return {
        "run": config.name,
        "mlflow_run_id": mlflow_run_id,
        "stages": {
            stage: {"key": folder.name, "seconds": seconds_of(folder), "job_id": job_id_of(run_dir, folder.name)}
            for stage, folder in stages.items()
        },
        "validation": _validation(validation, curve_of(stages)),
        "speculation": validation and _speculation(config, validation),
        "segments": {
            stage: {"number": len(segments), "reasons": [segment.reason for segment in segments]}
            for stage, segments in ((stage, read_segments(folder)) for stage, folder in stages.items())
        },
        "data": prepare and _pick(prepare, "prompts_seen", "prompts_overlong"),
        "events": _events(stages),
        "best": train and train.best and train.best.model_dump(mode="json", exclude={"drafter_dir"}),
        "train": train
        and _pick(
            train,
            *("steps", "step_seconds_median", "timing_share", "speedup_estimate"),
            *("reward_first", "reward_last", "reward_parts"),
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


def _events(stages: Mapping[str, Path]) -> list[dict[str, Any]]:
    found = [{"stage": name, **asdict(event)} for name, stage in stages.items() for event in read_events(stage)]
    return sorted(found, key=lambda event: event["time"])


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
    """Print the results of a run, which may be somebody else's, from those stages that have finished."""
    console = console or Console()
    stages = find_stages(run_dir)
    for table in summary_tables(run_dir, stages, build_summary(run_dir, stages, None)):
        print_table(console, *table)
    if (serving := exported(run_dir, stages)) is not None:
        drafter_dir, command = serving
        print_line(console, f"drafter: {drafter_dir}\nserve it with the policy:\n  {command}")


class SummaryTable(NamedTuple):
    """A table of results; a column whose name begins with `>` is aligned to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def summary_tables(run_dir: Path, stages: Mapping[str, Path], summary: Mapping[str, Any]) -> list[SummaryTable]:
    """What a run has reached, and where its time went."""
    results = _results(readable_config(run_dir), summary, stages)
    tables = [
        SummaryTable(f"Run {summary['run']}", ("what", "result"), results),
        SummaryTable("Where the time went", ("stage", ">seconds", ">share", "job"), _stage_times(summary)),
    ]
    if summary["train"]:
        shares = sorted(summary["train"]["timing_share"].items(), key=lambda item: -item[1])
        rows = [(name, f"{share:.1%}") for name, share in shares]
        tables.append(SummaryTable("Where the time of a training step went", ("part", ">share"), rows))
    return tables


def event_table(summary: Mapping[str, Any]) -> SummaryTable:
    """What happened in the stages, in its order."""
    rows = [(event["stage"], str(event["step"]), event["kind"], event["text"]) for event in summary["events"]]
    return SummaryTable("Events", ("stage", ">step", "kind", "what"), rows)


def headlines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The few figures that people look for first, each with what it is."""
    validation, speculation, train = summary["validation"], summary["speculation"], summary["train"]
    found = []
    if validation and validation["accuracy_after"] is not None:
        before, after = validation["accuracy_before"], validation["accuracy_after"]
        found.append((f"{before:.0%} \u2192 {after:.0%}", f"accuracy on {validation['num_prompts']} held-out prompts"))
    if speculation and speculation["method"] != "none":
        for batch, speedup in speculation["generation_speedup"].items():
            found.append((f"{speedup:.2f}x", f"generation at batch {batch}, against plain decoding, matched"))
        found.append((f"{speculation['acceptance_length']:.2f}", "tokens an iteration, drafts and one more"))
    if train:
        found.append((f"{train['step_seconds_median']:.1f} s", f"a step, median of {train['steps']}"))
    return found


def exported(run_dir: Path, stages: Mapping[str, Path]) -> tuple[str, str] | None:
    """The folder of the exported drafter, and the command that serves it with its policy."""
    export, config = readable(stages, "export", ExportResult), readable_config(run_dir)
    if not (export and export.drafter_dir):
        return None
    if not all(path.resolve().is_relative_to(run_dir.resolve()) for path in (export.drafter_dir, export.policy_dir)):
        return None
    command = serve_command(export.policy_dir, export.drafter_dir, config.speculation.k, config)
    return str(export.drafter_dir), command


def result_rows(run_dir: Path) -> list[tuple[str, str]]:
    stages = find_stages(run_dir)
    return _results(readable_config(run_dir), build_summary(run_dir, stages, None), stages)


def _results(config: Config, summary: Mapping[str, Any], stages: Mapping[str, Path]) -> list[tuple[str, str]]:
    unfinished = [stage for stage in STAGES if not (summary["stages"].get(stage) or {}).get("seconds")]
    rows = _train_rows(summary)
    if "train" in unfinished and (steps := finished_steps(stages)):
        rows = [("training", f"{steps} of {config.train.num_steps} steps")]
    rows = [
        *_accuracy_rows(summary),
        *_set_rows(readable(stages, "validate", ValidateResult)),
        *curve_rows(curve_of(stages)),
        *_best_rows(readable(stages, "train", TrainResult)),
        *rows,
        *_change_rows(summary),
        *((f"step {event['step']}", event["text"]) for event in summary["events"] if event["kind"] == SIGNAL),
        *_speculation_rows(summary, readable(stages, "validate", ValidateResult)),
    ]
    if summary["export"] and summary["export"]["vllm_acceptance_length"] is not None:
        rows.append(("acceptance length, exported drafter", f"{summary['export']['vllm_acceptance_length']:.2f}"))
    if unfinished:
        rows.append(("not finished", ", ".join(unfinished)))
    return rows


def _change_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    changed = [event for event in summary["events"] if event["kind"] in CHANGES]
    return [(f"from step {event['step']} on", event["text"]) for event in changed]


def _accuracy_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    validation = summary["validation"]
    if not validation or validation["accuracy_after"] is None:
        return []
    before, after = validation["accuracy_before"], validation["accuracy_after"]
    rows = [("accuracy, held out", f"{before:.1%} -> {after:.1%} ({_count(validation['num_prompts'], 'prompt')})")]
    return [*rows, *_exactness_rows(validation["exactness"])]


def _set_rows(validation: ValidateResult | None) -> list[tuple[str, str]]:
    if validation is None:
        return []
    pairs = zip(validation.before[1:], validation.after[1:], strict=False)  # of another version, perhaps
    return [
        (
            f"accuracy, {after.set}",
            f"{before.accuracy:.1%} -> {after.accuracy:.1%} ({_count(after.num_prompts, 'prompt')})",
        )
        for before, after in pairs
    ]


def _best_rows(train: TrainResult | None) -> list[tuple[str, str]]:
    if train is None:
        return []
    early = [("training", f"ended early: {train.stopped_early}")] if train.stopped_early else []
    if train.best is None:
        return early
    taken = "; validated and exported" if train.policy_dir == train.best.policy_dir else ""
    text = f"step {train.best.step}, {train.best.metric} {train.best.value:.3f}{taken}: {train.best.policy_dir}"
    return [("best policy", text), *early]


def _exactness_rows(exactness: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if not exactness:
        return []
    drafts = f"{exactness['num_accepted_tokens']} of {_count(exactness['num_draft_tokens'], 'drafted token')} accepted"
    unit = {"sampled": "of the CDF", "greedy": "nats"}
    rows = [(f"exactness, {name}", _near_ties(exactness[name], unit[name])) for name in unit]
    return [*rows, ("exactness, drafts compared", drafts)]


def _near_ties(counts: Mapping[str, Any], unit: str) -> str:
    text = f"{_count(counts['num_differences'], 'difference')} in {_count(counts['num_tokens'], 'token')}"
    if not counts["num_differences"]:
        return text
    if counts.get("limit") is None or counts.get("largest_distance") is None:  # a result of an earlier version
        return f"{text}, all near-ties"
    distance = f"largest distance {counts['largest_distance']:.2g} {unit}, limit {counts['limit']:.2g}"
    return f"{text}, all near-ties: {distance}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _train_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    train, refit = summary["train"], summary["refit"]
    if not train:
        return []
    steps = _count(train["steps"], "step")
    return [
        ("precision", _precision_words(summary["precision"])),
        ("reward, training", f"{train['reward_first']:.3f} -> {train['reward_last']:.3f} ({steps})"),
        *[(f"its part {name}", f"{first:.3f} -> {last:.3f}") for name, (first, last) in train["reward_parts"].items()],
        ("step, median", f"{train['step_seconds_median']:.1f} s"),
        *_estimate_rows(train["speedup_estimate"]),
        (
            "refit parity",
            f"{refit['checks']} checks, {refit['failures']} failures, "
            f"largest |log-prob difference| {refit['max_abs_logprob_diff']:.3f}",
        ),
        *[("drafter", event) for event in refit["drafter_events"]],
    ]


def _estimate_rows(estimate: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if not estimate:
        return []
    ratios = f"generation {estimate['generation']:.2f}x, step {estimate['step']:.2f}x"
    how = f"medians of {_count(estimate['steps'], 'step')}, against expected times of plain decoding; no matched pairs"
    return [("speedup, estimate", f"{ratios} ({how})")]


def _precision_words(precision: Mapping[str, Any]) -> str:
    engines = []
    for engine in ("generation", "training"):
        mode = precision[f"{engine}_mode"]
        engines.append(f"{engine} {precision[engine]}" + (f" ({mode})" if precision[engine] == "fp8" else ""))
    if "fp8" not in (precision["generation"], precision["training"], precision["kv_cache"]):
        return ", ".join(engines)
    total = precision["fp8_layers"] + len(precision["bf16_layers"])
    layers = f"FP8 in {precision['fp8_layers']} of {total} linear layers"
    return f"{', '.join(engines)}; {layers}, KV cache {precision['kv_cache']}"


def _speculation_rows(summary: Mapping[str, Any], validation: ValidateResult | None) -> list[tuple[str, str]]:
    speculation = summary["speculation"]
    if not speculation or speculation["method"] == "none":
        return []
    rates_shown = speculation["acceptance_rate_per_pos"][:POSITIONS_SHOWN]
    by_position = "; by position " + " / ".join(f"{rate:.2f}" for rate in rates_shown) if rates_shown else ""
    name = f"{speculation['method']}, k = {speculation['k']}"
    rows = [("acceptance length", f"{speculation['acceptance_length']:.2f} ({name}{by_position})")]
    rows += _text_rows(validation)
    for pair in validation.speed if validation else []:
        spread = f"{pair.speedup_min:.2f} to {pair.speedup_max:.2f}"
        rates = f"{pair.plain_tokens_per_s:.0f} -> {pair.speculative_tokens_per_s:.0f} tokens/s"
        equal = f"{pair.tokens_equal:.0%} of responses the same"
        rows.append((f"speedup, batch {pair.batch}", f"{pair.speedup:.2f}x ({spread}; {rates}; {equal})"))
        rows += _source_rows(pair, validation)
    if speculation["decode_step_reduction"] is not None:
        rows.append(("decoding steps saved", f"{speculation['decode_step_reduction']:.0%}"))
    return rows


def _text_rows(validation: ValidateResult | None) -> list[tuple[str, str]]:
    if validation is None or validation.text is None:
        return []
    text = validation.text
    stored = f"{_count(text.num_stored, 'pre-generated response')} ({_count(text.stored_tokens, 'token')})"
    recent = f"{_count(text.num_recent, 'recent rollout')} ({_count(text.recent_tokens, 'token')})"
    return [(f"text that step {text.step} would find", f"{stored} for its {text.num_responses}, {recent}")]


def _source_rows(pair: SpeedPair, validation: ValidateResult | None) -> list[tuple[str, str]]:
    if validation is None or validation.text is None:
        return []
    shares = sorted(pair.token_share.items(), key=lambda item: -item[1])
    words = ", ".join(f"{share:.0%} {SOURCES.get(source, source)}" for source, share in shares)
    return [(f"accepted drafts, batch {pair.batch}", f"of all tokens, {words}" if words else "none")]


def _jobs(job_id: str, segments: Mapping[str, Any] | None) -> str:
    if segments is None or segments["number"] < 2:
        return job_id
    return f"{job_id} ({segments['number']} times: {', '.join(reason or 'running' for reason in segments['reasons'])})"


def _stage_times(summary: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    entries = summary["stages"]
    total = sum(entry["seconds"] or 0.0 for entry in entries.values())
    rows = []
    for stage in STAGES:
        entry = entries.get(stage, {"seconds": None, "job_id": None})
        seconds = entry["seconds"]
        numbers = (f"{seconds:.0f}", f"{seconds / total:.0%}") if seconds else ("-", "-")
        rows.append((stage, *numbers, _jobs(entry["job_id"] or "", summary["segments"].get(stage))))
    return [*rows, ("all", f"{total:.0f}", "", "")]
