"""The settings of the benchmarks, a small model for each sub-command of `specrl bench`. This imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from specrl.config import Config, ConfigError, DrafterConfig, PositiveInt, Section, SpeculationConfig
from specrl.config.algorithms import CORRECTIONS
from specrl.config.base import NonNegativeInt, PositiveFloat
from specrl.config.errors import explain
from specrl.config.methods import METHODS
from specrl.config.rollout import MAX_TEMPERATURE, MIN_TEMPERATURE, BubbleUse

ADAPTIVE = "adaptive"
WHOLE = "whole"
"""Adaptive draft lengths without budgets, with which budgets are compared."""
TAIL = "tail64"
"""The name of the long-tailed batch, which is 64 requests of natural length on one rank."""
TAIL_SIZE = 64


class BenchSettings(Section):
    """The settings of a benchmark. Its docstring is the help of its command, a field's docstring that of an option."""

    needs_run: ClassVar[bool] = True
    """Whether the benchmark measures a finished run, which `--run` names; otherwise it brings its own models."""
    run_is_optional: ClassVar[bool] = False
    """Whether `--run` may be left out, and the benchmark then measures what its other options name."""
    uses_gpus: ClassVar[bool] = False
    """Whether a benchmark without a run sees the GPUs of this machine."""
    always_jobs: ClassVar[bool] = False
    """Whether it consists of jobs, which run on this machine where no other scheduler is chosen."""
    goes_on: ClassVar[bool] = False
    """Whether a benchmark without a run goes on from what an earlier call of the same command has left."""

    def check(self, config: Config) -> None:
        """Check that this run has what the settings ask for.

        Raises:
            ConfigError: The run does not have it.
        """

    def trainings(self, config: Config) -> list[Config]:
        """Return the configurations of its trainings, if it has any and knows them before it starts.

        Args:
            config: The configuration of the run that is measured.

        Raises:
            ConfigError: The sizes do not fit together.
        """
        return []

    def check_alone(self) -> None:
        """Check that the settings are all that is needed where no run is measured.

        Raises:
            ConfigError: Something is missing, or does not exist.
        """

    def cores(self, config: Config) -> int:
        """Return the number of CPU cores that the benchmark uses, for the job that runs it.

        Args:
            config: The configuration of the run that is measured.
        """
        return int(getattr(self, "threads", None) or config.resources_of("validate").cpus_per_rank)

    @property
    def processes(self) -> int:
        """The number of processes with a model that the benchmark has at once, each of which needs a rank's memory."""
        return 1

    def headline(self, rows: Sequence[Mapping[str, Any]], config: Config) -> dict[str, float]:
        """Return the metrics that belong to the run that is measured, in its MLflow run; most benchmarks have none.

        Args:
            rows: What the benchmark has written as JSON.
            config: The configuration of the run.
        """
        return {}

    def summary(self, rows: Sequence[Mapping[str, Any]], config: Config) -> dict[str, float]:
        """Return the metrics by which the benchmark's own MLflow run is compared with others of its experiment."""
        return self.headline(rows, config)


def _number_or(*words: str) -> AfterValidator:
    """Return the validator of a value that is a positive number, which may be given as text, or one of the words."""

    def check(value: int | str) -> int | str:
        if value in words or (str(value).isdigit() and int(value) > 0):
            return value if value in words else int(value)
        raise ValueError(f"{value!r} is neither a positive number nor {' nor '.join(words)}")

    return AfterValidator(check)


def _at_least_one(values: tuple[object, ...]) -> tuple[object, ...]:
    if not values:
        raise ValueError("name at least one")
    return values


def _drafting(methods: tuple[str, ...]) -> tuple[str, ...]:
    # Plain decoding is not among them: every method is compared with it.
    allowed = [name for name, row in METHODS.items() if row.drafts]
    if unknown := [method for method in methods if method not in allowed]:
        raise ValueError(f"{unknown[0]!r} is not one of {', '.join(allowed)}")
    return methods


Methods = Annotated[tuple[str, ...], AfterValidator(_drafting)]
K = Annotated[int | str, _number_or(ADAPTIVE, WHOLE)]
Batch = Annotated[int | str, _number_or(TAIL)]


class RolloutSettings(BenchSettings):
    """Compare speculative with plain generation of the same tokens.

    The two run in turn, and the page shows what limits the speedup.
    """

    methods: Methods = ()
    """Draft methods separated by commas, such as eagle3,ngram; by default all that the run's drafter allows."""
    ks: tuple[K, ...] = (1, 3, 5, 7, ADAPTIVE)
    """Longest drafts in tokens, separated by commas; `adaptive` lets the controller choose, `whole` does so too but
    verifies all of every draft."""
    batches: tuple[Batch, ...] = (1, 2, 4, 8, 16, 32, TAIL)
    """Batch sizes separated by commas; `tail64` is 64 requests of natural length on one rank."""
    repeats: PositiveInt = 5
    """Number of rounds; each runs every variant once."""
    max_tokens: PositiveInt = 32
    """Longest response at a fixed batch size, in tokens; `tail64` goes to the run's own limit."""
    compile: bool = True
    """Also start compiled engines for plain decoding and for the first draft method, and take the faster ones."""

    def check(self, config: Config) -> None:
        methods_of(self, config)

    @field_validator("ks", "batches")
    @classmethod
    def _not_empty(cls, values: tuple[object, ...]) -> tuple[object, ...]:
        return _at_least_one(values)


def middle_of(ks: Sequence[int | str]) -> int | None:
    """Return the middle one of the fixed draft lengths, the lower of two; None if there is none."""
    fixed = sorted(k for k in ks if isinstance(k, int))
    return fixed[(len(fixed) - 1) // 2] if fixed else None


def methods_of(settings: RolloutSettings, config: Config) -> tuple[str, ...]:
    """Return the draft methods to measure on a run.

    Raises:
        ConfigError: A method needs a drafter that the run does not have.
    """
    own = config.speculation.draft_method
    drafting = [row for row in METHODS.values() if row.drafts]
    allowed = tuple(row.name for row in drafting if row.model is None or row.same_model(own))
    for method in settings.methods:
        if method not in allowed:
            raise ConfigError(
                f"methods: {method} needs a run with a drafter for it; this run allows: {', '.join(allowed)}"
            )
    return settings.methods or allowed


def speculation_of(run: SpeculationConfig, method: str, k: int) -> SpeculationConfig:
    """Return the run's speculation settings with another draft method and longest draft."""
    draft_model = run.draft_model if METHODS[method].model == "draft_model" else None
    changed = {"method": method, "k": k, "draft_model": draft_model}
    return SpeculationConfig.model_validate(run.model_dump() | changed)


def train_plainly(data: dict[str, Any], num_steps: int) -> None:
    """Let the run of a benchmark train for so many steps, without validation and with a checkpoint at its end alone.

    Args:
        data: The run's configuration as a nested dict, which is changed in place.
    """
    data["validate"] |= {"every": 0, "sets": {}}
    data["train"] |= {"num_steps": num_steps, "checkpoint_every": num_steps, "keep_checkpoints": 1}
    data["train"] |= {"best_metric": None, "final": "last", "stop_when": None}


def _check_temperature(temperature: float) -> float:
    if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise ValueError(f"{temperature:g} must be 0 (greedy), or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}")
    return temperature


class DrafterSettings(BenchSettings):
    """Measure drafters: any of them on a file of prompts, or those of a run over its RL steps.

    With --model, --drafter and --data it measures how much of a drafter's drafts is accepted, by position, category,
    response length, context length, temperature and k, and its speedup over plain decoding and over n-gram lookup by
    batch size. The drafter need not be specrl's. With --run it compares EAGLE-3 drafters over the same RL steps of that
    run, pretrained on and off the task, and frozen or trained online.
    """

    run_is_optional = True
    uses_gpus = True

    model: Path | None = None
    """Hugging Face folder of the policy that is drafted for."""
    drafter: tuple[Path, ...] = ()
    """Folder of a drafter, or several, separated by commas: EAGLE-3, a policy with a multi-token-prediction layer, or a
    smaller model."""
    data: Path | None = None
    """JSONL file of prompts. A question is text, a list of turns (the first is asked) or a list of chat messages."""
    prompt_column: str | None = None
    """Column of the question; by default the first of prompt, question, turns and messages that a row has."""
    category_column: str = "category"
    """Column by which acceptance and speedup are also shown, if the file has it."""
    template: str | None = None
    """Format string that puts the question in place of {prompt}, or chat for the tokenizer's chat template; by default
    chat if there is one."""
    prompts: PositiveInt = 32
    """Largest number of prompts of the file that are asked, as many of each category as possible."""
    max_tokens: PositiveInt = 128
    """Longest response in tokens, with --data."""
    ks: tuple[PositiveInt, ...] = (3,)
    """Lengths of drafts in tokens, with --data, separated by commas."""
    temperatures: tuple[Annotated[float, AfterValidator(_check_temperature)], ...] = (0.0, 1.0)
    """Temperatures, with --data, separated by commas; 0 is greedy decoding."""
    num_steps: PositiveInt = 10
    """Number of RL steps, with --run."""
    prompts_per_step: PositiveInt = 8
    """Number of prompts in a step, with --run."""
    samples_per_prompt: Annotated[int, Field(ge=2)] = 4
    """Number of responses to a prompt, with --run."""
    num_prompts: PositiveInt = 96
    """Number of prompts whose responses each drafter is pretrained on, with --run."""
    epochs: PositiveInt = 6
    """Number of epochs of the pretraining, with --run."""
    sources: tuple[Literal["off-task", "task", "both"], ...] = ("off-task", "task")
    """What drafters are pretrained on, with --run, separated by commas: chat-like instructions (off-task), prompts of
    the task (task), or half of each (both). The engine drafts with the last."""
    stale: bool = False
    """Whether to add two stale drafters to those of the last source, with --run: one always a step behind the one that
    is trained online, and one whose weights are all zero. One that is frozen at step 0 is always among them."""
    batches: tuple[PositiveInt, ...] = (1, 4)
    """Batch sizes of the matched runs, separated by commas."""
    repeats: PositiveInt = 3
    """Number of rounds of the matched runs."""

    @field_validator("ks", "temperatures", "batches", "sources")
    @classmethod
    def _not_empty(cls, values: tuple[object, ...]) -> tuple[object, ...]:
        return _at_least_one(values)

    @property
    def evaluates(self) -> bool:
        """Whether a drafter is measured on a file of prompts."""
        return self.model is not None or bool(self.drafter) or self.data is not None

    def check(self, config: Config) -> None:
        if self.evaluates:
            raise ConfigError("bench drafter: give either --run, or --model, --drafter and --data")
        _check_makes_drafters("drafter", config)

    def check_alone(self) -> None:
        given = {"--model": self.model, "--drafter": self.drafter or None, "--data": self.data}
        if missing := [name for name, value in given.items() if value is None]:
            what = "nothing to measure" if not self.evaluates else f"{', '.join(missing)} is missing"
            raise ConfigError(f"bench drafter: {what}; give --model, --drafter and --data, or --run")
        assert self.model is not None and self.data is not None
        for name, folder in (("--model", self.model), *(("--drafter", folder) for folder in self.drafter)):
            if not (folder / "config.json").is_file():
                raise ConfigError(f"{name} {folder}: there is no such folder with a config.json")
        if not self.data.is_file() or self.data.suffix != ".jsonl":
            raise ConfigError(f"--data {self.data}: it must be an existing file whose name ends in .jsonl")


def _check_makes_drafters(name: str, config: Config) -> None:
    """Raise ConfigError unless new drafters have the shape of the run's own, which the engine starts with."""
    if config.adopts_drafter:
        raise ConfigError(
            f"bench {name} makes new drafters with the sizes in [drafter]; this run has drafter.source = "
            f"{config.drafter.source!r}, whose sizes are its own; use a run without drafter.source"
        )


TRAINING_KEYS = ("loss", "position_decay", "ttt_growth", "ttt_steps", "lr", "parallel")
"""The settings of `[drafter]` that `specrl bench losses` may vary: those of the training, and whether all positions are
drafted in one pass. All of them leave the features and the draft vocabulary."""


class LossSettings(BenchSettings):
    """Compare ways of training an EAGLE-3 drafter.

    Each trains a new drafter on the same responses of the run's policy before RL, for as many steps, with several
    seeds. The page shows what an engine accepts of its drafts, by position, and how much faster it generates.
    """

    variants: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "loss=cross_entropy",
        "loss=reverse_kl",
        "loss=total_variation",
        "loss=negative_log_acceptance",
        "loss=negative_log_overlap",
        "loss=lk_hybrid",
        "position_decay=measured",
        "ttt_growth=0.5",
    )
    """Settings of [drafter] to compare, separated by commas; several for one drafter are joined by +, such as
    loss=lk_hybrid+position_decay=measured. All else is as in the run. Drafters with parallel=true, which draft all
    positions in one pass, have an engine of their own beside that of the others."""
    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = (1, 2, 3)
    """Seeds of responses, new drafters and the order of training, separated by commas."""
    num_prompts: PositiveInt | None = None
    """Number of prompts whose responses the drafters are trained on; the run's by default."""
    samples_per_prompt: PositiveInt | None = None
    """Number of responses to each of them; the run's by default."""
    epochs: PositiveInt | None = None
    """Number of epochs of the training; the run's by default."""
    num_held_out: PositiveInt = 32
    """Number of held-out prompts that acceptance is measured on."""
    batches: tuple[PositiveInt, ...] = (1, 8)
    """Batch sizes of the matched pairs, separated by commas."""
    repeats: PositiveInt = 3
    """Number of generations of each kind in a matched pair."""

    @field_validator("variants")
    @classmethod
    def _known_variants(cls, variants: tuple[str, ...]) -> tuple[str, ...]:
        for variant in variants:
            if unknown := [key for key in _settings_of(variant) if key not in TRAINING_KEYS]:
                allowed = ", ".join(TRAINING_KEYS)
                raise ValueError(f"{variant!r} sets {unknown[0]!r}; allowed: {allowed}, as KEY=VALUE joined by +")
        return variants

    def check(self, config: Config) -> None:
        method = config.speculation.draft_method
        if method.model != "drafter" or method.texts:
            raise ConfigError(
                f'bench losses trains EAGLE-3 drafters; this run has speculation.method = "{config.speculation.method}"'
                '; use a run with "eagle3"'
            )
        _check_makes_drafters("losses", config)
        for variant in self.variants:
            try:
                drafter = self.drafter_config(variant, config.drafter)
            except ValidationError as error:
                raise ConfigError(explain(error, DrafterConfig, ("drafter",))) from error
            if drafter.parallel and drafter.ttt_steps < config.drafter.ttt_steps:
                raise ConfigError(
                    f"--variants {variant}: drafts have the run's drafter.ttt_steps = {config.drafter.ttt_steps} "
                    f"tokens, and a parallel drafter never learns positions beyond its own ttt_steps = "
                    f"{drafter.ttt_steps}"
                )

    def drafter_config(self, variant: str, drafter: DrafterConfig) -> DrafterConfig:
        """Return the run's `[drafter]` with a variant's settings and the benchmark's number of epochs."""
        epochs = self.epochs or drafter.epochs
        return DrafterConfig.model_validate({**drafter.model_dump(), "epochs": epochs, **_settings_of(variant)})


def _settings_of(variant: str) -> dict[str, str]:
    """Return the keys of a variant with their values as text."""
    parts = [part.partition("=") for part in variant.split("+")]
    return {key.strip(): value.strip() for key, _, value in parts}


OtherUse = Literal["recent", "pregenerate_other", "both_other"]
"""What `specrl bench bubbles` compares beside the uses of idle time that a run can have."""


class BubbleSettings(BenchSettings):
    """Compare the uses of idle time with plain synchronous decoding.

    Each setting takes the same RL steps. The page also shows which rank waited for which.
    """

    uses: Annotated[tuple[BubbleUse | OtherUse, ...], Field(min_length=1)] = get_args(BubbleUse)
    """Uses of idle time, separated by commas, that are compared with plain decoding. `recent` leaves the time idle and
    drafts from recent rollouts alone; `pregenerate_other` and `both_other` pre-generate with other seeds than those of
    the rollouts, beside `pregenerate` and `both`, whose seeds `--seeds` chooses."""
    drafter: Path | None = None
    """Directory of an EAGLE-3 drafter to begin with; by default the run's own, as it was before RL."""
    num_steps: Annotated[int, Field(ge=2)] = 12
    """Number of RL steps of each setting."""
    ranks: Annotated[int, Field(ge=2)] = 2
    """Number of ranks on this machine."""
    threads: PositiveInt = 1
    """CPU threads of a rank."""
    seeds: Literal["same", "other"] = "same"
    """Seeds of pre-generated text, `same` or `other`, as in `bubbles.seeds`."""
    prompts_per_step: PositiveInt | None = None
    """Number of prompts in a step; the run's own by default."""
    samples_per_prompt: Annotated[int, Field(ge=2)] | None = None
    """Number of responses to a prompt; the run's own by default."""
    max_response_tokens: PositiveInt | None = None
    """Longest response in tokens; the run's own by default. If every rank has one of that length, no rank waits."""

    def cores(self, config: Config) -> int:
        return self.ranks * self.threads

    @property
    def processes(self) -> int:
        return self.ranks


class StepSettings(BenchSettings):
    """Compare an RL step with one of TRL's GRPO trainer.

    Both train the run's policy before RL on the same prompts, with the same reward and as many threads. They take their
    steps in turn, each in processes of its own, and the page shows the parts of a step side by side.
    """

    steps: PositiveInt = 4
    """Number of steps that are compared."""
    warm_up: PositiveInt = 1
    """Number of steps before them, which are not counted."""
    prompts_per_step: PositiveInt = 8
    """Number of prompts in a step."""
    samples_per_prompt: Annotated[int, Field(ge=2)] = 4
    """Number of responses to a prompt."""
    max_response_tokens: PositiveInt = 64
    """Longest response in tokens."""
    threads: PositiveInt = 2
    """Number of CPU threads of each side."""
    ranks: PositiveInt = 1
    """Number of specrl's ranks, which share its threads. TRL always has one process."""
    peer_sequences: PositiveInt = 8
    """Number of sequences in a forward and backward pass of TRL."""
    peer_precision: Literal["mixed", "bf16"] = "mixed"
    """Weights and moments of TRL's optimizer: mixed keeps them in FP32 and computes in BF16, as specrl does; bf16 keeps
    BF16 alone, which is faster, but loses most updates at the learning rates of RL."""

    @property
    def processes(self) -> int:
        return self.ranks + 1

    def check(self, config: Config) -> None:
        if find_spec("trl") is None:
            raise ConfigError(
                "bench step compares with TRL, which is not installed here: install it with `make env`, or in an "
                "environment of your own with `pip install -r requirements/dev.in`"
            )

    @model_validator(mode="after")
    def _divides(self) -> StepSettings:
        responses = self.prompts_per_step * self.samples_per_prompt
        if responses % self.peer_sequences:
            raise ValueError(
                f"peer_sequences = {self.peer_sequences} must divide the {responses} responses of a step "
                "(prompts_per_step x samples_per_prompt)"
            )
        if self.threads % self.ranks:
            raise ValueError(f"threads = {self.threads} must be a multiple of ranks = {self.ranks}")
        return self


class GrowthSettings(BenchSettings):
    """Measure how the cost of an RL step grows, and compare it with the arithmetic.

    The sizes that grow are the length of responses, the number of responses to a prompt, the number of ranks and the
    size of the model. It needs no finished run: its policies are random.
    """

    needs_run = False

    lengths: tuple[PositiveInt, ...] = (64, 256, 1024, 4096)
    """Lengths of responses of a tiny policy in tokens, separated by commas."""
    groups: tuple[PositiveInt, ...] = (2, 4, 8, 16)
    """Numbers of responses to a prompt, separated by commas."""
    ranks: tuple[PositiveInt, ...] = (1, 2, 4)
    """Numbers of ranks for the same work, separated by commas."""
    models: tuple[Literal["tiny", "135M", "360M"], ...] = ("tiny", "135M", "360M")
    """Models, separated by commas: tiny, 135M or 360M."""
    steps: PositiveInt = 2
    """Number of steps at each point, of which the fastest counts."""
    warm_up: NonNegativeInt = 1
    """Number of steps before them, which are not counted."""

    def cores(self, config: Config) -> int:
        return max(self.ranks, default=1)

    @property
    def processes(self) -> int:
        return max(self.ranks, default=1)


class CheckpointSettings(BenchSettings):
    """Measure what checkpoints cost on one rank.

    They are how long a step waits, how much the writing slows down what goes on beside it, and how long a start reads.
    """

    repeats: PositiveInt = 5
    """Number of rounds; each measures everything once."""
    work_seconds: PositiveFloat = 10.0
    """Seconds of forward passes in a round, without and beside the writing."""


class AgreementSettings(BenchSettings):
    """Measure how far engine and trainer agree about the same tokens.

    Each of them runs in BF16 and in FP8, and nothing is trained.
    """

    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = (1, 2, 3)
    """Seeds of the sampling, separated by commas."""
    num_prompts: PositiveInt = 64
    """Number of held-out prompts."""
    samples_per_prompt: PositiveInt = 4
    """Number of responses to a prompt."""


def _known_correction(name: str) -> str:
    return CORRECTIONS.choose(name, import_own=True).name


class PrecisionSettings(BenchSettings):
    """Compare BF16 and FP8 over the same RL steps.

    FP8 is used in generation alone, in generation and training, and in both with an importance correction.
    """

    num_steps: Annotated[int, Field(ge=2)] = 10
    """Number of RL steps of each setting and seed."""
    seeds: tuple[NonNegativeInt, ...] = (1, 2, 3)
    """Seeds of prompts and sampling, separated by commas. Every run begins with the run's own policy before RL."""
    correction: Annotated[str, AfterValidator(_known_correction)] = "tis"
    """Importance correction of the corrected settings, such as tis or icepop; the other settings have none."""
    corrected: tuple[Literal["both", "generation", "neither"], ...] = ("both",)
    """Which settings also run with the correction, separated by commas: those with FP8 in both engines, in generation
    alone, or in neither."""
    kv_cache: Literal["bf16", "fp8"] = "bf16"
    """Type of the KV cache in engines with FP8 weights, bf16 or fp8."""
    prompts_per_step: PositiveInt = 8
    """Number of prompts in a step."""
    samples_per_prompt: Annotated[int, Field(ge=2)] = 4
    """Number of responses to a prompt."""
    num_prompts: PositiveInt = 64
    """Number of held-out prompts for the accuracy."""
    threads: PositiveInt = 2
    """CPU threads of the one rank."""


class FaultSettings(BenchSettings):
    """Inject failures that others report as silent, one after another, and see what the run says.

    Each begins with the run's own policy and drafter before RL, on one rank.
    """

    num_steps: PositiveInt = 3
    """Number of RL steps with a fault, after one without."""
    prompts_per_step: PositiveInt = 8
    """Number of prompts in a step."""
    samples_per_prompt: Annotated[int, Field(ge=2)] = 4
    """Number of responses to a prompt."""
    only: tuple[str, ...] = ()
    """Names of faults, separated by commas; all by default."""
    threads: PositiveInt = 2
    """CPU threads of the one rank."""


class ControlBenchSettings(BenchSettings):
    """Measure what each constant of the drafting control is worth.

    Nothing is generated anew for that: the benchmark replays one recording of the run.
    """

    seeds: PositiveInt = 5
    """Number of seeds; each is a replay of every workload with every value."""
    record: bool = False
    """Record again what an earlier call has recorded."""

    def check(self, config: Config) -> None:
        if not config.speculation.method.startswith("eagle3"):
            raise ConfigError(
                f'bench control replays drafts of an EAGLE-3 drafter; this run has speculation.method = "'
                f'{config.speculation.method}"; use a run with "eagle3" or "eagle3+replay"'
            )


class PlanSettings(BenchSettings):
    """Compare the memory that `specrl run --dry-run` plans with what small runs take.

    It needs no finished run.
    """

    needs_run = False


class ProjectionSettings(BenchSettings):
    """Simulate the settings of published results, and the steps of configurations for GPUs.

    It needs no finished run.
    """

    needs_run = False

    configs: tuple[str, ...] = tuple(f"configs/qwen3-{name}.toml" for name in ("8b-rl-zero", "32b", "235b-a22b"))
    """Configuration files whose steps are simulated."""


class ExchangeSettings(BenchSettings):
    """Compare two ways in which ranks exchange the rollouts of a step: as arrays, and pickled as before.

    It needs no finished run.
    """

    needs_run = False

    responses: PositiveInt = 2000
    """Number of responses of all ranks together."""
    tokens: PositiveInt = 16384
    """Mean length of a response in tokens."""
    spread: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Standard deviation of the lengths, as a share of the mean."""
    ranks: Annotated[int, Field(ge=2)] = 2
    """Number of ranks on this machine."""
    repeats: PositiveInt = 3
    """Number of rounds; each runs both ways once."""
    threads: PositiveInt = 1
    """CPU threads of a rank."""

    def cores(self, config: Config) -> int:
        return self.ranks * self.threads

    @model_validator(mode="after")
    def _divides(self) -> ExchangeSettings:
        if self.responses % self.ranks:
            raise ValueError(f"responses = {self.responses} must be a multiple of ranks = {self.ranks}")
        return self


GPU_SECTIONS = ("environment", "fp8", "exactness", "sleep", "training", "speculation")
"""The sections of `specrl bench gpu`, in the order in which they run."""


class GpuSettings(BenchSettings):
    """Measure everything that a first GPU is asked.

    It takes at most 40 minutes on one H200, without a network and without a run, as all models are random: versions and
    driver, native FP8 against the emulation, exactness with and without CUDA graphs, sleep and wake with refits, policy
    updates in BF16 and FP8, memory against the plan, and generation by vLLM as it comes against speculation. A section
    that fails loses no other, and the same command goes on where an earlier one has ended. Without a GPU everything
    runs at tiny size, and what needs a GPU is marked.
    """

    needs_run = False
    uses_gpus = True
    goes_on = True

    sections: tuple[str, ...] = ()
    """Sections separated by commas, such as environment,exactness; all of them by default."""
    tiny: bool = False
    """Whether to take tiny models on a GPU, too."""
    minutes: PositiveInt = 40
    """Longest time of all sections together, in minutes; those for which none is left are not begun."""
    fresh: bool = False
    """Whether to forget what earlier calls have measured on this device, and to begin anew."""

    @field_validator("sections")
    @classmethod
    def _known(cls, sections: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [name for name in sections if name not in GPU_SECTIONS]:
            raise ValueError(f"{unknown[0]!r} is not one of {', '.join(GPU_SECTIONS)}")
        return sections
