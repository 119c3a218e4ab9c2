"""Collect scored rollouts: a request with its own seed for each response, then its reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specrl.config import Config, DataConfig
from specrl.data.problems import Prompt
from specrl.data.rewards.pool import RewardPool, Scores, Scoring
from specrl.rollout.engine import Engine, Generation, Request, Response, response_seed
from specrl.schemas import Rollout


@dataclass(frozen=True)
class Origin:
    """Where in a run rollouts come from. `run_seed` and `step`, with prompt and sample index, decide their seeds.

    The versions of policy and drafter that a step generates with have its number.
    """

    run_seed: int
    step: int
    rank: int = 0


@dataclass(frozen=True)
class Unscored:
    """Responses whose rewards are still on their way."""

    generation: Generation
    origin: Origin
    _asked: list[tuple[Prompt, int, Request, tuple[int, int]]]
    """The prompt, sample, request and `Engine.stored_for` of each."""
    _scoring: Scoring | None
    _part_names: tuple[str, ...]

    def scored(self) -> tuple[list[Rollout], Scores]:
        """Wait for the rewards; where nobody reads them all are 0.

        Raises:
            RewardError: The reward cannot be imported, or has lost too many processes.
        """
        responses = self.generation.responses
        scores = self._scoring.wait() if self._scoring is not None else Scores([[0.0]] * len(responses), [], 0.0)
        scores = scores.in_groups([prompt.id for prompt, *_ in self._asked])
        names = self._part_names if self._scoring is not None else ()
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
                    reward=reward,
                    reward_parts=dict(zip(names, parts, strict=False)) or None,
                    routes=response.routes,
                )
            )
        return rollouts, scores


def collect(
    engine: Engine,
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    config: Config,
    rewards: RewardPool | None,
    origin: Origin,
    **options: Any,
) -> Unscored:
    """Sample `samples_per_prompt` responses to each prompt; groups stay together, in prompt order.

    Each response is sent to its reward as soon as it is finished. The rollouts are a pure function of policy, run seed,
    step, prompt and sample index (invariant 1). `options` are further arguments of `Engine.generate`.

    Args:
        rewards: The pool that computes the rewards; None where nobody reads them.
    """
    wanted = [(prompt, sample) for prompt in prompts for sample in range(samples_per_prompt)]
    requests = [make_request(prompt, sample, config, origin) for prompt, sample in wanted]
    scoring = rewards.begin(config.data) if rewards is not None else None

    def on_response(index: int, response: Response) -> None:
        if scoring is not None:
            scoring.submit(index, wanted[index][0], rewarded_text(response, engine.tokenizer, config.data))

    generation = engine.generate(requests, on_response=on_response, **options)
    asked = [(*place, request, engine.stored_for(request)) for place, request in zip(wanted, requests, strict=True)]
    return Unscored(generation, origin, asked, scoring, config.data.part_names)


def rewarded_text(response: Response, tokenizer: Any, data: DataConfig) -> str:
    """The text of a response that its reward sees."""
    if not data.reward_special_tokens:
        return response.text
    return str(tokenizer.decode(response.tokens, skip_special_tokens=False))


def make_request(prompt: Prompt, sample: int, config: Config, origin: Origin) -> Request:
    """Make the request of one response, with its own seed."""
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
