"""The trainings of `specrl bench run`: what each changes, and its configuration. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from specrl.config import Config, ConfigError, change_config, parse_config
from specrl.keys import SECTIONS
from specrl.lineage.revision import config_changes

SECTIONS_OF_TRAINING = (*SECTIONS["train"], "validate", "resources", "stage_resources")
"""The sections that a training may vary; all cells share the earlier stages of the finished run."""
SEED = "seed"
BRACKETS = {"[": 1, "{": 1, "]": -1, "}": -1}


@dataclass(frozen=True)
class Cell:
    """A training, defined by what it changes in the run's configuration."""

    name: str  # without the seed
    changes: tuple[str, ...]  # `KEY=VALUE` each

    @property
    def values(self) -> dict[str, str]:
        return {key.strip(): value.strip() for key, _, value in (change.partition("=") for change in self.changes)}

    @property
    def seed(self) -> str:
        """Empty for the run's own seed; another seed makes the training a repetition of its cell."""
        return self.values.get(SEED, "")

    @property
    def label(self) -> str:
        return f"{self.name} seed={self.seed}" if self.seed else self.name


def parse_cells(vary: Sequence[str], bundles: Sequence[str]) -> tuple[Cell, ...]:
    """Combine every bundle (`NAME: KEY=V, KEY=V`) with every value of each varied key (`KEY=A,B`)."""
    named = [_bundle(text) for text in bundles] or [("", ())]
    combinations = list(product(*map(_axis, vary)))
    cells: list[Cell] = []
    for (name, changes), values in product(named, combinations):
        words = [name, *(change for change in values if not change.startswith(f"{SEED}="))]
        cells.append(Cell(" ".join(word for word in words if word) or "as configured", (*changes, *values)))
    for number, cell in enumerate(cells):
        if cell.label in {other.label for other in cells[:number]}:
            raise ConfigError(f"bench run: two cells are called {cell.label!r}; give each --cell another name")
    return tuple(cells)


def _bundle(text: str) -> tuple[str, tuple[str, ...]]:
    name, separator, changes = text.partition(":")
    parts = [part for part in split(changes) if part]
    if not separator or not name.strip() or not all("=" in part for part in parts):
        raise ConfigError(f"--cell {text!r}: expected 'NAME: KEY=VALUE, KEY=VALUE', such as 'k1: speculation.k=1'")
    return name.strip(), tuple(parts)


def _axis(text: str) -> list[str]:
    key, separator, values = text.partition("=")
    parts = split(values)
    if not separator or not key.strip() or not all(parts):
        raise ConfigError(f"--vary {text!r}: expected KEY=A,B,..., such as speculation.k=1,3,5")
    return [f"{key.strip()}={part}" for part in parts]


def split(text: str) -> list[str]:
    """Split at commas outside quotes and brackets."""
    parts, depth, quoted = [""], 0, False
    for letter in text:
        quoted ^= letter == '"'
        depth += 0 if quoted else BRACKETS.get(letter, 0)
        if letter == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def config_of(
    config: Config, cell: Cell, steps: int, validate_every: int, sharers: int = 1, given: Sequence[str] = ()
) -> Config:
    """Make the configuration of a cell's training; `sharers` trainings share each GPU.

    A preset in the cell must not override the changes `given` for all cells, which `config` already includes.
    One step more is configured than is taken, because the last step of a run writes a checkpoint.
    """
    for key in cell.values:
        if key.split(".")[0] not in SECTIONS_OF_TRAINING:
            allowed = ", ".join(dict.fromkeys(SECTIONS_OF_TRAINING))
            raise ConfigError(f"{key}: bench run varies what trainings read; sections that are allowed: {allowed}")
    asked = change_config(config, [*given, *cell.changes])
    if asked.resources_of("train").nodes > 1:
        raise ConfigError("bench run trains on one node: add --set stage_resources.train.nodes=1 (and ranks_per_node)")
    if validate_every and steps % validate_every:
        raise ConfigError(
            f"--validate-every {validate_every} with {steps} steps (--warm-up and --steps): the policy after the last "
            "step would not be measured; take a divisor of them, or 0"
        )
    data = asked.settings
    data["train"] |= {"num_steps": steps + 1, "checkpoint_every": steps + 1, "keep_checkpoints": 1}
    data["train"] |= {"best_metric": None, "final": "last", "stop_when": None}
    data["validate"]["every"] = validate_every or steps
    if asked.resources_of("train").gpus_per_rank:
        data["engine"]["gpu_memory_fraction"] /= sharers
    made = parse_config(data)
    for change in config_changes(asked, made):
        if change.key in cell.values and not change.key.startswith("engine."):
            raise ConfigError(f"{change.key}: bench run sets it itself; see its --steps, --warm-up, --validate-every")
    return made


def speedups(rows: Sequence[Mapping[str, Any]], cells: Sequence[Cell], config: Config) -> dict[str, float]:
    """The run's speedups by metric: its own configuration over plain decoding, if both were measured."""
    baseline = change_config(config, list(cells[0].changes))
    own = {cell.name for cell in cells[1:] if cell.values.keys() <= {SEED}}
    found = next((row for row in rows if row["cell"] in own and "step_ratio" in row), None)
    if found is None or baseline.speculation.draft_method.drafts or baseline.bubbles.use != "none":
        return {}
    return {f"speedup/{name}": found[f"{name}_ratio"] for name in ("generation", "step", "end_to_end")}
