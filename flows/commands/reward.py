"""`specrl reward`: score one response as a run would."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.commands.options import ConfigPath, Overrides, load, option, print_json
from specrl.artifacts import write_json
from specrl.config import Config, ConfigError

LONGEST = 10_000_000  # bytes of the longest accepted response: no run samples a longer one


def reward(
    config_path: ConfigPath,
    response: Annotated[str, option("The file with the response; - is standard input.", "FILE")],
    problem: Annotated[int, option("The training problem that it answers, from 0.", least=0)] = 0,
    json_path: Annotated[str | None, option("Write JSON there; - is standard output.", "FILE", "--json")] = None,
    overrides: Overrides = None,
) -> None:
    """Score a response to a problem as a run would.

    The reward and its sandbox are those of a run of CONFIG. The problem and its answer are printed too. If the reward
    fails, which in a run counts as data.reward_on_failure, the exit code is 1. With data.template = "chat", the reward
    sees only the question, unless model.source is a directory.
    """
    from specrl.data.rewards.trial import try_reward

    config = load(config_path, None, overrides)
    trial = try_reward(config, _read(response), problem, _tokenizer(config))
    if json_path == "-":
        print_json(vars(trial))
    else:
        if json_path is not None:
            write_json(Path(json_path), vars(trial))
        for line in trial.lines():
            print(line)
    if trial.error is not None:
        raise typer.Exit(1)


def _tokenizer(config: Config) -> Any:
    from specrl.models.sources import check_source, load_tokenizer, source_kind

    if config.data.template != "chat" or source_kind(config.model.source) != "directory":
        return None
    check_source(config.model)
    return load_tokenizer(Path(config.model.source).expanduser())


def _read(name: str) -> str:
    try:
        with sys.stdin.buffer if name == "-" else Path(name).open("rb") as file:
            found = file.read(LONGEST + 1)
    except OSError as error:
        raise ConfigError(f"--response {name}: {error.strerror}") from error
    if len(found) > LONGEST:
        raise ConfigError(f"--response {name}: it has more than {LONGEST:,} bytes, and no response is as long")
    try:
        return found.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--response {name}: it is no text in UTF-8: byte {error.start} is wrong") from error
