"""Refit in place, tied and untied: the engine follows the trainer, and every way in which it might not has a name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import specrl.rollout.vllm.cpu_kernels  # noqa: F401  (must precede vllm)

# isort: split
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from specrl.precision.near_ties import compare, rounding_of
from specrl.rollout.engine import Engine
from specrl.rollout.errors import DrafterCollapseError, PolicyParityError, RefitError
from specrl.rollout.refit.policy_probe import check_policy
from specrl.validation.exactness import traces
from tests.exactness.engines import logprobs_of, mixed_requests, running, verify_policy
from tests.exactness.toy import (
    drafter_weights,
    likely_tokens,
    llama_config,
    policy_weights,
    toy_config,
    write_drafter,
    write_policy,
)

SEQUENCES = [likely_tokens() * 4, likely_tokens()[::-1] * 3, [5, 9, 40, 60, 80, 100, 120]]
DTYPE = "bfloat16"
TOLERANCE = 0.05
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"


@dataclass
class Case:
    """An engine and what the trainer says about it."""

    engine: Engine
    tied: bool
    seed: int = 0
    drafter: dict[str, Tensor] = field(default_factory=lambda: drafter_weights(1, DTYPE))

    def policy(self, seed: int) -> dict[str, Tensor]:
        return {name: tensor.bfloat16() for name, tensor in policy_weights(seed, tied=self.tied).items()}

    def check(self, trainer: dict[str, Tensor]) -> float:
        differences = check_policy(logprobs_of(self.engine, SEQUENCES), trainer_logprobs(trainer, self.tied), TOLERANCE)
        return differences["refit/mean_abs_logprob_diff"]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    root = tmp_path_factory.mktemp("refit")
    policy = write_policy(root / "policy", policy_weights(0, tied=request.param), tied=request.param, dtype=DTYPE)
    drafter = write_drafter(root / "drafter", drafter_weights(1, DTYPE), DTYPE)
    with running(policy, drafter, toy_config("eagle3", 3, dtype=DTYPE), reads_policy=False) as engine:
        yield Case(engine, request.param)


def trainer_logprobs(weights: dict[str, Tensor], tied: bool) -> list[list[float]]:
    model = LlamaForCausalLM(llama_config(tied))
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    rows = []
    for tokens in SEQUENCES:
        with torch.no_grad():
            logprobs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        rows.append(logprobs.gather(-1, torch.tensor(tokens)[1:, None])[:, 0].tolist())
    return rows


def changed(weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """A copy with one tensor's rows in another order."""
    return weights | {name: weights[name].roll(1, 0)}


@pytest.mark.engine
def test_an_engine_that_waits_for_its_first_refit_has_read_the_drafter_alone(case: Case) -> None:
    """Other tests refit: this one comes first."""
    with pytest.raises(PolicyParityError, match=r"down_proj.* and \d+ more$"):
        verify_policy(case.engine, case.policy(0).items())
    case.engine.verify_drafter(case.drafter.items())


@pytest.mark.engine
def test_a_drafter_of_another_type_is_compared_as_the_engine_converts_it(case: Case) -> None:
    drafter = {name: weight.double() if weight.is_floating_point() else weight for name, weight in case.drafter.items()}
    case.engine.verify_drafter(drafter.items())
    case.engine.refit_drafter(drafter.items())
    case.engine.verify_drafter(drafter.items())


@pytest.mark.engine
def test_the_engine_follows_the_trainer_through_refits(case: Case) -> None:
    for version in (1, 2, 3):
        policy, drafter = case.policy(version), drafter_weights(10 + version, DTYPE)
        with pytest.raises(PolicyParityError, match=r"mean .* maximum"):
            case.check(policy)
        with pytest.raises(DrafterCollapseError):
            case.engine.verify_drafter(drafter.items())
        case.engine.refit(policy.items(), drafter.items())
        case.check(policy)
        verify_policy(case.engine, policy.items())
        case.engine.verify_drafter(drafter.items())


@pytest.mark.engine
def test_a_prefix_cache_that_cannot_be_dropped_is_an_error(case: Case) -> None:
    """The next prompts would read keys of the policy before."""
    pool = case.engine.llm.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    pinned = pool.get_new_blocks(1)
    with pytest.raises(RefitError, match="prefix cache cannot be dropped"):
        case.engine.refit(case.policy(1).items(), case.drafter.items())
    pool.free_blocks(pinned)
    case.engine.refit(case.policy(1).items(), case.drafter.items())


@pytest.mark.engine
@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight", EMBEDDINGS]
)
def test_a_policy_tensor_corrupted_on_its_way_is_an_error_with_a_name(case: Case, name: str) -> None:
    policy = case.policy(4)
    sent = changed(policy, name)
    if case.tied and name == EMBEDDINGS:
        sent[HEAD] = sent[EMBEDDINGS]
    case.engine.refit(sent.items(), None)
    with pytest.raises(PolicyParityError, match=name):
        verify_policy(case.engine, policy.items())
    if name == EMBEDDINGS:
        with pytest.raises(PolicyParityError, match="disagree after the refit"):
            case.check(policy)
        with pytest.raises(DrafterCollapseError, match="embed_tokens"):
            case.engine.verify_drafter([(EMBEDDINGS.removeprefix("model."), policy[EMBEDDINGS])])


@pytest.mark.engine
@pytest.mark.parametrize(
    "kind", ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "0.input_layernorm", EMBEDDINGS]
)
def test_a_single_element_that_changes_behind_the_trainer_is_an_error_with_a_name(case: Case, kind: str) -> None:
    """The trainer's tensors are noted once, as they leave it."""
    policy = case.policy(4)
    name = next(full for full in sorted(policy) if kind in full)
    hit = {name, HEAD} if case.tied and name == EMBEDDINGS else {name}
    expected = case.engine.expected_policy()

    def damaged() -> Iterator[tuple[str, Tensor]]:
        for sent, tensor in expected.noted(policy.items()):
            arrives = tensor.clone() if sent in hit else tensor
            if arrives is not tensor:
                arrives.view(-1)[3] += arrives.abs().max()
            yield sent, arrives

    case.engine.refit(damaged(), None)
    with pytest.raises(PolicyParityError, match=rf"differs from the trainer's in .*{name}"):
        expected.check()
    case.engine.refit(policy.items(), None)
    expected.check()


@pytest.mark.engine
def test_the_last_bit_of_an_embedding_is_compared(case: Case) -> None:
    policy = case.policy(4)
    moved = policy[EMBEDDINGS].clone()
    moved.view(torch.int16)[-1, -1] ^= 1
    case.engine.refit((policy | {EMBEDDINGS: moved} | ({HEAD: moved} if case.tied else {})).items(), None)
    with pytest.raises(PolicyParityError, match=EMBEDDINGS):
        verify_policy(case.engine, policy.items())


@pytest.mark.engine
def test_a_corrupted_head_is_an_error_with_a_name(case: Case) -> None:
    policy = case.policy(5)
    sent, expected = changed(policy, HEAD), case.engine.expected_policy()
    case.engine.refit(expected.noted(sent.items()), None)
    with pytest.raises(PolicyParityError, match=HEAD if case.tied else "disagree after the refit"):
        expected.check()  # a tied head that is sent must be the embeddings
        case.check(policy)


@pytest.mark.engine
def test_a_refit_packs_each_layer_that_multiplies_once(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[str] = []
    names = {layer: name for name, layer in case.engine.policy.named_modules()}
    for kind in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):

        def pack(method: Any, layer: Any, before: Any = kind.process_weights_after_loading) -> None:
            packed.append(names[layer])
            before(method, layer)

        monkeypatch.setattr(kind, "process_weights_after_loading", pack)
    policy = case.policy(9)
    backwards = dict(reversed(policy.items()))
    case.engine.refit(backwards.items(), None)
    linear = [name for name in names.values() if name.endswith("_proj")]
    # vLLM finishes the table of embeddings in the same way, though nothing multiplies it.
    assert sorted(packed) == sorted([*linear, "lm_head", "model.embed_tokens"])
    case.check(policy)
    verify_policy(case.engine, policy.items())


@pytest.mark.engine
def test_a_missing_or_unknown_tensor_is_an_error_with_its_name(case: Case) -> None:
    policy = case.policy(6)
    name = "model.layers.1.mlp.up_proj.weight"
    incomplete = {key: tensor for key, tensor in policy.items() if key != name}
    case.engine.refit(policy.items(), None)
    with pytest.raises(RefitError, match=name):
        case.engine.refit([(key, -tensor) for key, tensor in incomplete.items()], None)
    with pytest.raises(PolicyParityError) as wrong:
        verify_policy(case.engine, policy.items())
    assert "layers.1.mlp.down_proj" in str(wrong.value)
    with pytest.raises(RefitError, match="not have"):
        case.engine.refit([*policy.items(), ("model.layers.9.mlp.up_proj.weight", policy[name])], None)
    without_mapping = {key: tensor for key, tensor in case.drafter.items() if key != "d2t"}
    with pytest.raises(RefitError, match="d2t"):
        case.engine.refit(policy.items(), without_mapping.items())
    ids = case.drafter["d2t"] + torch.arange(len(case.drafter["d2t"])) + case.policy(6)[EMBEDDINGS].shape[0]
    with pytest.raises(RefitError, match=r"drafter whose d2t\[0\] = .* d2t must hold offsets"):
        case.engine.refit(policy.items(), {**case.drafter, "d2t": ids}.items())
    case.engine.refit(policy.items(), case.drafter.items())
    case.check(policy)


@pytest.mark.engine
@pytest.mark.parametrize(
    "name", ["fc.weight", "midlayer.self_attn.v_proj.weight", "norm.weight", "lm_head.weight", "d2t"]
)
def test_a_corrupted_drafter_tensor_is_an_error_with_its_name_and_changes_no_token(case: Case, name: str) -> None:
    policy, requests = case.policy(8), mixed_requests(14)
    case.engine.refit(policy.items(), case.drafter.items())
    plain = traces(case.engine, requests, len(requests), 0)
    case.engine.refit(policy.items(), changed(case.drafter, name).items())
    with pytest.raises(DrafterCollapseError, match=name):
        case.engine.verify_drafter(case.drafter.items())
    speculative = traces(case.engine, requests, len(requests), 3)
    found = compare(plain, speculative, rounding_of(DTYPE))  # in BF16 a near-tie may fall the other way
    assert found.num_unexplained == 0


def test_parity_counts_missing_numbers_as_disagreement() -> None:
    differences = check_policy([[-1.0, -2.0]], [[-1.1, -2.2]], 0.2)
    assert differences["refit/mean_abs_logprob_diff"] == pytest.approx(0.15)
    assert differences["refit/max_abs_logprob_diff"] == pytest.approx(0.2)
    with pytest.raises(PolicyParityError):
        check_policy([[-1.0, float("nan")]], [[-1.0, -2.0]], 0.2)
    with pytest.raises(AssertionError, match="same sequences"):
        check_policy([[-1.0]], [[-1.0, -2.0]], 0.2)
