"""One engine per draft source for the whole folder: starting one costs more than most tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from specrl.rollout.drafts.cost_model import Acceptance
from specrl.rollout.engine import Engine
from tests.exactness.engines import running
from tests.exactness.toy import policy_weights, toy_config, write_policy, write_trained_drafter

Start = Callable[[str], Engine]
LONGEST = {"none": 0, "eagle3": 5, "ngram": 4, "replay": 5, "eagle3+replay": 3, "draft_model": 2}
"""k of the engine for each method."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put engines with experts first: vLLM makes their group with the first engine of a process, or never."""
    items.sort(key=lambda item: not item.path.name.startswith("test_expert"))


@pytest.fixture(scope="package")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("exactness")
    policy = write_policy(root / "policy", policy_weights(0))
    return policy, write_trained_drafter(root / "drafter", policy)


@pytest.fixture(scope="package")
def engine_of(directories: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """The engine of a method, with its longest k and no text, started when it is first asked for."""
    policy, drafter = directories
    engines: dict[str, Engine] = {}
    with ExitStack() as stack:
        # Another random policy drafts for this one: now and then they agree.
        small = write_policy(tmp_path_factory.mktemp("small") / "policy", policy_weights(5))

        def start(method: str) -> Engine:
            if method not in engines:
                config = toy_config(
                    method, LONGEST[method], draft_model=small if method == "draft_model" else None, max_num_seqs=256
                )
                engines[method] = stack.enter_context(running(policy, drafter, config))
            engine = engines[method]
            engine.set_k(engine.longest_k)
            if engine.drafting is not None:  # or what it drafts would depend on the tests before
                engine.drafting.texts.store([])
                engine.set_recent([])
                drafter_k, replay_k = engine.config.speculation.draft_lengths
                engine.drafting.costs.acceptance = Acceptance(max(drafter_k, replay_k), drafter_k)
            return engine

        yield start
