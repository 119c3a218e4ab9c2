"""Stage `calibrate`: measures the effect of FP8 layer by layer, and chooses the layers that stay in BF16."""

from __future__ import annotations

import time

from specrl import logs
from specrl.artifacts import CalibrateResult, PrepareResult, PretrainResult, write_result
from specrl.context import StageContext
from specrl.precision.recipe import edge_layers, write_recipe
from specrl.schemas import read_folder
from specrl.stages.rank import stage_rank
from specrl.tracking.tracker import Tracker
from specrl.training.calibration import Calibration, calibrate, calibration_data, recipe_from, write_layers
from specrl.training.megatron.fp8 import LinearPrecision
from specrl.training.megatron.policy import Policy

SCALES_FILE, LAYERS_FILE = "scales.json", "layers.arrow"


def main(context: StageContext) -> None:
    started = time.monotonic()
    config = context.config
    policy_dir = context.input("prepare", PrepareResult).policy_dir
    rollouts = list(read_folder(context.input("pretrain", PretrainResult).rollouts_dir))
    with stage_rank(context) as (ranks, tracker, progress):
        switch = LinearPrecision(emulates=True)
        with logs.phase("loading of the policy"):
            policy = Policy(
                policy_dir,
                config.policy,
                dtype=config.model.dtype,
                ranks=ranks,
                trainable=False,
                seed=config.seed,
                fp8=switch,
            )
        data = calibration_data(rollouts, config, policy.dp_rank, policy.dp_size, policy.pad_multiple)
        num_layers = policy.hf_config.num_hidden_layers
        edges = edge_layers(policy.family, num_layers, *config.precision.bf16_edges)
        with logs.phase("calibration"):
            found = calibrate(
                policy,
                switch,
                data,
                config.precision.max_kl,
                ranks,
                lambda done, total, phase: progress.update(done, total, unit="pass", phase=phase),
                always_bf16=edges,
            )
        if ranks.is_first:
            recipe = recipe_from(found, policy.family, num_layers)
            write_recipe(context.stage_dir / SCALES_FILE, recipe, policy_dir)
            _write_results(context, tracker, found, started)


def _write_results(context: StageContext, tracker: Tracker, found: Calibration, started: float) -> None:
    folder = context.stage_dir
    write_layers(folder / LAYERS_FILE, found.rows)
    for file in (SCALES_FILE, LAYERS_FILE):
        tracker.log_artifact(folder / file, "calibration")
    tracker.log_metrics(
        {
            "calibration/kl_all_fp8": found.kl_all_fp8,
            "calibration/kl_chosen": found.kl_chosen,
            "calibration/num_bf16_layers": len(found.bf16_layers),
            "calibration/bf16_flop_fraction": found.bf16_flop_fraction,
            **({"calibration/kv_scale_max": max(found.kv_scales.k + found.kv_scales.v)} if found.kv_scales else {}),
        }
    )
    result = CalibrateResult(
        scales_path=folder / SCALES_FILE,
        layers_path=folder / LAYERS_FILE,
        bf16_layers=found.bf16_layers,
        kl_all_fp8=found.kl_all_fp8,
        kl_chosen=found.kl_chosen,
        seconds=time.monotonic() - started,
    )
    write_result(folder, result)
