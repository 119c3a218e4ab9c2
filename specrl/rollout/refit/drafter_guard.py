"""The guard of the drafter: a damaged, stale or lost drafter is noticed after the refit, replaced and reported.

Speculation is exact with any drafter, so a bad one costs nothing but time, silently. After every refit the guard
compares the engine's drafter with the trainer's, tensor by tensor. Whether its drafts are accepted is read from the
step's own rollouts, and before a checkpoint from the trainer's own drafts. Where acceptance falls, and from time to
time anyway, the guard generates a fixed probe with a fixed draft length, whose acceptance per position is compared with
its running value. On a collapse, trainer and engine go back to the last good drafter. If that is accepted no better,
the drafter alone is not the cause: most likely the policy has changed. Drafting then goes on with new running values,
if the controller chooses how far to draft and more than next to nothing is accepted; otherwise speculation is turned
off. The run goes on in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from specrl.config import Config
from specrl.distributed import Ranks
from specrl.rollout.drafts.acceptance import DRAFTER, SourceCounts, SpeculationStats, over_engines
from specrl.rollout.engine import Engine, Generation, Request, response_seed
from specrl.rollout.errors import DrafterCollapseError
from specrl.rollout.vllm.weights.load import Weights
from specrl.schemas import read_rollouts
from specrl.training.checkpoint.host_copy import HostTensors

NUM_PROMPTS = 8
"""The number of prompts of the probe."""
RESPONSES = 2
"""The number of responses to each of them. An engine reads a prompt once for both, and two short responses make as many
drafts as one of almost twice the length, in fewer iterations."""
PROBE_TOKENS = 14
"""The longest response, in tokens."""
PROBE_AT_LEAST_EVERY = 8
"""The number of versions after which a drafter that the trainer vouches for is probed all the same. The running value
of the probe's acceptance follows a policy that drifts; after many versions without a probe, drift would look like a
collapse."""
USEFUL = 0.1
"""The share of first draft tokens that must be accepted on the probe for drafting to go on after a collapse that the
last good drafter does not undo."""


class DrafterCheck(Enum):
    """What shows after a refit that the drafter's tokens are accepted."""

    PROBE = auto()
    """The probe."""
    TRAINER = auto()
    """The trainer's own drafts have, and the next rollouts will; the probe does from time to time."""
    ROLLOUTS = auto()
    """The next rollouts will, or `DrafterGuard.confirm`."""


class TrainedDrafter(Protocol):
    """What the guard needs of the trainer's drafter, which is the same on every rank."""

    @property
    def changes(self) -> int:
        """How many times it was changed; as long as the number stays, so does the state."""

    def named_weights(self) -> Weights: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


class AcceptanceWatch:
    """Compares acceptance per position with its running value.

    Acceptance at a position has collapsed if it is below `COLLAPSE` times the running value, and also below that value
    by more than `STANDARD_ERRORS` (binomial, from the number of drafts), so that neither noise nor slow drift counts.
    `SMOOTHING` is the weight of a new rate in the running value.
    """

    COLLAPSE, STANDARD_ERRORS, SMOOTHING = 0.5, 3.0, 0.5

    def __init__(self) -> None:
        self.running: tuple[float, ...] | None = None
        self.version: int | None = None
        """The version of the drafter whose rates were taken in last; the same one counts once, restarts included."""

    def state(self) -> dict[str, Any]:
        """Return the running value and the version of the last drafter in it, as JSON."""
        return {"running": self.running, "version": self.version}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.running = tuple(state["running"]) if state["running"] is not None else None
        self.version = state["version"]

    def check(self, stats: SpeculationStats, version: int, *, takes: bool = True) -> None:
        """Compare the rates of one probe with the running value, and take them into it unless `takes` is False.

        Raises:
            DrafterCollapseError: Nothing was drafted, or acceptance has collapsed at the position that the error names;
                the running value stays as it was.
        """
        if not stats.num_drafts:
            raise DrafterCollapseError(f"nothing was drafted on the probe with drafter version {version}")
        rates = stats.acceptance_rate_per_pos
        if self.running is None:
            self.running, self.version = rates, version
            return
        for position, (rate, running) in enumerate(zip(rates, self.running, strict=False), start=1):
            num_drafts = max(1, stats.drafted_per_pos[position - 1])
            error = math.sqrt(running * (1 - running) / num_drafts)
            if rate < self.COLLAPSE * running and rate < running - self.STANDARD_ERRORS * error:
                raise DrafterCollapseError(
                    f"acceptance at position {position} fell to {rate:.3f} of {num_drafts} drafts on the probe "
                    f"with drafter version {version}; its running value was {running:.3f}"
                )
        if version == self.version or not takes:
            return
        self.version = version
        self.running = tuple(
            running + self.SMOOTHING * (rate - running) for rate, running in zip(rates, self.running, strict=False)
        )

    def begin_anew(self, stats: SpeculationStats, version: int) -> None:
        """Take the rates of one probe for the running value, in place of what it was."""
        self.running, self.version = stats.acceptance_rate_per_pos, version


class RolloutWatch:
    """Notices a fall of acceptance in the rollouts of a step, on which the probe has the last word.

    Prompts, draft lengths and sources differ from step to step, so it judges nothing by itself. Acceptance has fallen
    if that of all the drafter's tokens, or at any position where no other source drafts, is below `FALL` times the
    running value. `SMOOTHING` is the weight of a new rate in it. Fewer than `LEAST` draft tokens tell nothing.
    """

    FALL, SMOOTHING, LEAST = 0.8, 0.5, 64

    def __init__(self) -> None:
        self.running: tuple[float, ...] = ()

    def doubts(self, stats: SpeculationStats) -> bool:
        """Return whether acceptance has fallen or cannot be told; take the rates into the running value."""
        own = stats.by_source.get(DRAFTER, SourceCounts())
        if own.num_draft_tokens < self.LEAST:
            return True
        by_position = stats.acceptance_rate_per_pos if own.num_drafts == stats.num_drafts else ()
        rates = (own.num_accepted_tokens / own.num_draft_tokens, *by_position)
        known = tuple(zip(rates, self.running, strict=False))
        self.running = tuple(old + self.SMOOTHING * (new - old) for new, old in known) + rates[len(known) :]
        return any(new < self.FALL * old for new, old in known)


@dataclass(frozen=True)
class GuardReport:
    """The state of the drafter after a refit, or after a probe between refits."""

    reloaded: bool
    """Whether the drafter had collapsed and its last good version was loaded again, with success."""
    speculating: bool
    """Whether the engine still drafts."""
    acceptance_length: float | None
    """The acceptance length on the probe, after any repair; 1 where nothing is drafted, None without a probe."""
    failures: int = 0
    """How many drafters were found wrong: 1 if that of the refit was, 2 if the last good one was, too."""

    def metrics(self) -> dict[str, float]:
        """Return the state under its names in MLflow."""
        found = {"refit/drafter_reloads": float(self.reloaded), "refit/speculating": float(self.speculating)}
        if self.acceptance_length is not None:
            found["refit/probe_acceptance_length"] = self.acceptance_length
        return found


class DrafterGuard:
    """Keeps the last good version of the drafter in host memory. Its checks are collective over the ranks.

    It is copied after a probe that found it good, and only if it has changed since the last copy: at most once a step.
    """

    def __init__(self, engine: Engine, drafter: TrainedDrafter | None, requests: list[Request], ranks: Ranks) -> None:
        """Guard the drafter of one engine.

        Args:
            drafter: The trainer's drafter; None where none is trained.
            requests: This engine's part of the probe. The engines hold one drafter, which is judged by what is accepted
                of it on all of them.
        """
        self._engine = engine
        self._drafter = drafter
        self._requests = requests
        self._ranks = ranks
        self._watch = AcceptanceWatch()
        self._rollouts = RolloutWatch()
        self._probed = False
        """Whether the drafter that the engine holds was probed."""
        self._vouched = False
        """Whether the trainer vouches for it."""
        self._resumed = False
        """Whether the next probe is the first one after a restart."""
        self._buffers = HostTensors()
        self._last_good: dict[str, Tensor] = {}
        self._copied: int | None = None
        """The number of changes of the drafter that was copied last."""
        self._stats = SpeculationStats()
        self._events: list[str] = []

    def renew(self) -> None:
        """Take the trainer's present drafter, which may come from a checkpoint, for the last good one."""
        if self._drafter is not None and self._drafter.changes != self._copied:
            self._last_good = self._buffers.take(self._drafter.state_dict())
            self._copied = self._drafter.changes

    def check(self, version: int, how: DrafterCheck = DrafterCheck.PROBE) -> GuardReport:
        """Check the drafter after a refit; on a collapse load the last good one, or turn speculation off (collective).

        Its tensors are always compared. Without a trained drafter nothing can go stale, and nothing is done.

        Args:
            version: The version of the drafter.
            how: What shows that its tokens are accepted.
        """
        if self._drafter is None or not self._engine.speculates:
            return GuardReport(reloaded=False, speculating=self._engine.speculates, acceptance_length=1.0)
        self._probed = self._vouched = False
        fault = self._of_any_rank(self._verify)
        if how is DrafterCheck.TRAINER and not self._was_probed_lately(version):
            how = DrafterCheck.PROBE
        if fault is not None or how is DrafterCheck.PROBE:
            return self._settle(fault or self._of_any_rank(lambda: self._check_acceptance(version)), version)
        self._vouched = how is DrafterCheck.TRAINER
        return GuardReport(reloaded=False, speculating=True, acceptance_length=None)

    def watch(self, stats: SpeculationStats, version: int) -> GuardReport | None:
        """Read from the rollouts of a step whether drafts are accepted (collective).

        If they are not, or too few were made to tell, a drafter that was not probed after its refit is probed now.

        Args:
            stats: The counters of all engines, the same on every rank.
            version: The version of the drafter.

        Returns:
            What came of the probe; None without one.
        """
        if self._drafter is None or not self._engine.speculates:
            return None
        doubts = self._rollouts.doubts(stats)
        return self._probe_unless_done(version) if doubts else None

    def confirm(self, version: int) -> GuardReport | None:
        """Probe the engine's drafter unless that was done or the trainer vouches for it (collective).

        On a collapse it is replaced as in `check`.

        Returns:
            What came of the probe; None without one.
        """
        if self._drafter is None or not self._engine.speculates or self._vouched:
            return None
        return self._probe_unless_done(version)

    def _probe_unless_done(self, version: int) -> GuardReport | None:
        if self._probed:
            return None
        return self._settle(self._of_any_rank(lambda: self._check_acceptance(version)), version)

    def _settle(self, fault: str | None, version: int) -> GuardReport:
        """Keep the drafter as the last good one if it has no fault; replace it if it has one (collective)."""
        self._probed, self._resumed = True, False
        if fault is None:
            self.renew()
            return self._report(reloaded=False)
        event = f"drafter collapse after refit {version}: {fault}"
        self._reload()
        wrong = self._of_any_rank(self._verify)
        # With wrong tensors no rank probes: the ranks of one engine generate together or not at all.
        fault = wrong or self._of_any_rank(lambda: self._check_acceptance(version))
        if fault is None:
            self._events.append(f"{event}; reloaded its last good version")
            return self._report(reloaded=True, failures=1)
        if wrong is None and self._may_go_on():
            self._watch.begin_anew(self._stats, version)
            self._events.append(
                f"{event}; its last good version is accepted no better: {fault}; so the drafter alone is not the "
                "cause, and drafting goes on with that version"
            )
            return self._report(reloaded=True, failures=2)
        self._engine.stop_speculating()
        self._events.append(
            f"{event}; its last good version did not help: {fault}; speculation is off until the stage starts anew"
        )
        return self._report(reloaded=False, failures=2)

    def _may_go_on(self) -> bool:
        """Return whether drafts of which less is accepted than usual may still be worth making.

        The controller finds out; where it does not choose, a useless drafter would cost time to the end of the job.
        """
        first = self._stats.acceptance_rate_per_pos[0] if self._stats.num_drafts else 0.0
        return self._engine.k is None and first >= USEFUL

    def _was_probed_lately(self, version: int) -> bool:
        probed = self._watch.version
        return probed is not None and version - probed < PROBE_AT_LEAST_EVERY

    def state(self) -> dict[str, Any]:
        """Return the running values of acceptance, as JSON."""
        return {"probe": self._watch.state(), "rollouts": self._rollouts.running}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._watch.restore(state["probe"])
        self._rollouts.running = tuple(state["rollouts"])
        self._resumed = True

    def take_events(self) -> list[str]:
        """Return the collapses since the last call, and what was done about each."""
        events, self._events = self._events, []
        return events

    def _report(self, *, reloaded: bool, failures: int = 0) -> GuardReport:
        speculating = self._engine.speculates
        return GuardReport(reloaded, speculating, self._stats.acceptance_length if speculating else 1.0, failures)

    def _of_any_rank(self, check: Callable[[], None]) -> str | None:
        """Return the first collapse that `check` finds on any rank, or None (collective)."""
        found = None
        try:
            check()
        except DrafterCollapseError as error:
            found = str(error)
        return next((fault for fault in self._ranks.gather(found) if fault is not None), None)

    def _verify(self) -> None:
        assert self._drafter is not None
        self._engine.verify_drafter(self._drafter.named_weights())

    def _check_acceptance(self, version: int) -> None:
        """Let each engine answer its part of the probe, and judge all answers together (collective)."""
        generation = self._probe()
        longest = max((len(response.tokens) for response in generation.responses), default=0)
        found = self._ranks.gather((generation.stats, longest) if self._engine.is_first else None)
        parts = [part for part in found if part is not None]
        self._stats = over_engines([stats for stats, _ in parts])
        # In responses of one or two tokens there may be nothing to draft, with any drafter.
        if self._stats.num_drafts or max(longest for _, longest in parts) > 2:
            # The first probe after a restart is one that the run without it would not have made.
            self._watch.check(self._stats, version, takes=not self._resumed)

    def _probe(self) -> Generation:
        """Generate the probe, prefilled anew, with the same prompts, seeds and draft length each time.

        All drafts must be the drafter's. Stored text is forgotten, because it would be drafted for a prompt of the
        probe that the last step had too.
        """
        engine = self._engine
        if engine.replays:
            engine.set_replay({})
        chosen = engine.k
        engine.set_k(engine.longest_k)
        engine.reset_prefix_cache()
        generation = engine.generate(self._requests)
        engine.set_k(chosen)
        return generation

    def _reload(self) -> None:
        assert self._drafter is not None and self._last_good, "renew comes first"
        self._drafter.load_state_dict(self._last_good)
        self._copied = self._drafter.changes
        self._engine.refit_drafter(self._drafter.named_weights())


def guard_requests(rollouts_dir: Path, config: Config) -> list[Request]:
    """Return the fixed probe of all engines: the first prompts of pretraining, at the run's sampling settings."""
    first = sorted(rollouts_dir.glob("step=*/rank-*.arrow"))[0]
    prompts = dict.fromkeys(tuple(rollout.prompt_tokens) for rollout in read_rollouts(first))
    sampling = config.sampling
    return [
        Request(
            list(prompt),
            response_seed(config.seed, 0, index, sample),
            min(PROBE_TOKENS, config.model.max_length - len(prompt)),
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
        )
        for sample in range(RESPONSES)
        for index, prompt in enumerate(list(prompts)[:NUM_PROMPTS])
    ]
