"""How `specrl bench rollouts --after-update` counts text that is followed after an update of the policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from specrl.bench.job import BenchJob
from specrl.bench.rollouts import carried
from specrl.bench.rollouts.carried import compared, config_of
from specrl.config import Config, ConfigError
from specrl.rollout.drafts.acceptance import REPLAY, SpeculationStats, VerifiedDraft
from specrl.rollout.requests import Generation, Request, Response

PROMPT = [1, 2, 3]
REQUESTS = [Request(PROMPT, seed, 300, 1.0) for seed in range(2)]


def generation(*tokens: list[int], drafts: tuple[VerifiedDraft, ...] = (), logprob: float = -1.0) -> Generation:
    responses = [
        Response(row, [logprob] * len(row), None, "", "length", 0.0, 1.0, drafts=drafts if place == 0 else ())
        for place, row in enumerate(tokens)
    ]
    return Generation(responses, SpeculationStats(), 1.0, sum(map(len, tokens)))


def test_followed_text_is_counted_before_and_after_the_first_difference() -> None:
    first = [7] * 300
    later = [7] * 200 + [8] + [7] * 99
    drafts = (
        VerifiedDraft(len(PROMPT) + 100, drafted=4, accepted=4, source=REPLAY),
        VerifiedDraft(len(PROMPT) + 199, drafted=4, accepted=1, source=REPLAY),
        VerifiedDraft(len(PROMPT) + 248, drafted=4, accepted=4, source=REPLAY),
    )
    rows, moved = compared(REQUESTS, generation(first, first), generation(later, first, drafts=drafts, logprob=-1.5))
    by_part = {row["part"]: row for row in rows}
    assert list(by_part) == ["1 to 250", "251 to 300", "before the first difference", "from it on", "all"]
    assert [by_part[part]["same"] for part in ("1 to 250", "251 to 300", "all")] == [0.5, 0.5, 0.5]
    assert by_part["all"]["agree"] == [200, 300] and moved == pytest.approx(0.5)
    assert by_part["1 to 250"]["followed"] == pytest.approx((4 + 1 + 2) / 500)
    assert by_part["251 to 300"]["followed"] == pytest.approx(2 / 100)
    assert by_part["before the first difference"]["followed"] == pytest.approx(5 / 500)
    assert by_part["from it on"]["followed"] == pytest.approx(4 / 100)
    assert by_part["from it on"]["accepted"] == pytest.approx(4 / 7)  # three of the second draft lie there, too
    assert by_part["all"]["tokens_per_iteration"] == pytest.approx(600 / (600 - 9))


def test_responses_have_room_and_drafts_have_their_full_length() -> None:
    run = Config.model_validate({"name": "run", "model": {"max_length": 303}, "engine": {"max_num_seqs": 1}})
    config = config_of(run, REQUESTS, 300)
    assert (config.speculation.method, config.speculation.draft_lengths) == ("replay", (0, run.speculation.replay_k))
    assert not config.speculation.adaptive and config.engine.max_num_seqs == 2
    with pytest.raises(ConfigError, match=r"--max-tokens 301: .*add --set model\.max_length=304"):
        config_of(run, REQUESTS, 301)


class AskedError(Exception):
    """What the engine was asked for."""


def test_nothing_ends_a_response_before_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(requests: list[Request]) -> NoReturn:
        raise AskedError(*requests)

    engine: Any = SimpleNamespace(generate=ask, set_k=lambda k: None)
    monkeypatch.setattr(carried, "start_engine", lambda *_: engine)
    subject: Any = SimpleNamespace(config=Config.model_validate({"name": "run"}), first_policy_dir=Path())
    job = BenchJob("rollouts", {}, "", Path(), Path("page.md"))
    with pytest.raises(AskedError) as asked:
        carried.measure(job, subject, [replace(REQUESTS[0], stop=("=",))], 7)
    assert asked.value.args == (replace(REQUESTS[0], max_tokens=7),) and engine.stop_tokens == []
