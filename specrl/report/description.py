"""A run in a few lines of Markdown, for its overview page in MLflow."""

from __future__ import annotations

from pathlib import Path

from specrl.config import Config
from specrl.export.card import data_name, learner
from specrl.report.results import read_config
from specrl.report.summary import Results, exported, result_rows

FIRST = ("accuracy, held out", "reward, training", "acceptance length")  # shown first, along with the speedups


def describe(run_dir: Path) -> str:
    """Describe a run, its results so far, and where to find more."""
    config, found = read_config(run_dir), Results.read(run_dir)
    lines, rows = [headline(config), ""], result_rows(found)
    short = {what: result.partition(" (")[0] for what, result in rows if what in FIRST or what.startswith("speedup")}
    shown = [f"{what} {result}" for what, result in short.items()]
    if shown:  # MLflow's page shows three lines until it is expanded
        lines += [f"**{'; '.join(shown)}**", ""]
    if rows:
        lines += ["| what | result |", "|---|---|", *(f"| {what} | {_cell(result)} |" for what, result in rows), ""]
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


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
