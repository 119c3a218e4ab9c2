"""A run in a few lines of Markdown, for the page that MLflow shows first."""

from __future__ import annotations

from pathlib import Path

from specrl.artifacts import ExportResult
from specrl.config import Config
from specrl.export.card import serve_command
from specrl.report.results import find_stages, finished, read_config
from specrl.report.summary import result_rows

FIRST = ("accuracy, held out", "reward, training", "acceptance length")  # these results come first, beside the speedups


def describe(run_dir: Path) -> str:
    """What a run is, what it has reached so far, and where to look further."""
    config = read_config(run_dir)
    lines = [headline(config), ""]
    try:
        rows = result_rows(run_dir)
    except ValueError as error:  # results of another version of specrl, which must not hide why a run has ended
        return "\n".join([*lines, str(error)])
    short = {what: result.partition(" (")[0] for what, result in rows if what in FIRST or what.startswith("speedup")}
    shown = [f"{what} {result}" for what, result in short.items()]
    if shown:  # MLflow's page shows three lines until it is asked for more
        lines += [f"**{'; '.join(shown)}**", ""]
    if rows:
        lines += ["| what | result |", "|---|---|", *(f"| {what} | {_cell(result)} |" for what, result in rows), ""]
    lines += ["Stages are the runs nested below this one. Among the artifacts: `summary.json`, `report.html`, `logs/`."]
    export = finished(find_stages(run_dir), "export", ExportResult)
    if export is not None:
        models = [f"[{config.name}-policy](#/models/{config.name}-policy)"]
        if export.drafter_dir is not None:
            models.append(f"[{config.name}-drafter](#/models/{config.name}-drafter)")
        lines += ["", f"Registered models: {', '.join(models)}."]
        if export.drafter_dir is not None:
            command = serve_command(export.policy_dir, export.drafter_dir, config.speculation.k, config)
            lines += ["", "    " + command]
    return "\n".join([*lines, "", f"Folder: `{run_dir}`"])


def headline(config: Config) -> str:
    """One sentence about what is trained on what."""
    path = config.data.path
    source = (
        ", ".join(place.name for place in path)
        if path is not None
        else ", ".join(generator.name for generator in config.data.generators)
    )
    return (
        f"RL post-training of `{config.model.source}` on `{source}`, {config.train.num_steps} steps of "
        f"{config.train.prompts_per_step} prompts x {config.train.samples_per_prompt} responses, drafts by "
        f"`{config.speculation.method}`."
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
