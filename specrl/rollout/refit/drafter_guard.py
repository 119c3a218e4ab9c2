"""The guard of the drafter: a damaged, stale or lost drafter would silently cost time, so refits are checked for it.

Its tensors are compared at every refit. At the start, before a checkpoint and every `refit.probe_every` steps the
engines also answer a fixed probe, whose acceptance is compared with its running value. On a collapse, trainer and
engine return to the last good drafter; if that does no better, speculation is turned off, and the run continues.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from specrl.config import Config
from specrl.distributed import Ranks
from specrl.rollout.drafts.acceptance import SpeculationStats, over_engines
from specrl.rollout.engine import Engine, Request, response_seed
from specrl.rollout.errors import DrafterCollapseError
from specrl.schemas import read_rollouts
from specrl.training.checkpoint.files import HostCopy
from specrl.training.drafter.trainer import Drafter

DRAFTER_RELOADS, SPECULATING = "refit/drafter_reloads", "refit/speculating"
ACCEPTANCE_LENGTH = "refit/probe_acceptance_length"
NUM_PROMPTS, RESPONSES, PROBE_TOKENS = 8, 2, 14
"""The prompts of the probe, the responses to each, and the longest response in tokens."""


class AcceptanceWatch:
    """Compares acceptance per position with its running value; neither noise nor slow drift counts.

    Acceptance has collapsed at a position if it is below `COLLAPSE` times the running value and also more than
    `STANDARD_ERRORS` (binomial, from the number of drafts) below that value.
    """

    COLLAPSE, STANDARD_ERRORS, SMOOTHING = 0.5, 3.0, 0.5

    def __init__(self) -> None:
        self.running: tuple[float, ...] = ()

    def check(self, stats: SpeculationStats, version: int) -> None:
        """Compare the rates of a probe with the running values, then update these."""
        if not stats.num_drafts:
            raise DrafterCollapseError(f"nothing was drafted on the probe with drafter version {version}")
        rates = stats.acceptance_rate_per_pos
        known = list(zip(rates, self.running, strict=False))
        for position, (rate, running) in enumerate(known, start=1):
            num_drafts = stats.drafted_per_pos[position - 1]
            error = math.sqrt(running * (1 - running) / num_drafts)
            if rate < self.COLLAPSE * running and rate < running - self.STANDARD_ERRORS * error:
                raise DrafterCollapseError(
                    f"acceptance at position {position} fell to {rate:.3f} of {num_drafts} drafts on the probe "
                    f"with drafter version {version}; its running value was {running:.3f}"
                )
        # A probe of short drafts does not reach all positions: the others keep their values.
        rest = rates[len(known) :] or self.running[len(known) :]
        self.running = tuple(running + self.SMOOTHING * (rate - running) for rate, running in known) + rest


class DrafterGuard:
    """Keeps the last version of the drafter that passed a probe, in host memory."""

    def __init__(self, engine: Engine, drafter: Drafter | None, requests: list[Request], ranks: Ranks) -> None:
        """Guard one engine's drafter with its part of the probe, `requests`; without a drafter, do nothing."""
        self._engine = engine
        self._drafter = drafter
        self._requests = requests
        self._ranks = ranks
        self._watch = AcceptanceWatch()
        self._probed = False
        # The drafter's change counter when it was last loaded into the engine, and when it was last copied.
        self._loaded, self._copied = 0, -1
        self._buffers = HostCopy()
        self._last_good: dict[str, Tensor] = {}
        self._stats = SpeculationStats()
        self._events: list[str] = []

    def check(self, version: int, *, probe: bool = True) -> dict[str, float]:
        """Compare the drafter's tensors after a refit, probe it if asked to, replace it if it is wrong (collective).

        Returns the drafter's state after that, under its names in MLflow.
        """
        reloaded = False
        if self._drafter is not None and self._engine.speculates:
            self._probed, self._loaded = False, self._drafter.changes
            if self._copied < 0:  # before the first probe there is only this drafter to return to
                self._keep()
                probe = True
            fault = self._of_any_rank(self._verify)
            if fault is None and not probe:
                return {DRAFTER_RELOADS: 0.0, SPECULATING: 1.0}
            reloaded = self._settle(fault or self._probe_fault(version), version)
        speculates = self._engine.speculates
        length = self._stats.acceptance_length if speculates else 1.0
        return {DRAFTER_RELOADS: float(reloaded), SPECULATING: float(speculates), ACCEPTANCE_LENGTH: length}

    def confirm(self, version: int) -> None:
        """Probe the drafter before a checkpoint not foreseen at its refit (collective)."""
        if self._drafter is not None and self._engine.speculates and not self._probed:
            self._settle(self._probe_fault(version), version)

    def take_events(self) -> list[str]:
        """The collapses since the last call, and what was done about each."""
        events, self._events = self._events, []
        return events

    def _settle(self, fault: str | None, version: int) -> bool:
        """Whether the drafter had collapsed, and its last good version was loaded again with success."""
        assert self._drafter is not None
        self._probed = True
        if fault is None:
            # The ranks' drafters trained in idle time are on no engine, were not probed, and differ from each other.
            if self._drafter.changes == self._loaded:
                self._keep()
            return False
        event = f"drafter collapse after refit {version}: {fault}"
        self._reload()
        # With wrong tensors no rank probes: the ranks of one engine generate together or not at all.
        fault = self._of_any_rank(self._verify) or self._probe_fault(version)
        if fault is None:
            self._events.append(f"{event}; reloaded its last good version")
            return True
        self._engine.stop_speculating()
        off = "speculation is off until the stage starts anew"
        self._events.append(f"{event}; its last good version did not help: {fault}; {off}")
        return False

    def _of_any_rank(self, check: Callable[[], None]) -> str | None:
        found = None
        try:
            check()
        except DrafterCollapseError as error:
            found = str(error)
        return next((fault for fault in self._ranks.gather(found) if fault is not None), None)

    def _verify(self) -> None:
        assert self._drafter is not None
        self._engine.verify_drafter(self._drafter.named_weights())

    def _probe_fault(self, version: int) -> str | None:
        return self._of_any_rank(lambda: self._check_acceptance(version))

    def _check_acceptance(self, version: int) -> None:
        engine = self._engine
        # All drafts must be the drafter's, but stored text may belong to a prompt of the probe.
        if engine.replays:
            engine.set_replay([])
        chosen = engine.k
        engine.set_k(engine.longest_k)
        engine.reset_prefix_cache()
        generation = engine.generate(self._requests, learn=False)
        engine.set_k(chosen)
        longest = max((len(response.tokens) for response in generation.responses), default=0)
        found = self._ranks.gather((generation.stats, longest) if engine.is_first else None)
        parts = [part for part in found if part is not None]
        self._stats = over_engines([stats for stats, _ in parts])
        # Responses of one or two tokens may leave nothing to draft for any drafter.
        if self._stats.num_drafts or max(longest for _, longest in parts) > 2:
            self._watch.check(self._stats, version)

    def _keep(self) -> None:
        assert self._drafter is not None
        if self._drafter.changes != self._copied:
            self._last_good = self._buffers.fill(self._drafter.state_dict())
            self._copied = self._drafter.changes

    def _reload(self) -> None:
        assert self._drafter is not None
        self._drafter.load_state_dict(self._last_good)
        self._copied = self._loaded = self._drafter.changes
        self._engine.refit_drafter(self._drafter.named_weights())


def guard_requests(rollouts_dir: Path, config: Config) -> list[Request]:
    """Make the fixed probe of all engines: the first prompts of pretraining, at the run's sampling settings."""
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
