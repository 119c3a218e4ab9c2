"""Short trainings with an entry of the menu each, on one model: `python -m tests.integration.menu_runs FOLDER`.

`FOLDER/menu.json` has what `menu_of` says. The first run goes through all stages. Its model, drafter and calibration
are the others', which train alone.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from tests.integration.stage_runs import Sections, import_stages, parent_run, run_stage

# isort: split
from specrl.config import STAGES, Config, StageName, parse_config
from specrl.models.tiny import write_tiny_model
from tests.forks import ROOT

CALCULATOR: dict[str, Any] = tomllib.loads((ROOT / "configs" / "calculator.toml").read_text())
NUM_STEPS, LONGEST, COEFFICIENT, SCALE = 2, 28, 0.5, 2.0
"""Steps, tokens of a response, the weight of an entropy or a divergence, and of the product of adapters."""
PLAIN: dict[str, dict[str, Any]] = {
    "environment": {"name": None, "max_turns": 4},
    "sampling": {"stop": [], "max_response_tokens": LONGEST},
    "data": {"reward": "tests.integration.loop_plan:reward"},
    "train": {"num_steps": NUM_STEPS, "prompts_per_step": 4, "checkpoint_every": NUM_STEPS},
    "validate": {"every": 0},
}
"""Responses of one turn without a calculator, few and short; about half of them earn the reward."""
TALK = {"train": PLAIN["train"], "validate": {"every": NUM_STEPS, "exactness_prompts": 4, "speed_batches": [4]}}
"""`configs/calculator.toml` with as few steps and prompts."""
LENGTH = {"name": "length", "weight": 0.5, "parameters": {"target": 0, "limit": 60}}
PARTS = [{"name": "tests.integration.loop_plan:reward", "label": "odd"}, LENGTH]
KL = {"kl_coef": COEFFICIENT}
MENU: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "dapo": {"train": {"algorithm": "dapo"}},
    "dr-grpo": {"train": {"algorithm": "dr-grpo"}},
    "gspo": {"train": {"algorithm": "gspo", "updates_per_step": 2}, "policy": {"lr": 1e-5}},
    "cispo": {"train": {"algorithm": "cispo", "updates_per_step": 2}, "policy": {"lr": 1e-7}},
    "rloo": {"train": {"algorithm": "rloo"}},
    "reinforce": {"train": {"algorithm": "reinforce++"}},
    "gdpo": {"train": {"algorithm": "gdpo"}, "data": {"reward": PARTS}},
    "entropy": {"train": {"entropy_coefficient": COEFFICIENT}},
    "k2-loss": {"train": {**KL, "kl_estimator": "k2"}, "policy": {"lr": 1e-3}},
    "k3-loss": {"train": KL, "policy": {"lr": 1e-3}},
    "k2-reward": {"train": {**KL, "kl_estimator": "k2", "kl_in": "reward"}, "policy": {"lr": 1e-3}},
    "k3-reward": {"train": {**KL, "kl_in": "reward"}, "policy": {"lr": 1e-3}},
    "renewed": {"train": {**KL, "reference_every": 1}, "policy": {"lr": 1e-3}},
    "lora": {"policy": {"lr": 1e-2, "lora": {"rank": 4, "alpha": 4 * SCALE}}},
    "watched": {
        "train": {"trace_steps": [1]},
        "tracking": {"wandb": "offline"},
        "resources": {"ranks_per_node": 2},
    },
}
PROGRAM = "\n```\nx=5\n```\n"
TESTED = f'"""{PROGRAM}"""\nassert x==5'
"""The tests of a row, and by its warm start what a response to it is: a text with a program, which passes them."""


def config_of(folder: Path, name: str, *layers: Sections) -> Config:
    """The configuration of a run in `folder`: that of the calculator on one rank, changed key by key by each layer."""
    sections = {**CALCULATOR, "name": name, "runs_dir": str(folder)}
    for layer in ({"resources": {"ranks_per_node": 1, "cpus_per_rank": 1}}, *layers):
        sections |= {section: {**sections.get(section, {}), **values} for section, values in layer.items()}
    return parse_config(sections)


def menu_of(folder: Path, judge_url: str, *, runs_programs: bool) -> dict[str, list[Sections]]:
    """The runs that are asked for, by their names: what `config_of` is given of each."""
    menu = {**MENU, "judge": judged(judge_url), "taught": taught(folder / "teacher")}
    if runs_programs:
        menu["code"] = coded(folder)
    return {"calculator": [TALK], **{name: [PLAIN, changes] for name, changes in menu.items()}}


def judged(url: str) -> dict[str, dict[str, Any]]:
    """A judge who counts the equals signs of a response, and a penalty for its length."""
    asked = {"url": url, "model": "judge", "template": "{response}"}
    return {"data": {"reward": [{"name": "judge", "parameters": asked}, LENGTH], "reward_network": True}}


def taught(teacher: Path) -> dict[str, dict[str, Any]]:
    """A teacher that is random, so that all tokens are about as likely."""
    teacher.mkdir()
    write_tiny_model(config_of(teacher, "teacher").model, 3, teacher)
    return {"policy": {"lr": 1e-3}, "train": {"teacher": str(teacher), "advantage": "none"}}


def coded(folder: Path) -> dict[str, dict[str, Any]]:
    """Programs as responses: the prepared model learns to write them before, and drafts nothing of them."""
    rows = [{"prompt": f"Program {number}\nA:", "answer": TESTED} for number in range(80)]
    (folder / "programs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"source": "file", "path": str(folder / "programs.jsonl"), "answer_from": "response", "reward": "code"}
    return {
        "model": {"source": str(folder / "calculator/stages/prepare-0/policy")},
        "data": data,
        "warm_start": {"num_examples": 480, "batch_size": 8},
        "sampling": {"max_response_tokens": 72},
        "speculation": {"method": "none", "k": 0},
    }


def main(folder: Path) -> None:
    import_stages()
    menu: dict[str, list[Sections]] = json.loads((folder / "menu.json").read_text())
    shared, mlflow_run = dict[StageName, Path](), ""
    for name, layers in menu.items():
        config, stages = config_of(folder, name, *layers), dict(shared)
        mlflow_run = mlflow_run or parent_run(config)
        own: tuple[StageName, ...] = ("prepare", "train") if "model" in layers[-1] else ("train",)
        for stage in own if shared else STAGES:
            stages[stage] = run_stage(config, stage, stages, mlflow_run)
        shared = shared or stages


if __name__ == "__main__":
    main(Path(sys.argv[1]))
