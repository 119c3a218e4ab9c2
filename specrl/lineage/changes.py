"""Differences between two configurations of a run, and which of them training may go on with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specrl.config import Config, dump_config
from specrl.config.base import Mark, Section
from specrl.config.methods import METHODS

IDENTITY = ("name", "runs_dir")
"""The keys that say where a run lies. A folder that is moved or renamed is still the same run."""


@dataclass(frozen=True)
class Change:
    """A key of the configuration with its values before and after."""

    key: str
    old: Any
    new: Any

    @property
    def section(self) -> str:
        return self.key.partition(".")[0]

    @property
    def is_file(self) -> bool:
        """Whether the key names the same file as before, whose contents have changed."""
        return bool(self.old == self.new)

    def __str__(self) -> str:
        if self.is_file:
            return f"{self.key} = {_words(self.new)} names a file that has changed"
        return f"{self.key} = {_words(self.old)} -> {_words(self.new)}"

    @property
    def adjustable(self) -> bool:
        """Whether a run may change it while it goes on."""
        if self.key == "speculation.method" and not self.is_file:
            new = METHODS[self.new]  # a drafter that is trained must have been pretrained
            return not new.has_weights or new.same_model(METHODS[self.old])
        return is_adjustable(self.key)


def config_changes(old: Config, new: Config) -> list[Change]:
    """The differences between two configurations, in the order of their keys."""
    before, after = (dict(_flat(json.loads(dump_config(config)))) for config in (old, new))
    keys = [key for key in {**before, **after} if key not in IDENTITY]
    return [Change(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]


def file_changes(old: Mapping[str, str], new: Mapping[str, str], config: Config) -> list[Change]:
    """The keys that name the same file as before, whose contents have changed, by what `keys.named_files` returned."""
    values = dict(_flat(json.loads(dump_config(config))))
    edited = [key for key in old if key in new and old[key] != new[key]]
    shown = {key: values.get(key, values.get(f"{key}.name")) for key in edited}
    return [Change(key, value, value) for key, value in shown.items()]


def is_adjustable(key: str) -> bool:
    """Whether a key, or a table that it lies in, is marked as `Adjustable`."""
    kind: Any = Config
    for part in key.split("."):
        if not (isinstance(kind, type) and issubclass(kind, Section)):
            return False
        fields = {field.alias or name: field for name, field in kind.model_fields.items()}
        field = fields[part]
        if any(isinstance(item, Mark) for item in field.metadata):
            return True
        kind = field.annotation
    return False


def adjustable_keys(kind: type[Section] = Config, prefix: str = "") -> list[str]:
    """All keys that are marked as `Adjustable`, in the order of their definition."""
    found: list[str] = []
    for name, field in kind.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        if any(isinstance(item, Mark) for item in field.metadata):
            found.append(key)
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found += adjustable_keys(field.annotation, f"{key}.")
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _words(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
