"""Pre-generation: idle engines answer the next step's prompts; the responses become drafts there, never rollouts.

Of conversations with an environment these are the first turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from specrl.config import Config
from specrl.data.problems import Prompt
from specrl.data.prompts import PromptSource
from specrl.data.rewards.pool import RewardPool
from specrl.rollout.bubbles.coordinator import BubbleCoordinator
from specrl.rollout.bubbles.texts import PregeneratedText
from specrl.rollout.collect import Origin, make_request
from specrl.rollout.conversations import open_conversations
from specrl.rollout.engine import Engine
from specrl.timeline import PREGENERATION


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
        self.texts: list[PregeneratedText] = []
        """The texts made in this bubble."""

    def work(self, stop: Callable[[], bool]) -> bool:
        """Generate a share of what is left until `stop()`, which ends the bubble: responses may lack their end."""
        # There is a step after the last one, too: `validate` measures what it would be like.
        prompts, samples = self._source.batch(self._step), self._config.train.samples_per_prompt
        claimed = self._coordinator.claim(len(prompts) * samples, samples)
        places = range(*map(int, self._engine.agreed(claimed.start, claimed.stop)))
        if not places:
            return False
        number = places[0] // samples
        prompts = prompts[number : places[-1] // samples + 1]
        opened = open_conversations(self._engine, prompts, self._config, self._rewards)
        asked = [opened[place // samples - number] for place in places]
        # Random numbers go by seed and position, so that with the next step's own seeds most of its text comes out.
        first = samples if self._config.bubbles.seeds == "other" else 0
        origin = Origin(self._config.seed, self._step)
        requests = [
            make_request(prompt, first + place % samples, self._config, origin)
            for place, prompt in zip(places, asked, strict=True)
        ]
        responses = self._engine.generate(requests, stop=stop, recall=True).responses
        self.texts += [
            PregeneratedText(prompt.id, request.seed, response.tokens)
            for prompt, request, response in zip(asked, requests, responses, strict=True)
            if response.tokens
        ]
        return True


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
