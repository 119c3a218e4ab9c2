"""The typed results that stages pass to each other on disk, and the functions that write all files.

A file that exists is complete: it is written under a temporary name, flushed to disk and renamed. A stage has finished
when its `result.json` exists; it is always written last.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from specrl.config.base import ConfigError

RESULT_FILE = "result.json"
PROMPTS_DIR = "prompts"
"""The folder of problem shards in that of `prepare`; `[data]` and the tokenizer there determine their contents."""
MOST_BYTES = 64 * 2**20  # the most bytes read from a text or JSON file; a run's own files are far smaller
PASSING = frozenset(
    {errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOLCK, errno.EROFS, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN}
)
"""The errors of a cluster's file system that pass after minutes."""
CURVE_FOLDER = "validation"
"""The folder of policy versions' scores, one file each, in the train stage's folder."""


class Artifact(BaseModel):
    """The base of all results: frozen, and undeclared keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PrepareResult(Artifact):
    policy_dir: Path  # the policy as a Hugging Face folder: configuration, tokenizer and safetensors
    prompts_seen: int = 0
    """The number of prompts examined: all rows of files, and the first ones drawn from generators."""
    prompts_overlong: int = 0  # those of them that were too long, and were dropped or truncated as `data.overlong` says
    drafter_dir: Path | None = None  # the drafter of `drafter.source` in specrl's own layout; None without one
    seconds: float  # the wall-clock time of the stage, here as in every result


class PretrainResult(Artifact):
    drafter_dir: Path | None
    """The folder of the EAGLE-3 drafter, or for `mtp` of the policy with its trained layer; None without a drafter."""
    rollouts_dir: Path
    num_responses: int
    reward_mean: float
    top1_match: float | None = None
    """The share of positions at which the drafter's most likely token is the policy's; None without a drafter."""
    seconds: float


class CalibrateResult(Artifact):
    scales_path: Path
    layers_path: Path
    """The Arrow table with a row for each linear layer: its FLOPs, its divergence alone in FP8, its precision."""
    bf16_layers: list[str]
    kl_all_fp8: float  # the KL divergence at the model's output with every linear layer in FP8, in nats per token
    kl_chosen: float  # the same divergence with the chosen layers kept in BF16
    seconds: float


class PrecisionReport(Artifact):
    """The precision requested of each engine, and how it computed FP8: `native`, `emulated` or `off`."""

    generation: str = "bf16"
    """The requested precision: `fp8`, or the model's type, `bf16` or `fp32`; likewise for `training` and `kv_cache`."""
    generation_mode: str = "off"
    training: str = "bf16"
    training_mode: str = "off"
    kv_cache: str = "bf16"
    fp8_layers: int = 0  # the number of linear layers in FP8, where an engine computes in FP8
    bf16_layers: list[str] = []  # the linear layers that the calibration keeps in BF16


class SetScore(Artifact):
    """The scores of one policy version on one held-out set. Intervals are of 95 % confidence, over prompts."""

    step: int  # the number of RL steps that the policy had been trained for: 0 is the policy before training
    set: str  # the name of the set
    num_prompts: int
    k: int  # the number of responses to each prompt
    accuracy: float  # the mean reward of all responses
    prompt_accuracies: tuple[float, ...]
    """The same for each prompt, in their order, so that policies can be compared prompt by prompt."""
    avg_at_k: float  # the share of all responses that are right: their reward is at least `validate.correct_reward`
    pass_at_k: float  # the mean over prompts of the probability that at least one of k responses is right
    pass_at: dict[int, float]
    """The same for fewer responses (the unbiased estimate of Chen et al., 2021), by their number, and for k."""
    ci: dict[str, tuple[float, float]]  # the confidence intervals of `accuracy`, `avg_at_k` and `pass_at_k`
    response_length_mean: float  # the mean length of all responses, in tokens
    response_length_max: int
    truncated_fraction: float  # the share of the responses that were cut off at their limit
    seconds: float  # the wall-clock time of generation and scoring
    decode_steps_per_token: float
    """The iterations that a response took, over its tokens, on average over all tokens: 1 without accepted drafts."""
    measure: str = ""
    """A digest of what the scores depend on besides the policy: only with the same one can they be compared."""

    def metrics(self) -> dict[str, float]:
        """The scores under their names in MLflow."""
        others = {"step", "set", "num_prompts", "k", "prompt_accuracies", "pass_at", "ci", "measure"}
        values: dict[str, float] = self.model_dump(exclude=others)
        values |= {f"pass_at_{size}": value for size, value in self.pass_at.items()}
        for name, (low, high) in self.ci.items():
            values |= {f"{name}_low": low, f"{name}_high": high}
        return {f"validation/{self.set}/{name}": value for name, value in values.items()}


_SCORES = TypeAdapter(list[SetScore])


class BestPolicy(Artifact):
    """The best of the policies that were validated during training."""

    step: int  # the number of RL steps that it was trained for
    metric: str  # the metric by which it is the best
    value: float
    policy_dir: Path
    drafter_dir: Path | None
    """The folder of the drafter trained with the policy; for `mtp`, `policy_dir`; None without a drafter."""


class TrainResult(Artifact):
    """The result of `train`, summed up from the records of its steps."""

    policy_dir: Path
    """The policy that later stages use: that of the last step or, with `train.final = "best"`, the best one."""
    drafter_dir: Path | None
    """The drafter's folder; for `mtp`, whose layer belongs to the policy, `policy_dir`; None without a drafter."""
    policy_step: int  # the number of RL steps that this policy was trained for
    steps: int  # the number of RL steps of the run
    stopped_early: str | None = None
    """Why `train.stop_when` ended training before `train.num_steps`; None if it did not."""
    best: BestPolicy | None = None  # the best policy; None where nothing was validated during training
    step_seconds_median: float
    timing_share: dict[str, float]  # the share of the steps' time that each part took, by the name of the part
    reward_first: float  # the mean reward of the first step
    reward_last: float  # the mean reward of the last step
    reward_parts: dict[str, tuple[float, float]] = {}
    """The mean of each part of the reward in the first and the last step, unweighted; empty where there are none."""
    acceptance_length: float
    acceptance_rate_per_pos: list[float]
    mismatch: dict[str, float]
    """The means over the steps of the `mismatch/...` metrics, by their names below `mismatch/`."""
    precision: PrecisionReport = PrecisionReport()
    refit_checks: int  # the number of refits that were checked: the first one, and one after each step
    refit_failures: int  # the number of refits after which the drafter was found wrong; a wrong policy ends the stage
    refit_max_abs_logprob_diff: float
    """The largest |log p_engine - log p_trainer| on the parity probe of any step, in nats."""
    drafter_events: list[str] = []  # the collapses of the drafter after a refit, and what was done about each
    seconds: float


class SpeedPair(Artifact):
    """Plain and speculative generation in turn, on the same prompts, weights and seeds. Figures are medians.

    In `validate`, prompts, seeds and the text to draft from are those of the training step that would come next.
    """

    batch: int  # the number of requests that run at the same time
    plain_tokens_per_s: float  # the rate of plain decoding by the same engine, whose drafts are switched off (k = 0)
    speculative_tokens_per_s: float
    speedup: float  # the ratio of the speculative tokens per second to the plain ones of the same engine, with k = 0
    speedup_min: float
    speedup_max: float
    decode_step_reduction: float  # 1 - speculative decoding steps / plain decoding steps
    tokens_equal: float  # the share of responses that are the same with and without speculation, token for token
    token_share: dict[str, float] = {}
    """The share of the tokens that each source drafted and that were accepted: `drafter`, `replay` (text that was
    pre-generated for the prompt), `recent` (recent rollouts), or a text source of the user's own. What is missing to 1
    was not drafted."""


class NextStepText(Artifact):
    """The text from which the first engine would draft at the start of the training step after the last one."""

    step: int  # the number of that step
    num_responses: int  # the number of its responses, on all engines
    num_stored: int  # the number of texts that bubbles have pre-generated for it, on all engines
    stored_tokens: int
    num_recent: int  # the number of recent rollouts that are drafted from
    recent_tokens: int


class ParityCounts(Artifact):
    """Plain and speculative responses with the same seeds, compared token by token."""

    num_responses: int
    num_tokens: int
    num_differences: int
    """The number of responses that differ. Only the first difference of each counts: later ones follow from it."""
    num_unexplained: int
    """The number of differences that are not near-ties, and of tokens that are not what their own distribution gives.
    Validation fails unless it is 0."""
    lead_noise: float
    """The largest movement of a token's lead between two batch shapes of plain decoding, in nats; 0 where no token
    differs, since it is not measured then."""
    limit: float
    """The largest distance that a near-tie may have, in nats."""
    largest_distance: float
    """The largest distance found, in nats; 0 without differences."""


class ExactnessResult(Artifact):
    """Speculative and plain decoding, compared on held-out prompts."""

    num_draft_tokens: int
    num_accepted_tokens: int
    """The number of accepted draft tokens. The comparison is conclusive only if some were accepted, some rejected."""
    sampled: ParityCounts
    greedy: ParityCounts


class ValidateResult(Artifact):
    accuracy_before: float  # the mean reward of the policy of `prepare` on the first of the held-out sets
    accuracy_after: float  # the mean reward of the trained policy on the same prompts, with the same seeds
    num_prompts: int  # the number of prompts of this set
    before: list[SetScore] = []
    """The scores of the policy of `prepare` on all held-out sets, with the same prompts and seeds as in `after`."""
    after: list[SetScore] = []  # the scores of the trained policy
    acceptance_length: float
    acceptance_rate_per_pos: list[float]
    speed: list[SpeedPair]  # one pair for each batch size of `validate.speed_batches`; empty when nothing is speculated
    text: NextStepText | None = None
    """The initial text of the pairs' speculative side; None for methods that draft from no text."""
    exactness: ExactnessResult | None = None
    """The comparison of speculative and plain decoding; None when nothing is speculated."""
    seconds: float


class Acceptance(Artifact):
    """How much of a drafter's drafts was accepted, on one held-out set at one temperature."""

    set: str  # the name of the set
    temperature: float  # the temperature; 0 is greedy decoding
    context: tuple[int, int] | None
    """The range of context lengths whose drafts are counted, in tokens; None for all drafts."""
    num_drafts: int
    acceptance_length: float
    acceptance_rate_per_pos: list[float]


class ExportResult(Artifact):
    policy_dir: Path
    drafter_dir: Path | None  # the drafter's folder; for `mtp`, `policy_dir`; None without a drafter
    vllm_acceptance_length: float | None
    """The acceptance length in a fresh vLLM that loaded the exported folders, on the first held-out set; None without a
    drafter."""
    acceptance: list[Acceptance] = []
    """The acceptance there by held-out set, temperature and context length; the first of them is that length."""
    seconds: float


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`. On success it is flushed to disk and renamed, on an error removed.

    The temporary path is unique among all writers of the file, on any host.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # the error of a full disk names no file
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON atomically; values that JSON lacks, such as paths, become strings."""
    write_text(path, json.dumps(value, indent=2, default=str) + "\n")


def append_line(path: Path, line: str, *, flush: bool = True) -> None:
    """Append a line to a text file and, with `flush`, wait until it is on disk.

    A line cut short by a kill or a full disk remains a line of its own, which readers skip. After an error it is
    removed, unless another process has appended to the file in the meantime.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        newline = "\n" if size and os.pread(file.fileno(), 1, size - 1) != b"\n" else ""
        data, end = memoryview(f"{newline}{line}\n".encode()), size
        try:
            while data:
                written = file.write(data)
                data, end = data[written:], end + written
            if flush:
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = str(path)
            if os.fstat(file.fileno()).st_size == end:
                os.ftruncate(file.fileno(), size)
            raise


def read_file(path: Path) -> bytes:
    """Read a file of a run, possibly another user's; raise ValueError for a link, a pipe or a huge file."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, or a socket
            raise ValueError(f"{path} is not a file") from error
        raise
    state = os.fstat(file)
    if not stat.S_ISREG(state.st_mode) or state.st_size > MOST_BYTES:
        os.close(file)
        raise ValueError(f"{path} is not a file of at most {MOST_BYTES} bytes")
    with os.fdopen(file, "rb") as opened:
        return opened.read(MOST_BYTES)


def is_passing(error: BaseException) -> bool:
    """Whether a file-system error is temporary, as while a file server restarts."""
    return isinstance(error, OSError) and error.errno in PASSING


def read_json(path: Path) -> Any:
    """Read the JSON value in a file of a run, possibly another user's; None if it cannot be read."""
    try:
        return json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return None


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in such a file; empty if there is none."""
    found = read_json(path)
    return found if isinstance(found, dict) else {}


def read_lines(path: Path) -> list[Any]:
    """Read a file with one JSON value per line; no values if there is no such file."""
    try:
        lines = read_file(path).splitlines()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return []
    values = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):  # a line cut short by a kill
            values.append(json.loads(line))
    return values


def write_result(stage_dir: Path, result: Artifact) -> None:
    """Write a stage's result. The stage counts as finished from then on."""
    write_text(stage_dir / RESULT_FILE, result.model_dump_json(indent=2) + "\n")


def read_result[Result: Artifact](stage_dir: Path, kind: type[Result]) -> Result:
    """Read a stage's result; raise ConfigError if it is missing or was written by another version of specrl."""
    path = stage_dir / RESULT_FILE
    if not path.exists():
        raise ConfigError(f"stage in {stage_dir} has not finished: no {RESULT_FILE}")
    values = read_object(path)
    try:
        # A run continued with other code keeps its finished stages; fields that this code lacks are dropped.
        return kind.model_validate({name: value for name, value in values.items() if name in kind.model_fields})
    except ValidationError as error:
        raise ConfigError(
            f"{path} is not a {kind.__name__} of this version; remove the folder to run the stage again"
        ) from error


def point_to(link: Path, folder: Path) -> None:
    """Point the symbolic link `link` at `folder`, which lies below the link's own folder, replacing any old target."""
    temporary = _temporary(link)
    temporary.symlink_to(folder.relative_to(link.parent))
    temporary.replace(link)


def write_scores(train_dir: Path, step: int, scores: Sequence[SetScore]) -> None:
    """Write the scores of the policy after `step` RL steps on all held-out sets, in the train stage's folder."""
    write_text(
        train_dir / CURVE_FOLDER / f"step={step:06d}.json", _SCORES.dump_json(list(scores), indent=2).decode() + "\n"
    )


def read_curve(train_dir: Path) -> list[SetScore]:
    """The scores of all policy versions, in the order of steps and, within each, of the held-out sets.

    Without those from before a change of what the newest scores of their set measure.
    """
    scores: list[SetScore] = []
    for path in sorted((train_dir / CURVE_FOLDER).glob("step=*.json")):
        with contextlib.suppress(ValidationError):  # written by another version of specrl
            scores += _SCORES.validate_python(read_json(path))
    newest = {score.set: score.measure for score in scores}
    return [score for score in scores if score.measure == newest[score.set]]


def digest(value: Any) -> str:
    """The first 12 hex digits of the SHA-256 of `value` as canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]
