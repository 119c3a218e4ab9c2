"""Drafter-invariant sampling on vLLM's second model runner: no draft source, schedule or batch changes a token (FP32).

Every engine runs in a process of its own, because the runner is chosen before vLLM is imported.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from specrl.rollout.vllm.replacements import REPLACEMENTS
from tests.exactness.engines import mixed_requests
from tests.exactness.second_runner import KernelCalls, Result, calls_of_an_iteration, generate
from tests.exactness.toy import likely_tokens, policy_weights, write_policy

pytestmark = pytest.mark.engine
REQUESTS = mixed_requests(96, longest_prompt=70, max_tokens=64)
STOP = likely_tokens()[3]
SCHEDULE = [(1, 2, 3), (3, 8, 2), (9, 16, 1), (17, 32, 0)]
"""k by the number of requests that run."""
TIGHT = {"max_num_batched_tokens": 64, "kv_cache_memory_bytes": 5 << 19, "enable_prefix_caching": False}


def in_own_process(policy: Path, speculative: dict[str, Any] | None, options: dict[str, Any]) -> Result:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(generate, policy, REQUESTS, STOP, speculative, options).result()


@pytest.fixture(scope="module")
def plain(directories: tuple[Path, Path]) -> Result:
    return in_own_process(directories[0], None, {})


@pytest.mark.parametrize(
    ("method", "k", "options"),
    [
        ("eagle3", 3, {}),
        ("eagle3", 5, {"async_scheduling": False}),
        ("eagle3", 3, {"schedule": SCHEDULE}),
        ("eagle3", 3, TIGHT),
        ("draft_model", 2, {}),
        ("none", 0, {"async_scheduling": False, "max_num_seqs": 3}),
    ],
)
def test_drafts_schedules_and_batches_change_no_token(
    directories: tuple[Path, Path], plain: Result, tmp_path: Path, method: str, k: int, options: dict[str, Any]
) -> None:
    policy, drafter = directories
    models = {"eagle3": drafter}
    if method == "draft_model":
        models[method] = write_policy(tmp_path / "policy", policy_weights(5))
    schedule = {"num_speculative_tokens_per_batch_size": options.pop("schedule")} if "schedule" in options else {}
    speculative = {"method": method, "model": str(models[method]), "num_speculative_tokens": k} if k else None
    found = in_own_process(policy, speculative | schedule if speculative else None, options)
    assert [answer.tokens for answer in found.answers] == [answer.tokens for answer in plain.answers]
    for answer, right in zip(found.answers, plain.answers, strict=True):
        assert answer.logprobs == pytest.approx(right.logprobs, abs=1e-4)
        assert answer.log_kept_mass == pytest.approx(right.log_kept_mass, abs=1e-4)
    assert (found.num_accepted > 100) == (k > 0)
    assert found.num_preempted > 0 or options is not TIGHT


def test_responses_end_at_stop_tokens_and_limits(plain: Result) -> None:
    ended = 0
    for request, answer in zip(REQUESTS, plain.answers, strict=True):
        assert STOP not in answer.tokens[:-1]
        ended += answer.tokens[-1] == STOP
        assert answer.tokens[-1] == STOP or len(answer.tokens) == request.max_tokens
    assert 10 < ended < len(REQUESTS)


def test_sampled_logprobs_are_those_of_scoring(plain: Result) -> None:
    compared = 0
    for request, answer in zip(REQUESTS, plain.answers, strict=True):
        if request.temperature == 1 and answer.scores:
            whole = [own + mass for own, mass in zip(answer.logprobs, answer.log_kept_mass, strict=True)]
            assert whole == pytest.approx(answer.scores, abs=1e-4)
            compared += len(whole)
    assert compared > 50


def test_logits_that_are_not_finite_are_an_error_with_the_request(tmp_path: Path) -> None:
    weights = policy_weights(0)
    weights["model.norm.weight"][0] = float("nan")
    policy = write_policy(tmp_path / "policy", weights)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        one = [replace(REQUESTS[0], max_tokens=2)]
        with pytest.raises(RuntimeError, match=r"NaNs detected in logits: \{'0"):
            pool.submit(generate, policy, one, STOP, None, {}).result()


def test_from_logits_to_accepted_drafts_nothing_waits_for_the_device() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert pool.submit(calls_of_an_iteration).result() == KernelCalls(
            ["sum_blocks", "keep_most_probable", "choose_token", "accept"], []
        )


def test_every_replacement_names_a_test_that_exists() -> None:
    for replacement in REPLACEMENTS:
        path, name = replacement.test.split("::")
        assert f"def {name}(" in Path(path).read_text()
