"""One rank of two: Megatron's parallel state and an engine in one process, answering this rank's share of requests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from specrl.distributed import join, leave
from specrl.rollout.engine import Engine
from specrl.training.megatron import cpu_shim as megatron_cpu
from tests.exactness.engines import mixed_requests
from tests.exactness.toy import toy_config


def main(policy_dir: str, drafter_dir: str, output_dir: str) -> None:
    megatron_cpu.install()
    from megatron.core import parallel_state

    ranks = join()
    parallel_state.initialize_model_parallel()
    engine = Engine(Path(policy_dir), Path(drafter_dir), config=toy_config("eagle3", 3), seed=0)
    share = mixed_requests(16)[ranks.rank :: ranks.world_size]
    tokens = [response.tokens for response in engine.generate(share).responses]
    (Path(output_dir) / f"{ranks.rank}.json").write_text(json.dumps(tokens))
    engine.shutdown()
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
