"""Algorithms chosen by name: a registry for each kind, and the value by which a configuration chooses a function.

Functions register themselves, each with a model of its options, where they are defined (`specrl/algorithms`). A
registry imports that module by its name when it is first asked for a function, so this package imports none of them.
The functions that come with specrl do not import torch before they are called, because configurations are validated on
login nodes without torch. A user's own function is named by an import path; it is imported when a configuration file is
read and when a stage uses it, but not when a run's stored configuration is merely displayed.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo, model_serializer

from specrl.config.base import Section, import_function
from specrl.config.errors import explain

Function = TypeVar("Function", bound=Callable[..., Any])

IMPORT_OWN = "import own functions"
"""The key of pydantic's validation context for whether functions given by import path are imported and checked."""


class Options(Section):
    """The options of an algorithm. A subclass declares each as a field with a default and a docstring."""


class Algorithm(BaseModel):
    """A function chosen by name, with all its options. In TOML: the name alone, or a table of `name` and options."""

    model_config = ConfigDict(frozen=True)

    name: str
    """The name under which the function is registered, or an import path `package.module:function`."""
    options: dict[str, Any]
    """The value of every option, by name."""

    @model_serializer
    def _as_in_toml(self) -> dict[str, Any]:
        return {"name": self.name, **self.options}

    def __str__(self) -> str:
        options = ", ".join(f"{key} = {json.dumps(value)}" for key, value in self.options.items())
        return f"{self.name} ({options})" if options else self.name


@dataclass(frozen=True)
class Registered:
    function: Callable[..., Any]
    options: type[Options]
    metrics: tuple[str, ...] | None
    """The names of all metrics that it returns; None if unknown."""
    of_parts: bool
    """Whether it takes the parts of rewards and their weights instead of rewards."""


class Registry:
    """The functions of one kind, by name."""

    def __init__(self, key: str, home: str, default: str) -> None:
        """Make an empty registry for a key such as `train.loss`; to import `home` registers specrl's own functions."""
        self.key = key
        self._home = home
        self._default = default
        self._by_name: dict[str, Registered] = {}

    def register(
        self,
        name: str,
        options: type[Options] = Options,
        metrics: tuple[str, ...] | None = None,
        *,
        of_parts: bool = False,
    ) -> Callable[[Function], Function]:
        """Decorator that registers a function, which is called with its options as the last argument.

        Args:
            metrics: The names of all metrics that the function returns; None if it does not say.
            of_parts: See `Registered.of_parts`.

        Raises:
            ValueError: Another function is registered under the name.
        """

        def decorate(function: Function) -> Function:
            other = self._by_name.get(name)
            if other is not None and _place(other.function) != _place(function):
                raise ValueError(f"{self.key}: {_place(other.function)} is already registered as {name!r}")
            self._by_name[name] = Registered(function, options, metrics, of_parts)
            return function

        return decorate

    def default(self) -> Algorithm:
        return self.choose(self._default)

    def choose(self, value: Any, *, import_own: bool = False) -> Algorithm:
        """Resolve a name, or a table of `name` and options, to a function with checked and completed options.

        Without `import_own`, a function given by import path is not imported, and its options stay as given.
        """
        if isinstance(value, Algorithm):
            value = {"name": value.name, **value.options}
        given = {"name": value} if isinstance(value, str) else value
        if not isinstance(given, dict) or not isinstance(given.get("name", ""), str):
            raise ValueError(
                f"{self.key} = {value!r}: allowed: {self._allowed()}, or a table with its name and options"
            )
        name = given.get("name", self._default)
        options = {key: option for key, option in given.items() if key != "name"}
        if ":" in name and not import_own:
            return Algorithm(name=name, options=options)
        return Algorithm(name=name, options=self._options(name, options).model_dump(mode="json"))

    def validate(self, value: Any, info: ValidationInfo) -> Algorithm:
        """`choose` as a pydantic validator."""
        return self.choose(value, import_own=bool(info.context and info.context.get(IMPORT_OWN)))

    def function(self, algorithm: Algorithm) -> Callable[..., Any]:
        """The chosen function with its options bound."""
        found, options = self.find(algorithm.name), self._options(algorithm.name, algorithm.options)
        return lambda *arguments: found.function(*arguments, options)

    def _options(self, name: str, values: dict[str, Any]) -> Options:
        model = self.find(name).options
        try:
            return model.model_validate(values)
        except ValidationError as error:
            raise ValueError(explain(error, model, tuple(self.key.split(".")))) from None

    def find(self, name: str) -> Registered:
        """The entry for a name or an import path; a ValueError if there is none."""
        if ":" in name:
            function = import_function(self.key, name)
            for registered in self._by_name.values():
                if registered.function is function:
                    return registered
            raise ValueError(
                f'{self.key} = "{name}": the function is not registered for this key; CONTRIBUTING.md shows how'
            )
        importlib.import_module(self._home)
        if name not in self._by_name:
            raise ValueError(f'{self.key} = "{name}": allowed: {self._allowed()}')
        return self._by_name[name]

    def _allowed(self) -> str:
        importlib.import_module(self._home)
        return ", ".join(self._by_name) + ", or an import path package.module:function"


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


LOSSES = Registry("train.loss", home="specrl.algorithms.losses", default="grpo")
"""The policy losses."""
ADVANTAGES = Registry("train.advantage", home="specrl.algorithms.advantages", default="grpo")
"""The advantage estimators."""
CORRECTIONS = Registry("train.correction", home="specrl.algorithms.corrections", default="tis")
"""The corrections for differences between the engine and the trainer."""
DRAFT_LOSSES = Registry("drafter.loss", home="specrl.algorithms.draft_losses", default="cross_entropy")
"""The losses of the drafter."""

PRESETS: dict[str, dict[str, Any]] = {
    "dapo": {
        "loss": {"name": "grpo", "clip_low": 0.2, "clip_high": 0.28},
        "loss_mean": "token",
        "refill_rounds": 9,
        "overlong_filter": True,
        "overlong_window": 0.2,
    },
    "dr-grpo": {"advantage": {"name": "grpo", "normalize_by_std": False}, "loss_mean": "constant"},
    "gspo": {"loss": "gspo", "loss_mean": "response"},
    "cispo": {"loss": "cispo"},
    "rloo": {"advantage": "rloo", "loss_mean": "constant"},
    "reinforce++": {"advantage": "reinforce++"},
    "gdpo": {"advantage": "gdpo"},
}
"""What `train.algorithm` stands for: DAPO (arXiv 2503.14476), Dr. GRPO (2503.20783), GSPO (2507.18071), CISPO
(2506.13585), RLOO (2402.14740), REINFORCE++ with the group's mean as baseline (2501.03262), GDPO (2601.05242)."""


def expand_preset(settings: dict[str, Any]) -> dict[str, Any]:
    """Replace `algorithm` by the settings of `[train]` that it stands for."""
    name = settings.get("algorithm")
    if name is None:
        return settings
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if preset is None:
        raise ValueError(f"train.algorithm = {json.dumps(name)}: allowed: {', '.join(PRESETS)}")
    if both := sorted(preset.keys() & settings.keys()):
        words = ", ".join(f"train.{key}" for key in both)
        raise ValueError(f'train.algorithm = "{name}" sets {words}, too: leave it out, and give all of {preset}')
    return {key: value for key, value in settings.items() if key != "algorithm"} | preset


Loss = Annotated[Algorithm, BeforeValidator(LOSSES.validate)]
Advantage = Annotated[Algorithm, BeforeValidator(ADVANTAGES.validate)]
Correction = Annotated[Algorithm, BeforeValidator(CORRECTIONS.validate)]
DraftLoss = Annotated[Algorithm, BeforeValidator(DRAFT_LOSSES.validate)]
