"""Conversations of the policy with an environment, in waves: one generation answers the next turn of all of them.

Each turn is an ordinary request with its own seed, whose prompt is the conversation so far. An environment's replies
depend on the turns alone, and a wave waits for all replies, so that no token depends on timing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from specrl.config import Config, DataConfig
from specrl.data.problems import Prompt
from specrl.data.rendering import Rendering
from specrl.data.rewards.environments import Turn
from specrl.data.rewards.functions import COMPLETION_IDS, is_built_in, shortened
from specrl.data.rewards.pool import RewardFailure, RewardPool, Scores, Scoring
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.rollout.engine import Engine, Generation, Request, Response

RESETS = 2  # attempts at opening a conversation: the first may time out on a busy machine


@dataclass
class Conversation:
    """A conversation so far."""

    prompt: Prompt
    first: Request
    """The request of the first turn; its `max_tokens` bounds everything that follows the prompt."""
    turns: list[Response] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """What the environment sees of each turn."""
    between: list[tuple[str, list[int]]] = field(default_factory=list)
    """The environment's reply to each turn but the last: text and tokens."""
    result: Turn | RewardFailure | None = None
    """The environment's verdict on the last turn, once the conversation is over."""
    cut_off: bool = False

    @property
    def tokens(self) -> list[int]:
        written = [tokens for _, tokens in self.between] + [[]]
        return [token for turn, more in zip(self.turns, written, strict=False) for token in (*turn.tokens, *more)]

    @property
    def unopened(self) -> RewardFailure | None:
        """The environment's failure to open the conversation; call this after the first turn."""
        if not self.prompt.unopened:
            return None
        return RewardFailure(shortened(self.prompt.text), shortened(self.texts[-1]), self.prompt.unopened)

    def request(self, seed: int) -> Request:
        tokens, left = self.tokens, self.first.max_tokens - len(self.tokens)
        return replace(self.first, prompt_tokens=[*self.first.prompt_tokens, *tokens], seed=seed, max_tokens=left)

    def hear(self, answer: Turn | RewardFailure, rendering: Rendering, max_turns: int) -> None:
        """Process the environment's reply to the last turn.

        The conversation is over if the environment says so or has failed, after `max_turns`, and if the turn was cut
        off or the reply leaves no room for another token, which also counts as cut off.
        """
        if isinstance(answer, RewardFailure):
            self.result = answer
            return
        last = self.turns[-1]
        self.cut_off = last.finish_reason == "length"
        if answer.done or self.cut_off or len(self.turns) == max_turns:
            self.result = answer
            return
        written = rendering.between(answer.messages, last.tokens[-1])
        self.cut_off = len(self.tokens) + len(written[1]) >= self.first.max_tokens
        if self.cut_off:
            self.result = answer
        else:
            self.between.append(written)

    def response(self) -> Response:
        """The whole conversation as one response."""
        last, turns = self.turns[-1], self.turns
        masses = [turn.log_kept_mass for turn in turns if turn.log_kept_mass is not None]
        lengths, texts = [len(turns[0].tokens)], [turns[0].text]
        for (text, written), turn in zip(self.between, turns[1:], strict=True):
            lengths += [len(written), len(turn.tokens)]
            texts += [text, turn.text]
        return Response(
            self.tokens,
            [logprob for turn in turns for logprob in turn.logprobs],
            [mass for row in masses for mass in row] if masses else None,
            "".join(texts),
            "length" if self.cut_off else last.finish_reason,
            started_at=turns[0].started_at,
            finished_at=last.finished_at,
            drafts=[draft for turn in turns for draft in turn.drafts],
            routes=last.routes,  # its prompt is the whole conversation before it
            turns=lengths if len(turns) > 1 else (),
        )


def open_conversations(
    engine: Engine, prompts: Sequence[Prompt], config: Config, rewards: RewardPool | None
) -> list[Prompt]:
    """The prompts as the environment opens their conversations; unchanged without one (collective over the engine).

    If it fails twice, the prompt stays as it is, and the conversation counts as failed after its first turn, without
    asking the environment again.

    Raises:
        ValueError: A conversation opens with more tokens than `config.max_prompt_tokens`.
    """
    if config.environment.name is None:
        return list(prompts)
    answers = None
    if rewards is not None:
        found: dict[int, Turn | RewardFailure] = {}
        for _ in range(RESETS):
            scoring = rewards.begin(config.data)
            for number, prompt in enumerate(prompts):
                if not isinstance(found.get(number), Turn):
                    scoring.submit(number, prompt, ())
            found |= _turns(scoring)
        answers = [found[number] for number in range(len(prompts))]
    opened = engine.of_first(answers)
    rendering = Rendering(config, engine.tokenizer)
    return [_opened(prompt, answer, rendering, config) for prompt, answer in zip(prompts, opened, strict=True)]


def _opened(prompt: Prompt, answer: Turn | RewardFailure, rendering: Rendering, config: Config) -> Prompt:
    if isinstance(answer, RewardFailure):
        return replace(prompt, unopened=answer.reason)
    if not answer.messages:
        return prompt
    text = rendering.opening(answer.messages)
    tokens = rendering.tokens(text)
    if not 1 <= len(tokens) <= config.max_prompt_tokens:
        raise ValueError(
            f'environment.name = "{config.environment.name}": reset opened a conversation with {len(tokens)} tokens; '
            f"allowed: 1 to {config.max_prompt_tokens} (data.max_prompt_tokens)"
        )
    return replace(prompt, text=text, tokens=tokens)


def converse(
    engine: Engine,
    prompts: Sequence[Prompt],
    requests: Sequence[Request],
    config: Config,
    rewards: RewardPool | None,
    seed_of: Callable[[int, int], int],
    **options: Any,
) -> tuple[Generation, Scores]:
    """Hold a conversation that begins with each request, wave by wave (collective over the ranks of the engine).

    Args:
        rewards: The processes of the environment, on the engine's first rank.
        seed_of: The seed of a turn, given the indices of conversation and turn.
        options: Further arguments of `Engine.generate`.
    """
    rendering, max_turns = Rendering(config, engine.tokenizer), config.environment.max_turns
    talks = [Conversation(prompt, request) for prompt, request in zip(prompts, requests, strict=True)]
    waves: list[Generation] = []
    waited_s = 0.0
    while left := [number for number, talk in enumerate(talks) if talk.result is None]:
        wave = _Wave([talks[number] for number in left], config, rewards)
        asked = [talks[number].request(seed_of(number, len(waves))) for number in left]
        generation = engine.generate(asked, on_response=partial(wave.take, engine.tokenizer), **options)
        waves.append(generation)
        started = time.perf_counter()
        answers = engine.of_first(wave.answers())
        waited_s += time.perf_counter() - started
        for number, answer in zip(left, answers, strict=True):
            talks[number].hear(answer, rendering, max_turns)
    responses = [talk.response() for talk in talks]
    whole = Generation(
        responses,
        SpeculationStats.merge(wave.stats for wave in waves),
        sum(wave.seconds for wave in waves),
        sum(wave.num_tokens for wave in waves),
    )
    scores = Scores.of([talk.result for talk in talks if talk.result is not None], waited_s, config.data)
    return whole, scores.log("environment.name", config.data.reward_on_failure)


class _Wave:
    """Sends each turn of a wave to the environment as soon as the turn is finished."""

    def __init__(self, talks: Sequence[Conversation], config: Config, rewards: RewardPool | None) -> None:
        self._talks, self._data = talks, config.data
        self._scoring = rewards.begin(config.data) if rewards is not None else None

    def take(self, tokenizer: Any, place: int, response: Response) -> None:
        talk = self._talks[place]
        talk.turns.append(response)
        talk.texts.append(rewarded_text(response, tokenizer, self._data))
        if self._scoring is not None and talk.unopened is None:
            self._scoring.submit(place, talk.prompt, tuple(talk.texts))

    def answers(self) -> list[Turn | RewardFailure] | None:
        if self._scoring is None:
            return None
        found = _turns(self._scoring)
        return [talk.unopened or found[place] for place, talk in enumerate(self._talks)]


def rewarded_prompt(prompt: Prompt, response: Response, data: DataConfig) -> Prompt:
    """The prompt that a response's reward sees, with the response's tokens for one with TRL's signature."""
    if is_built_in(data):
        return prompt
    return replace(prompt, metadata={**prompt.metadata, COMPLETION_IDS: response.tokens})


def rewarded_text(response: Response, tokenizer: Any, data: DataConfig) -> str:
    """The text of a response, or of a turn, that its reward or environment sees."""
    if not data.reward_special_tokens:
        return response.text
    return str(tokenizer.decode(response.tokens, skip_special_tokens=False))


def _turns(scoring: Scoring) -> dict[int, Turn | RewardFailure]:
    return {number: result for number, result in scoring.results().items() if not isinstance(result, tuple)}
