"""The ranks of a stage, and the data that they exchange."""

from specrl.distributed.arrays import Ragged, Route, deliver, gather_columns, gather_rows, sum_arrays
from specrl.distributed.ranks import Ranks, join, leave

__all__ = ["Ragged", "Ranks", "Route", "deliver", "gather_columns", "gather_rows", "join", "leave", "sum_arrays"]
