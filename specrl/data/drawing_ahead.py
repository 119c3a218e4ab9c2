"""A process that draws the problems of the next steps while a step is under way, where drawing them takes long."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
from multiprocessing.connection import Connection
from pathlib import Path

from specrl.config import Config, dump_config, parse_config
from specrl.data.prompts import PromptSource
from specrl.models.sources import load_tokenizer
from specrl.processes import become_helper, end_helper, start_helper

logger = logging.getLogger(__name__)

STEPS_AHEAD = 2
"""In idle time, the next step's problems are asked for during a step."""
NICENESS = 10


class DrawingAhead:
    """The process of one rank, which leaves what it draws in the files of `ProblemStore`; ranks can do without it."""

    def __init__(self, config: Config, begun: tuple[int, int], tokenizer_dir: Path) -> None:
        """Start nothing yet. The arguments are those of the process's own `PromptSource`."""
        self._arguments = dump_config(config), begun, tokenizer_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._has_ended = False

    def reach(self, step: int) -> None:
        """Have the problems of the steps after this one drawn, whose own are there."""
        if self._has_ended:
            return
        try:
            if self._connection is None:
                self._process, self._connection = start_helper(__name__)
                self._connection.send(self._arguments)
                os.set_blocking(self._connection.fileno(), False)
            self._connection.send(step)
        except BlockingIOError:  # it has not listened for hundreds of steps
            return
        except OSError as error:
            self._has_ended = True
            logger.warning("the process that draws problems ahead has ended; each step waits for its own: %s", error)

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._connection is not None:
            self._connection.close()
            end_helper(self._process)


def main(rank: Connection) -> None:
    """Draw the problems of the steps after each that the rank names, until it closes the connection."""
    become_helper(rank.recv())
    _go_last()
    text, begun, tokenizer_dir = rank.recv()
    config = parse_config(json.loads(text))
    source = PromptSource(config, load_tokenizer(tokenizer_dir), begun, problems_dir=config.problems_dir)
    with contextlib.suppress(EOFError):
        while True:
            step = rank.recv()
            while rank.poll():  # what the rank has passed meanwhile is of no use any more
                step = rank.recv()
            last = min(step + STEPS_AHEAD, config.train.num_steps)  # the one after the last step, which is validated
            for following in range(step + 1, last + 1):
                source.batch(following)


def _go_last() -> None:
    os.nice(NICENESS)
    # Where the kernel groups processes by session, the niceness of the group counts.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICENESS))
