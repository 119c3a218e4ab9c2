"""The base class of all sections, the number types, the stages, and the error for a wrong configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specrl.config.text import check_text

StageName = Literal["prepare", "pretrain", "calibrate", "train", "validate", "export", "bench"]
"""What a job of a run can be: one of `STAGES`, or `bench`, a benchmark of the finished run."""
STAGES: tuple[StageName, ...] = ("prepare", "pretrain", "calibrate", "train", "validate", "export")
"""The stages in the order in which a run takes them."""

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
"""A number above 0 and at most 1."""


@dataclass(frozen=True)
class Mark:
    """Marks a field that a run may change while it goes on."""


T = TypeVar("T")
Adjustable = Annotated[T, Mark()]
"""A field that a run may change while it goes on: training continues from its checkpoint with the new value, and what
earlier stages made stays. A change of another field that they or training read makes training start over."""


class ConfigError(ValueError):
    """A configuration cannot run; the message has one line for each problem, with the key and what is allowed."""


class Section(BaseModel):
    """A frozen section of the configuration, which refuses unknown keys; a docstring below a field describes it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _is_plain_text(cls, data: Any) -> Any:
        check_text(cls, data)
        return data
