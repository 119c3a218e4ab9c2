"""The rollout: one sampled response, as a dataclass in memory and as a row of an Arrow table on disk."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from specrl.artifacts import atomic_path

SCHEMA_VERSION = "3"

MERGED = ".merged"  # the rows of all ranks, in a step's folder, while the files that they were in are removed

ROLLOUT_SCHEMA = pa.schema(
    [
        pa.field("step", pa.int32(), nullable=False),
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("prompt_id", pa.int64(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("policy_version", pa.int32(), nullable=False),
        pa.field("drafter_version", pa.int32(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("prompt_tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("response_tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("turns", pa.list_(pa.int32()), nullable=False),
        pa.field("generation_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("log_kept_mass", pa.list_(pa.float32())),
        pa.field("policy_logprobs", pa.list_(pa.float32())),
        pa.field("response", pa.string(), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
        pa.field("reward", pa.float32(), nullable=False),
        pa.field("reward_parts", pa.map_(pa.string(), pa.float32())),
        pa.field("advantage", pa.float32(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("num_drafts", pa.int32(), nullable=False),
        pa.field("num_draft_tokens", pa.int32(), nullable=False),
        pa.field("num_accepted_tokens", pa.int32(), nullable=False),
        pa.field("num_stored", pa.int32(), nullable=False),
        pa.field("own_stored_tokens", pa.int32(), nullable=False),
        pa.field("started_at", pa.float64(), nullable=False),
        pa.field("finished_at", pa.float64(), nullable=False),
    ],
    metadata={"specrl.schema": "rollout", "specrl.schema_version": SCHEMA_VERSION},
)


@dataclass
class Rollout:
    """One response, or one conversation with an environment. Log-probs are natural; times are Unix seconds.

    With `sampling.top_p` or `top_k` the engine samples from a truncated distribution: the whole one at the sampling
    temperature, without the dropped tokens, divided by the mass of the kept ones.

    Per-token fields become an `array.array` of 4-byte numbers, whatever sequence they are made from, so that they are
    sent and stored without a Python object for each number.
    """

    step: int
    rank: int  # the rank that generated the response
    prompt_id: int
    sample: int  # the number of the response among those to the same prompt in the same step, from 0
    policy_version: int
    drafter_version: int
    seed: int  # the seed of the request, which with the policy and the prompt decides every token
    prompt_tokens: list[int]
    response_tokens: Sequence[int]
    generation_logprobs: Sequence[float]
    """The engine's log-prob of each sampled token, under the truncated distribution from which it was sampled."""
    response: str  # the text of the response, with what the environment wrote
    answer: str  # the prompt's correct answer
    finish_reason: str  # the reason why the response ended: `stop`, or `length` where it was cut off
    turns: Sequence[int] = ()
    """The numbers of response tokens that the policy sampled and that its environment wrote, in turn, the policy's
    first and last; empty where the policy sampled all of them."""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_stored: int = 0  # the number of texts that the engine had stored for the prompt
    own_stored_tokens: int = 0
    """The length of the stored text that was sampled with this response's own seed; 0 without one."""
    started_at: float = 0.0
    finished_at: float = 0.0
    reward: float = 0.0
    reward_parts: dict[str, float] | None = None
    """The parts of the reward by name, before weighting; None if it has none."""
    advantage: float = 0.0
    policy_logprobs: Sequence[float] | None = None
    """The trainer's log-prob of each sampled token under the policy that sampled it, of the whole distribution at the
    sampling temperature; None where none was computed."""
    log_kept_mass: Sequence[float] | None = None
    """The log of the mass kept by truncation at each sampled token; None if nothing can be dropped."""
    routes: NDArray[Any] | None = field(default=None, repr=False, compare=False)
    """The experts that the engine sent each token of prompt and response but the last to, [tokens - 1, layers, experts
    per token]; None for a policy without experts. They are not stored."""

    def __post_init__(self) -> None:
        self.response_tokens = as_array("i", self.response_tokens)
        self.turns = as_array("i", self.turns)
        self.generation_logprobs = as_array("f", self.generation_logprobs)
        if self.policy_logprobs is not None:
            self.policy_logprobs = as_array("f", self.policy_logprobs)
        if self.log_kept_mass is not None:
            self.log_kept_mass = as_array("f", self.log_kept_mass)

    @property
    def num_sampled(self) -> int:
        """The number of response tokens that the policy sampled."""
        return sum(self.turns[::2]) if self.turns else len(self.response_tokens)

    @property
    def sampled_tokens(self) -> Sequence[int]:
        mask = sampled_mask(self.turns or [len(self.response_tokens)])
        return as_array("i", np.asarray(self.response_tokens, np.int32)[mask])

    @property
    def whole_generation_logprobs(self) -> Sequence[float]:
        """The engine's log-prob of each sampled token under the whole distribution, as `policy_logprobs` are."""
        if self.log_kept_mass is None:
            return self.generation_logprobs
        both = (self.generation_logprobs, self.log_kept_mass)
        return as_array("f", np.sum([np.asarray(values, np.float64) for values in both], axis=0))


def sampled_mask(turns: Sequence[int] | NDArray[Any]) -> NDArray[np.bool_]:
    """For each response token, whether the policy sampled it, given the lengths `Rollout.turns`."""
    return np.repeat(np.arange(len(turns)) % 2 == 0, np.asarray(turns, np.int64))


def as_array(kind: str, values: Sequence[Any] | NDArray[Any]) -> array[Any]:
    """Numbers as an array of `kind`, "i" for int32 and "f" for float32; an `array.array` is returned itself."""
    if isinstance(values, array):
        return values
    if isinstance(values, np.ndarray):
        return array(kind, values.astype(kind, copy=False).tobytes())
    return array(kind, values)


def to_table(rollouts: list[Rollout]) -> pa.Table:
    """An Arrow table of `ROLLOUT_SCHEMA` with one row for each rollout."""
    columns = [_column([getattr(rollout, field.name) for rollout in rollouts], field.type) for field in ROLLOUT_SCHEMA]
    return pa.Table.from_arrays(columns, schema=ROLLOUT_SCHEMA)


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_map(kind):
        values = [None if row is None else list(row.items()) for row in values]
    elif pa.types.is_list(kind):  # arrays are copied whole, without an object for each number
        values = [None if row is None else np.asarray(row, kind.value_type.to_pandas_dtype()) for row in values]
    return pa.array(values, kind)


def from_table(table: pa.Table) -> list[Rollout]:
    """The rollouts of a table that `to_table` made."""
    version = (table.schema.metadata or {}).get(b"specrl.schema_version", b"none").decode()
    if version != SCHEMA_VERSION:
        raise ValueError(f"rollout table has schema version {version}; this code reads version {SCHEMA_VERSION}")
    lists = {field.name: _arrays(table[field.name]) for field in ROLLOUT_SCHEMA if pa.types.is_list(field.type)}
    lists["prompt_tokens"] = [list(row or ()) for row in lists["prompt_tokens"]]
    others = table.select([name for name in table.column_names if name not in lists])
    rows = zip(others.to_pylist(maps_as_pydicts="strict"), zip(*lists.values(), strict=True), strict=True)
    return [Rollout(**row, **dict(zip(lists, per_token, strict=True))) for row, per_token in rows]


def _arrays(column: pa.ChunkedArray) -> list[Any]:
    kind = "f" if pa.types.is_floating(column.type.value_type) else "i"
    return [None if row is None else as_array(kind, row) for row in column.to_numpy()]


def rollout_path(rollouts_dir: Path, step: int, rank: int) -> Path:
    """The file of one rank's rollouts in one step; in the end rank 0's file holds those of all ranks."""
    return rollouts_dir / f"step={step:06d}" / f"rank-{rank:04d}.arrow"


def write_rollouts(path: Path, rollouts: list[Rollout]) -> None:
    """Write an Arrow IPC file, which `pyarrow.dataset.dataset(folder, format="ipc")` reads too."""
    write_table(path, to_table(rollouts))


def read_rollouts(path: Path) -> list[Rollout]:
    """Read one file that `write_rollouts` wrote.

    Raises:
        ValueError: The file was written with another schema version.
    """
    return from_table(read_table(path))


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table as an Arrow IPC file."""
    with (
        atomic_path(path) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)


def read_table(path: Path) -> pa.Table:
    """Map the table of an Arrow IPC file into memory."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


def merge_ranks(step_dir: Path) -> None:
    """Merge the files that the ranks wrote in a step into one, because file systems limit the number of files.

    A kill at any moment neither loses nor duplicates a row: the next call continues where this one stopped.
    """
    merged, paths = step_dir / MERGED, sorted(step_dir.glob("rank-*.arrow"))
    if not merged.exists():
        if len(paths) < 2:
            return
        write_table(merged, pa.concat_tables(map(read_table, paths)))
    for path in paths:
        path.unlink()
    merged.rename(step_dir / "rank-0000.arrow")


def read_folder(rollouts_dir: Path) -> Iterator[Rollout]:
    """Yield the rollouts of all files below a folder, file by file in the order of their paths."""
    return (rollout for path in sorted(rollouts_dir.rglob("*.arrow")) for rollout in read_rollouts(path))
