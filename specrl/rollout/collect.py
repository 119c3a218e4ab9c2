"""Collect scored rollouts: a request with its own seed for each response, then its reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specrl.config import Config
from specrl.data.problems import Prompt
from specrl.data.rewards.pool import RewardPool, Scores
from specrl.rollout.conversations import converse, open_conversations, rewarded_prompt, rewarded_text
from specrl.rollout.engine import Engine, Generation, Request, Response, response_seed
from specrl.schemas import Rollout


@dataclass(frozen=True)
class Origin:
    """Where in a run rollouts come from. `run_seed`, `step`, prompt and sample index determine their seeds.

    A step generates with the versions of policy and drafter that have its number.
    """

    run_seed: int
    step: int
    rank: int = 0


@dataclass(frozen=True)
class Unscored:
    """Responses whose rewards are pending; conversations already have theirs."""

    generation: Generation
    origin: Origin
    _asked: list[tuple[Prompt, int, Request, tuple[int, int]]]
    """The prompt, sample, request and `Engine.stored_for` of each."""
    _part_names: tuple[str, ...]
    _wait: Callable[[], Scores]

    def scored(self) -> tuple[list[Rollout], Scores]:
        """Wait for the rewards: all 0 if nobody reads them, NaN for a response that its reward leaves out.

        Raises:
            RewardError: The reward cannot be imported, or too many of its processes have died.
        """
        responses = self.generation.responses
        scores = self._wait()
        rollouts: list[Rollout] = []
        rows = zip(self._asked, responses, scores.rewards, scores.parts, strict=True)
        for (prompt, sample, request, stored), response, reward, parts in rows:
            drafts = response.stats
            rollouts.append(
                Rollout(
                    step=self.origin.step,
                    rank=self.origin.rank,
                    prompt_id=prompt.id,
                    sample=sample,
                    policy_version=self.origin.step,
                    drafter_version=self.origin.step,
                    seed=request.seed,
                    prompt_tokens=request.prompt_tokens,
                    response_tokens=response.tokens,
                    generation_logprobs=response.logprobs,
                    log_kept_mass=response.log_kept_mass,
                    response=response.text,
                    answer=prompt.answer,
                    finish_reason=response.finish_reason,
                    num_drafts=drafts.num_drafts,
                    num_draft_tokens=drafts.num_draft_tokens,
                    num_accepted_tokens=drafts.num_accepted_tokens,
                    num_stored=stored[0],
                    own_stored_tokens=stored[1],
                    started_at=response.started_at,
                    finished_at=response.finished_at,
                    turns=response.turns,
                    reward=reward,
                    reward_parts=dict(zip(self._part_names, parts, strict=False)) or None,
                    routes=response.routes,
                )
            )
        return rollouts, scores


Asked = tuple[Prompt, int]
"""A prompt, and the number of the response among those to it."""


def deal(
    prompts: Sequence[Prompt], samples: int, engine: int, num_engines: int, *, whole_groups: bool = False
) -> list[Asked]:
    """One engine's share of `samples` responses to each prompt, in the order of prompts.

    Responses to one prompt have similar lengths, so that an engine with all of them may finish long after the others.
    """
    asked, size = [(prompt, sample) for prompt in prompts for sample in range(samples)], samples if whole_groups else 1
    return [one for number, one in enumerate(asked) if number // size % num_engines == engine]


def open_asked(engine: Engine, asked: Sequence[Asked], config: Config, rewards: RewardPool | None) -> list[Asked]:
    """The same with each prompt as `open_conversations` opens it."""
    distinct = {prompt.id: prompt for prompt, _ in asked}
    opened = dict(zip(distinct, open_conversations(engine, [*distinct.values()], config, rewards), strict=True))
    return [(opened[prompt.id], sample) for prompt, sample in asked]


def collect(
    engine: Engine,
    wanted: Sequence[Asked],
    config: Config,
    rewards: RewardPool | None,
    origin: Origin,
    **options: Any,
) -> Unscored:
    """Sample the wanted responses.

    Each response is sent to its reward as soon as it is finished. With an environment each is a conversation, which
    begins with a prompt of `open_conversations`. The rollouts are a pure function of policy, run seed, step, prompt and
    sample index (invariant 1). `options` are further arguments of `Engine.generate`.

    Args:
        rewards: The pool that computes the rewards; None if nobody reads them, or another rank of the engine has it.
    """
    requests = [make_request(prompt, sample, config, origin) for prompt, sample in wanted]
    stored = [engine.stored_for(request) for request in requests]
    asked = [(*place, request, texts) for place, request, texts in zip(wanted, requests, stored, strict=True)]
    if config.environment.name is not None:

        def seed_of(number: int, turn: int) -> int:
            prompt, sample = wanted[number]
            return response_seed(origin.run_seed, origin.step, prompt.id, sample, turn)

        asked_of = [prompt for prompt, _ in wanted]
        talks, scores = converse(engine, asked_of, requests, config, rewards, seed_of, **options)
        return Unscored(talks, origin, asked, (), lambda: scores)
    scoring = rewards.begin(config.data) if rewards is not None else None

    def on_response(index: int, response: Response) -> None:
        if scoring is not None:
            prompt = rewarded_prompt(wanted[index][0], response, config.data)
            scoring.submit(index, prompt, rewarded_text(response, engine.tokenizer, config.data))

    generation = engine.generate(requests, on_response=on_response, **options)
    if scoring is None:
        return Unscored(generation, origin, asked, (), lambda: Scores([[0.0]] * len(requests), [], 0.0))
    return Unscored(generation, origin, asked, config.data.part_names, scoring.wait)


def make_request(prompt: Prompt, sample: int, config: Config, origin: Origin) -> Request:
    sampling = config.sampling
    return Request(
        prompt_tokens=prompt.tokens,
        seed=response_seed(origin.run_seed, origin.step, prompt.id, sample),
        max_tokens=min(sampling.max_response_tokens, config.model.max_length - len(prompt.tokens)),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop=sampling.stop,
    )
