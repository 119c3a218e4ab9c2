"""The tensor type in algorithms' annotations, from a module that does not import torch.

A configuration names algorithms and their options, and is read on login nodes, where importing torch takes seconds. An
algorithm therefore uses only its tensors' methods, or imports torch in its body.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = object

__all__ = ["Tensor"]
