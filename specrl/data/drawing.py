"""Processes that draw shards of problems: all cores in `prepare` for the first ones, one process in `train` later."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path

from specrl.config import Config, ConfigError, dump_config, parse_config
from specrl.data.prompts import PromptSource, Shard
from specrl.models.sources import load_tokenizer
from specrl.processes import become_helper, end_helper, start_helper

FIRST_STEPS = 3  # steps drawn in advance; in idle time, the first step also needs the second one's problems
QUICK_S = 2.0  # seconds for which `prepare` draws by itself before it starts processes
NICENESS = 10


def draw_first(source: PromptSource, config: Config, tokenizer_dir: Path, place: tuple[int, int]) -> None:
    """Draw this rank's part of the problems needed before the first step; `place` is (rank, number of ranks)."""
    (rank, ranks), cores, first = place, config.resources_of("prepare").cpus_per_rank, range(FIRST_STEPS)
    deadline = time.monotonic() + QUICK_S
    if _keep(islice(source.shards(first, others=True), rank, None, ranks), deadline):
        _keep(islice(source.shards(range(FIRST_STEPS, config.train.num_steps + 1)), rank, None, ranks), deadline)
        return
    own = range(rank * cores, (rank + 1) * cores)
    for process in _start(source, config, tokenizer_dir, first, own, ranks * cores, needed=True):
        process.wait()


def _keep(shards: Iterable[Shard], until: float = math.inf) -> bool:
    for mixture, stream, number in shards:
        if time.monotonic() > until:
            return False
        mixture.keep(stream, number)
    return True


@contextlib.contextmanager
def drawn_ahead(source: PromptSource, config: Config, tokenizer_dir: Path, first_step: int) -> Iterator[None]:
    """Draw the problems of all steps from this one on in a low-priority process, unless all exist."""
    steps = range(first_step, config.train.num_steps + 1)  # the last step is followed by one more, for `validate`
    is_missing = not all(mixture.has(stream, number) for mixture, stream, number in source.shards(steps))
    processes = _start(source, config, tokenizer_dir, steps, range(1), 1, needed=False) if is_missing else []
    try:
        yield
    finally:
        for process in processes:
            end_helper(process)


def _start(
    source: PromptSource, config: Config, tokenizer_dir: Path, steps: range, own: range, total: int, *, needed: bool
) -> list[subprocess.Popen[bytes]]:
    processes = []
    for index in own:
        order = dump_config(config), tokenizer_dir, source.begun, source.prompts_dir, needed, steps, index, total
        process, connection = start_helper(__name__, send=[order])
        connection.close()
        processes.append(process)
    return processes


def main(rank: Connection) -> None:
    """Draw this process's part of the shards."""
    become_helper(rank.recv())
    text, tokenizer_dir, begun, prompts_dir, needed, steps, index, total = rank.recv()
    if not needed:  # nobody waits for it
        os.nice(NICENESS)
        with contextlib.suppress(OSError):  # if the kernel schedules sessions as groups, the group's priority counts
            Path("/proc/self/autogroup").write_text(str(NICENESS))
    source = PromptSource(parse_config(json.loads(text)), load_tokenizer(tokenizer_dir), begun, prompts_dir=prompts_dir)
    with contextlib.suppress(ConfigError):  # the rank meets the same error and reports it
        _keep(islice(source.shards(steps, others=needed), index, None, total))
