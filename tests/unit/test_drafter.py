from __future__ import annotations

import copy
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from specrl.config import DrafterConfig
from specrl.distributed import Ranks, join, leave
from specrl.processes import free_port
from specrl.training.drafter import attention, ttt
from specrl.training.drafter.chains import ChainBatch, pack_chains
from specrl.training.drafter.kinds.eagle3 import Eagle3Shape, feature_layers
from specrl.training.drafter.trainer import Drafter, choose_draft_vocabulary, count_tokens, schedule
from specrl.training.drafter.ttt import Objective, Tally, feed_context, metrics_from_sums, train_chains
from specrl.training.features import Features
from tests.literal_drafting import LiteralDrafter

VOCAB, HIDDEN, DRAFT_VOCAB = 50, 32, 24
ALONE = Ranks(0, 1, 0, torch.device("cpu"))


def write_policy(directory: Path, dtype: str = "float32") -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rope_theta=500.0,
        rms_norm_eps=1e-5,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


DEEP = {"num_layers": 3, "feature_layers": [1, 6]}
"""A drafter of several layers that reads what the policy's last layer returns, too."""


def make_drafter(policy_dir: Path, ranks: Ranks = ALONE, **settings: Any) -> Drafter:
    config = DrafterConfig.model_validate(settings)
    vocabulary = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:DRAFT_VOCAB].sort().values
    drafter = Drafter.create(policy_dir, config, vocabulary, ranks, seed=5)
    drafter.model.policy_logits = policy_logits  # type: ignore[method-assign]
    return drafter


def policy_logits(hidden: torch.Tensor) -> torch.Tensor:
    """Of made-up features, whose last hidden states are the logits themselves."""
    return hidden[..., :DRAFT_VOCAB]


def make_features(drafter: Drafter, lengths: list[tuple[int, int]], seed: int = 0) -> Features:
    """Random features of sequences with these (prompt, response) lengths; some top-1 tokens are not drafted."""
    generator = torch.Generator().manual_seed(seed)
    batch, seq = len(lengths), max(sum(pair) for pair in lengths) + 2
    drafter.model.policy_logits = policy_logits  # type: ignore[method-assign]
    width = len(drafter.shape.feature_layers) * HIDDEN
    tokens = torch.randint(VOCAB, (batch, seq), generator=generator)
    mask = torch.zeros(batch, seq, dtype=torch.bool)
    for row, (prompt, response) in enumerate(lengths):
        mask[row, prompt - 1 : prompt + response - 1] = True
    logits = 3 * torch.randn(batch, seq, DRAFT_VOCAB, generator=generator)
    top1 = drafter.draft_tokens[logits.argmax(-1)]
    outside = torch.rand(batch, seq, generator=generator) < 0.1
    excluded = next(token for token in range(VOCAB) if token not in drafter.draft_tokens.tolist())
    return Features(
        tokens=tokens,
        mask=mask,
        hidden=ending_in(logits, torch.randn(batch, seq, width, generator=generator).to(drafter.shape.dtype)),
        target_top1=torch.where(outside, excluded, top1),
        starts=torch.zeros(batch, dtype=torch.int64),
    )


def ending_in(logits: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return torch.cat([hidden, F.pad(logits, (0, HIDDEN - DRAFT_VOCAB)).to(hidden.dtype)], -1)


def packed(drafter: Drafter, features: Features) -> ChainBatch:
    batch = pack_chains(features, drafter.draft_tokens, VOCAB, drafter.config.ttt_steps)
    assert batch is not None
    return batch


def unroll(drafter: Drafter, features: Features) -> list[torch.Tensor]:
    """Of each step the logits of all chains alive."""
    batch = packed(drafter, features)
    [part] = batch.parts()
    return list(ttt.unroll(drafter.model, batch, feed_context(drafter.model, batch), part))


def objective(drafter: Drafter) -> Objective:
    return drafter._objective


def trained(drafter: Drafter, features: Features) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, gradients and sums of a micro-batch, in float32 as what is summed up."""
    drafter._gradient.zero_()
    batch = packed(drafter, features)
    tally = Tally(batch, drafter.draft_tokens)
    loss = train_chains(drafter.model, batch, objective(drafter), batch.loss_counts(), learn=True, tally=tally)
    return loss, drafter._gradient.clone(), tally.sums().float()


def enlarge(drafter: Drafter) -> None:
    """Weights far from their small initial values, so that attention and norms matter in every comparison."""
    with torch.no_grad():
        for parameter in drafter.model.parameters():
            parameter.copy_(
                torch.randn_like(parameter) * (0.3 if parameter.dim() == 2 else 0.1) + (parameter.dim() == 1)
            )


@pytest.mark.parametrize(
    "shape",
    [{}, DEEP, DEEP | {"sliding_window": 16}],
    ids=["one layer", "three", "window"],
)
def test_unrolled_training_equals_literal_drafting_at_every_step(policy_dir: Path, shape: dict[str, Any]) -> None:
    drafter = make_drafter(policy_dir, ttt_steps=4, **shape)
    torch.manual_seed(1)
    enlarge(drafter)
    lengths = [(3, 9), (7, 4), (1, 6), (5, 2), (12, 14)]
    features = make_features(drafter, lengths)
    logits = unroll(drafter, features)
    expected: list[list[torch.Tensor]] = [[], [], [], []]
    literal = LiteralDrafter(drafter.model, drafter.model.embeddings)
    for row, (prompt, response) in enumerate(lengths):
        for start in range(prompt - 1, prompt + response - 2):
            steps = min(4, prompt + response - 2 - start)
            chain = literal.forced(features.tokens[row].tolist(), features.hidden[row], start, steps)
            for step, step_logits in enumerate(chain):
                expected[step].append(step_logits)
    for step in range(4):
        torch.testing.assert_close(logits[step].double(), torch.stack(expected[step]), rtol=1e-4, atol=1e-4)


def test_chunked_attention_gives_the_same_loss_and_gradients(policy_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make_drafter(policy_dir)
    torch.manual_seed(1)
    enlarge(drafter)
    features = make_features(drafter, [(3, 9), (7, 4)])
    whole = trained(drafter, features)
    monkeypatch.setattr(attention, "MAX_SCORES", 200)
    torch.testing.assert_close(trained(drafter, features), whole)


def test_padding_and_other_rows_do_not_change_a_sequence(policy_dir: Path) -> None:
    drafter = make_drafter(policy_dir)
    torch.manual_seed(1)
    enlarge(drafter)
    together = make_features(drafter, [(3, 9), (6, 4)])
    alone = Features(
        *(part[1:, :10] for part in (together.tokens, together.mask, together.hidden, together.target_top1)),
        together.starts[1:],
    )
    rows = [8, 7, 6]  # chains of the first sequence at each step come first
    for first, single, shared in zip(rows, unroll(drafter, alone), unroll(drafter, together), strict=True):
        torch.testing.assert_close(shared[first:], single, rtol=1e-4, atol=1e-4)


def test_loss_leaves_out_targets_outside_the_draft_vocabulary(policy_dir: Path) -> None:
    drafter = make_drafter(policy_dir)
    features = make_features(drafter, [(2, 12), (4, 6)])
    logits = unroll(drafter, features)
    in_vocab = set(drafter.draft_tokens.tolist())
    expected = 0.0
    for step in range(3):
        terms = []
        index = 0
        for row in range(2):
            for c in range(features.mask.shape[1] - step - 1):
                if not features.mask[row, c : c + step + 2].all():
                    continue
                if int(features.target_top1[row, c + step + 1]) in in_vocab:
                    p = policy_logits(features.hidden[row, c + step + 1, -HIDDEN:]).softmax(-1)
                    terms.append(-(p * logits[step][index].log_softmax(-1)).sum())
                index += 1
        assert index == len(logits[step])
        expected += 0.8**step * torch.stack(terms).mean()
    torch.testing.assert_close(trained(drafter, features)[0], expected.detach())


def test_update_learns_and_reports_acceptance(policy_dir: Path) -> None:
    """Deterministic language: token t is followed by 7 t + 3; the drafter learns to draft it, the metrics say so."""
    drafter = make_drafter(policy_dir)
    features = [arithmetic_features(drafter, seed) for seed in range(12)]
    before = drafter.update(features, lr=0.0)
    after = drafter.update(features, lr=1e-2, epochs=15)
    held_out = drafter.update([arithmetic_features(drafter, 99)], lr=0.0)
    assert after["loss"] < 0.5 * before["loss"]
    assert held_out["top1_match"] > 0.95
    assert held_out["acceptance_length"] > 3.5
    assert all(held_out[f"expected_acceptance_pos_{i}"] > 0.9 for i in range(3))


def test_a_drafter_in_float32_learns_from_features_in_bf16(policy_dir: Path) -> None:
    drafter = make_drafter(policy_dir)
    features = make_features(drafter, [(3, 5), (4, 6)])
    loss = drafter.update([replace(features, hidden=features.hidden.bfloat16())], lr=1e-3)["loss"]
    assert loss == pytest.approx(make_drafter(policy_dir).update([features], lr=1e-3)["loss"], rel=0.02)


def arithmetic_features(drafter: Drafter, seed: int) -> Features:
    known = drafter.draft_tokens
    follower = known[(7 * torch.arange(DRAFT_VOCAB) + 3) % DRAFT_VOCAB]
    table = torch.zeros(VOCAB, dtype=torch.int64)
    table[known] = follower
    generator = torch.Generator().manual_seed(seed)
    tokens = known[torch.randint(DRAFT_VOCAB, (8, 1), generator=generator)]
    for _ in range(11):
        tokens = torch.cat([tokens, table[tokens[:, -1:]]], 1)
    mask = torch.ones(8, 12, dtype=torch.bool)
    mask[:, -1] = False
    logits = 20.0 * (table[tokens][..., None] == known)
    hidden = torch.randn(8, 12, 3 * HIDDEN, generator=generator)
    starts = torch.zeros(8, dtype=torch.int64)
    return Features(tokens, mask, ending_in(logits, hidden.to(drafter.shape.dtype)), table[tokens], starts)


def test_acceptance_length_replays_decoding(policy_dir: Path) -> None:
    """The metric equals a literal speculative decoding of the stored responses with k drafts."""
    drafter = make_drafter(policy_dir)
    features = [arithmetic_features(drafter, seed) for seed in range(2)]
    drafter.update(features, lr=1e-2, epochs=2)
    metrics = metrics_from_sums(trained(drafter, features[0])[2])
    literal = LiteralDrafter(drafter.model, drafter.model.embeddings)
    drafts = accepted = 0
    for tokens, hidden in zip(features[0].tokens.tolist(), features[0].hidden, strict=True):
        start = 0
        while start + 2 < len(tokens):
            proposed = literal.draft(tokens, hidden, start, 3, drafter.draft_tokens)
            matches = [draft == token for draft, token in zip(proposed, tokens[start + 2 :], strict=False)]
            count = (*matches, False).index(False)
            drafts, accepted, start = drafts + 1, accepted + count, start + count + 1
    assert 0 < accepted < 3 * drafts, "an untrained or perfect drafter would test nothing"
    assert metrics["acceptance_length"] == pytest.approx(1 + accepted / drafts)


def test_lr_zero_measures_without_moving(policy_dir: Path) -> None:
    drafter = make_drafter(policy_dir)
    features = [make_features(drafter, [(3, 9), (6, 3)])]
    before = copy.deepcopy(drafter.state_dict())
    first, second = drafter.update(features, lr=0.0), drafter.update(features, lr=0.0)
    assert first == second
    assert first["loss"] > 0
    assert_equal_state(drafter.state_dict(), before)


def test_training_moves_only_the_drafter_and_refuses_attached_features(policy_dir: Path) -> None:
    drafter = make_drafter(policy_dir)
    embeddings = drafter.model.embeddings.clone()
    features = make_features(drafter, [(3, 9)])
    drafter.update([features], lr=1e-3)
    assert torch.equal(drafter.model.embeddings, embeddings)
    assert not drafter.model.embeddings.requires_grad
    features.hidden.requires_grad_()
    with pytest.raises(AssertionError, match="detached"):
        drafter.update([features], lr=1e-3)


def test_state_resumes_exactly(policy_dir: Path) -> None:
    original, resumed = (make_drafter(policy_dir) for _ in range(2))
    batches = [make_features(original, [(3, 9), (6, 3)], seed) for seed in range(3)]
    original.update(batches, lr=1e-3)
    resumed.load_state_dict(copy.deepcopy(original.state_dict()))
    metrics = original.update(batches, lr=1e-3), resumed.update(batches, lr=1e-3)
    assert metrics[0] == metrics[1]
    assert_equal_state(original.state_dict(), resumed.state_dict())


def test_responses_without_a_second_token_train_nothing(policy_dir: Path) -> None:
    drafter = make_drafter(policy_dir)
    metrics = drafter.update([make_features(drafter, [(3, 1), (5, 0)])], lr=0.0)
    assert metrics["loss"] == 0
    assert metrics["acceptance_length"] == 1
    assert drafter.update([], lr=1e-3)["loss"] == 0


def test_a_gradient_that_is_not_finite_stops_the_step_and_moves_nothing(policy_dir: Path) -> None:
    """Mutation: `norm > clip_grad` alone, which NaN is not."""
    drafter = make_drafter(policy_dir)
    before = {name: tensor.clone() for name, tensor in drafter.model.state_dict().items()}
    drafter._objective = replace(drafter._objective, loss=lambda logits, target: (logits.sum(-1), logits * math.nan))
    with pytest.raises(FloatingPointError, match="the norm of the drafter's gradient is nan"):
        drafter.update([make_features(drafter, [(3, 4)])], lr=1e-3)
    assert all(torch.equal(before[name], tensor) for name, tensor in drafter.model.state_dict().items())
    assert all(not tensor.any() for state in drafter.optimizer.state.values() for tensor in state.values())


def assert_equal_state(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def merge(left: Features, right: Features) -> Features:
    """The rows of both, padded to the longer one."""

    def padded(name: str) -> torch.Tensor:
        parts = (getattr(left, name), getattr(right, name))
        seq = max(part.shape[1] for part in parts)
        rows = [F.pad(part, [0, 0] * (part.dim() - 2) + [0, seq - part.shape[1]]) for part in parts]
        return torch.cat(rows)

    starts = torch.cat([left.starts, right.starts])
    return Features(*(padded(name) for name in ("tokens", "mask", "hidden", "target_top1")), starts)


def train_rank(rank: int, policy_dir: Path, out: Path, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_PORT=str(port))
    drafter = make_drafter(policy_dir, join())
    first, second = make_features(drafter, [(3, 9), (6, 3)], seed=0), make_features(drafter, [(2, 14)], seed=1)
    metrics = [
        drafter.update([(first, second)[rank]], lr=1e-3),
        drafter.update([first] if rank == 0 else [], lr=1e-3),
    ]
    torch.save({"metrics": metrics, "state": drafter.state_dict()}, out / f"rank{rank}.pt")
    leave()


def test_two_ranks_train_like_one_that_has_all_rows_and_an_idle_rank_takes_part(
    policy_dir: Path, tmp_path: Path
) -> None:
    mp.spawn(train_rank, args=(policy_dir, tmp_path, free_port()), nprocs=2)  # type: ignore[no-untyped-call]
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert ranks[0]["metrics"] == ranks[1]["metrics"]
    assert_equal_state(ranks[0]["state"], ranks[1]["state"])
    alone = make_drafter(policy_dir)
    first, second = make_features(alone, [(3, 9), (6, 3)], seed=0), make_features(alone, [(2, 14)], seed=1)
    for features, metrics in zip([merge(first, second), first], ranks[0]["metrics"], strict=True):
        assert alone.update([features], lr=1e-3) == pytest.approx(metrics, rel=1e-4)


def test_draft_vocabulary_keeps_frequent_tokens_and_fills_up() -> None:
    counts = count_tokens([[7, 7, 9], [9, 7, 30]], vocab_size=40)
    chosen = choose_draft_vocabulary(counts, size=5)
    assert chosen.tolist() == [0, 1, 7, 9, 30]
    assert choose_draft_vocabulary(counts, 2).tolist() == [7, 9]
    assert choose_draft_vocabulary(count_tokens([[1]], vocab_size=10), size=10).tolist() == list(range(10))


@pytest.mark.parametrize("layers, expected", [(30, (2, 15, 27)), (36, (2, 18, 33)), (6, (1, 3, 5)), (7, (2, 3, 4))])
def test_feature_layers_are_the_published_ones_and_distinct(layers: int, expected: tuple[int, int, int]) -> None:
    assert feature_layers(layers) == expected


def test_schedule_warms_up_and_decays() -> None:
    rates = [schedule(step, 200) for step in range(200)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0, abs=0.02)
    assert rates[-1] == pytest.approx(0.05, abs=0.01)


@pytest.mark.parametrize(
    "policy_class, config_class", [(Qwen2ForCausalLM, Qwen2Config), (Qwen3ForCausalLM, Qwen3Config)]
)
def test_drafter_of_a_qwen_policy_is_llama_shaped(policy_class: Any, config_class: Any, tmp_path: Path) -> None:
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8}
    policy = policy_class(config_class(**shape, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True))
    policy.save_pretrained(tmp_path)
    drafter = make_drafter(tmp_path)
    names = drafter.model.state_dict().keys()
    assert not [name for name in names if "bias" in name or "q_norm" in name or "k_norm" in name]
    assert drafter.shape.head_dim == (128 if config_class is Qwen3Config else 8)
    assert torch.equal(drafter.model.lm_head.weight, policy.get_input_embeddings().weight[drafter.draft_tokens])
    assert drafter.feature_layers == (2, 4, 5, 8)
    with pytest.raises(ValueError, match="the policy has only 50"):
        Eagle3Shape.from_policy(policy.config, draft_vocab_size=VOCAB + 1, intermediate_size=None)


def test_several_layers_start_from_as_many_of_the_policys(policy_dir: Path) -> None:
    drafter, policy = make_drafter(policy_dir, **DEEP), LlamaForCausalLM.from_pretrained(policy_dir)
    own = drafter.model.state_dict()
    assert {name.split(".self_attn")[0] for name in own if "q_proj" in name} == {"midlayer", "layers.1", "layers.2"}
    for name, source in {"midlayer": 3, "layers.1": 4, "layers.2": 5}.items():
        layer = policy.model.layers[source]
        assert torch.equal(own[f"{name}.mlp.up_proj.weight"], layer.mlp.up_proj.weight)
        assert torch.equal(own[f"{name}.self_attn.k_proj.weight"][:, -HIDDEN:], layer.self_attn.k_proj.weight)
    assert drafter.model.fc.weight.shape == (HIDDEN, 2 * HIDDEN)
    with pytest.raises(ValueError, match=r"feature_layers = \[1, 7\]: the policy has only 6"):
        make_drafter(policy_dir, feature_layers=[1, 7])
    with pytest.raises(ValueError, match="ascending"):
        make_drafter(policy_dir, feature_layers=[4, 1])


def test_a_drafter_starts_from_the_head_of_a_policy_in_several_files(policy_dir: Path, tmp_path: Path) -> None:
    """The embeddings, which come first, are not the head of an untied policy."""
    model = LlamaForCausalLM.from_pretrained(policy_dir)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    drafter = make_drafter(tmp_path)
    head = model.lm_head.weight[drafter.draft_tokens]
    assert torch.equal(drafter.model.get_parameter("lm_head.weight"), head)


def test_narrower_mlp_is_allowed_and_starts_random(policy_dir: Path) -> None:
    drafter = make_drafter(policy_dir, intermediate_size=16)
    assert drafter.model.midlayer.mlp.gate_proj.weight.shape == (16, HIDDEN)
    assert drafter.update([make_features(drafter, [(3, 9)])], lr=1e-3)["loss"] > 0
