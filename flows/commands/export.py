"""`specrl export`: write a run's drafter in a format that others load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.commands.options import RunName, RunsDir
from flows.folder import find_run
from specrl.artifacts import ExportResult, TrainResult, ValidateResult, write_text
from specrl.config import ConfigError
from specrl.report.results import find_stages, finished, read_config

Format = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="eagle3 (the original layout, for vLLM), speculators (for vLLM and the library), or sglang.",
    ),
]
To = Annotated[Path, typer.Option("--to", metavar="FOLDER", help="The new folder; it must be empty if it exists.")]
PolicyName = Annotated[
    str | None, typer.Option(metavar="NAME", help="The policy's hub id or folder, as the server will name it.")
]
Quantize = Annotated[
    str | None,
    typer.Option(metavar="int8|fp8", help="Write 8-bit linear layers as vLLM loads them, with --format eagle3 alone."),
]


def register(app: typer.Typer) -> None:
    app.command("export")(export)


def export(
    name: RunName,
    form: Format,
    to: To,
    policy: PolicyName = None,
    runs_dir: RunsDir = Path("runs"),
    quantize: Quantize = None,
) -> None:
    """Write the drafter of a finished run in a format that inference servers load.

    The folder gets a model card with the acceptance that the run has measured. The policy is a Hugging Face folder
    already: export/policy of the run.
    """
    from specrl.export.card import CARD_FILE, model_card
    from specrl.export.exported import ExportedDrafter
    from specrl.export.formats import find_format
    from specrl.export.quantised import find_scheme, quantisation_paragraph, write_quantised

    chosen, run_dir = find_format(form), find_run(name, runs_dir)
    scheme = None if quantize is None else find_scheme(quantize)
    if scheme is not None and form != "eagle3":
        raise ConfigError(f"--quantize {quantize}: only --format eagle3 can be quantized, not {form}")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"--to {to}: it exists and is not an empty folder")
    stages = find_stages(run_dir)
    exported = finished(stages, "export", ExportResult)
    trained, validated = finished(stages, "train", TrainResult), finished(stages, "validate", ValidateResult)
    if exported is None or trained is None or validated is None:
        raise ConfigError(f"run {run_dir.name} has not finished; specrl resume {run_dir.name} brings it to its end")
    config, served = read_config(run_dir), policy or str(exported.policy_dir)
    if exported.drafter_dir is None:
        raise ConfigError(f'run {run_dir.name} has no drafter: its speculation.method is "{config.speculation.method}"')
    if exported.drafter_dir == exported.policy_dir:
        raise ConfigError(
            f"run {run_dir.name} drafts with a layer of its policy, in whose folder it is: {exported.policy_dir}"
        )
    drafter = ExportedDrafter(exported.drafter_dir, exported.policy_dir, served, config.speculation.k)
    try:
        if scheme is None:
            chosen.write(drafter, to)
        else:
            write_quantised(drafter, to, scheme)
    except ValueError as error:
        raise ConfigError(f"--format {form}: {error}") from error
    command = chosen.command(drafter, to.absolute())
    about = "" if scheme is None else quantisation_paragraph(scheme, drafter.directory)
    write_text(to / CARD_FILE, model_card(config, trained, validated, exported, command, about))
    print(f"drafter of {run_dir.name} as {form}: {to.absolute()}\nserve it with the policy:\n  {command}")
