"""What all sections share: the frozen base model and the number types."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

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
