"""Every kind of drafter from `prepare` to `export`: `python -m tests.integration.kind_runs FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.integration.stage_runs import Sections, config_of, import_stages, parent_run, run_stage

# isort: split
from specrl.config import STAGES, StageName
from specrl.models.families import TINY_VOCAB_SIZE
from tests.published import EAGLE_3_1, write_published

LAYERS, PUBLISHED = "layers", "published"
ADAPTED, LORA = "ernie4_5_moe", {"rank": 4, "alpha": 8.0}
"""The kind whose policy is trained by adapters, which Megatron has in another order of channels, and these."""
KINDS: dict[str, Sections] = {
    LAYERS: {
        "drafter": {
            "num_layers": 3,
            "feature_layers": [1, 3, 4, 6],
            "sliding_window": 16,
            "draft_vocab_size": TINY_VOCAB_SIZE,
        }
    },
    PUBLISHED: {},
    **{
        family: {"model": {"tiny": {"family": family}}, "speculation": {"method": "mtp"}}
        for family in ("exaone_moe", "ernie4_5_moe")
    },
}
KINDS[ADAPTED] = {**KINDS[ADAPTED], "policy": {"lr": 1e-3, "lora": LORA}}
"""What the configuration of each kind says. The drafter of one layer and MiMo's go through whole runs elsewhere."""
SAME_POLICY = (LAYERS, PUBLISHED)
"""Kinds for one policy, whose calibration is that of the first one."""


def sections_of(kind: str, folder: Path) -> Sections:
    """What the configuration of a kind says; a drafter to start from is written for the first kind's policy."""
    if kind != PUBLISHED:
        return KINDS[kind]
    policy_dir = folder / LAYERS / "stages" / "prepare-0" / "policy"
    return {"drafter": {"source": str(write_published(folder / "source", policy_dir, EAGLE_3_1, range(4, 68)))}}


def main(folder: Path) -> None:
    import_stages()
    calibrated = dict[str, Path]()
    for kind in KINDS:
        policy = LAYERS if kind in SAME_POLICY else kind
        config, stages = config_of(folder, kind, sections_of(kind, folder)), dict[StageName, Path]()
        mlflow_run = parent_run(config)
        for stage in STAGES:
            if stage == "calibrate" and policy in calibrated:
                stages[stage] = calibrated[policy]
            else:
                stages[stage] = run_stage(config, stage, stages, mlflow_run)
        calibrated[policy] = stages["calibrate"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
