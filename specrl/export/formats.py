"""The formats that a drafter is exported in, each from the EAGLE-3 directory that specrl itself writes."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specrl.config import ConfigError
from specrl.export.card import ExportedDrafter, serve_arguments, window_options
from specrl.export.sglang import sglang_command, write_sglang
from specrl.export.speculators import write_speculators
from specrl.models.directory import CONFIG_FILE, WEIGHTS_FILE


@dataclass(frozen=True)
class Format:
    write: Callable[[ExportedDrafter, Path], None]
    """Writes the format into a new folder; raises ValueError where the format, or what loads it, cannot hold the
    drafter."""
    command: Callable[[ExportedDrafter, Path], str]
    """Returns the command that serves that folder."""


def _write_eagle3(drafter: ExportedDrafter, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name in (WEIGHTS_FILE, CONFIG_FILE):
        shutil.copyfile(drafter.directory / name, directory / name)


def _eagle3_command(drafter: ExportedDrafter, directory: Path) -> str:
    return shlex.join(serve_arguments(drafter.policy, directory, drafter.k))


def _speculators_command(_: ExportedDrafter, directory: Path) -> str:
    return shlex.join(["vllm", "serve", str(directory), *window_options(directory)])


FORMATS: dict[str, Format] = {
    "eagle3": Format(_write_eagle3, _eagle3_command),
    "speculators": Format(write_speculators, _speculators_command),
    "sglang": Format(write_sglang, sglang_command),
}
"""All formats by name. `eagle3` is the original layout, which vLLM loads."""


def find_format(name: str) -> Format:
    if name not in FORMATS:
        raise ConfigError(f"--format {name}: allowed are {', '.join(FORMATS)}, and policy")
    return FORMATS[name]
