"""vLLM drafts with the policy's own layer what the module drafts; refits reach it; no token differs (FP32)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specrl.config import Config, DrafterConfig
from specrl.distributed import Ranks
from specrl.models.directory import EMBEDDINGS, HEAD
from specrl.rollout.engine import Engine, Request, response_seed
from specrl.rollout.errors import DrafterCollapseError, PolicyParityError, RefitError
from specrl.rollout.vllm.weights.load import read_weights
from specrl.training.drafter.trainer import Drafter
from specrl.training.features import Features
from tests.exactness.engines import in_batches, mixed_requests, running, verify_policy
from tests.mtp_models import FAMILIES, PREFIX, LiteralMtp, greedy_features, mtp_weights, write_mtp_model

pytestmark = pytest.mark.engine
K, PROMPT, RESPONSE = 3, 6, 24
REQUESTS = mixed_requests(56, longest_prompt=60, max_tokens=40)
SHARP = ((0.1, 1.0, 0), (0.2, 1.0, 0), (0.4, 0.9, 0), (1.0, 1.0, 5))
"""(temperature, top_p, top_k) with which a layer that has learned greedy responses is right now and then."""
LAYERS = {"mimo": 3, "exaone_moe": 1, "ernie4_5_moe": 1}
"""vLLM drafts K tokens with the first of three layers, and with one alone."""
in_each_family = pytest.mark.parametrize("case", list(FAMILIES), indirect=True)


@dataclass
class Case:
    family: str
    engine: Engine
    policy_dir: Path
    drafter: Drafter
    """Trained on greedy responses; the layer on disk is random."""
    features: Features
    """Of some of these responses."""
    prompts: list[list[int]]
    """Of all of them."""

    def refit(self, layer: dict[str, Tensor]) -> None:
        self.engine.refit(read_weights(self.policy_dir), layer.items())

    @property
    def layer(self) -> dict[str, Tensor]:
        return dict(self.drafter.named_weights())


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Case]]:
    """One engine for each family, started when it is first asked for."""
    with ExitStack() as engines:
        yield cache(lambda family: engines.enter_context(started(family, tmp_path_factory.mktemp(family))))


@pytest.fixture
def case(request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Case:
    return cases(getattr(request, "param", "mimo"))


@contextmanager
def started(family: str, directory: Path) -> Iterator[Case]:
    policy_dir = write_mtp_model(directory / "policy", family, layers=LAYERS[family])
    ranks = Ranks(0, 1, 0, torch.device("cpu"))
    drafter = Drafter.of_policy(policy_dir, DrafterConfig(), ranks)
    prompts = torch.randint(4, 100, (32, PROMPT), generator=torch.Generator().manual_seed(1))
    features = greedy_features(policy_dir, prompts, RESPONSE)
    drafter.update([features], lr=3e-3, epochs=60)
    few = features.choose(range(4))
    config = Config.model_validate(
        {
            "name": "mtp",
            "model": {"source": "tiny", "dtype": "float32", "max_length": 128, "tiny": {"family": family}},
            "sampling": {"max_response_tokens": 64},
            "speculation": {"method": "mtp", "k": K},
            "engine": {"max_num_seqs": 256, "kv_cache_gib": 0.125},
        }
    )
    with running(policy_dir, None, config) as engine:
        yield Case(family, engine, policy_dir, drafter, few, prompts.tolist())


@in_each_family
def test_the_engine_starts_with_the_layer_on_disk(case: Case) -> None:
    case.engine.verify_drafter(mtp_weights(case.policy_dir).items())
    verify_policy(case.engine, read_weights(case.policy_dir))
    with pytest.raises(DrafterCollapseError, match=next(iter(case.layer))):
        case.engine.verify_drafter(case.layer.items())


@in_each_family
def test_vllm_drafts_what_the_module_drafts(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.refit(case.layer)
    case.engine.verify_drafter(case.layer.items())
    case.engine.set_k(K)
    runner, proposals = case.engine.runner, list[dict[int, list[int]]]()
    text = runner.speculator.text
    propose = text._propose  # before padding takes the place of what lies beyond a response's end

    def record(**asked: Any) -> Tensor:
        drafts, batch = propose(**asked), asked["input_batch"]
        length = int(runner.req_states.total_len.gpu[batch.idx_mapping[0]])
        proposals[-1][length - 2] = drafts[0, :K].tolist()  # by the position of the last token that the drafter read
        return drafts

    monkeypatch.setattr(text, "_propose", record)
    drafts = accepted = 0
    for row in case.features.tokens.tolist():
        proposals.append({})
        generation = case.engine.generate([Request(row[:PROMPT], 0, RESPONSE, 0.0)])
        assert generation.responses[0].tokens == row[PROMPT : PROMPT + len(generation.responses[0].tokens)]
        drafts, accepted = drafts + generation.stats.num_drafts, accepted + generation.stats.num_accepted_tokens
    literal, compared = LiteralMtp(case.policy_dir, case.layer), 0
    for row, by_start in enumerate(proposals):
        tokens, hidden = case.features.tokens[row].tolist(), case.features.hidden[row]
        for start, drafted in by_start.items():
            if start + 1 < len(tokens):
                chain = literal.chain(tokens, hidden, start, K, forced=False)
                assert drafted == [int(logits.argmax()) for logits in chain], (row, start)
                compared += 1
    assert compared > 20
    expected = case.drafter.update([case.features], lr=0.0)["acceptance_length"]
    assert expected > 1.2, "a layer that is never right would test little"
    assert 1 + accepted / drafts == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("case", "trained"), [("mimo", False), *((family, True) for family in FAMILIES)], indirect=["case"]
)
def test_no_draft_length_and_no_batch_size_changes_a_token(case: Case, trained: bool) -> None:
    case.refit(case.layer if trained else mtp_weights(case.policy_dir))
    case.engine.set_k(0)
    plain = [response.tokens for response in in_batches(case.engine, REQUESTS, 32)]
    for k, size in ((K, 32), (1, 8), (K, 3)):
        case.engine.set_k(k)
        responses = in_batches(case.engine, REQUESTS, size)
        assert [response.tokens for response in responses] == plain
        assert not trained or sum(response.stats.num_accepted_tokens for response in responses) > 0
    case.engine.set_k(K)


@in_each_family
def test_drafting_changes_none_of_many_tokens(case: Case, num_tokens: int) -> None:
    case.refit(case.layer)
    requests = sharp_requests(case.prompts, num_tokens // 40)
    case.engine.set_k(0)
    plain = case.engine.generate(requests)
    case.engine.set_k(K)
    speculative = case.engine.generate(requests)
    assert plain.num_tokens >= num_tokens
    assert [response.tokens for response in speculative.responses] == [r.tokens for r in plain.responses]
    accepted, drafted = speculative.stats.num_accepted_tokens, speculative.stats.num_draft_tokens
    assert num_tokens / 200 < accepted < 0.95 * drafted, "drafts that are never or always right would test little"
    kind = f"{LAYERS[case.family]} MTP layers of {case.family}"
    print(f"{kind}: 0 of {plain.num_tokens} tokens differ; {accepted} of {drafted} drafted tokens were accepted")


def sharp_requests(prompts: list[list[int]], count: int) -> list[Request]:
    """Each prompt with each of `SHARP`, in turn, and each time with another seed and length."""
    found = []
    for index in range(count):
        prompt, seed = prompts[index // len(SHARP) % len(prompts)], response_seed(16, 0, index, 0)
        found.append(Request(prompt, seed, 20 + index % 100, *SHARP[index % len(SHARP)]))
    return found


def test_drafting_goes_on_to_the_last_position_of_the_context(case: Case) -> None:
    """Positions beyond the table of `max_position_embeddings` on disk."""
    case.refit(case.layer)
    request = replace(REQUESTS[0], prompt_tokens=[20, 30, 40] * 20, max_tokens=68, temperature=1.0)
    responses = []
    for k in (0, K):
        case.engine.set_k(k)
        responses.append(case.engine.generate([replace(request, seed=seed) for seed in range(8)]).responses)
    assert [r.tokens for r in responses[0]] == [r.tokens for r in responses[1]]
    assert max(60 + len(response.tokens) for response in responses[0]) == 128


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("mimo", "model.mtp_layers.0.input_proj.weight"),
        ("mimo", "model.mtp_layers.0.hidden_layernorm.weight"),
        ("mimo", "model.mtp_layers.0.mlp.down_proj.weight"),
        ("mimo", "model.mtp_layers.0.self_attn.k_proj.weight"),
        ("mimo", "model.mtp_layers.0.self_attn.q_proj.bias"),
        ("exaone_moe", "mtp.fc.weight"),
        ("exaone_moe", "mtp.norm.weight"),
        ("exaone_moe", "mtp.layers.0.self_attn.q_norm.weight"),
        ("exaone_moe", "mtp.layers.0.mlp.up_proj.weight"),
        ("ernie4_5_moe", "model.mtp_linear_proj.0.weight"),
        ("ernie4_5_moe", "model.mtp_block.0.self_attn.k_proj.weight"),
    ],
    indirect=["case"],
)
def test_a_corrupted_tensor_of_the_layer_is_an_error_with_its_name(case: Case, name: str) -> None:
    sent = case.layer | {name: case.layer[name].roll(1, 0)}
    case.refit(sent)
    with pytest.raises(DrafterCollapseError, match=name):
        case.engine.verify_drafter(case.layer.items())
    verify_policy(case.engine, read_weights(case.policy_dir))


def test_a_missing_tensor_of_the_layer_or_of_the_policy_is_an_error_with_its_name(case: Case) -> None:
    name = PREFIX + "final_layernorm.weight"
    with pytest.raises(RefitError, match=name):
        case.refit({key: tensor for key, tensor in case.layer.items() if key != name})
    policy = {key: tensor for key, tensor in read_weights(case.policy_dir) if key != "lm_head.weight"}
    with pytest.raises(RefitError, match=r"lm_head\.weight"):
        case.engine.refit(policy.items(), case.layer.items())


@in_each_family
def test_a_new_policy_reaches_what_the_layer_shares_with_it(case: Case) -> None:
    torch.manual_seed(0)
    before = dict(read_weights(case.policy_dir))
    policy = {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in before.items()}
    if before[HEAD] is before[EMBEDDINGS]:  # K-EXAONE's head is tied here, and MiMo's is not
        policy[HEAD] = policy[EMBEDDINGS]
    case.engine.refit(policy.items(), case.layer.items())
    verify_policy(case.engine, policy.items())
    case.engine.verify_drafter(case.layer.items())
    drafter = case.engine.drafter
    assert drafter is not None and drafter.lm_head is case.engine.policy.lm_head
    with pytest.raises(PolicyParityError, match=r"lm_head\.weight"):
        verify_policy(case.engine, read_weights(case.policy_dir))


def test_a_path_that_vllm_would_misread_is_refused(case: Case, tmp_path: Path) -> None:
    misleading = write_mtp_model(tmp_path / "eagle3-run")
    with pytest.raises(ValueError, match=r"eagle3.*choose another"):
        Engine(misleading, None, config=case.engine.config, seed=0)
