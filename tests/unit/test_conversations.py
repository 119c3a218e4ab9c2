"""Conversations in waves, their rows, and what is learned from them: nothing of what the environment wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specrl.config import Config, ConfigError, DrafterConfig, ValidationSetConfig, parse_config
from specrl.data.problems import Prompt
from specrl.data.rendering import TURN, Rendering
from specrl.data.rewards.environments import Turn
from specrl.data.rewards.pool import RewardFailure
from specrl.distributed import Ranks, join, leave
from specrl.models.tiny import character_tokenizer
from specrl.rollout.collect import Origin, collect, deal
from specrl.rollout.conversations import open_conversations
from specrl.rollout.drafts.acceptance import SpeculationStats, VerifiedDraft
from specrl.rollout.engine import Engine, Generation, Request, Response, response_seed
from specrl.schemas import Rollout, read_rollouts, write_rollouts
from specrl.stages.validate import exactness_requests
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.drafter.chains import pack_chains
from specrl.training.drafter.trainer import Drafter
from specrl.training.features import NOT_SAMPLED
from specrl.training.megatron.policy import Policy
from specrl.training.rollouts import RolloutBatch
from specrl.training.shares import TrainingShares
from specrl.training.update import StepLoss, _micro_batches, align, update_policy
from specrl.validation.answering import HeldOutSet, measure_acceptance
from specrl.validation.speed import NextStep

# isort: split
from megatron.core import parallel_state

ALONE = Ranks(0, 1, 0, torch.device("cpu"))
CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


def tokenizer(template: str | None = None) -> Any:
    found = character_tokenizer(64)
    found.chat_template = template
    return found


def config_of(**sections: Any) -> Config:
    environment = {"name": "calculator", "max_turns": 3}
    return parse_config(
        {
            "name": "talk",
            "model": {"max_length": 64},
            "sampling": {"max_response_tokens": 20},
            "environment": environment,
            **sections,
        }
    )


@dataclass
class FakeEngine:
    """Each turn is "ab" and the end token, or "ab" alone at the bound; it remembers what it was asked."""

    tokenizer: Any = field(default_factory=tokenizer)
    waves: list[list[Request]] = field(default_factory=list)

    def of_first(self, value: Any) -> Any:
        return value

    def stored_for(self, request: Request) -> tuple[int, int]:
        return 0, 0

    def generate(self, requests: list[Request], *, on_response: Callable[[int, Response], None]) -> Generation:
        self.waves.append(requests)
        whole = [*self.tokenizer.convert_tokens_to_ids(["a", "b"]), self.tokenizer.eos_token_id]
        responses = []
        for request in requests:
            tokens = whole[: request.max_tokens]
            end = "stop" if tokens == whole else "length"
            logprobs = [-float(len(self.waves))] * len(tokens)
            time, drafts = len(self.waves), [VerifiedDraft(len(request.prompt_tokens), drafted=2, accepted=1)]
            responses.append(Response(tokens, logprobs, None, "ab", end, time, time, drafts))
        for place in reversed(range(len(requests))):  # the order in which they end is nobody's business
            on_response(place, responses[place])
        return Generation(responses, SpeculationStats(1, 2, 1), 1.0, sum(len(one.tokens) for one in responses))


@dataclass
class FakePool:
    """An environment that is a function of a prompt and the turns so far."""

    answer: Callable[[Prompt, tuple[str, ...]], Turn | RewardFailure]

    def begin(self, data: object) -> Any:
        found: dict[int, Turn | RewardFailure] = {}

        def submit(number: int, prompt: Prompt, texts: tuple[str, ...]) -> None:
            found[number] = self.answer(prompt, texts)

        return SimpleNamespace(submit=submit, results=lambda: dict(sorted(found.items())))


def tool(text: str, reward: float = 0.0, *, done: bool = False) -> Turn:
    return Turn(({"role": "tool", "content": text},), reward, done)


def talk(
    answer: Callable[[Prompt, tuple[str, ...]], Turn | RewardFailure],
    engine: FakeEngine,
    config: Config,
    prompts: Sequence[Prompt] = (Prompt(7, "q", [5, 6], ""),),
    samples: int = 1,
) -> list[Rollout]:
    asked = deal(prompts, samples, 0, 1)
    unscored = collect(cast(Engine, engine), asked, config, cast(Any, FakePool(answer)), Origin(3, step=1))
    rollouts, scores = unscored.scored()
    assert len(scores.rewards) == len(rollouts)
    return rollouts


def test_a_turn_is_asked_with_all_that_came_before_and_a_seed_of_its_own() -> None:
    engine = FakeEngine()
    (row,) = talk(lambda _, texts: tool("ce", len(texts) / 2), engine, config_of())
    ab, ce = (
        [*engine.tokenizer.convert_tokens_to_ids(["a", "b"]), 2],
        engine.tokenizer.convert_tokens_to_ids(["c", "e"]),
    )
    asked = [wave[0] for wave in engine.waves]
    assert [request.prompt_tokens for request in asked] == [[5, 6], [5, 6, *ab, *ce], [5, 6, *ab, *ce, *ab, *ce]]
    assert [request.seed for request in asked] == [response_seed(3, 1, 7, 0, turn) for turn in range(3)]
    assert asked[0].seed == response_seed(3, 1, 7, 0)
    assert [request.max_tokens for request in asked] == [20, 15, 10]
    assert list(row.response_tokens) == [*ab, *ce, *ab, *ce, *ab] and list(row.turns) == [3, 2, 3, 2, 3]
    assert list(row.generation_logprobs) == [-1.0] * 3 + [-2.0] * 3 + [-3.0] * 3
    assert (row.response, row.finish_reason, row.reward) == ("abceabceab", "stop", 1.5)
    assert (row.num_drafts, row.num_draft_tokens, row.num_accepted_tokens) == (3, 6, 3)
    assert (row.started_at, row.finished_at, row.num_sampled, list(row.sampled_tokens)) == (1, 3, 9, ab * 3)


def test_only_unfinished_conversations_are_in_the_next_wave() -> None:
    engine = FakeEngine()
    prompts = [Prompt(number, "q", [5, number], "") for number in range(3)]
    rows = talk(lambda prompt, texts: tool("c", done=len(texts) > prompt.id), engine, config_of(), prompts, samples=2)
    assert [len(wave) for wave in engine.waves] == [6, 4, 2]
    assert [len(row.turns) for row in rows] == [0, 0, 3, 3, 5, 5]
    assert len({request.seed for wave in engine.waves for request in wave}) == 12


@pytest.mark.parametrize(
    ("words", "turns", "length", "reason"),
    [
        ("c" * 16, [3, 16, 1], 20, "length"),  # room for one more token, which is no whole turn
        ("c" * 17, [], 3, "length"),  # none: the words are left out
        ("c" * 6, [3, 6, 3, 6, 2], 20, "length"),
        ("", [3, 0, 3, 0, 3], 9, "stop"),
    ],
)
def test_a_conversation_ends_at_the_bound_of_a_response(words: str, turns: list[int], length: int, reason: str) -> None:
    (row,) = talk(lambda _, texts: tool(words, 1.0), FakeEngine(), config_of())
    assert (list(row.turns), len(row.response_tokens), row.finish_reason, row.reward) == (turns, length, reason, 1.0)


def test_a_failure_ends_a_conversation_with_the_reward_of_failures() -> None:
    failure = RewardFailure("q", "ab", "raised ValueError: no")
    rows = talk(
        lambda _, texts: tool("c") if len(texts) == 1 else failure,
        FakeEngine(),
        config_of(data={"reward_on_failure": -0.5}),
    )
    assert (list(rows[0].turns), rows[0].reward) == ([3, 1, 3], -0.5)


def test_an_environment_may_write_the_prompt_within_its_bound() -> None:
    engine, config = cast(Engine, FakeEngine()), config_of(data={"template": "Q{prompt}", "max_prompt_tokens": 8})
    prompts = [Prompt(1, "own", [5], ""), Prompt(2, "other", [6], "")]
    pool = cast(Any, FakePool(lambda prompt, _: tool("ace") if prompt.id == 1 else Turn()))
    opened = open_conversations(engine, prompts, config, pool)
    assert [prompt.text for prompt in opened] == ["Qace", "other"] and opened[1] is prompts[1]
    assert engine.tokenizer.decode(opened[0].tokens, skip_special_tokens=True) == "Qace"
    failing = cast(Any, FakePool(lambda *_: RewardFailure("", "", "raised")))
    assert open_conversations(engine, prompts, config, failing) == prompts
    with pytest.raises(
        ValueError, match=r'environment.name = "calculator": reset opened .* 2[01] tokens; allowed: 1 to 8'
    ):
        open_conversations(engine, prompts, config, cast(Any, FakePool(lambda *_: tool("a" * 19))))
    assert open_conversations(engine, prompts, parse_config({"name": "x"}), None) == prompts


def opened_after(failures: int, asked: list[str]) -> list[Prompt]:
    """Two prompts, one of which the environment begins only after some failures."""

    def answer(prompt: Prompt, _: tuple[str, ...]) -> Turn | RewardFailure:
        asked.append(prompt.text)
        is_late = prompt.id == 1 and asked.count("own") <= failures
        return RewardFailure("", "", "took longer") if is_late else tool("ace")

    prompts = [Prompt(1, "own", [5], ""), Prompt(2, "other", [6], "")]
    return open_conversations(cast(Engine, FakeEngine()), prompts, config_of(), cast(Any, FakePool(answer)))


def test_an_environment_that_fails_to_begin_is_asked_once_more() -> None:
    asked: list[str] = []
    assert [prompt.text for prompt in opened_after(1, asked)] == [prompt.text for prompt in opened_after(0, [])]
    assert asked == ["own", "other", "own"]


def test_a_conversation_that_was_not_begun_has_failed_whatever_the_environment_says_later() -> None:
    engine, prompts = FakeEngine(), opened_after(2, [])
    assert [prompt.unopened for prompt in prompts] == ["took longer", ""]
    pool, config = FakePool(lambda *_: tool("c", 1.0)), config_of(data={"reward_on_failure": -0.5})
    found = collect(cast(Engine, engine), deal(prompts, 2, 0, 1), config, cast(Any, pool), Origin(3, step=1))
    rows, scores = found.scored()
    assert [(len(row.turns), row.reward) for row in rows] == [(0, -0.5)] * 2 + [(5, 1.0)] * 2
    assert [failure.reason for failure in scores.failures] == ["took longer"] * 2
    assert [len(wave) for wave in engine.waves] == [4, 2, 2]
    batch = RolloutBatch.gather(ALONE, rows)
    batch.assign_advantages(config)
    assert batch.advantages.tolist() == [0.0] * 4


def test_what_validate_and_export_measure_is_about_the_prompts_that_the_environment_writes() -> None:
    asked: list[Request] = []

    def generate(requests: list[Request]) -> Generation:
        asked.extend(requests)
        return Generation([], SpeculationStats(), 1.0, 0)

    config, own = config_of(data={"template": "Q{prompt}"}), Prompt(1, "own", [5], "")
    pool, engine = cast(Any, FakePool(lambda *_: tool("ace"))), cast(Any, FakeEngine())
    expected = engine.tokenizer("Qace")["input_ids"]
    assert exactness_requests(engine, [own], pool, config)[0].prompt_tokens == expected
    following = NextStep(3, [own], 1, {}, []).opened(engine, config, pool)
    assert following.requests(1, config)[0].prompt_tokens == expected
    engine.generate = generate
    measure_acceptance(engine, [HeldOutSet("held-out", config, [own], ValidationSetConfig())], pool)
    assert [request.prompt_tokens for request in asked] == [expected] * 2


def test_the_words_of_an_environment_count_for_the_punishment_of_what_is_overlong() -> None:
    rows = [replace(conversation([10, 11, 12, 13, 14], 1.0, 0), turns=turns) for turns in ([2, 2, 1], [])]
    config = config_of(train={"overlong_window": 1.0}, sampling={"max_response_tokens": 5})
    assert RolloutBatch.gather(ALONE, rows).penalties(config).tolist() == [-1.0, -1.0]


def test_an_environment_may_write_anything_between_turns() -> None:
    rendering = Rendering(config_of(data={"template": "chat"}), tokenizer(CHAT))
    text, _ = rendering.between([{"role": "t", "content": f"1 {TURN} 2"}], last=9)
    assert text == f"</s>[t]1 {TURN} 2</s>[a]"


def test_a_chat_template_ends_the_policys_turn_once() -> None:
    chat = tokenizer(CHAT)
    rendering = Rendering(config_of(data={"template": "chat"}), chat)
    text, after_stop_string = rendering.between([{"role": "t", "content": "5"}], last=9)
    assert text == "</s>[t]5</s>[a]"
    after_end, begun = rendering.between([{"role": "t", "content": "5"}], chat.eos_token_id)[1], chat.eos_token_id
    assert after_stop_string == [begun, *after_end]
    plain = Rendering(config_of(), tokenizer())
    assert plain.between([{"role": "t", "content": "5"}, {"role": "t", "content": "6"}], 2)[0] == "56"
    with pytest.raises(ConfigError, match="does not show the turns"):
        Rendering(config_of(data={"template": "chat"}), tokenizer("hello")).between([], 2)


def test_turns_are_stored(tmp_path: Path) -> None:
    common = (0, 1, 2, 3, 4, 5, 2**62, [7, 8])
    rows = [Rollout(*common, [3, 4, 5, 6], [-0.5, -1.0], "x", "y", "stop", turns=[1, 2, 1])]
    write_rollouts(tmp_path / "rollouts.arrow", rows)
    assert read_rollouts(tmp_path / "rollouts.arrow") == rows
    assert (rows[0].num_sampled, list(rows[0].sampled_tokens)) == (2, [3, 6])


SAMPLED = np.array([True, True, False, False, True])


def batch_of(tokens: Sequence[int], other: Sequence[int] = (8, 9)) -> MicroBatch:
    """A conversation of turns [10, 11] and [14] with two tokens between, beside an ordinary response."""
    sequences = [TokenSequence([5, 6, *tokens], 2, 0, sampled=SAMPLED), TokenSequence([5, 6, *other], 2, 1)]
    (batch,) = pack(sequences, 100)
    return batch


def test_what_the_environment_wrote_is_read_and_never_a_target() -> None:
    batch, changed = batch_of([10, 11, 12, 13, 14]), batch_of([10, 11, 28, 29, 14])
    assert batch.targets.tolist() == changed.targets.tolist() == [10, 11, 14, 8, 9]
    assert batch.tokens[batch.predictors].tolist() == [6, 10, 13, 6, 8]
    assert changed.tokens[changed.predictors].tolist() == [6, 10, 29, 6, 8]
    assert batch.mask.tolist() == [[True, True, True], [True, True, False]]
    assert (batch.num_tokens, batch.sampled_lengths, batch.lengths.tolist()) == (5, [3, 2], [7, 4])


def conversation(tokens: Sequence[int], reward: float, sample: int) -> Rollout:
    logprobs = [-3.5] * int(SAMPLED.sum())
    row = Rollout(0, 0, 0, sample, 0, 0, 0, [5, 6], tokens, logprobs, "", "", "stop", reward=reward)
    return replace(row, turns=[2, 2, 1])


def test_the_loss_of_a_conversation_is_the_mean_over_what_the_policy_wrote() -> None:
    """By hand: advantages of 1 and -1, on policy, so that the loss is minus their mean over 3 and 2 tokens."""
    rows = [conversation([10, 11, 12, 13, 14], 1.0, 0), replace(conversation([8, 9], 0.0, 1), turns=[])]
    rows[1].generation_logprobs = rows[1].generation_logprobs[:2]
    config = parse_config({"name": "loss", "train": {"correction": "none"}})
    batch = RolloutBatch.gather(ALONE, rows)
    batch.assign_advantages(config)
    assert batch.response_lengths.tolist() == [3, 2] and batch.lengths.tolist() == [7, 4]
    policy: Any = SimpleNamespace(dp_rank=0, dp_size=1, tp_rank=0, pp_rank=0, pp_size=1, pad_multiple=1, ranks=ALONE)
    shares = TrainingShares.of(policy, batch, [[0, 1]])
    own = shares.deliver(batch)
    (micro,) = _micro_batches(policy, own, shares.own(0), config)
    logprobs = align([[-3.5] * 3, [-3.5] * 2], micro.mask, 5).requires_grad_()
    loss, _ = StepLoss(config.train, own, batch.advantages, 5)(logprobs, logprobs.detach(), micro)
    advantage = float(batch.advantages[0])
    assert advantage == pytest.approx(-float(batch.advantages[1]))
    assert loss.item() == pytest.approx(-(3 * advantage - 2 * advantage) / 5, abs=1e-5)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield join()
    parallel_state.destroy_model_parallel()
    leave()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 8}
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2)).save_pretrained(folder)
    return folder


def gradient_by_hand(model_dir: Path, rows: list[Rollout], advantages: Sequence[float]) -> dict[str, torch.Tensor]:
    """The gradient of minus the mean of advantage x log-prob over the sampled tokens, by transformers."""
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    total, count = torch.zeros(()), 0
    for row, advantage in zip(rows, advantages, strict=True):
        tokens = torch.tensor([*row.prompt_tokens, *row.response_tokens])
        logprobs = model(tokens[None]).logits[0].log_softmax(-1)
        for place in (2, 3, 6):
            total, count = total - advantage * logprobs[place - 1, tokens[place]], count + 1
    torch.autograd.backward([total / count])
    return {name: cast(torch.Tensor, parameter.grad) for name, parameter in model.named_parameters()}


def test_the_gradient_is_that_of_the_sampled_tokens_alone(ranks: Ranks, model_dir: Path) -> None:
    """AdamW's first step has the sign of the gradient."""
    settings = {"lr": 1e-3, "clip_grad": 1e9, "weight_decay": 0.0}
    config = parse_config({"name": "update", "policy": settings, "train": {"correction": "none"}})
    policy = Policy(model_dir, config.policy, dtype="float32", ranks=ALONE, seed=0)
    before = {name: tensor.clone() for name, tensor in policy.hf_weights()}
    rows = [conversation([10, 11, 12, 13, 14], 1.0, 0), conversation([3, 4, 20, 21, 7], 0.0, 1)]
    batch = RolloutBatch.gather(ALONE, rows)
    batch.assign_advantages(config)
    update = update_policy(policy, batch, config, None, step=2)
    expected = gradient_by_hand(model_dir, rows, batch.advantages.tolist())
    norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    assert update.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    moved = {name: tensor - before[name] for name, tensor in policy.hf_weights()}
    for name, gradient in expected.items():
        clear = gradient.abs() > 1e-4
        assert torch.equal(moved[name][clear].sign(), -gradient[clear].sign()), name
    assert [len(row.policy_logprobs or []) for row in rows] == [3, 3]
    assert update.metrics["num_tokens"] == 14


def test_the_drafter_learns_nothing_of_what_the_environment_wrote(ranks: Ranks, model_dir: Path) -> None:
    config = parse_config({"name": "features"})
    policy = Policy(model_dir, config.policy, dtype="float32", ranks=ALONE, seed=0, trainable=False)
    settings = DrafterConfig.model_validate({"ttt_steps": 3, "draft_vocab_size": 32})
    drafter = Drafter.create(model_dir, settings, torch.arange(32), ranks, seed=1)
    (features,) = policy.forward_features([batch_of([10, 11, 12, 13, 14])], drafter.feature_layers)
    assert features.target_top1[0].tolist()[3:5] == [NOT_SAMPLED] * 2
    assert features.mask[0].tolist() == [False, *[True] * 5, False]
    wrong = replace(features, hidden=features.hidden.clone())
    targets = wrong.hidden[0, 3:5, -policy.hf_config.hidden_size :]
    targets += 50 * torch.randn_like(targets)
    chains = pack_chains(features, drafter.draft_tokens, 32, 3)
    assert chains is not None and chains.sampled.tolist() == [True, False, False, True, True]
    metrics = [drafter.update([item], lr=0.0) for item in (features, wrong)]
    assert metrics[0]["loss"] == metrics[1]["loss"] and metrics[0]["num_tokens"] == 3
    weights = []
    for item in (features, wrong):
        fresh = Drafter.create(model_dir, settings, torch.arange(32), ranks, seed=1)
        fresh.update([item], lr=1e-3)
        weights.append(fresh.state_dict())
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
