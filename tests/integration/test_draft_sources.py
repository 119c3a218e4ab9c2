"""Every draft source gives the tokens of plain decoding, in FP32, and says what it did."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specrl.artifacts import SetScore
from specrl.config import SamplingConfig, ValidationSetConfig
from specrl.data.problems import Prompt
from specrl.distributed import Ranks
from specrl.rollout.drafts.acceptance import DRAFTER, OWN_TEXT, RECENT, REPLAY, SpeculationStats
from specrl.rollout.engine import Engine, Request, Response, StoredText
from specrl.rollout.vllm.engine.arguments import generation_params
from specrl.validation.answering import HeldOutSet, LastAnswers, answer
from specrl.validation.speed import matched_pair
from tests.exactness.engines import mixed_requests, running
from tests.exactness.toy import drafter_weights, likely_tokens, policy_weights, toy_config, write_drafter, write_policy

pytestmark = pytest.mark.engine
REQUESTS = mixed_requests(32, seed=5)
LONGEST = 16
ALONE = Ranks(0, 1, 0, torch.device("cpu"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("draft-sources")
    write_policy(root / "policy", policy_weights(0))
    write_drafter(root / "drafter", drafter_weights(1))
    return root


@pytest.fixture(scope="module")
def mixed(root: Path) -> Iterator[Engine]:
    with running(root / "policy", root / "drafter", toy_config("eagle3+replay", 3, adaptive=True)) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(mixed: Engine) -> list[Response]:
    """k = 0 is compared with an engine without speculation in the exactness suite."""
    mixed.set_k(0)
    generation = mixed.generate(REQUESTS)
    assert generation.stats.num_drafts == 0
    return generation.responses


@pytest.fixture(scope="module")
def texts(plain: list[Response]) -> list[StoredText]:
    """Responses to half of the prompts, some of them wrong in one token."""
    wrong = likely_tokens()[0]
    stored = []
    for index, (request, response) in enumerate(zip(REQUESTS, plain, strict=True)):
        if index % 2 == 0:
            text = response.tokens if index % 4 else [*response.tokens[:5], wrong, *response.tokens[6:]]
            stored.append(StoredText(request.prompt_tokens, text))
    return stored


def tokens(responses: list[Response]) -> list[list[int]]:
    return [response.tokens for response in responses]


@pytest.mark.parametrize("k", [1, 3, None])
def test_replay_and_eagle3_share_a_batch(
    mixed: Engine, plain: list[Response], texts: list[StoredText], k: int | None
) -> None:
    mixed.set_replay(texts)
    mixed.set_k(k)
    generation = mixed.generate(REQUESTS)
    assert tokens(generation.responses) == tokens(plain)
    if k is not None:
        by_source = generation.stats.by_source
        assert by_source[REPLAY].num_accepted_tokens > 0.5 * by_source[REPLAY].num_draft_tokens > 0
        assert by_source[DRAFTER].num_accepted_tokens > 0
        assert len(generation.stats.drafted_per_pos) == LONGEST
        of_requests = SpeculationStats.merge(SpeculationStats.of(response.drafts) for response in generation.responses)
        assert of_requests.by_source == by_source


def test_long_drafts_save_iterations_and_stored_text_can_be_taken_away(
    mixed: Engine, plain: list[Response], texts: list[StoredText]
) -> None:
    mixed.set_k(3)
    longest = max(range(len(REQUESTS)), key=lambda index: len(plain[index].tokens))
    request = REQUESTS[longest]
    mixed.set_replay([StoredText(request.prompt_tokens, plain[longest].tokens)])
    steps = mixed.generate([request]).stats.decode_steps
    assert steps <= len(plain[longest].tokens) // LONGEST + 2
    mixed.set_replay([])
    generation = mixed.generate(REQUESTS)
    assert REPLAY not in generation.stats.by_source
    assert tokens(generation.responses) == tokens(plain)


def test_what_rollouts_said_is_found_again_by_later_ones_and_by_nothing_else(
    mixed: Engine, plain: list[Response]
) -> None:
    mixed.set_replay([])
    mixed.set_k(3)
    first = mixed.generate(REQUESTS, recall=True)
    again = mixed.generate(REQUESTS, recall=True)
    other = mixed.generate(REQUESTS)
    assert tokens(first.responses) == tokens(again.responses) == tokens(other.responses) == tokens(plain)
    assert again.stats.by_source[RECENT].num_accepted_tokens > 0.5 * again.num_tokens
    assert again.stats.decode_steps < other.stats.decode_steps
    assert RECENT not in other.stats.by_source
    assert REPLAY not in again.stats.by_source


def test_responses_draft_from_their_finished_siblings(mixed: Engine, plain: list[Response]) -> None:
    """Requests that differ in nothing say the same: all that the first ones said is right for those that follow."""
    mixed.set_replay([])
    mixed.set_recent([])
    mixed.set_k(3)
    longest = max(range(len(REQUESTS)), key=lambda index: len(plain[index].tokens))
    group = [REQUESTS[longest]] * (mixed.config.engine.max_num_seqs + 4)
    generation = mixed.generate(group, recall=True)
    assert tokens(generation.responses) == [plain[longest].tokens] * len(group)
    assert generation.stats.by_source[REPLAY].num_accepted_tokens > 2 * len(plain[longest].tokens)
    assert REPLAY not in mixed.generate(group).stats.by_source
    mixed.set_recent([])


def test_a_matched_pair_begins_every_repeat_with_the_text_that_it_is_given(
    mixed: Engine, plain: list[Response], texts: list[StoredText]
) -> None:
    given: list[int] = []

    def give_texts() -> None:
        given.append(1)
        mixed.set_recent([[plain[1].tokens], [plain[3].tokens]])
        mixed.set_replay(texts)

    pair = matched_pair(mixed, REQUESTS, len(REQUESTS), 3, 2, give_texts=give_texts)
    assert len(given) == 2
    assert pair.tokens_equal == 1.0
    assert pair.token_share[REPLAY] > 0.2 and pair.token_share[DRAFTER] > 0
    assert pair.token_share[RECENT] > 0
    assert mixed.drafting is not None
    # What it was given and what the last repeat said; the repeat before would be found word for word.
    assert len(mixed.drafting.texts._recent) == 2 + len(REQUESTS)
    without = matched_pair(mixed, REQUESTS, len(REQUESTS), 3, 1)
    assert RECENT not in without.token_share and without.tokens_equal == 1.0
    mixed.set_recent([])
    mixed.set_replay([])


def test_the_text_of_its_own_seed_is_followed_though_most_texts_say_otherwise(
    mixed: Engine, plain: list[Response]
) -> None:
    mixed.set_k(3)
    longest = max(range(len(REQUESTS)), key=lambda index: len(plain[index].tokens))
    request, own = REQUESTS[longest], plain[longest].tokens
    prompt, other = request.prompt_tokens, [own[0], *(token for token in likely_tokens() if token != own[1])]
    rows = (other, 1), (other, 2), (own, request.seed)
    mixed.set_replay([StoredText(prompt, *row) for row in rows])
    assert mixed.stored_for(request) == (3, len(own))
    found = mixed.generate([request])
    assert found.responses[0].tokens == own
    assert found.stats.by_source[OWN_TEXT].num_accepted_tokens == found.stats.by_source[OWN_TEXT].num_draft_tokens > 0
    mixed.set_replay([StoredText(prompt, text) for text, _ in rows])
    assert mixed.stored_for(request) == (3, 0)
    assert mixed.generate([request]).stats.num_accepted_tokens < found.stats.num_accepted_tokens
    mixed.set_replay([])


def test_a_validation_drafts_from_the_answers_of_the_one_before_and_of_an_earlier_start(
    mixed: Engine, tmp_path: Path
) -> None:
    config = mixed.config.model_copy(update={"sampling": SamplingConfig(max_response_tokens=48)})
    prompts = [
        Prompt(index, "", request.prompt_tokens[:60], "", {}) for index, request in enumerate(mixed_requests(8, seed=6))
    ]
    chosen = HeldOutSet("sums", config, prompts, ValidationSetConfig(samples_per_prompt=2))
    mixed.set_k(3)

    def answers(last: LastAnswers) -> SetScore:
        return answer(mixed, None, chosen, 0, ALONE, learn=False, last=last)[0]

    last = LastAnswers(mixed, tmp_path, rank=0)
    first, second = answers(last), answers(last)
    restarted = answers(LastAnswers(mixed, tmp_path, rank=0))
    same = {"seconds", "decode_steps_per_token"}
    assert first.model_dump(exclude=same) == second.model_dump(exclude=same) == restarted.model_dump(exclude=same)
    assert first.decode_steps_per_token > 0.3 >= second.decode_steps_per_token == restarted.decode_steps_per_token
    assert answers(LastAnswers(mixed, tmp_path / "new", rank=0)).decode_steps_per_token == first.decode_steps_per_token
    assert mixed.stored_for(Request(prompts[0].tokens, 0, 1, 1.0)) == (0, 0)


def test_a_response_goes_on_where_it_was_stopped(mixed: Engine, plain: list[Response]) -> None:
    """With its tokens as part of the prompt: random numbers go by seed and position."""
    mixed.set_k(3)
    halves = [response.tokens[: len(response.tokens) // 2] for response in plain]
    rest = [
        replace(request, prompt_tokens=[*request.prompt_tokens, *half], max_tokens=request.max_tokens - len(half))
        for request, half in zip(REQUESTS, halves, strict=True)
    ]
    found = tokens(mixed.generate(rest).responses)
    assert [[*half, *end] for half, end in zip(halves, found, strict=True)] == tokens(plain)


def test_a_stopped_generation_returns_what_it_has(mixed: Engine, plain: list[Response]) -> None:
    mixed.set_k(3)
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) == 4

    generation = mixed.generate(REQUESTS, stop=stop)
    assert len(asked) == 4
    reasons = [response.finish_reason for response in generation.responses]
    assert reasons.count("abort") > 10
    for response, whole in zip(generation.responses, plain, strict=True):
        if response.finish_reason == "abort":
            assert len(response.tokens) < len(whole.tokens)
            assert response.logprobs == pytest.approx(whole.logprobs[: len(response.tokens)], abs=1e-4)
        assert response.tokens == whole.tokens[: len(response.tokens)]
    assert generation.num_tokens == sum(map(len, tokens(generation.responses)))
    queued = mixed.generate(REQUESTS * 2, stop=lambda: True)  # more than run at once: some were never worked on
    assert [response.tokens for response in queued.responses[len(REQUESTS) :]] == [[]] * len(REQUESTS)
    assert tokens(mixed.generate(REQUESTS).responses) == tokens(plain)


def test_stored_text_of_an_older_policy_changes_nothing_after_a_refit(
    mixed: Engine, plain: list[Response], texts: list[StoredText]
) -> None:
    torch.manual_seed(0)
    weights = {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in policy_weights(0).items()}
    mixed.refit(weights.items(), drafter_weights(2).items())
    mixed.set_replay([])
    mixed.set_k(0)
    expected = tokens(mixed.generate(REQUESTS).responses)
    assert expected != tokens(plain)
    mixed.set_replay(texts)
    mixed.set_k(3)
    generation = mixed.generate(REQUESTS)
    assert tokens(generation.responses) == expected
    assert generation.stats.by_source[REPLAY].num_draft_tokens
    mixed.refit(policy_weights(0).items(), drafter_weights(1).items())


def test_an_iteration_that_reads_a_part_of_a_prompt_is_not_timed_as_one_of_decoding(root: Path) -> None:
    with running(root / "policy", None, toy_config("none", 0), max_num_batched_tokens=64) as engine:
        short, long = ([9] * length for length in (2, 150))
        first = engine.add(short, generation_params(Request(short, 0, 40, 1.0), engine.max_length, []))
        while not first.decodes:
            engine.step()
        second = engine.add(long, generation_params(Request(long, 1, 40, 1.0), engine.max_length, []))
        while not second.decodes:
            engine.step()
            assert engine.last is not None and not engine.last.all_decoding
        assert len(first.tokens) > 3
        for _ in range(3):
            engine.step()
        assert engine.last.all_decoding and engine.last.batch == 2
        engine.end()


def test_what_is_expected_of_drafts_is_learned_while_generating(
    mixed: Engine, texts: list[StoredText], plain: list[Response]
) -> None:
    mixed.set_replay(texts)
    mixed.set_k(None)
    assert mixed.drafting is not None
    before = mixed.drafting.costs.acceptance.by_position()
    for size in (1, 4):
        for start in range(0, len(REQUESTS), size):
            mixed.generate(REQUESTS[start : start + size])
    assert (mixed.drafting.costs.acceptance.by_position() != before).any()
    rates = [mixed.drafting.costs.rates(batch) for batch in (1, 2, 4, 8, 16, 32)]
    assert all(min(of_batch.values()) > 0 for of_batch in rates)


def test_the_draft_length_is_chosen_anew_for_those_that_still_run(
    mixed: Engine, plain: list[Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed.set_replay([])
    mixed.set_k(None)
    assert mixed.drafting is not None
    mixed.drafting.metrics()
    asked: list[int] = []

    def best(batch: int) -> int:
        asked.append(batch)
        return 2 if batch > 4 else 5

    monkeypatch.setattr(mixed.drafting.costs, "best", best)
    assert tokens(mixed.generate(REQUESTS, learn=False).responses) == tokens(plain)
    assert asked[: mixed.drafting.costs.max_batch] == list(range(1, mixed.drafting.costs.max_batch + 1))
    running = asked[mixed.drafting.costs.max_batch :]
    assert running == sorted(running, reverse=True)
    assert len(running) > 2 and running[0] > len(REQUESTS) - 4  # the others end with their first token
    assert 2 < mixed.drafting.metrics()["spec/k"] < 5


def test_what_nothing_is_learned_from_leaves_no_trace(mixed: Engine, plain: list[Response]) -> None:
    mixed.set_replay([])
    mixed.set_k(None)
    assert mixed.drafting is not None
    knowledge = (mixed.drafting.costs, mixed.drafting.texts)
    mixed.generate(REQUESTS[:8], recall=True)
    mixed.drafting.begin([], [], recall=False, learn=False)  # as the generations that leave no trace do
    before = pickle.dumps(knowledge)
    for k in (2, None):  # with None, a slow machine may have settled on no drafts
        mixed.set_k(k)
        generation = mixed.generate(REQUESTS, learn=False)
        assert tokens(generation.responses) == tokens(plain)
        assert k is None or generation.stats.num_accepted_tokens > 0
        assert pickle.dumps(knowledge) == before
    mixed.generate(REQUESTS)
    assert pickle.dumps(knowledge) != before


@pytest.mark.parametrize("method", ["replay", "draft_model"])
def test_other_sources_give_the_same_tokens(
    root: Path, plain: list[Response], texts: list[StoredText], method: str
) -> None:
    draft_model = root / "policy" if method == "draft_model" else None
    with running(root / "policy", None, toy_config(method, 3, draft_model=draft_model)) as engine:
        if method == "replay":
            engine.set_replay(texts)
        else:
            with pytest.raises(AssertionError, match="replays no stored text"):
                engine.set_replay(texts)
        generation = engine.generate(REQUESTS)
        assert tokens(generation.responses) == tokens(plain)
        assert generation.stats.num_accepted_tokens > 100
        if method == "draft_model":  # drafts are greedy, and the draft model is the policy itself
            greedy = [r for request, r in zip(REQUESTS, generation.responses, strict=True) if not request.temperature]
            assert (
                sum(r.stats.num_accepted_tokens for r in greedy)
                > 0.9 * sum(r.stats.num_draft_tokens for r in greedy)
                > 0
            )
        engine.set_k(0)
        generation = engine.generate(REQUESTS[:8])
        assert tokens(generation.responses) == tokens(plain)[:8]
        assert generation.stats.num_drafts == 0
