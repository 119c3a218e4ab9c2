"""Ranks with Megatron's parallel state and an engine in each, which answer their shares of the same requests.

`python -m tests.exactness.rank RANKS POLICY DRAFTER FOLDER`. Everything is imported once; ranks are forked from there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import specrl.training.megatron  # noqa: F401  (must precede megatron.core)

# isort: split
from megatron.core import parallel_state

from specrl.distributed import join, leave
from specrl.rollout.engine import Engine
from tests.exactness.engines import mixed_requests
from tests.exactness.toy import toy_config
from tests.forks import fork, import_engine, wait


def work(policy_dir: Path, drafter_dir: Path, output_dir: Path) -> None:
    ranks = join()
    parallel_state.initialize_model_parallel()
    engine = Engine(policy_dir, drafter_dir, config=toy_config("eagle3", 3), seed=0)
    share = mixed_requests(16)[ranks.rank :: ranks.world_size]
    tokens = [response.tokens for response in engine.generate(share).responses]
    (output_dir / f"{ranks.rank}.json").write_text(json.dumps(tokens))
    engine.shutdown()
    leave()


def main(size: int, *folders: Path) -> None:
    import_engine()
    wait(fork(size, lambda rank: work(*folders)))


if __name__ == "__main__":
    main(int(sys.argv[1]), *map(Path, sys.argv[2:]))
