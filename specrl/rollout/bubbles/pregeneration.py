"""Pre-generation: idle engines answer the next step's prompts; the responses become drafts there, never rollouts.

For conversations with an environment, only first turns are pre-generated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from specrl.config import Config
from specrl.data.problems import Prompt
from specrl.data.prompts import PromptSource
from specrl.data.rewards.pool import RewardPool
from specrl.rollout.bubbles.coordinator import BubbleCoordinator
from specrl.rollout.bubbles.texts import PregeneratedText
from specrl.rollout.collect import Origin, deal, make_request, open_asked
from specrl.rollout.engine import Engine, StoredText
from specrl.timeline import PREGENERATION


@dataclass
class Pregeneration:
    """Generates responses to the next step's prompts under the current policy, in one bubble."""

    name = PREGENERATION
    engine: Engine
    source: PromptSource
    config: Config
    coordinator: BubbleCoordinator
    rewards: RewardPool | None
    step: int
    """The step whose prompts are answered."""
    texts: list[PregeneratedText] = field(default_factory=list)

    def work(self, stop: Callable[[], bool]) -> bool:
        """Generate a share of the remaining responses until `stop()` ends the bubble; some may be cut short."""
        # There is a step after the last one, too: `validate` measures it.
        prompts, samples = self.source.batch(self.step), self.config.train.samples_per_prompt
        claimed = self.coordinator.claim(len(prompts) * samples, samples)
        places = range(*map(int, self.engine.agreed(claimed.start, claimed.stop)))
        if not places:
            return False
        share = deal(prompts, samples, 0, 1)[places.start : places.stop]
        asked = open_asked(self.engine, share, self.config, self.rewards)
        # Noise depends on seed and position: the next step's seeds give the next step's text while the policies agree.
        origin = Origin(self.config.seed, self.step)
        requests = [make_request(*one, self.config, origin) for one in asked]
        responses = self.engine.generate(requests, stop=stop, recall=True).responses
        self.texts += [
            PregeneratedText(prompt.id, request.seed, response.tokens)
            for (prompt, _), request, response in zip(asked, requests, responses, strict=True)
            if response.tokens
        ]
        return True


def store_texts(engine: Engine, prompts: Sequence[Prompt], texts: Iterable[PregeneratedText]) -> None:
    """Let the engine draft from those of the texts that answer one of the prompts, and from no others."""
    tokens = {prompt.id: prompt.tokens for prompt in prompts}
    engine.set_replay(
        [StoredText(tokens[text.prompt_id], text.tokens, text.seed) for text in texts if text.prompt_id in tokens]
    )
