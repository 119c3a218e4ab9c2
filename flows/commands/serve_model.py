"""`specrl serve-model`: serve a run's exported policy and drafter with vLLM's OpenAI server."""

from __future__ import annotations

import shlex
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from flows.commands.options import Port, RunName, RunsDir, option, usable_port
from flows.folder import find_own_run
from slurm.backend import JobError
from specrl.artifacts import ExportResult
from specrl.config import Config, ConfigError
from specrl.export.card import serve_arguments
from specrl.processes import LOOPBACK, node_folder
from specrl.report.results import find_stages, finished, read_config
from specrl.serving.server import ModelServer, ServerEndedError

CheckOnly = Annotated[bool, option("End after the check, instead of serving until Ctrl-C.", name="--check")]
Prompts = Annotated[int, option("How many held-out prompts of the task the check asks.", "NUMBER", least=1)]


def serve_model(
    name: RunName, runs_dir: RunsDir = Path("runs"), port: Port = None, check: CheckOnly = False, prompts: Prompts = 16
) -> None:
    """Serve a finished run's policy with its drafter.

    It prints the vllm serve command that it runs, waits until the server answers, sends held-out prompts of the task
    through it, and prints how many of its drafts the server accepted. Then it serves until Ctrl-C, on the loopback
    interface alone. The server ends with this command, even if that is killed. If VLLM_API_KEY is set, the server asks
    its clients for that key.
    """
    run_dir = find_own_run(name, runs_dir)
    config, exported = read_config(run_dir), _exported(run_dir)
    assert exported.drafter_dir is not None
    chosen = usable_port(port)
    command = serve_arguments(exported.policy_dir, exported.drafter_dir, config.speculation.k, config)
    command += ["--host", LOOPBACK, "--port", str(chosen)]
    print(shlex.join(command), flush=True)
    log = node_folder() / f"serve-model-{chosen}.log"  # whoever serves a run may not write to it
    try:
        with ModelServer(["--model", *command[2:]], chosen, log) as server:
            started = time.monotonic()
            server.wait_until_it_answers()
            print(f"vLLM answers at {server.url}/v1, {time.monotonic() - started:.0f} s after its start", flush=True)
            print(_acceptance(server, config, exported, prompts), flush=True)
            if not check:
                print("it serves until Ctrl-C", flush=True)
                with suppress(KeyboardInterrupt):
                    server.wait_until_it_ends()
                print("the server has ended")
    except ServerEndedError as error:
        raise JobError(str(error)) from error
    log.unlink(missing_ok=True)


def _acceptance(server: ModelServer, config: Config, exported: ExportResult, count: int) -> str:
    from specrl.data.prompts import PromptSource
    from specrl.models.sources import load_tokenizer

    source = PromptSource(config, load_tokenizer(exported.policy_dir))  # whoever serves a run may not write to it
    prompts = source.held_out(min(count, config.validate_.num_prompts))
    tokens, stats = server.answer(prompts, config)
    temperature = config.sampling.temperature
    by_position = " / ".join(f"{rate:.2f}" for rate in stats.acceptance_rate_per_pos)
    return (
        f"{len(prompts)} held-out prompts at temperature {temperature:g}, {tokens} tokens: "
        f"acceptance length {stats.acceptance_length:.2f} (k = {config.speculation.k}; by position {by_position}); "
        f"the export measured {exported.vllm_acceptance_length:.2f}"
    )


def _exported(run_dir: Path) -> ExportResult:
    exported = finished(find_stages(run_dir), "export", ExportResult)
    if exported is None:
        raise ConfigError(f"run {run_dir.name} has exported nothing yet; continue it with: specrl resume {run_dir}")
    if exported.drafter_dir is None:
        method = read_config(run_dir).speculation.method
        raise ConfigError(
            f'run {run_dir.name} has no drafter to serve: its speculation.method is "{method}"; its policy alone is '
            f"served by: vllm serve {exported.policy_dir}"
        )
    for folder in (exported.policy_dir, exported.drafter_dir):
        if not folder.is_dir():
            raise ConfigError(
                f"run {run_dir.name}: what it exported to {folder} is gone; specrl resume exports it again"
            )
    return exported
