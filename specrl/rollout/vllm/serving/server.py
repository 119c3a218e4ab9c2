"""A process with vLLM's OpenAI server on the loopback interface. This imports neither vLLM nor torch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count, takewhile
from pathlib import Path
from typing import Any, NoReturn, Self

from specrl.processes import LOOPBACK
from specrl.rollout.drafts.acceptance import SpeculationStats

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": LOOPBACK,
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Environment variables of the server, unless the user has set them."""
KEY = "VLLM_API_KEY"
"""The variable from which vLLM's server reads the key that it asks of its clients."""
LOOK_SECONDS = 0.2
"""The pause between two looks at whether the server answers or has ended."""
END_SECONDS = 30
"""How long the server may take to end after it was told to, before it is killed."""
METRIC = re.compile(r"vllm:(\w+?)(?:\{(.*)\})? (\S+)")
"""A line of the page /metrics, with name, labels and value."""
POSITION = re.compile(r'position="(\d+)"')


def own_variables() -> dict[str, str]:
    """List the user's variables, without the one by which this process may have chosen the runner of its own engine."""
    return {name: value for name, value in os.environ.items() if name != "VLLM_USE_V2_MODEL_RUNNER"}


class ServerEndedError(RuntimeError):
    """vLLM's server ended without having been told to, or refused a request. The message is one line."""


class ModelServer:
    """vLLM's server, which exists as long as the context of this object, and never longer than this process."""

    def __init__(self, arguments: Sequence[str], port: int, log: Path) -> None:
        """Start the server, and return before it answers.

        Args:
            arguments: The words after `vllm`, such as `serve`, the model, and the port.
            port: That port.
            log: The file that gets what the server prints.
        """
        self.url = f"http://{LOOPBACK}:{port}"
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "specrl.rollout.vllm.serving.process", str(os.getpid()), *arguments],
                env={**ENVIRONMENT, **own_variables()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for this process, which ends the server
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the server and all processes that it has started."""
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait_until_it_answers(self) -> None:
        """When the server can take requests.

        Raises:
            ServerEndedError: It ended instead.
        """
        while True:
            self.check()
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(LOOK_SECONDS)

    def wait_until_it_ends(self) -> NoReturn:
        """Wait for the server's end.

        Raises:
            ServerEndedError: The server has ended.
        """
        while True:
            self.check()
            time.sleep(LOOK_SECONDS)

    def check(self) -> None:
        """Return if the server has not ended.

        Raises:
            ServerEndedError: It has.
        """
        code = self._process.poll()
        if code is not None:
            raise ServerEndedError(
                f"vLLM's server ended with code {code}: {_last_words(self._log)}; its log is {self._log}"
            )

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request for a completion.

        Args:
            body: The fields of OpenAI's API, without the model, which is the one that the server has.

        Raises:
            ServerEndedError: The server refuses it or has ended.
        """
        (model, *_) = json.loads(self._read("/v1/models"))["data"]
        answer: dict[str, Any] = json.loads(self._read("/v1/completions", {"model": model["id"], **body}))
        return answer

    def counters(self) -> tuple[int, SpeculationStats]:
        """The tokens that were generated since the start, and the counters of drafts, from the page /metrics.

        Raises:
            ServerEndedError: The server has ended.
        """
        return parse_metrics(self._read("/metrics"))

    def _read(self, path: str, body: Mapping[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{self.url}{path}", data, headers)) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as error:
            words = " ".join(error.read().decode(errors="replace").split())
            raise ServerEndedError(f"vLLM's server answers with {error.code}: {words:.600}") from error
        except OSError as error:
            self.check()
            raise ServerEndedError(
                f"vLLM's server does not answer any more ({error}); its log is {self._log}"
            ) from error


def parse_metrics(page: str) -> tuple[int, SpeculationStats]:
    """The number of generated tokens and the counters of drafts that vLLM's page /metrics shows.

    The page does not say how many drafts reached each position. Nearly all of them have full length, so every position
    counts as drafted in all of them. Engines of the same server are added up.
    """
    totals: dict[str, int] = {}
    for line in page.splitlines():
        if found := METRIC.fullmatch(line):
            name, labels, value = found.groups()
            position = POSITION.search(labels or "")
            key = f"{name}/{position.group(1)}" if position else name
            totals[key] = totals.get(key, 0) + int(float(value))

    drafts, draft_tokens, accepted = (
        totals.get(f"spec_decode_num_{name}_total", 0) for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    names = (f"spec_decode_num_accepted_tokens_per_pos_total/{position}" for position in count())
    per_pos = tuple(totals[name] for name in takewhile(totals.__contains__, names))
    stats = SpeculationStats(drafts, draft_tokens, accepted, per_pos, drafted_per_pos=(drafts,) * len(per_pos))
    return totals.get("generation_tokens_total", 0), stats


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\w(Error|Exception|Interrupt)\b.*:|^vllm.*error:", line)]
    return (errors or lines or ["it said nothing"])[-1][:600]
