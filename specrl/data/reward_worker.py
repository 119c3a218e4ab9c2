"""The process that computes rewards. It imports little and ends with the rank that started it."""

from __future__ import annotations

import contextlib
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

from specrl.config import ConfigError, DataConfig
from specrl.data.rewards import judge, make_reward
from specrl.processes import end_with_parent

START = (
    "import sys; from multiprocessing.connection import Connection; rank = Connection(int(sys.argv[1])); "
    "sys.path[:] = rank.recv(); from specrl.data.reward_worker import main; main(rank)"
)
"""The program of a worker, `python -c START FD`: it looks for modules where the rank does."""
OTHERS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that Slurm or a terminal sends to all processes of a job, and that are meant for the rank."""


def main(rank: Connection) -> None:
    """Answer prompts and responses with rewards until the rank closes the connection.

    The first two messages are the rank's process id and the sections whose rewards are asked for, each as JSON. The
    answer to them is an empty text, or the reason why there is no such reward.
    """
    end_with_parent(rank.recv())
    for number in OTHERS_SIGNALS:
        signal.signal(number, lambda *_: None)  # a handler and not SIG_IGN, which programs started here would inherit
    with contextlib.suppress(OSError):  # where memory runs out, this process goes before the rank
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        rewards = [make_reward(DataConfig.model_validate_json(section)) for section in rank.recv()]
    except ConfigError as error:
        rank.send(str(error))
        return
    rank.send("")
    with contextlib.suppress(EOFError):
        while True:
            section, prompt, response = rank.recv()
            rank.send(judge(rewards[section], prompt, response))
    os._exit(0)  # threads that the reward has started shall not keep the process
