"""The process that computes rewards. It imports little and ends with the rank that started it."""

from __future__ import annotations

import contextlib
import os
from multiprocessing.connection import Connection

from specrl.config import ConfigError, DataConfig
from specrl.data.rewards.functions import judge, make_reward
from specrl.processes import become_helper


def main(rank: Connection) -> None:
    """Answer prompts and responses with rewards until the rank closes the connection.

    The first two messages are the rank's process id and the sections whose rewards are asked for, each as JSON. The
    answer to them is an empty text, or the reason why there is no such reward.
    """
    become_helper(rank.recv())
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
