"""Deal prompts to engines by expected response length, so that bubbles come from the unpredictable tail alone.

What is expected depends on the last steps' rollouts alone, so that a restarted run deals as an undisturbed one does.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from specrl.data.dealing import deal_longest_first
from specrl.data.problems import Prompt

WINDOW = 8
"""The latest steps whose responses count."""


class ResponseLengthEstimator:
    """Estimates response lengths, in tokens, by the mean at the prompt's difficulty in the last `WINDOW` batches."""

    def __init__(self) -> None:
        self._batches: deque[list[tuple[str, int, int]]] = deque(maxlen=WINDOW)
        self._means: dict[str, float] = {}
        self._per_prompt_token = 1.0

    def learn(self, prompts: Sequence[Prompt], lengths: Iterable[tuple[int, int]]) -> None:
        """Add a batch, with (prompt id, number of tokens) of each response; those to other prompts are ignored."""
        by_id = {prompt.id: prompt for prompt in prompts}
        known = ((by_id[prompt_id], length) for prompt_id, length in lengths if prompt_id in by_id)
        self._batches.append([(prompt.difficulty, len(prompt.tokens), length) for prompt, length in known])
        totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        prompt_tokens = response_tokens = 0
        for batch in self._batches:
            for difficulty, size, length in batch:
                totals[difficulty][0] += length
                totals[difficulty][1] += 1
                prompt_tokens, response_tokens = prompt_tokens + size, response_tokens + length
        self._means = {difficulty: total / count for difficulty, (total, count) in totals.items()}
        self._per_prompt_token = response_tokens / prompt_tokens if prompt_tokens else 1.0

    def of(self, prompt: Prompt) -> float:
        """The expected tokens of a response: for a difficulty never seen, as many per prompt token as on average."""
        return self._means.get(prompt.difficulty, self._per_prompt_token * len(prompt.tokens))


def deal(prompts: Sequence[Prompt], expected: ResponseLengthEstimator, engines: int) -> list[list[Prompt]]:
    """Divide prompts among engines, equally many with about equal sums of expected lengths, each in their order."""
    assert len(prompts) % engines == 0
    lengths = [expected.of(prompt) for prompt in prompts]
    shares = deal_longest_first(lengths, engines, room=len(prompts) // engines)
    return [[prompts[index] for index in sorted(share)] for share in shares]


def stored_lengths(folder: Path) -> list[tuple[int, int]]:
    """List (prompt id, number of response tokens) of every rollout below a folder."""
    found: list[tuple[int, int]] = []
    for path in sorted(folder.rglob("rank-*.arrow")):
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all()
            lengths = pc.list_value_length(table["response_tokens"])
            found += zip(table["prompt_id"].to_pylist(), lengths.to_pylist(), strict=True)
    return found
