"""What the formats of an export are made from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrl.models.directory import CONFIG_FILE


@dataclass(frozen=True)
class ExportedDrafter:
    """The drafter of a run, as its last stage exports it."""

    directory: Path
    policy_dir: Path
    policy: str
    """The directory or hub id of the policy, as the serving side will name it."""
    k: int
    """The number of draft tokens per iteration that is recommended."""

    @property
    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / CONFIG_FILE).read_text())
        return found

    @property
    def policy_config(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.policy_dir / CONFIG_FILE).read_text())
        return found
