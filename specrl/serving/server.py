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
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count, takewhile
from pathlib import Path
from typing import Any, NoReturn, Self

from prometheus_client.parser import text_string_to_metric_families

from specrl.config import Config
from specrl.data.problems import Prompt
from specrl.processes import LOOPBACK
from specrl.rollout.drafts.acceptance import SpeculationStats

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": LOOPBACK,
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""The server's, unless the user has set them."""
KEY = "VLLM_API_KEY"  # what vLLM's server asks of its clients
LOOK_SECONDS = 0.2  # between two looks at whether the server answers
AT_ONCE = 4  # requests under way
COUNT_SECONDS = 10  # within which the server counts a response that it has sent
END_SECONDS = 30  # to end after it was told to, before it is killed


class ServerEndedError(RuntimeError):
    """vLLM's server ended without having been told to, or refused a request."""


class ModelServer:
    """vLLM's server, which exists as long as the context of this object, and never longer than this process."""

    def __init__(self, arguments: Sequence[str], port: int, log: Path) -> None:
        """Start `vllm serve` with these options, among them `--model` and `--port`; it does not answer yet."""
        self.url = f"http://{LOOPBACK}:{port}"
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "specrl.serving.process", str(os.getpid()), *arguments],
                env={**ENVIRONMENT, **os.environ},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for this process, which ends the server
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait_until_it_answers(self) -> None:
        """Wait until the server can take requests; ServerEndedError if it ended instead."""
        while self._process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(LOOK_SECONDS)
        self.wait_until_it_ends()

    def wait_until_it_ends(self) -> NoReturn:
        code = self._process.wait()
        raise ServerEndedError(
            f"vLLM's server ended with code {code}: {_last_words(self._log)}; its log is {self._log}"
        )

    def answer(self, prompts: Sequence[Prompt], config: Config) -> tuple[int, SpeculationStats]:
        """The tokens with which the server answers prompts, sampled as `sampling` says, and its drafts.

        ServerEndedError where it refuses a request, has ended, or has drafted nothing.
        """
        (model, *_) = json.loads(self._read("/v1/models"))["data"]
        bodies = [{"model": model["id"], **body_of(prompt, config)} for prompt in prompts]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(lambda body: json.loads(self._read("/v1/completions", body)), bodies))
        tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
        deadline = time.monotonic() + COUNT_SECONDS
        counted, stats = parse_metrics(self._read("/metrics"))
        while counted < tokens and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            counted, stats = parse_metrics(self._read("/metrics"))
        if not stats.num_drafts:
            raise ServerEndedError(f"vLLM's server drafted nothing in {tokens} tokens: it does not speculate")
        return tokens, stats

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
            raise ServerEndedError(
                f"vLLM's server does not answer any more ({error}); its log is {self._log}"
            ) from error


def body_of(prompt: Prompt, config: Config) -> dict[str, Any]:
    """A request of OpenAI's API, with vLLM's additions; without a seed, since vLLM cannot rewind one on CPUs."""
    sampling = config.sampling
    return {
        "prompt": prompt.tokens,
        "max_tokens": min(sampling.max_response_tokens, config.model.max_length - len(prompt.tokens)),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,  # for vLLM, too, 0 stands for all tokens
        "stop": list(sampling.stop),
        **{"min_p": 0.0, "repetition_penalty": 1.0},  # else those of the model's generation_config.json
    }


def parse_metrics(page: str) -> tuple[int, SpeculationStats]:
    """The generated tokens and the counters of drafts on vLLM's page /metrics, of all engines together.

    The page does not say how many drafts reached each position: nearly all have full length, so every position counts
    in all of them.
    """
    totals: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            totals[sample.name.removeprefix("vllm:"), sample.labels.get("position", "")] += int(sample.value)
    drafts, draft_tokens, accepted = (
        totals[f"spec_decode_num_{name}_total", ""] for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    positions = (("spec_decode_num_accepted_tokens_per_pos_total", str(position)) for position in count())
    per_pos = tuple(totals[position] for position in takewhile(totals.__contains__, positions))
    stats = SpeculationStats(drafts, draft_tokens, accepted, per_pos, drafted_per_pos=(drafts,) * len(per_pos))
    return totals["generation_tokens_total", ""], stats


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\w(Error|Exception|Interrupt)\b.*:|^vllm.*error:", line)]
    return (errors or lines or ["it said nothing"])[-1][:600]
