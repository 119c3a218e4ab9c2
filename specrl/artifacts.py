"""What passes between stages: typed results on disk, and the one way files are written.

A file that exists is complete: it is written under a temporary name, flushed to disk and renamed. A stage is finished
when its `result.json` exists; that manifest is always written last.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

RESULT_FILE = "result.json"


class Artifact(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PrepareResult(Artifact):
    policy_dir: Path
    """Hugging Face directory: config, tokenizer, safetensors."""
    warm_start_loss_first: float | None = None
    warm_start_loss_last: float | None = None
    seconds: float


class PretrainResult(Artifact):
    drafter_dir: Path | None
    """EAGLE-3 directory, or for `mtp` the policy's with its layer as trained; none when nothing is trained."""
    rollouts_dir: Path
    num_responses: int
    reward_mean: float
    top1_match: float | None = None
    seconds: float


class CalibrateResult(Artifact):
    scales_path: Path
    layers_path: Path
    """Arrow table, one row per linear layer: errors, amax percentiles, the precision chosen."""
    bf16_layers: list[str]
    kl_all_fp8: float
    kl_chosen: float
    """Nats per token at the model's output, with the chosen layers kept in BF16."""
    seconds: float


class PrecisionReport(Artifact):
    """What was asked of each engine, and what it did: `native` or `emulated` FP8, or `off`."""

    generation: str = "bf16"
    generation_mode: str = "off"
    training: str = "bf16"
    training_mode: str = "off"
    kv_cache: str = "bf16"
    fp8_layers: int = 0
    """Linear layers in FP8, where an engine computes in FP8."""
    bf16_layers: list[str] = []
    """Linear layers that the calibration keeps in BF16."""


class TrainResult(Artifact):
    policy_dir: Path
    drafter_dir: Path | None
    """`policy_dir` for `mtp`, whose layer belongs to the policy."""
    steps: int
    step_seconds_median: float
    timing_share: dict[str, float]
    reward_first: float
    reward_last: float
    acceptance_length: float
    acceptance_rate_per_pos: list[float]
    mismatch: dict[str, float]
    precision: PrecisionReport = PrecisionReport()
    refit_checks: int
    refit_failures: int
    refit_max_abs_logprob_diff: float
    drafter_events: list[str] = []
    """Drafters that collapsed after a refit, and what was done about it."""
    seconds: float


class SpeedPair(Artifact):
    """Plain against speculative generation of the same tokens: same prompts, weights, seeds; interleaved; medians."""

    batch: int
    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    speedup: float
    speedup_min: float
    speedup_max: float
    decode_step_reduction: float
    """1 - speculative iterations / plain iterations."""
    tokens_equal: float
    """Share of responses that are the same, token for token, on both sides."""


class ParityCounts(Artifact):
    """Plain against speculative responses with the same seeds."""

    num_responses: int
    num_tokens: int
    num_differences: int
    """Responses that part; tokens after a first difference follow from it."""
    num_unexplained: int
    """Differences that are no near-tie; gated to be 0."""
    cdf_noise: float
    """Largest movement of a CDF step between two batch shapes of plain decoding."""
    logprob_gap_noise: float
    """Largest movement of the gap between the two best log-probs, nats."""
    limit: float | None = None
    """Largest distance that a near-tie may have: of the CDF for sampled responses, in nats for greedy ones. None in
    results of earlier versions, as is the next."""
    largest_distance: float | None = None
    """Largest distance of a difference found, in the same unit; 0 without differences."""


class ExactnessResult(Artifact):
    """Speculation against plain decoding on held-out prompts."""

    chi_squared: float | None
    degrees_of_freedom: int
    num_cells: int | None = None
    """Cells of the chi-squared test among which samples could fall; prompts with a single one are not counted. None in
    results of earlier versions."""
    num_samples: int
    p_value: float | None
    """Of first tokens against exact probabilities; none for greedy runs."""
    num_draft_tokens: int
    num_accepted_tokens: int
    """Drafted for those samples: without drafts the test says nothing."""
    sampled: ParityCounts
    greedy: ParityCounts


class ValidateResult(Artifact):
    accuracy_before: float
    accuracy_after: float
    num_prompts: int
    acceptance_length: float
    acceptance_rate_per_pos: list[float]
    speed: list[SpeedPair]
    exactness: ExactnessResult | None = None
    """None when nothing is speculated."""
    seconds: float


class ExportResult(Artifact):
    policy_dir: Path
    drafter_dir: Path | None
    """`policy_dir` for `mtp`."""
    vllm_acceptance_length: float | None
    """Acceptance length of the exported directory, loaded on its own in a fresh vLLM."""
    model_version: str | None
    seconds: float


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success flush it to disk and rename it, on error remove it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, default=str) + "\n")


def write_result(stage_dir: Path, result: Artifact) -> None:
    write_text(stage_dir / RESULT_FILE, result.model_dump_json(indent=2) + "\n")


ResultType = TypeVar("ResultType", bound=Artifact)


def read_result(stage_dir: Path, kind: type[ResultType]) -> ResultType:
    """The finished stage's result.

    Raises:
        ValueError: the stage has not finished, or its result was written by another version.
    """
    path = stage_dir / RESULT_FILE
    if not path.exists():
        raise ValueError(f"stage in {stage_dir} has not finished: no {RESULT_FILE}")
    try:
        return kind.model_validate_json(path.read_text())
    except ValidationError as error:
        raise ValueError(f"{path} is no {kind.__name__}; remove the folder to run the stage again") from error


def digest(value: Any) -> str:
    """First 12 hex digits of the SHA-256 of `value` as canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]
