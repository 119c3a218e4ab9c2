"""Keep transformers from importing what this project does not use of it."""

from __future__ import annotations

import transformers.utils


def skip_unused_parts() -> None:
    """Have transformers take scikit-learn and SciPy for missing, before it imports any model.

    It would import both, and pandas with them, for the losses of object detection and for assisted generation. That is
    a fifth of the time that a rank takes to import everything.
    """
    for name in ("is_sklearn_available", "is_scipy_available"):
        setattr(transformers.utils, name, lambda: False)
