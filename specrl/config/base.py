"""The base class of all sections, the number types, the stages, import paths, and the error of a configuration."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

StageName = Literal["prepare", "pretrain", "calibrate", "train", "validate", "export", "bench", "flow"]
"""The kinds of jobs: one of `STAGES`, `bench` (a benchmark of the finished run), or `flow` (the run's flow)."""
STAGES: tuple[StageName, ...] = ("prepare", "pretrain", "calibrate", "train", "validate", "export")
"""The stages in the order in which they run."""
TRAINER_STAGES: tuple[StageName, ...] = ("prepare", "pretrain", "calibrate", "train")
ENGINE_STAGES: tuple[StageName, ...] = ("pretrain", "train", "validate", "export")
"""Stages in which Megatron holds the policy (`prepare` only for a warm start), and stages with an engine."""


PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
"""A number above 0 and at most 1."""


ADJUSTABLE = "adjustable"
T = TypeVar("T")
Adjustable = Annotated[T, ADJUSTABLE]
"""A field that may change during a run: training continues from its checkpoint with the new value, and the results of
earlier stages stay. A change of another field that a stage reads makes training start over."""


class ConfigError(ValueError):
    """The configuration cannot run; the message has one line per problem, with the key and what is allowed."""


@contextmanager
def prefixed(words: str) -> Iterator[None]:
    """Put words, such as a key, before the message of a ConfigError that is raised within the block."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{words}{error}") from error


class Section(BaseModel):
    """A frozen section of the configuration that refuses unknown keys; docstrings below fields describe them."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and {*(get_args(annotation) or (annotation,))} <= {int, float, NoneType}:
            raise ValueError(f"{str(value).lower()} is a switch; allowed: a number")  # Python treats it as 1 or 0
        return value


def import_function(key: str, path: str) -> Any:
    """Import `package.module:function`, the value of `key`, from the current folder or `sys.path`."""
    module_name, _, name = path.partition(":")
    if not module_name or not name.isidentifier():
        raise ConfigError(f'{key} = "{path}": an import path has the form package.module:function')
    if (file := Path(module_name)).suffix == ".py" or "/" in module_name:
        module = file.stem if file.is_absolute() else ".".join(file.with_suffix("").parts)
        raise ConfigError(f'{key} = "{path}": name the module, not its file: "{module}:{name}", from PYTHONPATH')
    if str(Path.cwd()) not in sys.path:
        # Users keep functions in the current folder, which console scripts do not search. It comes last, as in a job: a
        # file there must not shadow a package.
        sys.path.append(str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way while it is imported
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            reason += f"; it is looked for in the folder {Path.cwd()} and on PYTHONPATH"
            if (known := sys.modules.get(module_name.partition(".")[0])) is not None:  # such as specrl's own tasks
                reason += f", and {known.__name__} is {getattr(known, '__file__', None) or 'Python itself'}"
        elif (found := sys.modules.get(module_name)) and isinstance(error, AttributeError) and error.obj is found:
            reason += f"; it was imported from {getattr(found, '__file__', None) or 'Python itself'}"
        raise ConfigError(f'{key} = "{path}" cannot be imported: {reason}') from error
