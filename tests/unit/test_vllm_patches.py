"""What is replaced in vLLM."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count
from threading import Event, Thread
from types import ModuleType

import pytest

from specrl.rollout.vllm.engine.patches import own_modules


@pytest.fixture
def importing() -> Iterator[None]:
    """Another thread, which gets its turn after every few instructions, adds modules, and takes them away again."""

    def import_modules() -> None:
        for number in count():
            if done.is_set():
                return
            sys.modules[f"imported_{number % 1000}"] = ModuleType("imported")
            if number % 1000 == 999:
                forget()

    def forget() -> None:
        for name in [name for name in list(sys.modules) if name.startswith("imported_")]:
            del sys.modules[name]

    done, interval = Event(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = Thread(target=import_modules)
    thread.start()
    yield
    done.set()
    thread.join()
    sys.setswitchinterval(interval)
    forget()


def test_vllms_modules_are_listed_while_another_thread_imports(importing: None) -> None:
    for _ in range(50):
        assert all(name.partition(".")[0] == "vllm" for name in own_modules.modules)
