"""`specrl serve-model`: serve a run's exported policy and drafter with vLLM's OpenAI server."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from flows.commands.options import Port, RunName, RunsDir, usable_port
from flows.folder import find_own_run
from specrl.artifacts import ExportResult
from specrl.config import ConfigError
from specrl.export.card import serve_arguments
from specrl.processes import LOOPBACK
from specrl.report.results import read_config, result_of

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": LOOPBACK,
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""The server's defaults, which the user may override."""
FORCED = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # or vLLM's processes would outlive the command


def serve_model(name: RunName, runs_dir: RunsDir = Path("runs"), port: Port = None) -> None:
    """Serve a finished run's policy with its drafter.

    It prints the command vllm serve and then becomes it: vLLM's server, only on the loopback interface, until Ctrl-C.
    If VLLM_API_KEY is set, clients must send that key.
    """
    run_dir = find_own_run(name, runs_dir)
    config, exported = read_config(run_dir), _exported(run_dir)
    assert exported.drafter_dir is not None
    command = serve_arguments(exported.policy_dir, exported.drafter_dir, config.speculation.k, config)
    command += ["--host", LOOPBACK, "--port", str(usable_port(port))]
    print(shlex.join(command), flush=True)
    server = [sys.executable, "-m", "specrl.serving.process", "--model", *command[2:]]
    os.execve(server[0], server, {**ENVIRONMENT, **os.environ, **FORCED})


def _exported(run_dir: Path) -> ExportResult:
    exported = result_of(run_dir, "export", ExportResult)
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
