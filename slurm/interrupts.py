"""Hold Ctrl-C back for the moment in which a process is started and nobody has its handle yet."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """An interrupt that comes within the block is raised at its end.

    Only in the main thread; no other thread is ever interrupted. The signal is not blocked, which processes started in
    the block would inherit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
