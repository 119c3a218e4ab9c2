"""The run configuration: TOML in, validated and frozen, JSON out. Imports neither torch nor vLLM.

Every section is a frozen pydantic model that refuses unknown keys; the docstring below a field is its documentation
and names its unit. `load_config` merges a file with `--set a.b=c` overrides, and `parse_config` validates what is
already a dict; both turn every mistake into a `ConfigError` whose message has one line for each wrong key. Settings
without an effect are mistakes in a file alone (`specrl.config.unused` says why).
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from specrl.config.algorithms import DRAFT_LOSSES, IMPORT_OWN, PRESETS, Algorithm, Registry
from specrl.config.base import ENGINE_STAGES, STAGES, TRAINER_STAGES, ConfigError, Section, StageName
from specrl.config.cluster import ClusterConfig, Resources, StageResources, TrackingConfig
from specrl.config.errors import explain
from specrl.config.methods import METHODS
from specrl.config.model import (
    DataConfig,
    EnvironmentConfig,
    GeneratorConfig,
    ModelConfig,
    RewardPart,
    TinyModelConfig,
    WarmStartConfig,
)
from specrl.config.rollout import BubblesConfig, EngineConfig, RefitConfig, SamplingConfig, SpeculationConfig
from specrl.config.sbatch import asks_for_gpus, gpus_per_node
from specrl.config.text import NAME, RunsPath, check_text, redacted, shown
from specrl.config.training import DrafterConfig, PolicyConfig, PrecisionConfig, TrainConfig
from specrl.config.unused import unused_data, unused_drafting, unused_reward, unused_training
from specrl.config.validation import StopConfig, ValidateConfig, ValidationSetConfig
from specrl.metrics import OF_PARTS

__all__ = [
    "STAGES",
    "ClusterConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DrafterConfig",
    "EngineConfig",
    "GeneratorConfig",
    "ModelConfig",
    "PolicyConfig",
    "PrecisionConfig",
    "Resources",
    "RewardPart",
    "SamplingConfig",
    "Section",
    "SpeculationConfig",
    "StageName",
    "StopConfig",
    "TinyModelConfig",
    "TrackingConfig",
    "TrainConfig",
    "ValidationSetConfig",
    "change_config",
    "dump_config",
    "load_config",
    "parse_config",
    "understood_config",
]


RESERVED = ("mlflow.db", "mlartifacts")
"""MLflow's entries in the runs folder, besides files whose names start like its database's."""


def _unreserved(name: str) -> str:
    if name.lower().startswith(RESERVED):
        raise ValueError(f"{name!r} is MLflow's in the folder of the runs; choose a name that begins differently")
    return name


MAY_LEAVE_OTHERS = ("speculation.method", "data.source")
"""Settings of a run that may change even if others then have no effect."""
RUNS_DIR = "SPECRL_RUNS_DIR"
"""The variable that names the runs folder if neither configuration nor command does."""
SHORT_RESPONSES = 1024  # the highest `sampling.max_response_tokens` with which groups stay whole by default


class Config(Section):
    """The whole configuration of a run."""

    name: Annotated[str, Field(pattern=NAME, max_length=128), AfterValidator(_unreserved)]
    """The run's name: letters, digits, `.`, `_` and `-`, at most 128, because jobs, models and temporary files add to
    it. Its results are in `runs_dir/NAME`."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """The seed from which all random numbers of the run are derived, below 2^32, as vLLM and NumPy require."""
    runs_dir: Annotated[
        RunsPath, Field(default_factory=lambda: Path(os.environ.get(RUNS_DIR, "runs")), validate_default=True)
    ]
    """The folder that holds the folders of all runs; by default the one that SPECRL_RUNS_DIR names, or `runs`."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    sampling: SamplingConfig = SamplingConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    bubbles: BubblesConfig = BubblesConfig()
    engine: EngineConfig = EngineConfig()
    refit: RefitConfig = RefitConfig()
    policy: PolicyConfig = PolicyConfig()
    drafter: DrafterConfig = Field(default_factory=DrafterConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    precision: PrecisionConfig = PrecisionConfig()
    validate_: Annotated[ValidateConfig, Field(alias="validate")] = ValidateConfig()
    resources: Resources = Resources()
    stage_resources: dict[StageName, StageResources] = Field(default_factory=dict)
    """Overrides of `[resources]` and `[cluster]`, by stage."""
    cluster: ClusterConfig = ClusterConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def run_dir(self) -> Path:
        """The absolute path of the run's folder."""
        return (self.runs_dir / self.name).absolute()

    @property
    def settings(self) -> dict[str, Any]:
        """All settings as JSON types; `parse_config` restores an equal configuration."""
        return self.model_dump(mode="json", by_alias=True)

    def updated(self, **sections: dict[str, Any]) -> Self:
        """A copy with other values in some sections, unchecked."""
        made = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=made)

    @property
    def algorithms(self) -> tuple[tuple[Registry, Algorithm], ...]:
        """The functions that the run chose by name, each with its registry."""
        return *self.train.algorithms, (DRAFT_LOSSES, self.drafter.loss)

    @property
    def import_paths(self) -> list[str]:
        """The import paths `module:name` of the user's functions and classes in the configuration."""
        chosen = (*(algorithm.name for _, algorithm in self.algorithms), self.environment.name, self.cluster.backend)
        rewards = (self.data.reward, *(chosen_set.reward or () for chosen_set in self.validate_.sets.values()))
        of_rewards = (part.name for parts in rewards for part in parts)
        of_stages = (own.backend for own in self.stage_resources.values())
        return [path for path in (*chosen, *of_rewards, *of_stages) if path is not None and ":" in path]

    @property
    def best_metric(self) -> str | None:
        """The metric by which the best policy is chosen; None without validation during training."""
        if not self.validate_.every:
            return None
        return self.train.best_metric or f"validation/{self.validate_.first_set}/accuracy"

    @property
    def adopts_drafter(self) -> bool:
        """Whether the run drafts with the drafter of `drafter.source`, and trains it further."""
        return self.drafter.source is not None and self.speculation.draft_method.model == "drafter"

    @property
    def unused(self) -> list[str]:
        """A line for each setting without effect alongside the others; `load_config` refuses them."""
        return [
            *unused_drafting(self.speculation, self.drafter),
            *unused_data(self.data, self.validate_, self.drafter),
            *unused_reward(self.data, self.validate_, self.environment),
            *unused_training(self.train),
        ]

    def unused_after(self, changed: Collection[str]) -> list[str]:
        """Those lines that a change of these settings caused; earlier ones do not prevent a change."""
        keys = "|".join(re.escape(key.removesuffix(".name")) for key in changed if key not in MAY_LEAVE_OTHERS)
        return [line for line in self.unused if keys and re.search(rf"\b({keys})\b", line)]

    @property
    def whole_groups(self) -> bool:
        """See `train.whole_groups`."""
        given = self.train.whole_groups
        return self.sampling.max_response_tokens <= SHORT_RESPONSES if given is None else given

    def resources_of(self, stage: StageName) -> Resources:
        """`[resources]` with the stage's own overrides applied."""
        return self.resources.model_copy(update=self._own(stage, Resources))

    def cluster_of(self, stage: StageName) -> ClusterConfig:
        """`[cluster]` with the stage's own overrides applied.

        Options of sbatch that request GPUs are dropped for stages without GPUs, and so are those set to `false`.
        """
        own = self._own(stage, ClusterConfig)
        has_gpus = bool(self.resources_of(stage).gpus_per_rank)
        shared = {
            name: value for name, value in self.cluster.sbatch.items() if has_gpus or not asks_for_gpus(name, value)
        }
        merged = {**shared, **own.pop("sbatch", {})}
        sbatch = {name: value for name, value in merged.items() if value is not False}
        return self.cluster.model_copy(update={**own, "sbatch": sbatch})

    def _own(self, stage: StageName, section: type[Section]) -> dict[str, Any]:
        own = self.stage_resources.get(stage, StageResources())
        return own.model_dump(include=set(section.model_fields), exclude_none=True)

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt, in tokens."""
        return self.data.max_prompt_tokens or self.model.max_length - self.sampling.max_response_tokens

    @model_validator(mode="before")
    @classmethod
    def _is_plain_text(cls, data: Any) -> Any:
        check_text(data)
        return data

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        room = self.model.max_length - self.sampling.max_response_tokens
        if room <= 0:
            raise ValueError(
                f"sampling.max_response_tokens = {self.sampling.max_response_tokens} leaves no room for a prompt: "
                f"it must be below model.max_length = {self.model.max_length}"
            )
        if self.max_prompt_tokens > room:
            raise ValueError(
                f"data.max_prompt_tokens = {self.max_prompt_tokens}: it must be at most {room}, what "
                "sampling.max_response_tokens leaves of model.max_length"
            )
        if self.data.num_problems is not None and self.data.num_problems < self.train.prompts_per_step:
            raise ValueError(
                f"data.num_problems = {self.data.num_problems}: it must be at least train.prompts_per_step = "
                f"{self.train.prompts_per_step}"
            )
        self._check_bubbles()
        self._check_drafter()
        if self.policy.lora is not None and self.precision.training == "fp8":
            raise ValueError(
                'policy.lora with precision.training = "fp8": the trainer merges adapters in BF16; set it to bf16'
            )
        self._check_ranks()
        self._check_gpu_options()
        self._check_validation()
        self._check_parts()
        if self.engine.sleep and not self.resources_of("train").gpus_per_rank:
            raise ValueError(
                "engine.sleep = true: sleeping frees the memory of a GPU, and the train stage has gpus_per_rank = 0; "
                "set it to false"
            )
        without = [stage for stage in ENGINE_STAGES if not self.resources_of(stage).gpus_per_rank]
        if self.engine.batch_invariant and without:
            raise ValueError(
                "engine.batch_invariant = true: vLLM has these kernels for GPUs alone, and the "
                f"{without[0]} stage has gpus_per_rank = 0; set it to false"
            )
        return self

    def _check_bubbles(self) -> None:
        use, method = f'bubbles.use = "{self.bubbles.use}"', f'speculation.method = "{self.speculation.method}"'
        if self.bubbles.pregenerates and not self.speculation.draft_method.replays:
            allowed = ", ".join(name for name, row in METHODS.items() if row.replays)
            raise ValueError(f"{use} needs a method that drafts from stored text: {method} must be one of {allowed}")
        if self.bubbles.trains_drafter and not self.speculation.draft_method.has_weights:
            allowed = ", ".join(name for name, row in METHODS.items() if row.has_weights)
            raise ValueError(f"{use} needs a drafter to train: {method} must be one of {allowed}")
        if self.bubbles.trains_drafter and not self.drafter.online_lr:
            raise ValueError(f"{use} trains the drafter: drafter.online_lr = 0 must be above 0")
        if self.bubbles.trains_drafter and self.drafter.update_every > 1:
            raise ValueError(
                f"{use} trains the drafter in every step: drafter.update_every = {self.drafter.update_every} must be 1"
            )

    def _check_drafter(self) -> None:
        method = self.speculation.draft_method
        if self.drafter.source is not None and method.is_policy_layer:
            raise ValueError(
                f'drafter.source = "{self.drafter.source}" with speculation.method = "{method.name}": a layer of the '
                "policy drafts; use a method with an EAGLE-3 drafter, such as eagle3"
            )
        if not self.drafter.epochs and method.model == "drafter" and self.drafter.source is None:
            raise ValueError("drafter.epochs = 0: a new drafter must be trained; set it above 0, or set drafter.source")

    def _check_validation(self) -> None:
        for name, chosen in self.validate_.sets.items():
            reward = chosen.reward or self.data.reward
            is_task = self.environment.name is None and any(part.name == "task" for part in reward)
            if is_task and (chosen.path is not None or (self.data.source == "file" and not chosen.generators)):
                raise ValueError(
                    f'validate.sets.{name}.reward = "task" is a generator\'s own scorer, and the set is a file: set it '
                    "to another reward, such as math_verify or exact_match"
                )
        if self.train.best_metric is not None:
            self.validate_.check_metric("train.best_metric", self.train.best_metric, with_better=True)
        if self.train.stop_when is not None and self.train.stop_when.metric.startswith("validation/"):
            self.validate_.check_metric("train.stop_when.metric", self.train.stop_when.metric)
        if self.train.final == "best" and not self.validate_.every:
            raise ValueError('train.final = "best": nothing is validated during training; set validate.every above 0')

    def _check_parts(self) -> None:
        parts, train = self.data.part_names, self.train
        metric, known = train.stop_when.metric if train.stop_when else "", [f"{OF_PARTS}{name}" for name in parts]
        if metric.startswith(OF_PARTS) and metric not in known:
            allowed = ", ".join(known) or "reward/mean; data.reward has no parts"
            raise ValueError(f'train.stop_when.metric = "{metric}": allowed: {allowed}')
        if train.advantage.name != "gdpo":
            return
        if not parts:
            raise ValueError(
                f'train.advantage = "gdpo" normalises the parts of a reward, and data.reward = '
                f'"{self.data.reward_words}" has none: give a list of several, or take "grpo"'
            )
        if train.overlong_window:
            raise ValueError(
                f'train.overlong_window = {train.overlong_window:g} with train.advantage = "gdpo": a penalty would be '
                "added to the sum of the parts, which gdpo does not look at; leave it out, or give data.reward a part "
                "for it, such as length"
            )

    def _check_ranks(self) -> None:
        policy, key = self.policy, "policy.tensor_parallel x policy.pipeline_parallel"
        for stage in TRAINER_STAGES:
            if stage == "prepare" and not self.warm_start.num_examples:
                continue
            self._check_divides(key, policy.tensor_parallel * policy.pipeline_parallel, stage)
            ranks = self.resources_of(stage).ranks // policy.pipeline_parallel
            if ranks % policy.expert_parallel:
                raise ValueError(
                    f"policy.expert_parallel = {policy.expert_parallel} does not divide the {ranks} ranks of a "
                    f"pipeline stage in the {stage} stage (nodes x ranks_per_node / policy.pipeline_parallel)"
                )
        for stage in ENGINE_STAGES:
            self._check_divides("engine.tensor_parallel", self.engine.tensor_parallel, stage)
        ranks = self.resources_of("train").ranks
        engines = ranks // self.engine.tensor_parallel
        if self.train.prompts_per_step % engines:
            raise ValueError(
                f"train.prompts_per_step = {self.train.prompts_per_step} must be a multiple of the {engines} engines "
                "(ranks / engine.tensor_parallel)"
            )
        if self.train.prompts_per_step % self.train.updates_per_step:
            raise ValueError(
                f"train.updates_per_step = {self.train.updates_per_step} must divide "
                f"train.prompts_per_step = {self.train.prompts_per_step}"
            )

    def _check_divides(self, key: str, size: int, stage: StageName) -> None:
        if (ranks := self.resources_of(stage).ranks) % size:
            raise ValueError(
                f"{key} = {size} does not divide the {ranks} ranks of the {stage} stage "
                "(nodes x ranks_per_node, in resources or stage_resources)"
            )

    def _check_gpu_options(self) -> None:
        """Check that the options of sbatch request as many GPUs as the ranks of a node need."""
        for stage in STAGES:
            resources = self.resources_of(stage)
            needed = resources.ranks_per_node * resources.gpus_per_rank
            for name, value in self.cluster_of(stage).sbatch.items():
                given = gpus_per_node(name, value, resources.nodes, resources.ranks_per_node)
                own = self.stage_resources.get(stage, StageResources()).sbatch
                key = f"{f'stage_resources.{stage}' if name in own else 'cluster'}.sbatch.{name} = {value!r}"
                if not needed and asks_for_gpus(name, value):
                    raise ValueError(f"{key} asks for GPUs, and the {stage} stage has gpus_per_rank = 0")
                if given is not None and given < needed:
                    raise ValueError(
                        f"{key} gives {given} GPUs on each node, and the {stage} stage has {needed} ranks there with a "
                        "GPU each (ranks_per_node, in resources or stage_resources)"
                    )


def load_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a TOML file and apply overrides `a.b=c`, whose values are parsed as TOML or else taken as strings."""
    if path.is_dir() or not path.exists():  # a pipe will do
        raise ConfigError(f"no configuration file at {path}")
    text = ""
    try:
        data = tomllib.loads(text := path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"at line (\d+)", str(error))
        line = f": {shown(redacted(text.split('\n')[int(at[1]) - 1].strip()))}" if at is not None else ""
        raise ConfigError(f"{path} is not valid TOML: {error}{line}") from error
    for override in overrides or []:
        _apply_override(data, override)
    config = parse_config(data, import_own=True)
    if config.unused:
        raise ConfigError("\n".join(config.unused))
    return config


def change_config(config: Config, overrides: list[str]) -> Config:
    """Apply overrides in the form of `load_config`; a preset replaces only the settings that it defines."""
    data, given = config.settings, dict[str, Any]()
    for override in overrides:
        _apply_override(data, override)
        _apply_override(given, override)
    asked = given.get("train")
    if isinstance(asked, dict) and isinstance(name := asked.get("algorithm"), str):
        for key in PRESETS.get(name, {}).keys() - asked.keys():
            data["train"].pop(key, None)
    return parse_config(data, import_own=True)


def parse_config(data: dict[str, Any], *, import_own: bool = False) -> Config:
    """Validate a nested dict, as read from TOML or from a run's `config.json`.

    With `import_own`, algorithms given by import path are imported, so that their options are checked and completed. A
    run's `config.json` contains complete options.
    """
    try:
        return Config.model_validate(data, context={IMPORT_OWN: import_own})
    except ValidationError as error:
        raise ConfigError(explain(error, Config)) from error


def understood_config(data: dict[str, Any], run_dir: Path) -> Config:
    """The configuration of a run, perhaps somebody else's, without unknown settings; it imports nothing."""
    known = {name: dict(value) if isinstance(value, dict) else value for name, value in data.items()}
    while True:
        known |= {"name": "unknown", "runs_dir": "runs"}  # both are replaced by the run's actual place
        try:
            config = Config.model_validate(known)
        except ValidationError as error:
            lines = error.errors(include_url=False, include_context=False, include_input=False)
            if not any(_left_out(known, line["loc"]) for line in lines):
                known = {}
        else:
            return config.model_copy(update={"name": run_dir.name, "runs_dir": run_dir.parent})


def _left_out(data: dict[str, Any], place: tuple[int | str, ...]) -> bool:
    """Remove the offending key of a section, or the section; return whether there was one."""
    name, key = (*map(str, place[:2]), "", "")[:2]
    section = data.get(name)
    if isinstance(section, dict) and key in section:
        del section[key]
        return True
    return data.pop(name, None) is not None


def dump_config(config: Config) -> str:
    """The resolved configuration as JSON, for its file."""
    return config.model_dump_json(indent=2, by_alias=True) + "\n"


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip() or not key.isprintable():
        raise ConfigError(f"--set {redacted(override)!r}: expected key=value, such as train.num_steps=10")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    *parents, leaf = key.strip().split(".")
    for depth, parent in enumerate(parents):
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ConfigError(
                f"--set {redacted(override)!r}: {'.'.join(parents[: depth + 1])} is a value, not a section"
            )
    data[leaf] = value
