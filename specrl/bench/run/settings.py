"""The settings of `specrl bench run` and `specrl bench sweep`. This imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from specrl.bench.settings import BenchSettings, Methods, speculation_of, train_plainly
from specrl.bench.uses import PLAIN, Use, parse_use
from specrl.config import Config, ConfigError, PositiveInt, parse_config
from specrl.config.base import NonNegativeInt
from specrl.config.methods import METHODS
from specrl.config.rollout import BubbleUse

Precision = Literal["fp32", "bf16", "fp8"]
PRETRAINED, TRAINED = "pretrained", "trained"
"""The run's own drafter before and after its RL steps."""


class RunSettings(BenchSettings):
    """Train the same RL steps in several ways, and compare whole steps and whole trainings with plain decoding.

    Every use of speculation and of idle time has a trainer and an engine of its own, which begin with the run's policy
    and drafter before RL. They take the same prompts with the same seeds, a step each in turn.
    """

    uses: Annotated[tuple[str, ...], Field(min_length=1)] = (PLAIN, "eagle3", "pregenerate", "both")
    """Uses separated by commas: plain, eagle3, recent, pregenerate, train_drafter and both, or METHOD/BUBBLES, such as
    ngram/none. Plain decoding always takes part."""
    precisions: Annotated[tuple[Precision, ...], Field(min_length=1)] = ("fp32", "bf16")
    """Precisions separated by commas, each compared with plain decoding in the same one: fp32, in which all uses must
    sample the same tokens, bf16, and fp8, which is used in generation and training."""
    steps: PositiveInt = 8
    """Number of RL steps that are compared."""
    warm_up: NonNegativeInt = 1
    """Number of steps before them, whose times do not count."""
    ranks: PositiveInt = 2
    """Number of ranks of each use, on this machine. With one rank, nobody waits, and bubbles have nothing to do."""
    threads: PositiveInt = 1
    """CPU threads of a rank."""
    together: Annotated[int, Field(ge=2)] | None = None
    """Number of uses that are in memory at once, plain decoding among them, which is repeated with every group; by
    default all. On GPUs each of them gets its part of `engine.gpu_memory_fraction`."""
    k: PositiveInt | None = None
    """Longest draft of the drafter in tokens; the run's own by default."""
    drafter: str = PRETRAINED
    """The drafter to begin with: `pretrained`, the run's own as it was before RL, `trained`, as it was after it, or the
    directory of another EAGLE-3 drafter for the same policy."""
    prompts_per_step: PositiveInt | None = None
    """Number of prompts in a step; the run's own by default."""
    samples_per_prompt: Annotated[int, Field(ge=2)] | None = None
    """Number of responses to a prompt; the run's own by default."""
    max_response_tokens: PositiveInt | None = None
    """Longest response in tokens; the run's own by default."""
    validate_every: NonNegativeInt = 0
    """Number of steps from one validation on the held-out prompts to the next; 0 validates never. Its time counts in
    the whole training alone."""

    @field_validator("uses")
    @classmethod
    def _known(cls, uses: tuple[str, ...]) -> tuple[str, ...]:
        for name in uses:
            parse_use(name)
        return tuple(dict.fromkeys((PLAIN, *uses)))

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The uses that are in memory at once, group by group; plain decoding comes first in each."""
        others, size = self.uses[1:], (self.together or len(self.uses)) - 1
        starts = range(0, len(others), size) if others else ()
        return [(PLAIN, *others[start : start + size]) for start in starts] or [(PLAIN,)]

    def cores(self, config: Config) -> int:
        return self.ranks * self.threads

    @property
    def processes(self) -> int:
        return self.ranks * max(map(len, self.groups))

    def check(self, config: Config) -> None:
        own = config.speculation.draft_method
        for name in self.uses:
            method = METHODS[parse_use(name).method]
            if method.model is not None and not method.same_model(own):
                raise ConfigError(
                    f'uses: {name} needs a drafter for {method.name}; this run has speculation.method = "{own.name}"'
                )
        self.trainings(config)

    def trainings(self, config: Config) -> list[Config]:
        return [
            self.config_of(config, Path("run"), name, precision) for name in self.uses for precision in self.precisions
        ]

    def config_of(self, config: Config, folder: Path, name: str, precision: Precision) -> Config:
        """Return a run's configuration with this use and precision, and with the sizes of the comparison.

        There is one step more than are taken, since the last one of a run writes a checkpoint. In FP32 no importance
        correction is applied: its weights contain the last bits of the engine's log-probs, which depend on the batch.

        Args:
            folder: The folder of this use's training.

        Raises:
            ConfigError: The sizes do not fit together.
        """
        use = parse_use(name)
        data = json.loads(config.model_dump_json(by_alias=True))
        data |= {"name": folder.name, "runs_dir": str(folder.parent)}
        k = (self.k or config.speculation.k or 3) if METHODS[use.method].drafts else 0
        data["speculation"] = speculation_of(config.speculation, use.method, k).model_dump(mode="json")
        data["bubbles"]["use"] = use.bubbles
        data["model"]["dtype"] = "float32" if precision == "fp32" else "bfloat16"
        quantised = precision if precision == "fp8" else "bf16"
        data["precision"] |= {"generation": quantised, "training": quantised}
        if precision != "fp8":
            data["precision"]["kv_cache"] = "bf16"
        train_plainly(data, self.warm_up + self.steps + 1)
        data["validate"]["every"] = self.validate_every
        if precision == "fp32":
            data["train"]["correction"] = "none"
        self._set_sizes(data)
        if config.resources_of("train").gpus_per_rank:
            data["engine"]["gpu_memory_fraction"] /= max(map(len, self.groups))
        return parse_config(data)

    def _set_sizes(self, data: dict[str, Any]) -> None:
        for key in ("prompts_per_step", "samples_per_prompt"):
            if (value := getattr(self, key)) is not None:
                data["train"][key] = value
        if self.max_response_tokens is not None:
            data["sampling"]["max_response_tokens"] = self.max_response_tokens
        own = {"nodes": 1, "ranks_per_node": self.ranks, "cpus_per_rank": self.threads}
        data["stage_resources"]["train"] = {**data["stage_resources"].get("train", {}), **own}

    def headline(self, rows: Sequence[Mapping[str, Any]], config: Config) -> dict[str, float]:
        """Return the speedups of the run's own use, precision, drafter and k; nothing where these were not measured."""
        if self.drafter != PRETRAINED or self.k not in (None, config.speculation.k):
            return {}
        own, precision = Use(config.speculation.method, config.bubbles.use), precision_of(config)
        return _fastest([row for row in rows if parse_use(row["use"]) == own and row["precision"] == precision])

    def summary(self, rows: Sequence[Mapping[str, Any]], config: Config) -> dict[str, float]:
        """Return the speedups of the run's own use or, where it was not measured, of the one with the fastest step."""
        return self.headline(rows, config) or _fastest(rows)


def _fastest(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the speedups of the row with the fastest step, by the names of their metrics; plain decoding has none."""
    drafted = [row for row in rows if row["use"] != PLAIN]
    best = max(drafted, key=lambda row: row["step_ratio"], default=None)
    names = ("generation", "step", "end_to_end")
    return {} if best is None else {f"speedup/{name}": best[f"{name}_ratio"] for name in names}


def precision_of(config: Config) -> Precision:
    """Return the precision in which a run generates."""
    if config.precision.generation == "fp8":
        return "fp8"
    return "fp32" if config.model.dtype == "float32" else "bf16"


@dataclass(frozen=True)
class GridPoint:
    """One combination of a sweep, which is measured on its own."""

    parameters: Mapping[str, str | int]
    """The value of each dimension of the grid, by its name."""
    settings: RunSettings

    @property
    def label(self) -> str:
        """The values of the dimensions in one line."""
        return " ".join(str(value) for value in self.parameters.values())


class SweepSettings(BenchSettings):
    """Measure whole trainings against plain decoding over a grid of settings, each combination as a job of its own.

    Every combination is measured by `specrl bench run`. What has been measured is kept with the run: the same
    combination is not measured again, and a sweep that was interrupted goes on where it was. A combination that fails
    does not affect the others.
    """

    always_jobs = True

    methods: Annotated[Methods, Field(min_length=1)] = ("eagle3",)
    """Draft methods, separated by commas."""
    ks: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (3,)
    """Longest drafts of the drafter in tokens, separated by commas."""
    precisions: Annotated[tuple[Precision, ...], Field(min_length=1)] = ("bf16",)
    """Precisions separated by commas: fp32, bf16 or fp8."""
    bubbles: Annotated[tuple[BubbleUse, ...], Field(min_length=1)] = ("none",)
    """Uses of idle time, separated by commas; those that a method cannot have are left out."""
    drafters: Annotated[tuple[str, ...], Field(min_length=1)] = (PRETRAINED,)
    """Drafters to begin with, separated by commas: pretrained, trained, or directories."""
    batches: tuple[PositiveInt, ...] = ()
    """Numbers of prompts in a step, separated by commas; the run's own by default."""
    steps: PositiveInt = 8
    """Number of RL steps that are compared."""
    warm_up: NonNegativeInt = 1
    """Number of steps before them, whose times do not count."""
    ranks: PositiveInt = 2
    """Number of ranks of each training, all on one node."""
    threads: PositiveInt = 1
    """CPU threads of a rank."""
    samples_per_prompt: Annotated[int, Field(ge=2)] | None = None
    """Number of responses to a prompt; the run's own by default."""
    max_response_tokens: PositiveInt | None = None
    """Longest response in tokens; the run's own by default."""
    validate_every: NonNegativeInt = 0
    """Number of steps from one validation on the held-out prompts to the next; 0 validates never."""

    def check(self, config: Config) -> None:
        points = self.points()
        if not points:
            raise ConfigError("bench sweep: no method of the grid can have any of its uses of idle time")
        for point in points:
            point.settings.check(config)

    def trainings(self, config: Config) -> list[Config]:
        return [training for point in self.points() for training in point.settings.trainings(config)]

    def points(self) -> list[GridPoint]:
        """Return every combination that can be measured, each once.

        A method that does not draft with one of vLLM's proposers has no k to choose, and one without a drafter none.
        """
        shared = self.model_dump(include=set(RunSettings.model_fields) - {"precisions"})
        return [
            GridPoint(
                {key: value for key, value in parameters.items() if value is not None},
                RunSettings(
                    uses=(f"{parameters['method']}/{parameters['bubbles']}",),
                    precisions=(parameters["precision"],),
                    k=parameters["k"],
                    drafter=parameters["drafter"],
                    prompts_per_step=parameters["batch"],
                    **shared,
                ),
            )
            for parameters in self._parameters()
        ]

    def _parameters(self) -> Iterator[dict[str, Any]]:
        names = ("method", "bubbles", "k", "drafter", "precision", "batch")
        for method, bubbles in dict.fromkeys(product(self.methods, self.bubbles)):
            row = METHODS[method]
            if Use(method, bubbles).problem is not None:
                continue
            ks = self.ks if row.vllm is not None else self.ks[:1]
            drafters = self.drafters if row.has_weights else self.drafters[:1]
            for values in dict.fromkeys(product(ks, drafters, self.precisions, self.batches or (None,))):
                yield dict(zip(names, (method, bubbles, *values), strict=True))
