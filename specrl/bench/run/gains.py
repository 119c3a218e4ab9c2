"""The counts of `specrl bench run` on GPUs: how many times as fast as without drafts the step of an 8B policy is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from specrl.bench.pages import Rows
from specrl.projection.simulator.measured import GPUS, DraftCounts, step_seconds


def on_gpus(epochs: Iterable[Sequence[DraftCounts]], drafter_updates: float) -> dict[str, list[float]]:
    """Columns with a figure for each epoch, in which engines choose between these draft lengths."""
    lengths = [tuple(epoch) for epoch in epochs]
    found = {}
    for gpus in GPUS:
        plain_s = step_seconds((DraftCounts(),), gpus)
        found[f"step_{gpus}_gpus_by_epoch"] = [plain_s / step_seconds(one, gpus, drafter_updates) for one in lengths]
    return found


def by_batch(rows: Rows) -> list[dict[str, Any]]:
    """A row for each family of cells that differ in their draft lengths alone, whose engine chooses between them.

    It may draft nothing, too. Cells that already choose on the machine that counts are in no family.
    """
    families: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("family") is not None:
            families.setdefault(tuple(row["family"]), []).append(row)
    return [_family(members) for members in families.values()]


def _family(rows: Rows) -> dict[str, Any]:
    found = [[DraftCounts(**one | {"paces": tuple(one["paces"])}) for one in row["drafts_by_epoch"]] for row in rows]
    epochs = ((epoch[0].undrafted, *epoch) for epoch in zip(*found, strict=True))
    seed = {name: rows[0][name] for name in ("seed",) if name in rows[0]}
    return {"cell": _name(rows), **seed, **on_gpus(epochs, rows[0]["drafter_updates"])}


def _name(rows: Rows) -> str:
    words = zip(*([word.strip(",") for word in row["cell"].split()] for row in rows), strict=False)
    common = " ".join(alike[0] for alike in takewhile(lambda alike: len(set(alike)) == 1, words))
    return ", ".join(filter(None, (common, "length by batch")))
