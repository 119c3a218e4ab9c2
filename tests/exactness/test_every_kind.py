"""Every kind of EAGLE-3 drafter, in every shape and format, gives the tokens of plain decoding, in FP32.

`--exactness-tokens` says how many are compared for each; `test_mtp_engine.py` does the same with a policy's own layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from specrl.export.card import ExportedDrafter
from specrl.export.formats import FORMATS
from specrl.models.families import TINY_VOCAB_SIZE
from specrl.rollout.engine import Request
from tests.exactness.engines import mixed_requests, running
from tests.exactness.toy import likely_tokens, toy_config, write_trained_drafter
from tests.published import EAGLE_3_1, FIRST_NORMS, write_published

pytestmark = pytest.mark.engine
BATCH, K, EPOCHS = 256, 5, 6
Written = Callable[[Path, Path, Path], Path]
"""Writes a drafter: given a new folder, the policy's folder, and that of the trained drafter of one layer."""


def shaped(directory: Path, policy_dir: Path, trained: Path, **shape: object) -> Path:
    return write_trained_drafter(directory / "drafter", policy_dir, epochs=EPOCHS, **shape)


def published(directory: Path, policy_dir: Path, trained: Path, norms: Sequence[str]) -> Path:
    source = write_published(directory / "published", policy_dir, norms, likely_tokens())
    return write_trained_drafter(directory / "drafter", policy_dir, source=source, epochs=EPOCHS)


def in_speculators_format(directory: Path, policy_dir: Path, trained: Path) -> Path:
    FORMATS["speculators"].write(ExportedDrafter(trained, policy_dir, str(policy_dir), K), directory / "drafter")
    return directory / "drafter"


KINDS: dict[str, Written] = {
    "one layer": lambda directory, policy_dir, trained: trained,
    "two layers, window": partial(shaped, num_layers=2, sliding_window=16),
    "three layers, other features": partial(shaped, num_layers=3, feature_layers=(1, 3, 4, 5)),
    "four layers, whole vocabulary": partial(shaped, num_layers=4, draft_vocab_size=TINY_VOCAB_SIZE),
    "published, EAGLE-3.1": partial(published, norms=EAGLE_3_1),
    "published, first norms": partial(published, norms=FIRST_NORMS),
    "speculators": in_speculators_format,
}


@dataclass
class Plain:
    requests: list[Request]
    tokens: list[list[int]]
    """What an engine that cannot speculate answers."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))


@pytest.fixture(scope="module")
def plain(directories: tuple[Path, Path], num_tokens: int) -> Plain:
    requests = mixed_requests(num_tokens // 65, longest_prompt=40, max_tokens=150, seed=16)
    with running(directories[0], None, toy_config(max_num_seqs=BATCH)) as engine:
        return Plain(requests, [response.tokens for response in engine.generate(requests).responses])


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_of_every_kind_changes_no_token(
    kind: str, directories: tuple[Path, Path], plain: Plain, num_tokens: int, tmp_path: Path
) -> None:
    policy_dir, trained = directories
    drafter_dir = KINDS[kind](tmp_path, policy_dir, trained)
    with running(policy_dir, drafter_dir, toy_config("eagle3", K, max_num_seqs=BATCH)) as engine:
        speculative = engine.generate(plain.requests)
    assert plain.num_tokens >= num_tokens
    assert [response.tokens for response in speculative.responses] == plain.tokens
    accepted, drafted = speculative.stats.num_accepted_tokens, speculative.stats.num_draft_tokens
    assert 0.05 * drafted < accepted < 0.95 * drafted, "drafts that are never or always right would test little"
    print(f"{kind}: 0 of {plain.num_tokens} tokens differ; {accepted} of {drafted} drafted tokens were accepted")
