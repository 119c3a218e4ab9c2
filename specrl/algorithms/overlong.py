"""What becomes of responses that come near their length limit (DAPO, arXiv 2503.14476, section 3.4)."""

from __future__ import annotations

from collections.abc import Sequence


def overlong_penalties(lengths: Sequence[int], longest: int, window: float) -> list[float]:
    """The soft overlong punishment of each response, which is added to its reward (equation 13): from 0 to -1.

    It is 0 up to `longest` - L tokens, and falls linearly to -1 at `longest`, where responses are cut off.

    Args:
        longest: `sampling.max_response_tokens`, the paper's L_max.
        window: `train.overlong_window`, by which L, the paper's L_cache, is this share of `longest`; 0 punishes none.
    """
    if not window:
        return [0.0] * len(lengths)
    punished = max(1, round(window * longest))
    return [max(-1.0, min(0.0, (longest - punished - length) / punished)) for length in lengths]
