"""`report.html`: one page with a run's numbers and charts, readable without a server or network."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.dataset as ds
from jinja2 import Environment, FileSystemLoader

from specrl.artifacts import write_text
from specrl.lineage.history import changes_by_step
from specrl.report.plots import embedded, gantt, histogram, line_chart
from specrl.report.samples import clipped, page_samples
from specrl.report.summary import Results, by_set, event_table, exported, headlines, summary_tables
from specrl.schemas import ROLLOUT_SCHEMA
from specrl.timeline import timeline_from

REPORT_FILE = "report.html"
TEMPLATE = "report.html.jinja"


@dataclass(frozen=True)
class Chart:
    title: str
    svg: str
    is_wide: bool = False


def write_report(run_dir: Path) -> Path:
    """Write the page from the run's rollouts and results; return its path."""
    found = Results.read(run_dir)
    results, *tables = summary_tables(found)
    charts = [*_rollout_charts(found.stages), *_result_charts(found)]
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, keep_trailing_newline=True)
    templates.filters |= {"clipped": clipped, "embedded": embedded}
    page = templates.get_template(TEMPLATE).render(
        name=found.config.name,
        headlines=headlines(found),
        results=results,
        tables=[table for table in (*tables, event_table(found)) if table.rows],
        serving=exported(found),
        charts=charts,
        steps=page_samples(run_dir),
    )
    path = run_dir / REPORT_FILE
    write_text(path, page)
    return path


def _rollout_charts(stages: Mapping[str, Path]) -> list[Chart]:
    if "train" not in stages:
        return []
    steps, rewards, lengths = read_columns(stages["train"] / "rollouts")
    if not len(steps):
        return []
    means = [(float(step), float(rewards[steps == step].mean())) for step in np.unique(steps)]
    marks = {float(step): "; ".join(texts) for step, texts in changes_by_step(stages["train"]).items()}
    return [
        Chart("Reward", line_chart({"": means}, "RL step", "mean reward", marks)),
        Chart("Response lengths", histogram(lengths.tolist(), 40, "response length, tokens", "responses")),
    ]


def _result_charts(found: Results) -> list[Chart]:
    charts = []
    if found.curve:
        series = {
            name: [(score.step, score.accuracy, *score.ci["accuracy"]) for score in scores]
            for name, scores in by_set(found.curve).items()
        }
        line = line_chart(series, "RL step", "accuracy")
        charts.append(Chart("Accuracy on held-out prompts, with 95 % confidence intervals", line))
    if "train" in found.stages:
        charts += _bubble_charts(found.stages["train"] / "steps")
    if found.validate and found.validate.speed:
        speedups = [(pair.batch, pair.speedup) for pair in found.validate.speed]
        line = line_chart({"": speedups}, "running batch", "tokens per second, relative to plain")
        charts.append(Chart("Speculative against plain generation, matched pairs", line))
    return charts


def _bubble_charts(steps_dir: Path) -> list[Chart]:
    records = [json.loads(path.read_text()) for path in sorted(steps_dir.glob("step=*.json"))]
    if max((len(record.get("ranks", [])) for record in records), default=0) < 2:  # may change on restarts
        return []
    shown = {0: "first", len(records) // 2: "middle", len(records) - 1: "last"}
    pictures = [
        Chart(
            f"Step {records[index]['step']} ({name})",
            gantt([timeline_from(rank) for rank in records[index]["ranks"]]),
            is_wide=True,
        )
        for index, name in shown.items()
    ]
    metrics = {record["step"]: record["metrics"] for record in records}
    shares = [(step, row["bubble/used_s"] / (row["bubble/idle_s"] or math.inf)) for step, row in metrics.items()]
    return [*pictures, Chart("Use of idle time", line_chart({"": shares}, "RL step", "share of idle seconds used"))]


def read_columns(rollouts_dir: Path) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Step, reward and number of sampled tokens of every rollout, each as an array [rollouts]."""
    rows = ds.dataset(sorted(rollouts_dir.glob("step=*/*.arrow")), schema=ROLLOUT_SCHEMA, format="ipc")
    lengths = pc.list_value_length(ds.field("generation_logprobs"))
    table = rows.to_table(columns={"step": ds.field("step"), "reward": ds.field("reward"), "length": lengths})
    return table["step"].to_numpy(), table["reward"].to_numpy(), table["length"].to_numpy()
