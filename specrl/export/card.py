"""An exported drafter and its model card, or that of a policy with a multi-token-prediction layer."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrl.artifacts import Acceptance, ExportResult, TrainResult, ValidateResult
from specrl.config import Config
from specrl.models.directory import CONFIG_FILE, read_model_config
from specrl.models.drafters import has_window

CARD_FILE = "README.md"
ALONE = "this directory loaded on its own, held-out set | temperature | tokens before the draft | acceptance length"


@dataclass(frozen=True)
class ExportedDrafter:
    """The drafter of a run, as its last stage exports it."""

    directory: Path
    policy_dir: Path
    policy: str  # the directory or hub id on the serving side
    k: int  # recommended draft tokens per iteration

    @property
    def config(self) -> dict[str, Any]:
        return read_model_config(self.directory)

    @property
    def policy_config(self) -> dict[str, Any]:
        return read_model_config(self.policy_dir)


def serve_arguments(
    policy: Path | str, drafter_dir: Path, k: int, config: Config | None = None, *, files: Path | None = None
) -> list[str]:
    """The arguments of the `vllm serve` command that uses the drafter, whose files may still be elsewhere (`files`).

    Given the configuration of a run without GPUs, it serves as the run's engine generated, with a KV cache of the same
    size: vLLM would take nearly all of the machine's memory. If the drafter's directory is the policy's, a layer of the
    policy drafts.
    """
    speculative: dict[str, str | int] = {"method": "mtp"}
    if drafter_dir != policy:
        speculative = {"method": "eagle3", "model": str(drafter_dir)}
    speculative["num_speculative_tokens"] = k
    words = ["vllm", "serve", str(policy), "--speculative-config", json.dumps(speculative)]
    words += window_options(files or drafter_dir)
    return words if config is None else [*words, *_options(config)]


def window_options(directory: Path) -> list[str]:
    """The options of `vllm serve` for a drafter with a sliding window.

    vLLM would divide the policy's layers into groups as small as the drafter, each with its own block table.
    """
    windowed = (directory / CONFIG_FILE).is_file() and has_window(directory)
    return ["--disable-hybrid-kv-cache-manager"] if windowed else []


def _options(config: Config) -> list[str]:
    words = ["--dtype", config.model.dtype, "--max-model-len", str(config.model.max_length)]
    if config.engine.tensor_parallel > 1:
        words += ["--tensor-parallel-size", str(config.engine.tensor_parallel)]
    if not config.resources_of("export").gpus_per_rank:
        words += ["--kv-cache-memory-bytes", str(int(config.engine.kv_cache_gib * 2**30))]
        words += [] if config.engine.compile else ["--enforce-eager"]
    return words


def serve_command(policy: Path | str, drafter_dir: Path, k: int, config: Config, *, files: Path | None = None) -> str:
    """The shell command that serves a run's drafter."""
    return shlex.join(serve_arguments(policy, drafter_dir, k, config, files=files))


def model_card(
    config: Config, trained: TrainResult, validated: ValidateResult, exported: ExportResult, command: str
) -> str:
    """The card as Markdown, with the run's measurements."""
    data, temperature = data_name(config), f"{config.sampling.temperature:g}"
    k, positions = config.speculation.k, " / ".join(f"{rate:.2f}" for rate in validated.acceptance_rate_per_pos)
    acceptance = [
        f"| {data}, held out | {k} | {temperature} | {validated.acceptance_length:.2f} (by position {positions}) |",
        f"| {data}, the RL steps | chosen at each step | {temperature} | {trained.acceptance_length:.2f} |",
    ]
    speed = [
        f"| {pair.batch} | {pair.speedup:.2f} | {pair.speedup_min:.2f} - {pair.speedup_max:.2f} |"
        for pair in validated.speed
    ]
    tables = (
        _table("data | k | temperature | acceptance length", acceptance),
        _table(ALONE, [_row(found) for found in exported.acceptance]),
        _table("batch | generation speedup (median of matched pairs) | range", speed),
    )
    return "\n".join([f"# {_title(config, trained)}", "", *filter(None, tables), f"    {command}", ""])


def _row(found: Acceptance) -> str:
    context = "all" if found.context is None else f"{found.context[0]} to {found.context[1]}"
    positions = " / ".join(f"{rate:.2f}" for rate in found.acceptance_rate_per_pos)
    length = f"{found.acceptance_length:.2f} (by position {positions})" if positions else "no drafts"
    return f"| {found.set} | {found.temperature:g} | {context} | {length} |"


def _table(head: str, rows: list[str]) -> str:
    return "\n".join([f"| {head} |", "|---" * (head.count("|") + 1) + "|", *rows, ""]) if rows else ""


def learner(config: Config) -> str:
    """The trained model and, if any, its teacher."""
    teacher = f" with the teacher `{config.train.teacher}`" if config.train.teacher is not None else ""
    return f"`{config.model.source}`{teacher}"


def data_name(config: Config) -> str:
    """The names of the files or generators of the problems."""
    path = config.data.path
    return (
        ", ".join(place.name for place in path)
        if path is not None
        else ", ".join(generator.name for generator in config.data.generators)
    )


def _title(config: Config, trained: TrainResult) -> str:
    if trained.drafter_dir == trained.policy_dir:
        return f"""Policy of run {config.name}, with its multi-token-prediction layer

{learner(config)} after {trained.policy_step} steps of reinforcement learning by specrl. Its
multi-token-prediction layer was trained with it, on the policy's own hidden states and without a gradient to the
policy. Drafts never change what is sampled, only how fast."""
    return f"""EAGLE-3 drafter of run {config.name}

Trained together with its policy ({learner(config)}, version {trained.policy_step}) by specrl. It belongs to that
policy version alone: another version accepts fewer of its drafts. Drafts never change what is sampled, only how
fast."""
