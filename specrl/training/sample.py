"""The sequences of a step from which the drafter learns: an even sample by length if all of them are too many."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from specrl.training.batches import MicroBatch
from specrl.training.features import Features, Window, padded

LARGEST_PART = 1 / 8
"""The largest part of the budget that one sequence may take, so that a few long ones do not use it up."""
MIN_WINDOW = 256
"""The tokens of a sequence that are kept whatever the budget."""


@dataclass(frozen=True)
class Sample:
    """The sequences, or parts of them, from which the drafter learns, and their grouping.

    It is the same on all ranks that hold the policy together, and divides the rows of each group among them.
    """

    groups: tuple[tuple[int, ...], ...]
    """The sequences of each of the drafter's micro-batches, by `TokenSequence.index`."""
    windows: dict[int, Window]
    """The part kept of each of these sequences, by the same index."""
    is_whole: bool
    """Whether the groups are the policy's own micro-batches, with nothing left out."""

    @property
    def kept(self) -> dict[int, Window] | None:
        """The windows for `Policy` to keep; None if every rank keeps all features."""
        return None if self.is_whole and not any(window.owner for window in self.windows.values()) else self.windows

    def arrange(
        self, features: list[Features], batches: Iterable[MicroBatch], model_rank: int
    ) -> list[Features | None]:
        """The features of each group, None for a group of which this rank keeps no row; empties the given list."""
        own = [
            [index for index in batch.indices if index in self.windows and self.windows[index].owner == model_rank]
            for batch in batches
        ]
        if self.is_whole:
            return [features.pop(0) if indices else None for indices in own]
        rows: dict[int, Features] = {}
        for indices in filter(None, own):
            item = features.pop(0)
            for row, index in enumerate(indices):
                rows[index] = item.row(row, self.windows[index].stop - self.windows[index].start)
        arranged: list[Features | None] = []
        for group in self.groups:
            found = [rows.pop(index) for index in group if index in rows]
            arranged.append(padded(found) if found else None)
        return arranged


def even_sample(lengths: Sequence[int], offset: float, fits: Callable[[Sequence[int]], bool]) -> list[int]:
    """The indices of a sample whose lengths are distributed like those of all items, the longest first.

    Items sorted by length are taken at equal distances, starting at the fraction `offset` of the first distance (a
    systematic sample): all are equally likely, and every range of lengths is represented in proportion, up to one item.
    At least one item is taken, even if it does not fit.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))

    def take(count: int) -> list[int]:
        last = len(order) - 1  # an offset close to 1 could round beyond it
        return [order[min(int((number + offset) * len(order) / count), last)] for number in range(count)]

    if fits(order):
        return order
    return take(bisect_left(range(2, len(order)), True, key=lambda count: not fits(take(count))) + 1)


def feature_area(batch: MicroBatch) -> int:
    """The number of positions in a micro-batch's features, whose rows are padded to the longest sequence."""
    return len(batch.indices) * int(batch.lengths.max()) if batch.indices else 0


def whole_sample(batches: Iterable[MicroBatch], owners: int) -> Sample:
    """The sample of everything, for `owners` ranks that share the work; its groups are the micro-batches."""
    groups: list[tuple[int, ...]] = []
    windows: dict[int, Window] = {}
    for batch in batches:
        lengths = batch.lengths.tolist()
        windows |= {index: Window(0, length) for index, length in zip(batch.indices, lengths, strict=True)}
        groups.append(tuple(batch.indices))
    return Sample(tuple(groups), _dealt(groups, windows, owners), is_whole=True)


def sample_sequences(
    parts: Sequence[Sequence[MicroBatch]], *, max_tokens: int, tokens_per_micro_batch: int, owners: int, seed: int
) -> Sample:
    """The sample of one data-parallel rank's sequences from which the drafter learns in a step.

    It is everything if that fits `max_tokens`, padding included. Otherwise it is an even sample of the sequences by
    length; those longer than `LARGEST_PART` of that limit are cut to a window of this length at a random place.
    Sequences of different `parts`, the updates of the step, are not grouped.
    """
    batches = [batch for part in parts for batch in part]
    areas = [feature_area(batch) for batch in batches]
    # A micro-batch with shared prompts may have more responses than the drafter should learn from in one step.
    fit = all(
        area <= tokens_per_micro_batch or len(batch.indices) == 1 for area, batch in zip(areas, batches, strict=True)
    )
    if sum(areas) <= max_tokens and fit:
        return whole_sample(batches, owners)
    indices = [index for batch in batches for index in batch.indices]
    lengths: list[int] = [length for batch in batches for length in batch.lengths.tolist()]
    prompts = [length for batch in batches for length in batch.prompt_lengths.tolist()]
    part_of = [number for number, part in enumerate(parts) for batch in part for _ in batch.indices]
    random, limit = Random(seed), max(MIN_WINDOW, int(LARGEST_PART * max_tokens))
    cut = [min(length, limit) for length in lengths]

    def groups_of(chosen: Sequence[int]) -> list[list[int]]:
        by_part = [[number for number in chosen if part_of[number] == part] for part in range(len(parts))]
        return [group for items in by_part for group in by_length(items, cut, tokens_per_micro_batch)]

    def fits(chosen: Sequence[int]) -> bool:
        return sum(len(group) * cut[group[0]] for group in groups_of(chosen)) <= max_tokens

    chosen = even_sample(lengths, random.random(), fits)
    windows = {indices[number]: _window(lengths[number], prompts[number], limit, random) for number in chosen}
    groups = [tuple(indices[number] for number in group) for group in groups_of(chosen)]
    return Sample(tuple(groups), _dealt(groups, windows, owners), is_whole=False)


def by_length(items: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut items, the longest first, into groups of as many as fit a padded area, at least one each."""
    groups: list[list[int]] = []
    for item in items:
        if not groups or (len(groups[-1]) + 1) * lengths[groups[-1][0]] > max_tokens:
            groups.append([])
        groups[-1].append(item)
    return groups


def _window(length: int, prompt_length: int, limit: int, random: Random) -> Window:
    last = max(0, length - limit)
    start = random.randint(min(last, max(0, prompt_length - limit // 2)), last)
    return Window(start, min(length, start + limit))


def _dealt(groups: Sequence[Sequence[int]], windows: dict[int, Window], owners: int) -> dict[int, Window]:
    return {
        index: replace(windows[index], owner=(number + place) % owners)
        for number, group in enumerate(groups)
        for place, index in enumerate(group)
    }
