"""What a change of settings or code means for each stage of a run: what stays, what goes on and what is redone.

A stage that has finished stays, unless a setting that it read has changed and is not `Adjustable`, or a stage that it
reads is redone. Training continues from its newest checkpoint under a new key, and nothing that has another key is
touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from specrl.artifacts import RESULT_FILE
from specrl.config import STAGES, Config, ConfigError, StageName
from specrl.keys import INPUTS, SECTIONS, stage_key
from specrl.lineage.changes import Change
from specrl.lineage.record import Continuation, RunRecord, newest_whole_step

Action = Literal["stays", "goes on", "continues", "starts over", "is redone", "runs"]
SOURCE_KEYS = ("model.source", "model.tiny", "drafter.source")
"""Settings that only `prepare` reads."""


@dataclass(frozen=True)
class StagePlan:
    stage: StageName
    key: str
    action: Action
    reason: str


@dataclass(frozen=True)
class Revision:
    """A change of a run: its new record, and what becomes of each stage."""

    record: RunRecord
    stages: tuple[StagePlan, ...]
    changes: tuple[Change, ...]
    """The settings that change, and the files that have changed."""
    new_code: bool
    trained: tuple[Change, ...]
    """Those of the changes that training reads."""
    previous: str
    """The key of the train stage before the change."""

    @property
    def continued(self) -> Continuation | None:
        """The checkpoint of this run's earlier train stage from which the new one goes on."""
        plan = self.stages[STAGES.index("train")]
        return self.record.continues if plan.action == "continues" else None

    @property
    def events(self) -> list[tuple[str, str]]:
        """The kind and the text of an event for each change that training reads."""
        settings = [("settings", str(change)) for change in self.trained]
        return [*settings, *([("code", f"code {self.record.code}")] if self.new_code else [])]


@dataclass
class Reviser:
    """Decides stage by stage what a change means; `revise` describes the fields."""

    run_dir: Path
    record: RunRecord
    """The record before the change."""
    old: Config
    new: Config
    changes: Sequence[Change]
    stage_code: str
    new_code: bool
    restart: bool
    keys: dict[StageName, str] = field(default_factory=dict)
    continues: Continuation | None = None

    def plan(self, stage: StageName) -> StagePlan:
        """Decide about a stage, after those that it reads, and set its key."""
        relevant = self.relevant(stage)
        finished = (self.folder(stage) / RESULT_FILE).exists()
        before_train = STAGES.index(stage) < STAGES.index("train")
        if finished and before_train:
            relevant = [change for change in relevant if not change.adjustable]
        redone = [name for name in INPUTS[stage] if self.keys[name] != self.record.stage_keys[name]]
        lost = stage == "train" and not finished and self._start_is_lost()
        if not redone and not relevant and not lost and (finished or not self.new_code):
            self.keys[stage] = self.record.stage_keys[stage]
            if stage == "train":
                self.continues = self.record.continues
            return self._plan(stage, "stays" if finished else "goes on", "finished" if finished else "not finished yet")
        if stage == "train":
            return self._plan_train(redone, relevant)
        self.keys[stage] = self._new_key(stage)
        if not finished:
            return self._plan(stage, "runs", "not finished yet")
        because = [*(str(change) for change in relevant), *(f"{name} changes" for name in redone)]
        return self._plan(stage, "is redone", "; ".join(because))

    def relevant(self, stage: StageName) -> list[Change]:
        """The changes that a stage reads itself."""
        found = [change for change in self.changes if _reaches(stage, change)]
        before, after = (
            stage_key(config, stage, {name: name for name in INPUTS[stage]}, "") for config in (self.old, self.new)
        )
        return found if before != after else [change for change in found if change.is_file]

    def _plan_train(self, redone: list[StageName], relevant: list[Change]) -> StagePlan:
        start = self._newest_checkpoint()
        if start is None:
            return self._plan_first_step()
        unmarked = [change for change in relevant if not change.adjustable]
        if not (redone or unmarked):
            self._check_steps(start)
            self.continues = start
            self.keys["train"] = self._new_key("train")
            return self._plan("train", "continues", f"from step {start.step} of {start.key}")
        because = "; ".join([f"{change.key} changes" for change in unmarked] + [f"{name} is redone" for name in redone])
        if not self.restart:
            raise ConfigError(
                f"train of {self.run_dir.name} would start over, without the {start.step} steps of {start.key}: "
                f"{because}; only the settings that specrl resume --help lists may change while a run goes on. Add "
                "--restart to start over (those steps stay on disk), or start another run: --set name=NAME"
            )
        return self._start_over("starts over", f"{because}; the {start.step} steps of {start.key} stay on disk")

    def _start_over(self, action: Action, reason: str) -> StagePlan:
        self.continues = self.record.origin
        self.keys["train"] = self._new_key("train")
        return self._plan("train", action, reason)

    def _plan_first_step(self) -> StagePlan:
        made = self._steps_made()
        if made and not self.restart:
            raise ConfigError(
                f"train of {self.run_dir.name} has made {made} steps, but has no checkpoint left and would start over: "
                "add --restart"
            )
        if made:
            return self._start_over("starts over", f"no checkpoint is left of its {made} steps")
        return self._start_over("runs", "no checkpoint yet")

    def _newest_checkpoint(self) -> Continuation | None:
        """The newest whole checkpoint of the train stage or, where it has none, of the stage that it continues."""
        old, step = self.record.stage_keys["train"], newest_whole_step(self.folder("train"))
        if step is not None:
            return Continuation(
                run=self.run_dir.name,
                key=old,
                step=step,
                stage_dir=Path("stages") / old,
                counts_on=True,
                num_prompts=self._num_prompts(step),
            )
        start = self.record.continues
        if start is None or not start.counts_on:
            return None
        step = newest_whole_step(start.in_run(self.run_dir).stage_dir, start.step)
        if step is None:
            return None
        if step == start.step:
            return start
        num_prompts = start.num_prompts * step // start.step  # its steps are taken to have had equally many
        return start.model_copy(update={"step": step, "num_prompts": num_prompts})

    def _start_is_lost(self) -> bool:
        start = self.record.continues
        if start is None or not start.counts_on or newest_whole_step(self.folder("train")) is not None:
            return False
        return newest_whole_step(start.in_run(self.run_dir).stage_dir, start.step) != start.step

    def _steps_made(self) -> int:
        records = (self.folder("train") / "steps").glob("step=*.json")
        start = self.record.continues
        before = start.step if start is not None and start.counts_on else 0
        return max([before, *(int(path.stem.partition("=")[2]) + 1 for path in records)])

    def _num_prompts(self, step: int) -> int:
        start = self.record.continues
        begun, before = (start.step, start.num_prompts) if start is not None and start.counts_on else (0, 0)
        return before + (step - begun) * self.old.train.prompts_per_step

    def _check_steps(self, start: Continuation) -> None:
        steps = self.new.train.num_steps
        if steps < start.step:
            raise ConfigError(
                f"train.num_steps = {steps}: the run has already made {start.step} steps; allowed: {start.step} or more"
            )

    def _new_key(self, stage: StageName) -> str:
        inputs = {name: self.keys[name] for name in INPUTS[stage]}
        start = self.continues if stage == "train" else self.record.origin if stage == "prepare" else None
        return stage_key(self.new, stage, inputs, self.stage_code, start and start.content)

    def _plan(self, stage: StageName, action: Action, reason: str) -> StagePlan:
        return StagePlan(stage, self.keys[stage], action, reason)

    def folder(self, stage: StageName) -> Path:
        return self.run_dir / "stages" / self.record.stage_keys[stage]


def revise(
    run_dir: Path,
    old: RunRecord,
    record: RunRecord,
    configs: tuple[Config, Config],
    changes: Sequence[Change],
    *,
    stage_code: str,
    new_code: bool,
    restart: bool,
) -> Revision:
    """What a change means for every stage, or a ConfigError.

    `record` is the one after the change, still with the keys and the continuation of before; `stage_code` is the
    `code_digest` of the sources that new jobs will run.
    """
    reviser = Reviser(run_dir, old, *configs, changes, stage_code, new_code, restart)
    stages = tuple(reviser.plan(stage) for stage in STAGES)
    update = {"stage_keys": reviser.keys, "continues": reviser.continues}
    return Revision(
        record=record.model_copy(update=update),
        stages=stages,
        changes=tuple(changes),
        new_code=new_code,
        trained=tuple(reviser.relevant("train")),
        previous=old.stage_keys["train"],
    )


def _reaches(stage: StageName, change: Change) -> bool:
    if change.key.startswith(SOURCE_KEYS):
        return stage == "prepare"
    if stage == "prepare" and change.key == "speculation.method":
        return True  # only some methods take the drafter of `drafter.source`, which `prepare` writes
    if stage == "train" and change.section == "validate":
        return change.adjustable  # the settings of validation during training
    return change.section in SECTIONS[stage]
