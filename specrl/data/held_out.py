"""The held-out sets of `validate.sets`: the configuration for answering each, and its problems."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from specrl.artifacts import digest
from specrl.config import Config, ConfigError
from specrl.config.base import prefixed
from specrl.data.files import FileProblems, read_problems
from specrl.data.problems import Counts, Fit, Problem
from specrl.data.shards import GeneratorMixture

DRAWN_BY = {"generators", "validation_fraction", "template", "system_prompt", "chat_template_kwargs", "overlong"}
"""The fields of `[data]` that determine what is drawn."""


def make_problems(
    config: Config, fit: Fit, counts: Counts | None = None, prompts_dir: Path | None = None
) -> FileProblems | GeneratorMixture:
    """Open the run's problems; without `prompts_dir`, the folder of shards, generators draw them every time."""
    data, counts = config.data, counts or Counts()
    if data.source == "file":
        return FileProblems(config, fit, counts)
    drawn_by = (data.model_dump(mode="json", include=DRAWN_BY), config.seed, config.max_prompt_tokens)
    folder = prompts_dir / digest(drawn_by) if prompts_dir is not None else None
    return GeneratorMixture(data, config.seed, fit, counts, folder)


def config_of_set(config: Config, name: str) -> Config:
    """The configuration for answering a held-out set: the run's, with the set's own settings."""
    chosen = config.validate_.held_out_sets[name]
    data: dict[str, Any] = {}
    if chosen.path is not None:
        data = {"source": "file", "path": chosen.path, "validation_path": None, "weights": ()}
    elif chosen.generators:
        overlong = "drop" if config.data.overlong == "error" else config.data.overlong
        data = {"source": "generators", "generators": chosen.generators, "path": None, "validation_path": None}
        data |= {"weights": (), "overlong": overlong}
    if chosen.reward is not None:
        data["reward"] = chosen.reward
    sampling = {"temperature": chosen.temperature, "top_p": chosen.top_p}
    return config.updated(data=data, sampling={key: value for key, value in sampling.items() if value is not None})


def held_out_problems(
    config: Config,
    name: str,
    fit: Fit,
    patience_s: float = math.inf,
    counts: Counts | None = None,
    prompts_dir: Path | None = None,
) -> list[Problem]:
    """The distinct problems of a held-out set; from generators, those found within `patience_s` seconds."""
    chosen, own, counts = config.validate_.held_out_sets[name], config_of_set(config, name), counts or Counts()
    count = chosen.num_prompts or config.validate_.num_prompts
    with prefixed(f"validate.sets.{name}: "):
        if chosen.path is None:
            return make_problems(own, fit, counts, prompts_dir).held_out(count, patience_s)
        rows = {row.identity: row for place in chosen.path for row in read_problems(place, own, fit, counts)}
    places = ", ".join(map(str, chosen.path))
    if chosen.num_prompts is not None and len(rows) < chosen.num_prompts:
        raise ConfigError(
            f"validate.sets.{name}.num_prompts = {chosen.num_prompts}, but {places} has only {len(rows)} distinct "
            "problems: ask for fewer, or leave it out to take all"
        )
    return list(rows.values())[: chosen.num_prompts]
