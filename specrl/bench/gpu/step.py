"""The section `step` of `specrl bench gpu`: whole RL steps of a shipped configuration, in ranks of the train stage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from math import gcd
from pathlib import Path
from typing import Any

import torch

from specrl.artifacts import Artifact, CalibrateResult, PrepareResult, PretrainResult, write_result
from specrl.bench.cells import Cell
from specrl.bench.gpu.generation import LENGTH, RATES
from specrl.bench.gpu.models import Row, Scale, gpu_gib, shipped, write_policy, write_untrained_drafter
from specrl.bench.run.main import planned_gib
from specrl.bench.run.page import PARTS
from specrl.bench.run.trainings import CONTEXT_FILE, Training
from specrl.config import Config, StageName
from specrl.context import StageContext
from specrl.models.families import FAMILIES
from specrl.precision import native
from specrl.precision.recipe import KvScales, Recipe, write_recipe
from specrl.projection.memory import MARGIN
from specrl.rollout.refit.drafter_guard import NUM_PROMPTS
from specrl.rollout.refit.policy_probe import MAX_TOKENS
from specrl.schemas import Rollout, rollout_path, write_rollouts

POSITIONS = 40960  # of Qwen3-8B
STEPS = 2  # the first one compiles and warms up
GROUPS = 2  # prompts of each engine in a step; all of their responses are decoded at once
FIRST_TOKEN = 3  # of those that are drafted, so that no draft ends a response
POLICY = "policy"  # its folder
IN_BF16 = 'precision.training="bf16"'
KV_SCALE = 2.0**-5  # until the first update has measured them


def measure(scale: Scale, folder: Path) -> Iterator[Row]:
    """Take RL steps of the shipped 8B configuration with random weights: generation, both updates, and checked refit.

    All GPUs take part, at most eight; where there are several, two of them do so again, as one engine and one copy of
    the policy. All weights are trained if the plan leaves a GPU its margin, otherwise LoRA adapters. Each engine gets
    two prompts per step. Its responses have full length, and draft tokens are accepted by chance, at the rate that
    gives length 2.5 with three of them. The first step warms up. `used_gib` is what was in use of the fullest GPU.
    """
    inputs = write_inputs(scale, folder / "step")
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    for ranks, engine, policy in layouts(torch.cuda.device_count() or 2):
        place = folder / "step" / f"{ranks}-ranks-{ranks // engine}-engines"
        config = config_of(scale, folder / "step" / POLICY, (ranks, engine, policy), gpu_gib(), capability)
        context = StageContext(config, "train", "train-0", place / "stage", inputs, "")
        context.save(place / CONTEXT_FILE)
        training = Training(Cell("step", ()), context)
        with ExitStack() as stack:
            training.start(stack, RATES[LENGTH])
            for step in range(STEPS):
                training.step()
                yield {"ranks": ranks, "engine_tp": engine, "policy_tp": policy, "step": step, **measured(training)}
    shutil.rmtree(folder / "step" / POLICY)  # 16 GB


def layouts(count: int) -> list[tuple[int, int, int]]:
    """Measured with so many GPUs: the numbers of ranks, of ranks per engine, and of ranks per copy of the policy."""
    ranks = min(count, 8)
    return [(ranks, 1, gcd(ranks, 4)), (2, 2, 2)][: min(ranks, 2)]


def config_of(
    scale: Scale, policy_dir: Path, layout: tuple[int, int, int], gib: float, capability: tuple[int, int] | None
) -> Config:
    """The shipped configuration with this layout, on such GPUs, or on CPUs; LoRA if not all weights can be trained."""
    ranks, engine, policy = layout
    settings = [
        f'model.source="{policy_dir}"',
        f"engine.tensor_parallel={engine}",
        f"policy.tensor_parallel={policy}",
        f"train.prompts_per_step={GROUPS * ranks // engine}",
        f"resources.ranks_per_node={ranks}",
        f"resources.gpu_memory_gib={gib}",
        f"resources.cpus_per_rank={max(1, len(os.sched_getaffinity(0)) // ranks)}",
    ]
    if capability is None:
        settings += ["resources.gpus_per_rank=0", "engine.sleep=false"]
    elif capability < native.FIRST_CAPABILITY:
        settings += [f'precision.{part}="bf16"' for part in ("generation", "training", "kv_cache")]
    elif capability >= native.FIRST_OF_POWERS:
        settings.append(IN_BF16)
    config = shipped(scale, *settings)
    fits = planned_gib(config, "GPU, trainer") <= (1 - MARGIN) * gib
    return config if fits else shipped(scale, *settings, "policy.lora={}", IN_BF16)


def write_inputs(scale: Scale, folder: Path) -> dict[StageName, Path]:
    """Write what `train` reads of earlier stages: a random policy and drafter, and made-up responses and scales."""
    vocab_size, layers = scale.stepped.vocab_size, scale.stepped.num_hidden_layers
    policy_dir = write_policy(scale.stepped, POSITIONS, folder / POLICY)
    drafted = range(FIRST_TOKEN, FIRST_TOKEN + scale.draft_vocab)
    drafter_dir = write_untrained_drafter(policy_dir, drafted, folder / "drafter")
    texts = torch.randint(FIRST_TOKEN, vocab_size, (NUM_PROMPTS, 2, MAX_TOKENS // 2)).tolist()
    rest = [0.0] * (MAX_TOKENS // 2), "", "", "length"
    rollouts = [Rollout(0, 0, i, 0, 0, 0, 0, prompt, text, *rest) for i, (prompt, text) in enumerate(texts)]
    write_rollouts(rollout_path(folder / "rollouts", 0, 0), rollouts)
    kv_scales = KvScales(*[[KV_SCALE] * layers] * 3)
    write_recipe(folder / "scales.json", Recipe(FAMILIES["qwen3"], layers, kv_scales=kv_scales), policy_dir)
    responses: dict[str, Any] = {"rollouts_dir": folder / "rollouts", "num_responses": NUM_PROMPTS, "reward_mean": 0}
    recipe: dict[str, Any] = {"scales_path": folder / "scales.json", "layers_path": folder, "bf16_layers": []}
    results: dict[StageName, Artifact] = {
        "prepare": PrepareResult(policy_dir=policy_dir, seconds=0),
        "pretrain": PretrainResult(drafter_dir=drafter_dir, **responses, seconds=0),
        "calibrate": CalibrateResult(**recipe, kl_all_fp8=0, kl_chosen=0, seconds=0),
    }
    for stage, result in results.items():
        write_result(folder / stage, result)
    return {stage: folder / stage for stage in results}


def measured(training: Training) -> Row:
    """What was trained, and the columns of the newest step."""
    config, metrics = training.context.config, training.metrics()[-1]
    lora, precision = config.policy.lora is not None, config.precision
    row: Row = {"trained": "LoRA" if lora else "all", "trainer": precision.training, "engine": precision.generation}
    row |= {"start_s": training.start_s, **{name: metrics[f"timing/{name}"] for name in PARTS}}
    row |= {"tokens": metrics["rollout/response_length_mean"], "acceptance_length": metrics["spec/acceptance_length"]}
    planned, used = planned_gib(config, "GPU, trainer"), training.used_gib or None
    return row | {"used_gib": used, "planned_gib": planned or None, "of_plan": used and used / planned}
