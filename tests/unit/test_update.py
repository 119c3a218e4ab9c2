from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specrl.config import Config, parse_config
from specrl.distributed import Ranks, join, leave
from specrl.precision.mismatch import MismatchSums
from specrl.schemas import Rollout
from specrl.training.batches import TokenSequence, pack
from specrl.training.checkpoint.checkpoints import Checkpoints, Retention
from specrl.training.checkpoint.load import TrainState, load
from specrl.training.megatron.policy import Policy
from specrl.training.rollouts import RolloutBatch
from specrl.training.shares import TrainingShares, deal_groups
from specrl.training.update import StepLoss, _micro_batches, align, trained_rollouts, update_policy

# isort: split
from megatron.core import parallel_state

ALONE = Ranks(0, 1, 0, torch.device("cpu"))


def test_align_puts_values_where_the_mask_is_true() -> None:
    mask = torch.tensor([[False, True, True, False], [True, False, False, False]])
    assert align([[1.0, 2.0], [3.0]], mask, 3).tolist() == [[0, 1, 2, 0], [3, 0, 0, 0]]


def test_micro_batches_are_padded_as_the_policy_needs() -> None:
    policy: Any = SimpleNamespace(dp_rank=0, dp_size=1, tp_rank=0, pp_rank=0, pp_size=1, pad_multiple=16, ranks=ALONE)
    lengths = (3, 14, 30)
    rollouts = [
        Rollout(0, 0, 0, i, 0, 0, 0, [5, 6], [7] * length, [0.0] * length, "", "", "stop")
        for i, length in enumerate(lengths)
    ]
    batch = RolloutBatch.gather(ALONE, rollouts)
    shares = TrainingShares.of(policy, batch, [[0, 1, 2]])
    batches = _micro_batches(policy, shares.deliver(batch), shares.own(0), Config(name="pad"))
    assert [len(batch.tokens) for batch in batches] == [64]  # the prompt once
    assert [batch.num_tokens for batch in batches] == [sum(lengths)]


def test_align_refuses_another_number_of_values() -> None:
    with pytest.raises(AssertionError):
        align([[1.0]], torch.tensor([[True, True]]), 2)


@pytest.mark.parametrize("correction", ["tis", "icepop", "seq-mask"])
def test_truncated_sampling_is_no_mismatch(correction: str) -> None:
    """The engine's log-probs are of the nucleus, the trainer's of the whole distribution: only numerics may differ."""
    whole, mass = [-2.0, -1.5, -3.0], [-0.7, 0.0, -2.5]
    sampled = [a - b for a, b in zip(whole, mass, strict=True)]
    rollout = Rollout(
        *(0, 0, 0, 0, 0, 0, 0, [5], [6, 7, 8], sampled, "", "", "stop"), advantage=1.0, policy_logprobs=whole
    )
    config = parse_config({"name": "truncated", "train": {"correction": correction}})
    policy: Any = SimpleNamespace(dp_rank=0, dp_size=1, tp_rank=0, pp_rank=0, pp_size=1, pad_multiple=1, ranks=ALONE)

    def loss() -> float:
        rollouts = RolloutBatch.gather(ALONE, [rollout])
        shares = TrainingShares.of(policy, rollouts, [[0]])
        own = shares.deliver(rollouts)
        batch = _micro_batches(policy, own, shares.own(0), config)[0]
        logprobs = align([whole], batch.mask, 3)
        return float(StepLoss(config.train, own, rollouts.advantages, 3)(logprobs, logprobs, batch)[0])

    def mismatch() -> dict[str, float]:
        return MismatchSums.of(rollout.policy_logprobs or [], rollout.whole_generation_logprobs).metrics()

    rollout.log_kept_mass = mass
    assert loss() == pytest.approx(-1.0, abs=1e-6)  # a weight of 1 and an advantage of 1 at each token
    assert mismatch()["mismatch/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-6)
    assert mismatch()["mismatch/importance_ratio_max"] == pytest.approx(1.0, abs=1e-6)
    rollout.log_kept_mass = None  # as if nothing had been dropped
    assert loss() > -0.6
    assert mismatch()["mismatch/token_mult_prob_error"] > 4


def group_rollouts(groups: int, responses: int) -> RolloutBatch:
    rollouts = [
        Rollout(0, 0, prompt, sample, 0, 0, 0, [prompt] * 50, [7] * (10 + sample), [0.0] * 10, "", "", "stop")
        for prompt in range(groups)
        for sample in range(responses)
    ]
    return RolloutBatch.gather(ALONE, rollouts)


@pytest.mark.parametrize(("groups", "shares"), [(4, 2), (3, 3), (5, 1)])
def test_the_responses_to_a_prompt_are_trained_on_by_one_rank(groups: int, shares: int) -> None:
    batch = group_rollouts(groups, 4)
    dealt = deal_groups(batch, range(4 * groups), np.zeros(4 * groups, np.int64), shares)
    assert sorted(number for share in dealt for number in share) == list(range(4 * groups))
    prompts = [sorted(batch.prompt_ids[share].tolist()) for share in dealt]
    assert all(own.count(prompt) == 4 for own in prompts for prompt in own)
    assert [len(set(own)) for own in prompts] == [groups // shares] * shares


def test_a_group_is_divided_where_a_rank_would_have_nothing_to_do() -> None:
    batch = group_rollouts(1, 4)
    dealt = deal_groups(batch, range(4), np.zeros(4, np.int64), 2)
    assert sorted(map(len, dealt)) == [2, 2]
    assert deal_groups(batch, [], np.zeros(4, np.int64), 2) == [[], []]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield join()
    parallel_state.destroy_model_parallel()
    leave()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2)).save_pretrained(folder)
    return folder


SIGNAL, FLAT = (0.0, 0.5, 1.0), (1.0, 1.0, 1.0)
"""Rewards of a group: of the first, the middle response has an advantage of 0."""


def scored(groups: Sequence[Sequence[float]], config: Config, cut_off: Sequence[tuple[int, int]] = ()) -> RolloutBatch:
    """Rollouts with these rewards, whose log-probs are about those of a policy that knows nothing."""
    generator = np.random.default_rng(3)
    rollouts = []
    for prompt, rewards in enumerate(groups):
        for sample, reward in enumerate(rewards):
            tokens = generator.integers(0, 32, 4 + sample).tolist()
            logprobs = [-3.5] * len(tokens)
            reason = "length" if (prompt, sample) in cut_off else "stop"
            row = Rollout(0, 0, prompt, sample, 0, 0, 0, [prompt, 5], tokens, logprobs, "", "", reason, reward=reward)
            rollouts.append(row)
    batch = RolloutBatch.gather(ALONE, rollouts)
    batch.assign_advantages(config)
    return batch


def updated(
    model_dir: Path,
    groups: Sequence[Sequence[float]],
    policy: dict[str, Any] | None = None,
    cut_off: Sequence[tuple[int, int]] = (),
    longest: int = 8,
    **train: Any,
) -> tuple[dict[str, float], dict[str, torch.Tensor], RolloutBatch]:
    """The metrics of a step's update, how the weights moved, and the rollouts."""
    sections = {"policy": policy or {}, "sampling": {"max_response_tokens": longest}}
    config = parse_config({"name": "update", **sections, "train": {"correction": "none", **train}})
    trained = Policy(
        model_dir, config.policy, dtype="float32", ranks=ALONE, seed=0, keep_reference=config.train.kl_coef > 0
    )
    before = {name: tensor.clone() for name, tensor in trained.hf_weights()}
    rollouts = scored(groups, config, cut_off)
    update = update_policy(trained, rollouts, config, None, step=2)
    return update.metrics, {name: tensor - before[name] for name, tensor in trained.hf_weights()}, rollouts


def test_groups_are_left_out_and_not_responses() -> None:
    """Mutation: choosing the responses whose advantage is not 0."""
    config = Config(name="groups")
    assert trained_rollouts(scored([FLAT, SIGNAL, FLAT], config), config.train) == [3, 4, 5]
    penalised = config.train.model_copy(update={"kl_coef": 0.1})
    assert trained_rollouts(scored([FLAT, SIGNAL], config), penalised) == [0, 1, 2, 3, 4, 5]


def test_leaving_groups_out_changes_no_gradient(ranks: Ranks, model_dir: Path) -> None:
    """Mutation: a denominator of the tokens that are trained on, which would make the step twice as large here."""
    large = {"clip_grad": 1e9}
    less, moved, _ = updated(model_dir, [FLAT, SIGNAL], large)
    more, other, _ = updated(model_dir, [FLAT, SIGNAL], large, drop_zero_signal_groups=False)
    assert (less["num_tokens"], more["num_tokens"]) == (21, 42)
    assert less["loss"] == pytest.approx(more["loss"], abs=1e-6)
    assert less["grad_norm"] == pytest.approx(more["grad_norm"], rel=1e-4) and less["grad_norm"] > 0
    for name, tensor in moved.items():
        torch.testing.assert_close(tensor, other[name], atol=1e-6, rtol=1e-3)


def test_a_batch_is_what_has_signal_and_then_what_was_dropped_first() -> None:
    config = parse_config({"name": "dapo", "train": {"prompts_per_step": 3, "updates_per_step": 3, "refill_rounds": 1}})
    batch = scored([FLAT, SIGNAL, FLAT[::-1], SIGNAL, FLAT], config)
    assert batch.num_missing(config) == 1
    assert np.unique(batch.prompt_ids[batch.in_loss]).tolist() == [0, 1, 3]
    assert batch.held[12].advantage == 0 and trained_rollouts(batch, config.train) == [3, 4, 5, 9, 10, 11]
    full = scored([FLAT, SIGNAL, SIGNAL, SIGNAL], config)
    assert full.num_missing(config) == 0
    assert np.unique(full.prompt_ids[full.in_loss]).tolist() == [1, 2, 3]
    undisturbed = parse_config({"name": "grpo", "train": {"prompts_per_step": 3}})
    assert scored([FLAT, SIGNAL, SIGNAL, SIGNAL], undisturbed).in_loss.all()


def test_groups_that_dynamic_sampling_dropped_leave_the_mean(ranks: Ranks, model_dir: Path) -> None:
    """Mutation: a mean over all that was sampled, which would make the step half as large here."""
    settings: dict[str, Any] = {"policy": {"clip_grad": 1e9}, "refill_rounds": 1}
    kept, moved, _ = updated(model_dir, [FLAT, SIGNAL], **settings, prompts_per_step=1)
    alone, other, _ = updated(model_dir, [FLAT, SIGNAL], **settings, prompts_per_step=2)
    assert kept["num_tokens"] == alone["num_tokens"] == 21
    assert kept["grad_norm"] == pytest.approx(2 * alone["grad_norm"], rel=1e-5) and kept["grad_norm"] > 0
    assert any(tensor.any() for tensor in (*moved.values(), *other.values()))


def test_what_was_cut_off_leaves_the_mean_and_not_its_group(ranks: Ranks, model_dir: Path) -> None:
    """One update is on-policy, so that the loss is minus the mean advantage of the tokens that stay."""
    deviation = math.sqrt((0.5**2 + 0.0 + 0.5**2) / 3)
    metrics, _, rollouts = updated(model_dir, [SIGNAL], cut_off=[(0, 2)], overlong_filter=True)
    assert rollouts.advantages.tolist() == pytest.approx([-0.5 / deviation, 0, 0.5 / deviation], rel=1e-4)
    assert metrics["loss"] == pytest.approx(4 * 0.5 / deviation / (4 + 5), rel=1e-4)
    assert metrics["num_tokens"] == 6 + 7 and rollouts.held[2].policy_logprobs is None
    whole, _, _ = updated(model_dir, [SIGNAL], cut_off=[(0, 2)])
    assert whole["loss"] == pytest.approx((4 - 6) * 0.5 / deviation / (4 + 5 + 6), rel=1e-4)
    by_response, _, _ = updated(model_dir, [SIGNAL], cut_off=[(0, 2)], overlong_filter=True, loss_mean="response")
    assert by_response["loss"] == pytest.approx(0.5 / deviation / 2, rel=1e-4)
    nothing, still, _ = updated(
        model_dir, [SIGNAL], cut_off=[(0, 0), (0, 1), (0, 2)], overlong_filter=True, kl_coef=0.1
    )
    assert nothing["num_tokens"] == 0 and not any(tensor.any() for tensor in still.values())


def dapo_loss(rewards: Sequence[Sequence[float]], longest: int, cache: int, size: int) -> float:
    """Equations 8 to 13 of DAPO (arXiv 2503.14476) for one on-policy update, written anew, of responses as in `scored`.

    Their ratios are 1, so that no clip has an effect.
    """
    total, num_tokens = 0.0, 0
    for own in [own for own in rewards if len(set(own)) > 1][:size]:
        lengths = [4 + sample for sample in range(len(own))]
        punished = [min(0.0, max(-1.0, (longest - cache - length) / cache)) for length in lengths]
        found = np.array(own) + punished
        for advantage, length in zip((found - found.mean()) / found.std(), lengths, strict=True):
            if length < longest:
                total, num_tokens = total + advantage * length, num_tokens + length
    return -total / num_tokens


def test_the_preset_dapo_is_the_objective_of_the_paper(ranks: Ranks, model_dir: Path) -> None:
    """Responses of 4 to 10 tokens, of which the last is cut off and the one before half punished."""
    flat = (1.0,) * 7
    groups = [flat, (0, 1, 0, 1, 0, 1, 0), (1, 1, 1, 1, 0, 1, 1), flat, (0, 0, 0, 0, 0, 1, 1)]
    cut_off = [(prompt, 6) for prompt in range(len(groups))]
    metrics, moved, _ = updated(model_dir, groups, longest=10, cut_off=cut_off, algorithm="dapo", prompts_per_step=3)
    assert metrics["loss"] == pytest.approx(dapo_loss(groups, longest=10, cache=2, size=3), rel=1e-4)
    assert metrics["num_tokens"] == 3 * sum(range(6, 12)) and any(tensor.any() for tensor in moved.values())


def test_an_entropy_bonus_raises_the_entropy_where_there_is_no_signal(ranks: Ranks, model_dir: Path) -> None:
    """Its mean is that over all tokens of the step, by the entropies of transformers."""
    metrics, moved, rollouts = updated(model_dir, [FLAT], {"lr": 1e-2}, entropy_coefficient=0.5)
    model = LlamaForCausalLM.from_pretrained(model_dir)

    def entropy() -> float:
        found = []
        for rollout in rollouts.held.values():
            tokens = torch.tensor([*rollout.prompt_tokens, *rollout.response_tokens])
            with torch.no_grad():
                scores = model(tokens[None]).logits[0, len(rollout.prompt_tokens) - 1 : -1].log_softmax(-1)
            found += (-(scores.exp() * scores).sum(-1)).tolist()
        return sum(found) / len(found)

    before = entropy()
    assert metrics["entropy"] == pytest.approx(before, rel=1e-5)
    assert metrics["loss"] == pytest.approx(-0.5 * before, rel=1e-5) and metrics["num_tokens"] == 21
    weights = model.state_dict()
    for name, tensor in moved.items():
        weights[name] += tensor
    assert entropy() > before


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_penalty_in_the_reward_is_in_the_advantages(ranks: Ranks, model_dir: Path, estimator: str) -> None:
    """As TRL's RLOO has it for k1, rewards - beta * sum(log p - log p_reference), the reference's by transformers.

    Mutation: no penalty for the response that was cut off, which is in the mean of its group.
    """
    settings: dict[str, Any] = {"kl_in": "reward", "kl_estimator": estimator, "advantage": "rloo"}
    settings |= {"cut_off": [(0, 2)], "overlong_filter": True}
    metrics, moved, rollouts = updated(model_dir, [SIGNAL, FLAT], kl_coef=0.1, **settings)
    model = LlamaForCausalLM.from_pretrained(model_dir)
    sums = []
    for rollout in rollouts.held.values():
        tokens = torch.tensor([*rollout.prompt_tokens, *rollout.response_tokens])
        with torch.no_grad():
            scores = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        reference = scores.gather(1, tokens[1:, None])[len(rollout.prompt_tokens) - 1 :, 0]
        ratio = torch.tensor(rollout.generation_logprobs) - reference
        sums.append(float({"k1": ratio, "k2": ratio**2 / 2, "k3": (-ratio).exp() - 1 + ratio}[estimator].sum()))
    assert rollouts.kl.tolist() == pytest.approx(sums, abs=1e-4)
    rewards = [reward - 0.1 * found for reward, found in zip([*SIGNAL, *FLAT], sums, strict=True)]
    expected = [
        rewards[i] - (sum(rewards[start : start + 3]) - rewards[i]) / 2
        for start in (0, 3)
        for i in range(start, start + 3)
    ]
    assert rollouts.advantages.tolist() == pytest.approx(expected, abs=1e-4)
    assert [rollout.advantage for rollout in rollouts.held.values()] == pytest.approx(expected, abs=1e-4)
    assert metrics["kl"] == pytest.approx(sum(sums) / rollouts.response_lengths.sum(), abs=1e-5)
    assert metrics["num_tokens"] == 42 - 8 and any(tensor.any() for tensor in moved.values())
    assert rollouts.rewards.tolist() == [*SIGNAL, *FLAT]


@pytest.mark.parametrize("advantage", ["grpo", "reinforce++", "rloo", "gdpo"])
def test_no_penalty_is_divided_by_the_deviation_of_equal_rewards(advantage: str) -> None:
    """Mutation: advantages of rewards minus penalties, which makes rounding as large as a reward."""
    train = {"kl_coef": 0.1, "kl_in": "reward", "advantage": advantage}
    parts = [{"name": "task"}, {"name": "length", "parameters": {"target": 9}}]
    config = parse_config({"name": "rounding", "train": train, "data": {"reward": parts}})
    batch = scored([FLAT, SIGNAL], config)
    of_rewards = batch.advantages.copy()
    batch.kl[:] = [1e-3, 0, 2e-3, 3.0, 0, 0]
    batch.assign_advantages(config)
    expected = [0.0, -1.5e-4, 1.5e-4, 0.3, -0.15, -0.15]
    assert (of_rewards - batch.advantages).tolist() == pytest.approx(expected, abs=1e-9)


def test_metrics_are_means_over_what_was_trained_on(ranks: Ranks, model_dir: Path) -> None:
    """Mutation: a mean over updates without tokens, of which there would be three here."""
    once, _, _ = updated(model_dir, [SIGNAL, FLAT, FLAT, FLAT], {"lr": 1e-9})
    often, _, _ = updated(model_dir, [SIGNAL, FLAT, FLAT, FLAT], {"lr": 1e-9}, updates_per_step=4)
    assert often["entropy"] == pytest.approx(once["entropy"], rel=1e-5)
    assert often["grad_norm"] == pytest.approx(4 * once["grad_norm"], rel=1e-4)  # a quarter of the step's tokens each
    assert often["lr"] == 1e-9


def test_a_constant_in_place_of_the_mean_length_scales_the_gradient(ranks: Ranks, model_dir: Path) -> None:
    by_token, _, rollouts = updated(model_dir, [SIGNAL, SIGNAL[::-1]])
    constant, _, _ = updated(model_dir, [SIGNAL, SIGNAL[::-1]], loss_mean="constant")
    share = rollouts.response_lengths.mean() / 8
    assert constant["grad_norm"] == pytest.approx(share * by_token["grad_norm"], rel=1e-4)


def test_a_step_without_signal_moves_nothing_and_measures_nothing(ranks: Ranks, model_dir: Path) -> None:
    metrics, moved, rollouts = updated(model_dir, [FLAT, FLAT], updates_per_step=2)
    assert metrics == {"num_tokens": 0.0, "logprob_s": metrics["logprob_s"]}
    assert not any(tensor.any() for tensor in moved.values())
    assert all(rollout.policy_logprobs is None for rollout in rollouts.held.values())


@pytest.mark.parametrize(
    "algorithms",
    [
        {"loss": "gspo", "advantage": "rloo", "correction": "icepop"},
        {"loss": "gspo", "advantage": "grpo", "correction": "seq-mask", "kl_coef": 0.1},
        {"loss": "grpo", "advantage": "rloo", "correction": "tis", "kl_coef": 0.1},
        {"loss": "cispo", "advantage": "reinforce++", "correction": "none", "loss_mean": "response"},
    ],
    ids=lambda chosen: "-".join(map(str, chosen.values())),
)
def test_every_algorithm_takes_a_step_of_several_updates(
    ranks: Ranks, model_dir: Path, algorithms: dict[str, Any]
) -> None:
    """The first update is on-policy, the second one is not: its ratio is what the first has moved."""
    metrics, moved, _ = updated(model_dir, [SIGNAL, SIGNAL[::-1], FLAT], {"lr": 1e-2}, updates_per_step=2, **algorithms)
    assert all(math.isfinite(value) for value in metrics.values())
    assert (metrics["clip_fraction"] > 0) == (algorithms["loss"] == "gspo")  # whose range is a thousandth of the other
    assert 0 <= metrics["corrected_fraction"] < 1
    assert (metrics["kl"] > 0) == ("kl_coef" in algorithms)
    assert any(tensor.any() for tensor in moved.values())


def test_a_renewed_reference_is_a_part_of_the_checkpoint(ranks: Ranks, model_dir: Path, tmp_path: Path) -> None:
    config = parse_config({"name": "renewed", "policy": {"lr": 1e-2}, "train": {"correction": "none", "kl_coef": 0.1}})

    def loaded(*, stores: bool = True) -> Policy:
        kept = {"keep_reference": True, "stores_reference": stores}
        return Policy(model_dir, config.policy, dtype="float32", ranks=ALONE, seed=0, **kept)

    def kl(policy: Policy) -> float:
        return update_policy(policy, scored([SIGNAL], config), config, None, step=2).metrics["kl"]

    trained = loaded()
    assert kl(trained) == 0 and kl(trained) > 0
    trained.renew_reference()
    assert kl(trained) == 0 and trained.model.training
    checkpoints = Checkpoints(tmp_path, trained, Retention(2))
    checkpoints.save(TrainState(3, trained, None))
    checkpoints.wait()
    expected = kl(trained)  # the reference is an update behind
    restored, forgetful = loaded(), loaded(stores=False)
    load(tmp_path / "step=000003", restored, None)
    load(tmp_path / "step=000003", forgetful, None)
    assert 0 < kl(restored) == expected < kl(forgetful)
    checkpoints = Checkpoints(tmp_path, forgetful, Retention(2))
    checkpoints.save(TrainState(4, forgetful, None))
    checkpoints.wait()
    load(tmp_path / "step=000004", restored, None)  # has none: the one before stays
    assert kl(restored) > 0


def test_a_gradient_that_is_not_finite_stops_the_step_and_moves_nothing(ranks: Ranks, model_dir: Path) -> None:
    """Mutation: clipping by the norm as it is, which leaves NaN in weights and moments."""
    policy = Policy(model_dir, Config(name="nan").policy, dtype="float32", ranks=ALONE, seed=0)
    before = {name: tensor.clone() for name, tensor in policy.hf_weights()}

    def loss(logprobs: torch.Tensor, *_: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return (logprobs - logprobs.detach()).sqrt().sum() * 0, {}

    batches = pack([TokenSequence([1, 2, 3], 1, 0)], 8)
    with pytest.raises(FloatingPointError, match="the norm of the policy's gradient is nan"):
        policy.train_step(batches, loss)
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.hf_weights())
    assert policy.optimizer.counters() == {"adam_steps": 0}
    policy.train_step(batches, lambda logprobs, *_: (-logprobs.sum(), {}))
    assert all(tensor.isfinite().all() for _, tensor in policy.hf_weights())
