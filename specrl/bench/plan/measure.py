"""The memory of one small run of the train stage's parts, by what allocates it, beside the plan.

Counted are the bytes that torch's CPU allocator has given out: those of all tensors, and nothing else. Libraries, the
interpreter and files that are mapped into memory are not among them, nor are they in what is compared with it.

An engine on a CPU packs the weights of its linear layers into memory of its own; what the start of an engine takes from
the C library beyond tensors is added for that. `warm_up` has started and ended another one before, so that no import is
among it, and the profiler is not at work, which takes memory too.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from specrl.bench.plan.sizes import Size, random_batches, write_policy
from specrl.config import Config
from specrl.distributed import join
from specrl.models.shapes import model_shape
from specrl.projection import budgets, memory
from specrl.projection.memory import MemoryItem, Rank
from specrl.rollout.engine import Engine, Request
from specrl.training.batches import MicroBatch
from specrl.training.checkpoint.checkpoints import Checkpoints, Retention
from specrl.training.checkpoint.host_copy import HostTensors
from specrl.training.checkpoint.load import TrainState
from specrl.training.drafter.trainer import Drafter
from specrl.training.megatron.policy import Policy

MALLINFO_FIELDS = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)
"""What the C library's `mallinfo2` returns, all of them sizes."""
GENERATED_TOKENS = 8
"""The length of the responses that are generated: the memory of an engine does not depend on it."""
MARK = "specrl: "
"""The prefix of the names by which phases are found among the profiler's events."""


@dataclass(frozen=True)
class PhaseMemory:
    """The bytes of tensors in one phase of the run."""

    peak: int
    """The most at any moment of it."""
    held: int
    """What it left behind."""


@dataclass(frozen=True)
class MeasuredSize:
    """One small run, measured."""

    size: Size
    items: tuple[MemoryItem, ...]
    """The plan's items, without those that are no tensors."""
    phases: dict[str, PhaseMemory] = field(default_factory=dict)
    packed: int = 0
    """The bytes that the engine's start took beside tensors."""

    @property
    def planned(self) -> float:
        """The bytes that the plan counts at the peak."""
        return memory.peak_gib(self.items) * memory.GIB

    @property
    def peak(self) -> int:
        """The bytes measured at the peak."""
        return max(phase.peak for phase in self.phases.values()) + self.packed

    def as_json(self) -> dict[str, Any]:
        """Return all of it, as JSON."""
        return {
            "name": self.size.name,
            "how": self.size.words,
            "planned": self.planned,
            "peak": self.peak,
            "packed": self.packed,
            "phases": {name: asdict(phase) for name, phase in self.phases.items()},
            "items": [asdict(item) for item in self.items],
        }


def measure(size: Size, folder: Path) -> MeasuredSize:
    """Run each part of a step of the train stage once on one rank, and return its memory beside the plan.

    Args:
        folder: A folder that does not exist.
    """
    policy_dir = folder / "policy"
    config = write_policy(size, policy_dir)
    rank = Rank(model_shape(config.model), config, gpu=0, data_parallel=1)
    (budget,) = budgets.stage_budgets("train", rank)
    items = tuple(item for item in budget.items if item.name != budgets.LIBRARIES)
    new_drafter(config, policy_dir).save(folder / "drafter", policy_version=0)
    taken = taken_by_engine(config, policy_dir, folder / "drafter")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run_parts(size, config, policy_dir, folder)
    phases = phases_of(profiled)
    return MeasuredSize(size, items, phases, taken - (phases["engine"].held - phases["drafter"].held))


def warm_up(size: Size, folder: Path) -> None:
    """Start and end an engine of this size, which imports all that an engine needs.

    Args:
        folder: A folder that does not exist.
    """
    policy_dir = folder / "policy"
    config = write_policy(size, policy_dir)
    new_drafter(config, policy_dir).save(folder / "drafter", policy_version=0)
    Engine(policy_dir, folder / "drafter", config=config, seed=0).shutdown()


def taken_by_engine(config: Config, policy_dir: Path, drafter_dir: Path) -> int:
    """Return the bytes that an engine takes from the C library, those of tensors among them."""
    before = allocated_bytes()
    engine = Engine(policy_dir, drafter_dir, config=config, seed=0)
    taken = allocated_bytes() - before
    engine.shutdown()
    return taken


def run_parts(size: Size, config: Config, policy_dir: Path, folder: Path) -> None:
    """Build what a rank of the train stage holds, and take the parts of a step, each as a phase."""
    ranks = join()
    with phase("policy"):
        policy = Policy(policy_dir, config.policy, dtype=config.model.dtype, ranks=ranks, seed=0)
    with phase("drafter"):
        drafter = new_drafter(config, policy_dir)
    with phase("engine"):
        engine = Engine(policy_dir, folder / "drafter", config=config, seed=0)
    last_good = HostTensors()
    for step in range(2):  # the second step's peak has Adam's moments and the guard's copy from its beginning
        with phase(f"generation {step}"):
            engine.generate(requests(size))
        with phase(f"policy update {step}"):
            _, features = policy.train_step(random_batches(size), mean_loss, features=drafter.feature_spec)
        with phase(f"drafter update {step}"):
            drafter.update(features, lr=config.drafter.online_lr)
        del features
        with phase(f"refit {step}"):
            engine.refit(policy.hf_weights(), drafter.named_weights(), version=step + 1)
            last_good.take(drafter.state_dict())
        if not step:
            with phase("checkpoint"):
                checkpoints = Checkpoints(folder / "checkpoints", policy, Retention(1))
        with phase(f"saving {step}"):
            checkpoints.save(TrainState(step, policy, drafter))
            checkpoints.wait()
    engine.shutdown()


def new_drafter(config: Config, policy_dir: Path) -> Drafter:
    """Return a drafter that is not trained yet."""
    tokens = torch.arange(config.drafter.draft_vocab_size)
    return Drafter.create(policy_dir, config.drafter, tokens, join())


def mean_loss(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss that gives every parameter a gradient."""
    return -logprobs[batch.mask].mean(), {}


def requests(size: Size) -> list[Request]:
    """Return as many requests as run at once, with long prompts and short responses that end at the full length."""
    prompt = size.length - GENERATED_TOKENS
    return [
        Request([4 + (seed + place) % 100 for place in range(prompt)], seed, GENERATED_TOKENS, 1.0, 1.0, 0)
        for seed in range(size.sequences)
    ]


class _AllocatorState(ctypes.Structure):
    """The C library's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO_FIELDS]


def allocated_bytes() -> int:
    """Return the bytes that the C library has given out to this process, those of tensors among them."""
    gc.collect()  # or what is garbage would be counted
    library = ctypes.CDLL("libc.so.6")
    library.mallinfo2.restype = _AllocatorState
    state = library.mallinfo2()
    return int(state.uordblks + state.hblkhd)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark what happens inside the block as a phase of the run."""
    with record_function(MARK + name):
        yield


def phases_of(profiled: Any) -> dict[str, PhaseMemory]:
    """Return the memory of each phase, in the order in which they began."""
    events = list(profiled.profiler.kineto_results.events())
    marks = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name().removeprefix(MARK))
        for event in events
        if event.name().startswith(MARK)
    )
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    found: dict[str, PhaseMemory] = {}
    held, position = 0, 0
    for start, end, name in marks:
        while position < len(changes) and changes[position][0] < start:
            held += changes[position][1]
            position += 1
        peak = held
        while position < len(changes) and changes[position][0] <= end:
            held += changes[position][1]
            peak = max(peak, held)
            position += 1
        found[name] = PhaseMemory(peak, held)
    return found
