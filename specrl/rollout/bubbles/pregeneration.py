"""Pre-generation: idle engines answer the next step's prompts; the responses become drafts there, never rollouts.

Of conversations with an environment these are the first turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specrl.config import Config
from specrl.data.problems import Prompt
from specrl.data.prompts import PromptSource
from specrl.data.rewards.pool import RewardPool
from specrl.rollout.bubbles.coordinator import BubbleCoordinator
from specrl.rollout.bubbles.texts import PregeneratedText
from specrl.rollout.collect import Origin, make_request
from specrl.rollout.conversations import open_prompts
from specrl.rollout.engine import Engine, Request
from specrl.timeline import PREGENERATION


@dataclass
class PendingResponse:
    """A response that is being pre-generated, perhaps in several pieces."""

    prompt_id: int
    request: Request
    tokens: list[int] = field(default_factory=list)

    def rest(self) -> Request:
        """A request for what is missing: random numbers go by seed and position."""
        if not self.tokens:
            return self.request
        prompt_tokens = [*self.request.prompt_tokens, *self.tokens]
        return replace(self.request, prompt_tokens=prompt_tokens, max_tokens=self.request.max_tokens - len(self.tokens))


class Pregeneration:
    """Generates responses to the next step's prompts under the current policy."""

    name = PREGENERATION

    def __init__(
        self,
        engine: Engine,
        source: PromptSource,
        config: Config,
        coordinator: BubbleCoordinator,
        rewards: RewardPool | None = None,
    ) -> None:
        self._rewards = rewards
        self._engine, self._source, self._config, self._coordinator = engine, source, config, coordinator
        self.begin(0)

    def begin(self, step: int) -> None:
        """Begin a new bubble, in the generation of `step`."""
        self._step = step + 1
        self._claimed: list[PendingResponse] = []
        self._unfinished: list[PendingResponse] = []

    @property
    def texts(self) -> list[PregeneratedText]:
        """The texts made in this bubble."""
        return [
            PregeneratedText(item.prompt_id, item.request.seed, item.tokens) for item in self._claimed if item.tokens
        ]

    def work(self, stop: Callable[[], bool]) -> bool:
        """Generate until `stop()`, first what is still unfinished."""
        items = self._unfinished or self._claim()
        if not items:
            return False
        generation = self._engine.generate([item.rest() for item in items], stop=stop, recall=True)
        for item, response in zip(items, generation.responses, strict=True):
            item.tokens += response.tokens
        aborted = [response.finish_reason == "abort" for response in generation.responses]
        self._unfinished = [item for item, is_aborted in zip(items, aborted, strict=True) if is_aborted]
        return True

    def _claim(self) -> list[PendingResponse]:
        # There is a step after the last one, too: `validate` measures what it would be like.
        prompts, samples = self._source.batch(self._step), self._config.train.samples_per_prompt
        claimed = self._coordinator.claim(len(prompts) * samples, samples)
        places = range(*map(int, self._engine.agreed(claimed.start, claimed.stop)))
        numbers = sorted({place // samples for place in places})
        own = open_prompts(self._engine, [prompts[number] for number in numbers], self._config, self._rewards)
        opened = dict(zip(numbers, own, strict=True))
        items = [self._pending(opened[place // samples], place % samples) for place in places]
        self._claimed += items
        return items

    def _pending(self, prompt: Prompt, sample: int) -> PendingResponse:
        other = self._config.bubbles.seeds == "other"
        index = sample + self._config.train.samples_per_prompt if other else sample
        return PendingResponse(
            prompt.id, make_request(prompt, index, self._config, Origin(self._config.seed, self._step))
        )


def store_texts(engine: Engine, prompts: Sequence[Prompt], stored: Mapping[int, Sequence[PregeneratedText]]) -> None:
    """Let the engine draft from the texts stored for these prompts, by the prompt's id, and from no other ones."""
    found = by_tokens(prompts, stored)
    engine.set_replay(
        {prompt: [text.tokens for text in texts] for prompt, texts in found.items()},
        {prompt: [text.seed for text in texts] for prompt, texts in found.items()},
    )


def by_tokens(
    prompts: Sequence[Prompt], stored: Mapping[int, Sequence[PregeneratedText]]
) -> dict[tuple[int, ...], list[PregeneratedText]]:
    """The stored texts of these prompts by the tokens of the prompt; prompts with equal tokens share theirs."""
    found: dict[tuple[int, ...], list[PregeneratedText]] = {}
    for prompt in prompts:
        if prompt.id in stored:
            found.setdefault(tuple(prompt.tokens), []).extend(stored[prompt.id])
    return found
