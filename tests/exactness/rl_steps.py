"""Five RL steps with and without speculation, in one process: `python -m tests.exactness.rl_steps FOLDER`.

Leaves what was sampled, the rewards, and the final policy of each run in FOLDER, for the test to compare.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from specrl.artifacts import CalibrateResult, PrepareResult, PretrainResult, write_json, write_result
from specrl.config import Config
from specrl.context import StageContext
from specrl.data.prompts import PromptSource
from specrl.distributed import Ranks, join, leave
from specrl.loop import Trainer
from specrl.models.sources import load_tokenizer
from specrl.progress import Progress
from specrl.rollout.errors import PolicyParityError
from specrl.rollout.refit.load import Refit
from specrl.rollout.vllm.weights.comparison import Expected
from specrl.schemas import Rollout, read_rollouts, write_rollouts
from specrl.stages.train import build
from specrl.tracking.tracker import Tracker
from specrl.training.drafter.drafters import new_drafter, save_drafter
from specrl.training.megatron.policy import Policy
from specrl.training.rollouts import RolloutBatch
from specrl.training.update import update_policy
from tests.exactness.toy import likely_tokens, policy_weights, write_policy

NUM_STEPS = 5
METHODS = ("none", "eagle3")
SWAPPED = tuple(f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))


def share_of_vowels(prompt: str, response: str, answer: str) -> float:
    """Any reward that differs within a group will do."""
    return sum(letter in "aei" for letter in response) / max(1, len(response))


def config_of(method: str, folder: Path) -> Config:
    k = 0 if method == "none" else 3
    return Config.model_validate(
        {
            "name": method,
            "seed": 8,
            "runs_dir": folder,
            "model": {"source": "tiny", "dtype": "float32", "max_length": 96},
            "data": {"reward": f"{__name__ if __name__ != '__main__' else 'tests.exactness.rl_steps'}:share_of_vowels"},
            "sampling": {"max_response_tokens": 24},
            "speculation": {"method": method, "k": k, "adaptive": False},
            "bubbles": {"use": "none"},
            "engine": {"max_num_seqs": 16, "kv_cache_gib": 0.125},
            "drafter": {"draft_vocab_size": 32, "online_lr": 1e-3},
            "policy": {"lr": 1e-3},
            # Truncated importance sampling reads the engine's log-probs, whose last bits depend on the batch's shape;
            # Adam makes whole steps of such bits where a gradient is nearly zero.
            "train": {
                "num_steps": NUM_STEPS,
                "prompts_per_step": 4,
                "samples_per_prompt": 4,
                "correction": "none",
            },
        }
    )


def main(folder: Path) -> None:
    ranks = join()
    policy_dir = write_policy(folder / "policy", policy_weights(0))
    for method in METHODS:
        trainer = prepare(config_of(method, folder), policy_dir, folder / f"{method}-inputs", ranks)
        trainer.run(0, Progress(folder, enabled=False))
        weights = {name: tensor.contiguous().clone() for name, tensor in trainer.policy.hf_weights()}
        save_file(weights, folder / f"{method}.safetensors")
        if trainer.drafter is not None:
            write_json(folder / "gradients.json", policy_gradients(trainer))
            write_json(folder / "swapped.json", refit_with_a_swap(trainer))
        trainer.engine.shutdown()
    leave()


def prepare(config: Config, policy_dir: Path, folder: Path, ranks: Ranks) -> Trainer:
    """What the stages before `train` leave, made up; then the trainer as the stage builds it."""
    prompts = PromptSource(config, load_tokenizer(policy_dir)).pretraining(8)
    text = likely_tokens()
    rollouts = [Rollout(0, 0, p.id, 0, 0, 0, 1, p.tokens, text, [-1.0] * len(text), "", "", "length") for p in prompts]
    write_rollouts(folder / "rollouts" / "step=000000" / "rank-0000.arrow", rollouts)
    drafter_dir = None
    if config.speculation.method != "none":
        drafter_dir = folder / "drafter"
        policy = Policy(policy_dir, config.policy, dtype="float32", ranks=ranks, trainable=False, seed=config.seed)
        save_drafter(new_drafter(config, policy_dir, rollouts, ranks), policy, drafter_dir, policy_version=0)
    results = {
        "prepare": PrepareResult(policy_dir=policy_dir, seconds=0.0),
        "pretrain": PretrainResult(
            drafter_dir=drafter_dir,
            rollouts_dir=folder / "rollouts",
            num_responses=len(rollouts),
            reward_mean=0.0,
            seconds=0.0,
        ),
        "calibrate": CalibrateResult(
            scales_path=folder, layers_path=folder, bf16_layers=[], kl_all_fp8=0.0, kl_chosen=0.0, seconds=0.0
        ),
    }
    for stage, result in results.items():
        write_result(folder / stage, result)
    context = StageContext(config, "train", "train-0", config.run_dir / "train", {s: folder / s for s in results}, "")
    return build(context, ranks, Tracker())


class SwappingRefit(Refit):
    """A refit on whose way to the engine two tensors of the first layer are taken for each other."""

    def _policy_weights(self, expected: Expected | None) -> Iterator[tuple[str, Tensor]]:
        weights = dict(super()._policy_weights(expected))
        first, second = SWAPPED
        return iter((weights | {first: weights[second], second: weights[first]}).items())


def refit_with_a_swap(trainer: Trainer) -> dict[str, str]:
    """Return what the job's first refit says when tensors were swapped."""
    refit = SwappingRefit(
        trainer.engine,
        trainer.policy,
        trainer.drafter,
        trainer.refit.probe,
        trainer.refit.guard,
        trainer.ranks,
    )
    try:
        refit.load(version=NUM_STEPS + 1)
    except PolicyParityError as error:
        return {"error": str(error)}
    return {"error": ""}


def policy_gradients(trainer: Trainer) -> dict[str, float | None]:
    """Gradient of each policy parameter after the drafter's update on features of the policy's own forward pass."""
    rollouts = read_rollouts(next(iter(sorted(trainer.recorder.rollouts_dir.glob("step=*/rank-*.arrow")))))
    assert trainer.drafter is not None
    batch = RolloutBatch.gather(trainer.ranks, rollouts)
    features = update_policy(trainer.policy, batch, trainer.config, trainer.drafter.feature_layers, step=0).features
    model = trainer.policy.model
    for parameter in model.parameters():
        parameter.grad = None
        if hasattr(parameter, "main_grad"):
            parameter.main_grad.zero_()
    before = [parameter.detach().clone() for parameter in trainer.drafter.model.parameters()]
    trainer.update_drafter(features)
    after = trainer.drafter.model.parameters()
    assert any(not a.equal(b) for a, b in zip(before, after, strict=True)), "the drafter did not learn"
    return {
        name: None
        if parameter.grad is None and not (hasattr(parameter, "main_grad") and parameter.main_grad.any())
        else 1.0
        for name, parameter in model.named_parameters()
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
