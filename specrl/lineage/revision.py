"""Changes of a run: how two configurations differ, and whether each stage stays, continues or is redone.

A finished stage stays unless a setting that it read has changed and is not `Adjustable`, or a stage that it reads is
redone. Training continues from its newest checkpoint under a new key; results under other keys are not touched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specrl.artifacts import RESULT_FILE
from specrl.config import STAGES, Config, ConfigError, StageName
from specrl.config.base import ADJUSTABLE, Section
from specrl.config.methods import METHODS
from specrl.keys import INPUTS, flat_settings, named_files, reads, stage_key
from specrl.lifetime.segments import last_recorded_step
from specrl.lineage.record import Continuation, RunRecord, newest_whole_step

IDENTITY = ("name", "runs_dir")  # a run stays the same if its folder is moved or renamed


@dataclass(frozen=True)
class Change:
    """A configuration key with its old and new values."""

    key: str
    old: Any
    new: Any

    @property
    def is_file(self) -> bool:
        """Whether the key still names the same file, with changed contents."""
        return bool(self.old == self.new)

    def __str__(self) -> str:
        if self.is_file:
            return f"{self.key} = {_words(self.new)} names a file that has changed"
        return f"{self.key} = {_words(self.old)} -> {_words(self.new)}"

    @property
    def adjustable(self) -> bool:
        """Whether it may change during a run."""
        if self.key == "speculation.method" and not self.is_file:
            new = METHODS[self.new]  # training a drafter requires that it was pretrained
            return not new.has_weights or new.same_model(METHODS[self.old])
        return any(f"{self.key}.".startswith(f"{key}.") for key in adjustable_keys())


def config_changes(old: Config, new: Config) -> list[Change]:
    """The differences between two configurations, ordered by key."""
    before, after = (dict(flat_settings(config)) for config in (old, new))
    keys = [key for key in {**before, **after} if key not in IDENTITY]
    return [Change(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]


def file_changes(old: Mapping[str, str], new: Mapping[str, str], config: Config) -> list[Change]:
    """The keys that still name the same file with changed contents, from two results of `keys.named_files`."""
    values = dict(flat_settings(config))
    edited = [key for key in old if key in new and old[key] != new[key]]
    shown = {key: values.get(key, values.get(f"{key}.name")) for key in edited}
    return [Change(key, value, value) for key, value in shown.items()]


def adjustable_keys(kind: type[Section] = Config, prefix: str = "") -> list[str]:
    """All keys marked as `Adjustable`, in order of definition."""
    found: list[str] = []
    for name, info in kind.model_fields.items():
        key = f"{prefix}{info.alias or name}"
        if ADJUSTABLE in info.metadata:
            found.append(key)
        elif isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            found += adjustable_keys(info.annotation, f"{key}.")
    return found


def _words(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


Action = Literal["stays", "goes on", "continues", "starts over", "is redone", "runs"]


@dataclass(frozen=True)
class StagePlan:
    stage: StageName
    key: str
    action: Action
    reason: str


@dataclass
class Revision:
    """A change of a run: the fate of each stage, and the run's new record; a ConfigError if it is not allowed."""

    run_dir: Path
    before: RunRecord  # after the change, but with the previous keys and continuation
    old: Config
    new: Config
    changes: Sequence[Change]
    stage_code: str  # the `code_digest` of new jobs
    new_code: bool
    restart: bool

    def __post_init__(self) -> None:
        start = self.before.continues
        self._start = start if start is not None and start.counts_on else None
        self._keys: dict[StageName, str] = {}
        self._continues: Continuation | None = None
        self._configs = [(config, named_files(config)) for config in (self.old, self.new)]
        self.stages = [self._plan(stage) for stage in STAGES]
        self.record = self.before.model_copy(update={"stage_keys": self._keys, "continues": self._continues})

    @property
    def previous(self) -> str:
        """The key of the train stage before the change."""
        return self.before.stage_keys["train"]

    @property
    def continued(self) -> Continuation | None:
        """The checkpoint of this run's earlier train stage that the new one continues."""
        return self._continues if self.stages[STAGES.index("train")].action == "continues" else None

    @property
    def events(self) -> list[tuple[str, str]]:
        """The kind and text of an event for each change that affects training."""
        settings = [("settings", str(change)) for change in self._relevant("train")]
        return [*settings, *([("code", f"code {self.record.code}")] if self.new_code else [])]

    def _plan(self, stage: StageName) -> StagePlan:
        """Decide the fate of a stage, after those that it reads, and set its key."""
        action, reason = self._decide(stage)
        if stage not in self._keys:
            inputs = {name: self._keys[name] for name in INPUTS[stage]}
            start = self._continues if stage == "train" else self.before.origin if stage == "prepare" else None
            self._keys[stage] = stage_key(*self._configs[1], stage, inputs, self.stage_code, start and start.content)
        return StagePlan(stage, self._keys[stage], action, reason)

    def _decide(self, stage: StageName) -> tuple[Action, str]:
        relevant = self._relevant(stage)
        finished = (self._folder(stage) / RESULT_FILE).exists()
        if finished and STAGES.index(stage) < STAGES.index("train"):
            relevant = [change for change in relevant if not change.adjustable]
        redone = [name for name in INPUTS[stage] if self._keys[name] != self.before.stage_keys[name]]
        lost = stage == "train" and not finished and self._start_is_lost()
        if not redone and not relevant and not lost and (finished or not self.new_code):
            self._keys[stage] = self.before.stage_keys[stage]
            if stage == "train":
                self._continues = self.before.continues
            return ("stays", "finished") if finished else ("goes on", "not finished yet")
        if stage == "train":
            return self._decide_train(redone, relevant)
        if not finished:
            return "runs", "not finished yet"
        return "is redone", "; ".join([*map(str, relevant), *(f"{name} changes" for name in redone)])

    def _relevant(self, stage: StageName) -> list[Change]:
        """The changes that a stage reads itself."""
        # Only some methods use the drafter of `drafter.source`, which `prepare` writes.
        also = "speculation.method" if stage == "prepare" else ""
        found = [
            change
            for change in self.changes
            if change.key == also or any(reads(config, stage, change.key) for config, _ in self._configs)
        ]
        inputs: dict[StageName, str] = {name: name for name in INPUTS[stage]}
        before, after = (stage_key(*config, stage, inputs, "") for config in self._configs)
        return found if before != after else [change for change in found if change.is_file]

    def _decide_train(self, redone: list[StageName], relevant: list[Change]) -> tuple[Action, str]:
        start = self._newest_checkpoint()
        if start is None:
            return self._decide_first_step()
        unmarked = [change for change in relevant if not change.adjustable]
        if not (redone or unmarked):
            if (steps := self.new.train.num_steps) < start.step:
                raise ConfigError(
                    f"train.num_steps = {steps}: the run has already made {start.step} steps; allowed: {start.step} or "
                    "more"
                )
            self._continues = start
            return "continues", f"from step {start.step} of {start.key}"
        because = "; ".join([f"{change.key} changes" for change in unmarked] + [f"{name} is redone" for name in redone])
        if not self.restart:
            raise ConfigError(
                f"train of {self.run_dir.name} would start over, without the {start.step} steps of {start.key}: "
                f"{because}; only the settings that specrl resume --help lists may change while a run goes on. Add "
                "--restart to start over (those steps stay on disk), or start another run: --set name=NAME"
            )
        self._continues = self.before.origin
        return "starts over", f"{because}; the {start.step} steps of {start.key} stay on disk"

    def _decide_first_step(self) -> tuple[Action, str]:
        last = last_recorded_step(self._folder("train"))
        made = max(self._start.step if self._start else 0, 0 if last is None else last + 1)
        if made and not self.restart:
            raise ConfigError(
                f"train of {self.run_dir.name} has made {made} steps, but has no checkpoint left and would start "
                "over: add --restart"
            )
        self._continues = self.before.origin
        return ("starts over", f"no checkpoint is left of its {made} steps") if made else ("runs", "no checkpoint yet")

    def _newest_checkpoint(self) -> Continuation | None:
        """The newest complete checkpoint of the train stage or, failing that, of the stage that it continues."""
        start, step = self._start, newest_whole_step(self._folder("train"))
        if step is not None:
            begun, before = (start.step, start.num_prompts) if start is not None else (0, 0)
            return Continuation(
                run=self.run_dir.name,
                key=self._folder("train").name,
                step=step,
                stage_dir=Path("stages") / self._folder("train").name,
                counts_on=True,
                num_prompts=before + (step - begun) * self.old.train.prompts_per_step,
            )
        step = None if start is None else newest_whole_step(start.in_run(self.run_dir).stage_dir, start.step)
        if start is None or step is None or step == start.step:
            return None if step is None else start
        num_prompts = start.num_prompts * step // start.step  # assumes equally many per step
        return start.model_copy(update={"step": step, "num_prompts": num_prompts})

    def _start_is_lost(self) -> bool:
        start, newest = self._start, self._newest_checkpoint()
        return start is not None and newest != start and (newest is None or newest.key == start.key)

    def _folder(self, stage: StageName) -> Path:
        return self.run_dir / "stages" / self.before.stage_keys[stage]
