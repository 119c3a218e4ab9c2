"""Prompts, responses and rewards of a run for people; only what is shown is loaded from the rollouts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from textwrap import indent

import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from specrl.artifacts import PrepareResult, read_file
from specrl.config import ConfigError
from specrl.report.results import find_stages, readable
from specrl.report.tables import print_line
from specrl.schemas import ROLLOUT_SCHEMA

COLUMNS: tuple[str, ...] = ("step", "prompt_id", "sample", "prompt_tokens", "response_tokens", "turns", "response")
COLUMNS += ("answer", "reward", "reward_parts", "finish_reason")
PAGE_STEPS = 30  # steps whose samples the report page shows
PAGE_CHARACTERS = 4000  # characters of the longest text on the report page


@dataclass(frozen=True)
class Sample:
    step: int
    prompt_id: int
    sample: int  # index among the responses to the prompt in this step
    reward: float
    reward_parts: str  # in words; empty if the reward has only one
    num_tokens: int  # of the response, without an environment's turns
    finish_reason: str
    prompt: str
    response: str
    answer: str  # the reference answer


@dataclass(frozen=True)
class StepSamples:
    """Some of a step's responses, by why they were chosen."""

    step: int
    num_responses: int
    reward_mean: float
    chosen: dict[str, list[Sample]]  # by `best`, `worst` and `longest`


class SampleReader:
    """Reads a training's rollouts by memory mapping, so that reading rewards is cheap however long the responses."""

    def __init__(self, run_dir: Path) -> None:
        self._stages = find_stages(run_dir)
        self._folder = self._stages["train"] / "rollouts" if "train" in self._stages else None

    @property
    def steps(self) -> list[int]:
        folders = self._folder.glob("step=*") if self._folder is not None else ()
        names = (folder.name.partition("=")[2] for folder in folders if any(folder.glob("*.arrow")))
        return sorted(int(name) for name in names if name.isdecimal() and len(name) == len("000000"))

    def step(self, step: int, best: int, worst: int, longest: int) -> StepSamples:
        """The `count` best, worst and longest responses of a step."""
        table = self._read(step)
        whole = pc.list_value_length(table["response_tokens"]).to_pylist()
        lengths = [length - sum(turns[1::2]) for length, turns in zip(whole, table["turns"].to_pylist(), strict=True)]
        rewards = table["reward"].to_pylist()
        orders = {
            "best": (best, sorted(range(len(rewards)), key=lambda row: -rewards[row])),
            "worst": (worst, sorted(range(len(rewards)), key=lambda row: rewards[row])),
            "longest": (longest, sorted(range(len(rewards)), key=lambda row: -lengths[row])),
        }
        chosen = {name: [self._sample(table, row) for row in rows[:count]] for name, (count, rows) in orders.items()}
        return StepSamples(step, len(rewards), sum(rewards) / max(len(rewards), 1), chosen)

    def _read(self, step: int) -> pa.Table:
        assert self._folder is not None
        paths = sorted((self._folder / f"step={step:06d}").glob("*.arrow"))
        return pa.concat_tables([_read_rollouts(path) for path in paths])

    def _sample(self, table: pa.Table, row: int) -> Sample:
        values = {name: table[name][row].as_py() for name in COLUMNS}
        response_tokens, parts = values.pop("response_tokens"), values.pop("reward_parts") or ()
        return Sample(
            prompt=self._decode(values.pop("prompt_tokens")),
            response=values.pop("response") or self._decode(response_tokens),
            num_tokens=len(response_tokens) - sum(values.pop("turns")[1::2]),
            reward_parts=", ".join(f"{name} {value:.3f}" for name, value in parts),
            **values,
        )

    def _decode(self, tokens: list[int]) -> str:
        if not tokens:
            return ""
        if self._tokenizer is None:
            return f"({len(tokens)} tokens; the policy's tokenizer is gone)"
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        prepared = readable(self._stages, "prepare", PrepareResult)
        folder = None if prepared is None else prepared.policy_dir.resolve()
        if folder is None or not folder.is_relative_to(self._stages["prepare"].resolve()):
            return None
        try:
            return Tokenizer.from_str(read_file(folder / "tokenizer.json").decode())
        except Exception:  # the library raises no narrower error for a damaged tokenizer
            return None


def _read_rollouts(path: Path) -> pa.Table:
    """Validate what is read, because the file may be somebody else's."""
    if path.is_symlink() or not path.is_file():
        raise ConfigError(f"{path} is not a file")
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all().select(COLUMNS)
        table.validate(full=True)  # wrong offsets would read foreign memory
        return table.cast(pa.schema([ROLLOUT_SCHEMA.field(name) for name in COLUMNS]))
    except (pa.ArrowException, ValueError, KeyError, OSError) as error:
        raise ConfigError(f"{path} holds no rollouts: {str(error).partition(chr(10))[0]}") from error


def page_samples(run_dir: Path) -> list[StepSamples]:
    """For the report page: some evenly spaced steps, with their best, worst and longest responses."""
    reader = SampleReader(run_dir)
    steps = reader.steps
    if len(steps) > PAGE_STEPS:
        steps = [steps[round(index * (len(steps) - 1) / (PAGE_STEPS - 1))] for index in range(PAGE_STEPS)]
    samples = [reader.step(step, best=2, worst=2, longest=1) for step in steps]
    return [step for step in samples if step.num_responses]


def response_rows(run_dir: Path) -> list[dict[str, str | int | float]]:
    """The samples of the report page as rows for MLflow's table; empty if the rollouts cannot be read."""
    try:
        steps = page_samples(run_dir)
    except ConfigError:
        return []
    rows = []
    for found in steps:
        chosen = {sample: why for why, samples in found.chosen.items() for sample in samples}  # one may be chosen twice
        for sample, why in chosen.items():
            texts = {name: clipped(getattr(sample, name)) for name in ("prompt", "response", "answer")}
            rows.append({**asdict(sample), **texts, "why": why})
    return rows


def clipped(text: str) -> str:
    """Shorten a long text for the page by leaving out its middle."""
    if len(text) <= PAGE_CHARACTERS:
        return text
    half = PAGE_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def print_samples(title: str, samples: Iterable[Sample]) -> None:
    print_line(title)
    for sample in samples:
        parts = f" ({sample.reward_parts})" if sample.reward_parts else ""
        print_line(
            f"\n  step {sample.step}, prompt {sample.prompt_id}, sample {sample.sample}: reward {sample.reward:.3f}"
            f"{parts}, {sample.num_tokens} tokens, {sample.finish_reason}"
        )
        for name in ("prompt", "response", "answer"):
            text = indent(getattr(sample, name), "    ", lambda line: True)
            print_line(f"  {name}:\n{text}")
    print_line("")
