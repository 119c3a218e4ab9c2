from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from specrl.models.tiny import CHARACTERS, SPECIAL
from specrl.rollout.engine import Engine, Request, response_seed
from specrl.rollout.errors import NonFiniteLogitsError
from specrl.validation.exactness import check, measure_exactness
from specrl.validation.speed import matched_pair
from tests.exactness.engines import logprobs_of, mixed_requests, running
from tests.exactness.toy import drafter_weights, likely_tokens, policy_weights, toy_config, write_drafter, write_policy
from tests.forks import run_module

END_TOKEN = 2
CHARACTER_TOKENS = range(len(SPECIAL), len(SPECIAL) + len(CHARACTERS))
NUM_RANKS = 2


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("engine")
    weights = policy_weights(0)
    weights["lm_head.weight"][END_TOKEN, 0] = 0  # responses end now and then
    return write_policy(root / "policy", weights), write_drafter(root / "drafter", drafter_weights(1))


@pytest.fixture(scope="module")
def engine(directories: tuple[Path, Path]) -> Iterator[Engine]:
    with running(*directories, toy_config("eagle3", 3)) as engine:
        yield engine


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_tokens", []),
        ("seed", -1),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("temperature", -0.5),
        ("temperature", 0.001),
        ("temperature", 2.1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
    ],
)
def test_a_request_that_cannot_be_honoured_is_refused(field: str, value: object) -> None:
    arguments: dict[str, object] = {"prompt_tokens": [5], "seed": 1, "max_tokens": 4, "temperature": 1.0}
    with pytest.raises(AssertionError, match=field.split("_", maxsplit=1)[0]):
        Request(**{**arguments, field: value})  # type: ignore[arg-type]


def test_response_seeds_are_a_pure_function_without_collisions() -> None:
    seeds = {
        response_seed(run, step, prompt, sample)
        for run in range(3)
        for step in range(20)
        for prompt in range(20)
        for sample in range(8)
    }
    assert len(seeds) == 3 * 20 * 20 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert response_seed(1, 2, 3, 4) == response_seed(1, 2, 3, 4)


@pytest.mark.engine
def test_responses_come_in_order_with_text_reason_and_times(engine: Engine) -> None:
    progress: list[tuple[int, int]] = []
    requests = mixed_requests(60)
    generation = engine.generate(requests, on_progress=lambda done, total: progress.append((done, total)))
    assert progress[-1] == (60, 60)
    assert progress == sorted(progress)
    assert {response.finish_reason for response in generation.responses} == {"stop", "length"}
    for request, response in zip(requests, generation.responses, strict=True):
        stopped = response.tokens[-1] == END_TOKEN
        assert (response.finish_reason == "stop") == stopped
        assert stopped or len(response.tokens) == request.max_tokens
        assert END_TOKEN not in response.tokens[:-1]
        # One character per token, but for the end token and the vocabulary's unused ids.
        assert len(response.text) == sum(token in CHARACTER_TOKENS for token in response.tokens)
        assert len(response.logprobs) == len(response.tokens)
        assert response.started_at <= response.finished_at
    assert generation.num_tokens == sum(len(response.tokens) for response in generation.responses)


@pytest.mark.engine
def test_counters_of_requests_add_up_to_those_of_the_generation(engine: Engine) -> None:
    generation = engine.generate(mixed_requests(40, seed=1))
    responses, stats = generation.responses, generation.stats
    assert stats.num_drafts == sum(response.stats.num_drafts for response in responses) > 0
    assert stats.num_draft_tokens == sum(response.stats.num_draft_tokens for response in responses)
    assert stats.num_accepted_tokens == sum(response.stats.num_accepted_tokens for response in responses) > 0
    assert sum(stats.accepted_per_pos) == stats.num_accepted_tokens
    assert stats.decode_steps < max(len(response.tokens) for response in responses) * 2


@pytest.mark.engine
def test_generation_logprobs_are_those_of_scoring_at_temperature_one(engine: Engine) -> None:
    prompts = [request.prompt_tokens for request in mixed_requests(24, seed=2)]
    requests = [Request(prompt, response_seed(0, 0, i, 0), 20, 1.0) for i, prompt in enumerate(prompts)]
    responses = engine.generate(requests).responses
    scores = logprobs_of(engine, [p + r.tokens for p, r in zip(prompts, responses, strict=True)])
    for response, score in zip(responses, scores, strict=True):
        assert response.logprobs == pytest.approx(score[-len(response.tokens) :], abs=1e-3)
        assert response.log_kept_mass is None


@pytest.mark.engine
@pytest.mark.parametrize(("top_p", "top_k"), [(0.5, 0), (1.0, 5), (0.5, 5)])
def test_truncated_logprobs_and_the_kept_mass_give_those_of_scoring(engine: Engine, top_p: float, top_k: int) -> None:
    prompts = [request.prompt_tokens for request in mixed_requests(8, seed=3)]
    requests = [Request(prompt, response_seed(0, 1, i, 0), 20, 1.0, top_p, top_k) for i, prompt in enumerate(prompts)]
    responses = engine.generate(requests).responses
    scores = logprobs_of(engine, [p + r.tokens for p, r in zip(prompts, responses, strict=True)])
    for response, score in zip(responses, scores, strict=True):
        assert response.log_kept_mass is not None
        whole = [a + b for a, b in zip(response.logprobs, response.log_kept_mass, strict=True)]
        assert whole == pytest.approx(score[-len(response.tokens) :], abs=1e-3)
    assert min(mass for response in responses for mass in response.log_kept_mass or []) < -0.05


@pytest.mark.engine
def test_responses_of_one_token_make_a_matched_pair(engine: Engine) -> None:
    """They come from the prompts' passes: there is no decoding step that drafts could save."""
    pair = matched_pair(engine, [Request(likely_tokens()[:4], seed, 1, 1.0) for seed in (1, 2, 3)], 2, 3, 1)
    assert (pair.decode_step_reduction, pair.tokens_equal) == (0.0, 1.0)


@pytest.mark.engine
def test_exactness_can_be_measured_on_one_prompt_and_one_token_at_any_temperature(engine: Engine) -> None:
    asked = [Request(likely_tokens()[:3], 11, 1, 1.3, 0.5, 5)]
    measured = measure_exactness(engine, asked, 3)
    check(measured)
    assert (measured.sampled.num_tokens, measured.greedy.num_tokens) == (1, 1)


@pytest.mark.engine
def test_the_same_seed_gives_the_same_response_and_another_another(engine: Engine) -> None:
    prompt = likely_tokens()[:4]
    first, again, other = engine.generate([Request(prompt, seed, 30, 1.0) for seed in (11, 11, 12)]).responses
    assert first.tokens == again.tokens != other.tokens


@pytest.mark.engine
def test_a_full_context_can_be_generated_and_scored(engine: Engine) -> None:
    prompt = (likely_tokens() * 20)[: engine.max_length - 1]
    response = engine.generate([Request(prompt, 1, 50, 1.0)]).responses[0]
    assert len(response.tokens) == 1
    assert len(logprobs_of(engine, [prompt + response.tokens])[0]) == engine.max_length - 1
    with pytest.raises(ValueError, match="no room for a response"):
        engine.generate([Request(prompt + response.tokens, 1, 1, 1.0)])


@pytest.mark.engine
def test_the_engine_works_on_after_an_error_in_the_middle(engine: Engine) -> None:
    requests = mixed_requests(8, seed=3)
    expected = [response.tokens for response in engine.generate(requests).responses]

    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(requests, on_progress=fail)
    assert [response.tokens for response in engine.generate(requests).responses] == expected


@pytest.mark.engine
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_logits_that_are_not_finite_are_an_error_with_the_request(engine: Engine, top_p: float) -> None:
    norm = engine.policy.model.norm.weight.data
    request = Request(prompt_tokens=[5, 6, 7], seed=1, max_tokens=4, temperature=1.0, top_p=top_p)
    kept, norm[0] = norm[0].item(), float("nan")
    try:
        with pytest.raises(NonFiniteLogitsError, match=r"logits for token 3 of request \S+ are not finite"):
            engine.generate([request])
    finally:
        norm[0] = kept
    engine.reset_prefix_cache()
    assert len(engine.generate([request]).responses) == 1


@pytest.mark.engine
def test_k_outside_of_what_the_engine_was_started_with_is_refused(engine: Engine) -> None:
    with pytest.raises(AssertionError, match="outside 0 to 3"):
        engine.set_k(4)


@pytest.mark.engine
def test_eagle3_without_a_drafter_is_refused(directories: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="needs a drafter directory"):
        Engine(directories[0], None, config=toy_config("eagle3", 3), seed=0)


@pytest.mark.engine
def test_two_ranks_with_megatron_in_the_same_processes_give_the_tokens_of_one(
    engine: Engine, directories: tuple[Path, Path], tmp_path: Path
) -> None:
    run_module("tests.exactness.rank", NUM_RANKS, *directories, tmp_path)
    expected = [response.tokens for response in engine.generate(mixed_requests(16)).responses]
    for rank in range(NUM_RANKS):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == expected[rank::NUM_RANKS]
