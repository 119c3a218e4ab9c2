"""`specrl export` and `serve-model`: a run's drafter and policy for other software, and served with vLLM."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.commands.options import Port, RunName, RunsDir, option, usable_port, user_path
from flows.folder import find_own_run
from flows.origin import find_origin
from specrl.artifacts import ExportResult, TrainResult, ValidateResult, write_text
from specrl.config import Config, ConfigError
from specrl.export.card import serve_arguments
from specrl.processes import LOOPBACK
from specrl.report.results import read_config, result_of

FORMS = """The drafter as eagle3 (the original layout, for vLLM), speculators (for vLLM and the library) or sglang; or
policy, a Hugging Face folder of a checkpoint's policy."""
Format = Annotated[str, option(FORMS, "FORMAT", "--format")]
NEW = "The folder to write; if it exists, it must be empty."
To = Annotated[Path, typer.Option("--to", metavar="FOLDER", help=NEW, callback=user_path)]
PolicyName = Annotated[str | None, option("The policy's hub id or folder, as the server will know it.", "NAME")]
PLACE = "The name of a run, or the path of its folder; with --format policy also RUN@STEP."
RunOrCheckpoint = Annotated[str, typer.Argument(metavar="RUN", help=PLACE)]
POLICY = "policy"  # the only format that is not for drafters
OF_SERVER = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": LOOPBACK,
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""The defaults of vLLM's server, which the user may override."""
OF_PROCESSES = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # or vLLM's processes would outlive the command


def export(
    name: RunOrCheckpoint,
    form: Format,
    to: To,
    policy: PolicyName = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write a run's drafter, or a policy, for inference servers.

    The folder gets a model card with the acceptance that the run measured. The final policy is already a Hugging Face
    folder, export/policy in the run's folder. --format policy writes the policy of a checkpoint, by default the newest,
    even while the run is going on.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"--to {to}: it exists and is not an empty folder")
    if form != POLICY:
        _export_drafter(name, form, to, policy, runs_dir)
    elif policy is not None:
        raise ConfigError("--policy is for drafters; leave it out with --format policy")
    else:
        _export_policy(name, to, runs_dir)


def _export_policy(place: str, to: Path, runs_dir: Path) -> None:
    config = read_config(find_own_run(place.partition("@")[0], runs_dir)).model_copy(update={"runs_dir": runs_dir})
    method = config.speculation.method
    if config.speculation.draft_method.is_policy_layer:
        raise ConfigError(
            f'--format policy: speculation.method = "{method}" trains a layer of the policy, which a checkpoint keeps '
            "apart; specrl stop, then specrl resume --steps with the steps it has, writes both to export/policy"
        )
    origin = find_origin(place, config)
    import torch

    from specrl.distributed import Ranks
    from specrl.training.checkpoint.manifest import CheckpointError
    from specrl.training.checkpoint.policy_folder import write_policy_folder

    try:
        alone = Ranks(0, 1, 0, torch.device("cpu"))
        write_policy_folder(origin.checkpoint_dir, origin.policy_dir, to, getattr(torch, config.model.dtype), alone)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    print(f"policy of {origin.start.run} after step {origin.start.step}: {to.absolute()}")


def _export_drafter(name: str, form: str, to: Path, policy: str | None, runs_dir: Path) -> None:
    run_dir = find_own_run(name, runs_dir)
    from specrl.export.card import CARD_FILE, ExportedDrafter, model_card
    from specrl.export.formats import find_format

    chosen = find_format(form)
    config, exported, drafter_dir = _exported(run_dir)
    trained, validated = result_of(run_dir, "train", TrainResult), result_of(run_dir, "validate", ValidateResult)
    if drafter_dir == exported.policy_dir:
        raise ConfigError(f"run {run_dir.name} drafts with a layer of its policy, in whose folder it is: {drafter_dir}")
    served = policy or str(exported.policy_dir)
    drafter = ExportedDrafter(drafter_dir, exported.policy_dir, served, config.speculation.k)
    try:
        chosen.write(drafter, to)
    except ValueError as error:
        raise ConfigError(f"--format {form}: {error}") from error
    command = chosen.command(drafter, to.absolute())
    write_text(to / CARD_FILE, model_card(config, trained, validated, exported, command))
    print(f"drafter of {run_dir.name} as {form}: {to.absolute()}\nserve it with the policy:\n  {command}")


def serve_model(name: RunName, runs_dir: RunsDir = Path("runs"), port: Port = None) -> None:
    """Serve a finished run's policy with its drafter.

    It prints the command vllm serve and then becomes it: vLLM's server, only on the loopback interface, until Ctrl-C.
    If VLLM_API_KEY is set, clients must send that key.
    """
    config, exported, drafter_dir = _exported(find_own_run(name, runs_dir))
    command = serve_arguments(exported.policy_dir, drafter_dir, config.speculation.k, config)
    command += ["--host", LOOPBACK, "--port", str(usable_port(port))]
    print(shlex.join(command), flush=True)
    server = [sys.executable, "-m", "specrl.serving.process", "--model", *command[2:]]
    os.execve(server[0], server, {**OF_SERVER, **os.environ, **OF_PROCESSES})


def _exported(run_dir: Path) -> tuple[Config, ExportResult, Path]:
    """What a run has exported, and the drafter's folder; a ConfigError if it has no drafter, or a folder is gone."""
    exported, config = result_of(run_dir, "export", ExportResult), read_config(run_dir)
    if exported.drafter_dir is None:
        raise ConfigError(
            f'run {run_dir.name} has no drafter: its speculation.method is "{config.speculation.method}"; '
            f"its policy alone is served by: vllm serve {exported.policy_dir}"
        )
    for folder in (exported.policy_dir, exported.drafter_dir):
        if not folder.is_dir():
            raise ConfigError(
                f"run {run_dir.name}: what it exported to {folder} is gone; specrl resume exports it again"
            )
    return config, exported, exported.drafter_dir
