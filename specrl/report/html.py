"""`report.html`: one page of a run's numbers and plots, readable without a server or the network."""

from __future__ import annotations

import json
from html import escape
from io import StringIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

from specrl.artifacts import TrainResult, ValidateResult, write_text
from specrl.gantt import gantt
from specrl.report.results import find_stages, finished, read_config
from specrl.report.summary import render_summary
from specrl.report.svg import histogram, line_chart, share_bar
from specrl.timeline import timeline_from

REPORT_FILE = "report.html"
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}
svg text{font:12px system-ui,sans-serif;fill:#444} pre{background:#f5f5f5;padding:1rem;overflow-x:auto}
h2{margin-top:2rem;font-size:1.1rem}"""


def write_report(run_dir: Path) -> Path:
    """Write the page from the run's rollouts and results; a plot without data is left out.

    Raises:
        ValueError: the folder is not a run's.
    """
    config = read_config(run_dir)
    sections = [*_rollout_sections(run_dir), *_result_sections(run_dir)]
    text = StringIO()
    render_summary(run_dir, Console(file=text, force_terminal=False))
    body = "".join(f"<h2>{escape(title)}</h2>{svg}" for title, svg in sections)
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(config.name)}</title>'
        f"<style>{STYLE}</style><h1>{escape(config.name)}</h1><pre>{escape(text.getvalue())}</pre>{body}</html>\n"
    )
    path = run_dir / REPORT_FILE
    write_text(path, page)
    return path


def _rollout_sections(run_dir: Path) -> list[tuple[str, str]]:
    steps, rewards, lengths = read_columns(run_dir / "rollouts")
    if not len(steps):
        return []
    numbers = np.unique(steps)
    means = [float(rewards[steps == number].mean()) for number in numbers]
    return [
        ("Reward", line_chart([float(number) for number in numbers], means, "step", "mean reward of a step")),
        ("Response lengths", histogram(lengths.tolist(), 40, "tokens", "responses, all steps")),
    ]


def _result_sections(run_dir: Path) -> list[tuple[str, str]]:
    stages = find_stages(run_dir)
    train, validation = finished(stages, "train", TrainResult), finished(stages, "validate", ValidateResult)
    sections = []
    if train:
        sections.append(("Where a step's time goes", share_bar(train.timing_share)))
    if "train" in stages:
        sections += _bubble_sections(stages["train"].stage_dir / "steps")
    if validation and validation.speed:
        batches = [float(pair.batch) for pair in validation.speed]
        speedups = [pair.speedup for pair in validation.speed]
        title = "Speculative against plain generation, matched pairs"
        sections.append((title, line_chart(batches, speedups, "running batch", "tokens/s ratio")))
    return sections


def _bubble_sections(steps_dir: Path) -> list[tuple[str, str]]:
    """The first, the middle and the last step's Gantt picture, and how much of the ranks' waiting was put to use."""
    records = [json.loads(path.read_text()) for path in sorted(steps_dir.glob("step=*.json"))]
    if not records or len(records[0].get("ranks", [])) < 2:
        return []
    shown = {0: "first", len(records) // 2: "middle", len(records) - 1: "last"}
    pictures = [
        (f"Step {records[index]['step']} ({name})", gantt([timeline_from(rank) for rank in records[index]["ranks"]]))
        for index, name in shown.items()
    ]
    metrics = [record["metrics"] for record in records]
    shares = [row["bubble/used_s"] / row["bubble/idle_s"] if row["bubble/idle_s"] else 0.0 for row in metrics]
    steps = [float(record["step"]) for record in records]
    return [*pictures, ("Waiting put to use", line_chart(steps, shares, "step", "used / idle"))]


def read_columns(rollouts_dir: Path) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Step, reward and response length (tokens) of every rollout, each `[rollouts]`."""
    parts = [_read_file(path) for path in sorted(rollouts_dir.glob("step=*/*.arrow"))]
    if not parts:
        return np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32)
    steps, rewards, lengths = (np.concatenate(column) for column in zip(*parts, strict=True))
    return steps, rewards, lengths


def _read_file(path: Path) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    with pa.memory_map(str(path)) as source:
        table = pa.ipc.open_file(source).read_all()
        lengths = pc.list_value_length(table["response_tokens"])
        return table["step"].to_numpy().copy(), table["reward"].to_numpy().copy(), lengths.to_numpy().copy()
