"""The settings of the benchmarks, a small model for each sub-command of `specrl bench`. This imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator

from specrl.config import Config, ConfigError, PositiveInt, Section, SpeculationConfig
from specrl.config.algorithms import CORRECTIONS
from specrl.config.base import NonNegativeInt, PositiveFloat
from specrl.config.methods import METHODS
from specrl.config.rollout import BubbleUse

ADAPTIVE = "adaptive"
TAIL = "tail64"
"""The name of the long-tailed batch, which is 64 requests of natural length on one rank."""
TAIL_SIZE = 64


class BenchSettings(Section):
    """The settings of a benchmark. Its docstring is the help of its command, a field's docstring that of an option."""

    needs_run: ClassVar[bool] = True
    """Whether the benchmark measures a finished run, which `--run` names; otherwise it brings its own models."""
    uses_gpus: ClassVar[bool] = False
    """Whether a benchmark without a run sees the GPUs of this machine."""
    goes_on: ClassVar[bool] = False
    """Whether a benchmark without a run goes on from what an earlier call of the same command has left."""

    def check(self, config: Config) -> None:
        """Check that this run has what the settings ask for.

        Raises:
            ConfigError: The run does not have it.
        """


def _number_or(word: str) -> AfterValidator:
    """Return the validator of a value that is a positive number, which may be given as text, or the word."""

    def check(value: int | str) -> int | str:
        if value == word or (str(value).isdigit() and int(value) > 0):
            return value if value == word else int(value)
        raise ValueError(f"{value!r} is neither a positive number nor {word}")

    return AfterValidator(check)


K = Annotated[int | str, _number_or(ADAPTIVE)]
Batch = Annotated[int | str, _number_or(TAIL)]


class RolloutSettings(BenchSettings):
    """Compare speculative with plain generation of the same tokens.

    The two run in turn, and the page shows what limits the speedup.
    """

    methods: tuple[str, ...] = ()
    """Draft methods separated by commas, such as eagle3,ngram; by default all that the run's drafter allows."""
    ks: tuple[K, ...] = (1, 3, 5, ADAPTIVE)
    """Longest drafts in tokens, separated by commas; `adaptive` lets the controller choose."""
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

    @field_validator("methods")
    @classmethod
    def _known(cls, methods: tuple[str, ...]) -> tuple[str, ...]:
        # Plain decoding is not among them: every method is compared with it.
        allowed = [name for name, row in METHODS.items() if row.drafts]
        if unknown := [method for method in methods if method not in allowed]:
            raise ValueError(f"{unknown[0]!r} is not one of {', '.join(allowed)}")
        return methods

    @field_validator("ks", "batches")
    @classmethod
    def _not_empty(cls, values: tuple[object, ...]) -> tuple[object, ...]:
        if not values:
            raise ValueError("name at least one")
        return values


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


class DrafterSettings(BenchSettings):
    """Compare EAGLE-3 drafters over the same RL steps.

    They are pretrained on and off the task, and frozen or trained online.
    """

    num_steps: PositiveInt = 10
    """Number of RL steps."""
    prompts_per_step: PositiveInt = 8
    """Number of prompts in a step."""
    samples_per_prompt: Annotated[int, Field(ge=2)] = 4
    """Number of responses to a prompt."""
    num_prompts: PositiveInt = 96
    """Number of prompts whose responses each of the two drafters is pretrained on."""
    epochs: PositiveInt = 6
    """Number of epochs of the pretraining."""
    batches: tuple[PositiveInt, ...] = (1, 4)
    """Batch sizes of the matched pairs at the end, separated by commas."""
    repeats: PositiveInt = 3
    """Number of rounds of the matched pairs."""


class BubbleSettings(BenchSettings):
    """Compare the uses of idle time with plain synchronous decoding.

    Each setting takes the same RL steps. The page also shows which rank waited for which.
    """

    uses: Annotated[tuple[BubbleUse | Literal["recent"], ...], Field(min_length=1)] = get_args(BubbleUse)
    """Uses of idle time, separated by commas, that are compared with plain decoding. `recent` leaves the time idle and
    drafts from recent rollouts alone."""
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
    """Importance correction of the corrected setting, such as tis or icepop; the other settings have none."""
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
