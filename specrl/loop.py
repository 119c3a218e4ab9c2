"""The RL loop: synchronous GRPO whose rollouts are speculative and exact.

Read `Trainer.step` from top to bottom: that is a step. Everything in it is collective over the ranks of the train
stage; each rank holds an engine, its shard of the policy, and the drafter.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NoReturn

from specrl import logs
from specrl.config import Config
from specrl.data.rewards.pool import RewardPool
from specrl.distributed import Ranks
from specrl.events import SIGNAL, record_event
from specrl.lifetime import RECENT_STEPS, LeftJobError, Lifetime, Stop
from specrl.lineage.record import Continuation
from specrl.precision.recipe import KvScales
from specrl.progress import Progress
from specrl.rollout.bubbles.generator import RolloutGenerator
from specrl.rollout.engine import Engine
from specrl.rollout.refit.load import Refit
from specrl.schemas import Rollout
from specrl.step_record import StepRecord, StepRecorder, step_metrics
from specrl.timeline import Timer
from specrl.training.checkpoint.checkpoints import Checkpoints
from specrl.training.checkpoint.load import Restored, TrainState, load_newest
from specrl.training.drafter.spot import SpotTraining
from specrl.training.drafter.trainer import Drafter
from specrl.training.features import Features
from specrl.training.megatron.policy import Policy
from specrl.training.rollouts import RolloutBatch
from specrl.training.traces import traced
from specrl.training.update import PolicyUpdate, update_policy
from specrl.validation.precision import PrecisionMonitor
from specrl.validation.stopping import PATIENCE, EarlyStop, lost_signals
from specrl.validation.validation import Validation

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trainer:
    """One rank of the train stage."""

    config: Config
    ranks: Ranks
    engine: Engine
    policy: Policy
    teacher: Policy | None  # the frozen policy of `train.teacher`, which scores the trained rollouts
    drafter: Drafter | None  # None where none is trained
    spot: SpotTraining | None  # trains the drafter while this rank waits; None unless `bubbles.use` asks for it
    rewards: RewardPool | None
    """Computes the rewards; None except on the first rank of each engine."""
    generator: RolloutGenerator
    precision: PrecisionMonitor
    refit: Refit
    validation: Validation
    early_stop: EarlyStop
    recorder: StepRecorder
    checkpoints: Checkpoints
    lifetime: Lifetime
    continues: Continuation | None = None
    """The checkpoint of another stage that this one continues; None if it starts from its inputs alone."""

    def restore(self) -> int:
        """Restore the newest checkpoint, if any, and return the first step to run.

        The checkpoint is this stage's or that of the stage it continues; the output of later steps is dropped.
        """
        with logs.phase("loading of the checkpoint"):
            found = self.checkpoints.restore(self.drafter)
            if found is None and self.continues is not None:
                found = self.start_from(self.continues)
        first_step = 0
        if found is not None:
            first_step = found.state.step
            self.engine.precision.restore(found.state.kv_scales)  # the loop's first refit loads them into the engine
            if self.ranks.is_first:
                for damage in found.damaged:
                    record_event(self.checkpoints.directory.parent, "damaged checkpoint", damage, first_step)
        self.recorder.drop_from(first_step)
        # Without a checkpoint the initial policy is validated again, and checkpointed if it is the best.
        self.validation.restore(first_step if found is not None else -1)
        if (best := self.validation.best()) is not None:
            self.checkpoints.mark_best(best[0])
        self.early_stop.restore(self.validation.measured + self.recorder.measured(self.early_stop.metric))
        self.generator.restore(self.recorder.rollouts_dir, first_step)
        return first_step

    def start_from(self, start: Continuation) -> Restored | None:
        """Load another stage's checkpoint; return its remaining state if step numbering continues from it, else None.

        If numbering continues and the checkpoint is damaged, the newest intact one before it is loaded.
        """
        found = load_newest(start.checkpoint_dirs, self.policy, self.drafter if start.has_drafter else None)
        if start.counts_on:
            return found
        self.policy.renew_reference()  # the policy before RL is the one just loaded
        return None

    def run(self, first_step: int, progress: Progress) -> int:
        """Run the steps from `first_step` on, and return the number of steps the policy has been trained for.

        Raises LeftJobError if the next step does not fit into the remaining time, or the job is asked to end.
        """
        with logs.phase("first refit"):
            self.refit_engine(version=first_step)
        step = first_step
        if self.is_last(step):  # an earlier job ended after the last step
            return step
        traces = self.recorder.steps_dir.parent / "traces"
        self.lifetime.begin_steps(step, *self.recorder.recent_seconds(RECENT_STEPS))
        while not self.is_last(step):
            self.lifetime.saved(self.checkpoints.seconds)
            validates = any(self.validation.is_due(version, last=self.is_last(version)) for version in (step, step + 1))
            if (stop := self.lifetime.at_boundary(self.ranks, step, validates=validates)) is not None:
                self.leave(step, stop)
            with logs.step(step), traced(step, self.config.train.trace_steps, traces, self.ranks.rank):
                self.step(step, progress)
            step += 1
        with logs.phase("writing of the last checkpoint"):
            self.checkpoints.wait()
        self.lifetime.end_steps()
        return step

    def leave(self, step: int, stop: Stop) -> NoReturn:
        """Make sure that another job can continue at this step from a checkpoint, and raise LeftJobError."""
        logger.info("leaving before step %d: %s (%s)", step, stop.reason, stop.text)
        if step not in (self.lifetime.first_step, self.checkpoints.newest):
            self.save(step)
        self.checkpoints.wait()
        raise LeftJobError(stop)

    def step(self, step: int, progress: Progress) -> None:
        """Run one step: rollouts of policy version `step`, then policy, drafter and engine of version `step + 1`."""
        timer = Timer()
        with timer("step"):
            if self.validate(step, timer):  # the policy before training; later ones are validated after their refit
                self.save(step)
            with timer("generation"):
                generated = self.generator.generate(step)
                self.precision.check_engine()
                if self.config.engine.sleep:
                    self.engine.sleep()
            with timer("policy_update"):
                update = self.update_policy(step, generated.rollouts)
                self.precision.check_trainer(update.metrics["num_tokens"])
                kv_scales = self.precision.measure_kv_scales()
            mismatch = self.precision.check_agreement(update.mismatch) | update.routing
            with timer("drafter_update"):
                drafter_metrics = self.update_drafter(update.features)
            with timer("refit"):
                update.features.clear()  # otherwise they would stay in memory together with the next step's
                refit = self.refit_engine(version=step + 1, kv_scales=kv_scales)
            metrics = step_metrics(generated, update.metrics, drafter_metrics, timer.seconds) | mismatch | refit
            if self.engine.drafting is not None:
                metrics |= self.engine.drafting.metrics()
            self.early_stop.observe(step + 1, metrics)
            is_best = self.validate(step + 1, timer)
            with timer("checkpoint"):
                record = StepRecord.of(step, metrics, generated, self.refit.guard.take_events(), timer)
                self.recorder.report(record, generated)
                self.report_lost_signals(record)
                self.store(record, generated.rollouts.own(self.ranks), is_best=is_best)
        num_steps = step + 1 if self.is_last(step + 1) else self.config.train.num_steps
        self.recorder.finish(record, timer, num_steps, progress)

    def report_lost_signals(self, record: StepRecord) -> None:
        """Record an event if nothing has been learned for several steps."""
        if not self.ranks.is_first:
            return
        step, past = record.step, self.recorder.metrics
        earlier = [past[number] for number in range(step - PATIENCE, step) if number in past]
        first = past[0] if step and 0 in past else record.metrics
        for line in lost_signals([*earlier, record.metrics], first, self.config):
            logger.warning("%s", line)
            record_event(self.recorder.steps_dir.parent, SIGNAL, line, step)

    def update_policy(self, step: int, rollouts: RolloutBatch) -> PolicyUpdate:
        """Train the policy on the step's rollouts, and record features for the drafter to learn from."""
        layers = self.drafter.feature_layers if self.drafter is not None and self.updates_drafter(step) else None
        update = update_policy(self.policy, rollouts, self.config, layers, step=step, teacher=self.teacher)
        if (every := self.config.train.reference_every) is not None and (step + 1) % every == 0:
            self.policy.renew_reference()
        return update

    def updates_drafter(self, step: int) -> bool:
        """Whether the drafter is updated in this step, as it always is in the last of `train.num_steps`."""
        return (step + 1) % self.config.drafter.update_every == 0 or step + 1 == self.config.train.num_steps

    def update_drafter(self, features: list[Features | None]) -> dict[str, float]:
        """Train the drafter on features of the policy's own forward pass, which carry no gradient (invariant 3)."""
        if self.drafter is None:
            return {}
        merged = self.spot.merge() if self.spot is not None else {}
        metrics = merged or self.drafter.update(features, lr=self.config.drafter.online_lr)
        if self.spot is not None:
            self.spot.remember(features)
        return metrics if metrics["num_tokens"] else {}  # without tokens, nothing was measured

    def refit_engine(self, version: int, kv_scales: KvScales | None = None) -> dict[str, float]:
        """Load policy and drafter into the engine and check them.

        The drafter is probed every `refit.probe_every` steps and before a checkpoint; `save` probes it if it was not.
        """
        probe = version % self.config.refit.probe_every == 0 or self.may_save(version)
        return self.refit.load(version, kv_scales, probe=probe)

    def may_save(self, version: int) -> bool:
        """Whether a checkpoint of this version is due, or will be if it turns out to be the best so far."""
        last = self.is_last(version)
        return self.is_due(version) or self.validation.is_due(version, last=last)

    def is_due(self, version: int) -> bool:
        """Whether a checkpoint of this version is due regardless of its score."""
        return version % self.config.train.checkpoint_every == 0 or self.is_last(version)

    def validate(self, version: int, timer: Timer) -> bool:
        """Validate this version, which the engine must hold, on the held-out sets if that is due.

        Returns whether it is the best version so far and no checkpoint of it has been started.
        """
        if not self.validation.is_due(version, last=self.is_last(version)):
            return False
        with timer("validation"), self.lifetime.validation():
            is_best = self.validation.run(version)
        self.early_stop.observe(version, self.validation.metrics_of(version))
        if is_best:
            self.checkpoints.mark_best(version)
        return is_best and self.checkpoints.newest != version

    def is_last(self, version: int) -> bool:
        """Whether training ends with this version of the policy."""
        return version >= self.config.train.num_steps or self.early_stop.reason is not None

    def store(self, record: StepRecord, rollouts: list[Rollout], *, is_best: bool) -> None:
        """Write this rank's rollouts and, if one is due, start a checkpoint from which the next step can start.

        The record, with the times so far, is written and logged before it: this step is never run again after the
        checkpoint, so a kill before the record is finished would leave the step without one.
        """
        version = record.step + 1
        self.recorder.write_rollouts(record.step, rollouts)
        if self.is_due(version) or is_best:
            self.recorder.log_early(record)
            self.recorder.write(record)
            self.save(version)
        else:
            self.checkpoints.check()

    def save(self, step: int) -> None:
        """Start writing the checkpoint from which `step` can start, in parallel with that step's generation."""
        self.refit.guard.confirm(step)
        for event in self.refit.guard.take_events() if self.ranks.is_first else ():
            # Of the step that ends here: a job that starts from the checkpoint drops the events of what it runs again.
            record_event(self.checkpoints.directory.parent, "drafter", event, max(step - 1, 0))
        self.checkpoints.save(TrainState(step, self.policy, self.drafter, self.engine.precision.kv_scales))

    def shutdown(self) -> None:
        self.engine.shutdown()
        if self.rewards is not None:
            self.rewards.close()
