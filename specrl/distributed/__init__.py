"""What the ranks of a stage know of each other, and what they send each other."""

from specrl.distributed.arrays import Ragged, Route, deliver, gather_columns, gather_rows, sum_arrays
from specrl.distributed.ranks import Ranks, join, leave

__all__ = ["Ragged", "Ranks", "Route", "deliver", "gather_columns", "gather_rows", "join", "leave", "sum_arrays"]
