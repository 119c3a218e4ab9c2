"""`specrl bench`: measure a finished run's policy and drafter on this machine."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import ValidationError

from flows.folder import find_run
from slurm.backend import JobError
from slurm.environment import THREAD_VARIABLES
from slurm.failures import last_error
from specrl.bench.job import BenchJob
from specrl.bench.pages import default_page
from specrl.bench.settings import (
    AgreementSettings,
    BubbleSettings,
    DrafterSettings,
    PrecisionSettings,
    RolloutSettings,
    methods_of,
)
from specrl.bench.subject import find_subject
from specrl.config import ConfigError, Section
from specrl.config.errors import explain

S = TypeVar("S", bound=Section)
RunName = Annotated[str, typer.Option("--run", help="Name of a finished run, or its folder.")]
RunsDir = Annotated[Path, typer.Option("--runs-dir", help="Folder that holds the runs.")]
JsonPath = Annotated[Path | None, typer.Option("--json", help="Also write the rows here.")]
PagePath = Annotated[Path | None, typer.Option("--page", help="Markdown page; benchmarks/DATE-NAME.md by default.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; resources.cpus_per_rank by default.")]
Batches = Annotated[str | None, typer.Option(help="Batch sizes, such as 1,4,16.")]
Repeats = Annotated[int | None, typer.Option(help="Rounds; each runs every side once.")]

group = typer.Typer(help="Measure a finished run's policy and drafter: tables, a plot, a dated page.")


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="bench")


@group.command()
def rollouts(
    run: RunName,
    methods: Annotated[str | None, typer.Option(help="Draft sources, such as eagle3,ngram.")] = None,
    ks: Annotated[str | None, typer.Option(help="Draft lengths, such as 1,3,adaptive.")] = None,
    batches: Annotated[str | None, typer.Option(help="Batch sizes, such as 1,4,tail64.")] = None,
    repeats: Repeats = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest response at a fixed batch size.")] = None,
    compile_: Annotated[bool | None, typer.Option("--compile/--no-compile", help="Try compiled engines.")] = None,
    json_path: JsonPath = None,
    page: PagePath = None,
    threads: Threads = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Speculative against plain generation of the same tokens, interleaved; what limits it, beside it."""
    given = {
        **_lists(methods=methods, ks=ks, batches=batches),
        **{"repeats": repeats, "max_tokens": max_tokens, "compile": compile_},
    }
    settings = _settings(RolloutSettings, given)
    methods_of(settings, find_subject(find_run(run, runs_dir)).config)  # a mistake shows before anything starts
    execute("rollouts", run, runs_dir, settings, json_path, page, threads)


@group.command()
def drafter(
    run: RunName,
    num_steps: Annotated[int | None, typer.Option(help="RL steps.")] = None,
    prompts_per_step: Annotated[int | None, typer.Option(help="Prompts of a step.")] = None,
    samples_per_prompt: Annotated[int | None, typer.Option(help="Responses to a prompt.")] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Prompts that each drafter is pretrained on.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of the pretraining.")] = None,
    batches: Batches = None,
    repeats: Repeats = None,
    json_path: JsonPath = None,
    page: PagePath = None,
    threads: Threads = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """EAGLE-3 drafters pretrained on and off the task, frozen and trained online, over the same RL steps."""
    given = {
        **_lists(batches=batches),
        **{"num_steps": num_steps, "prompts_per_step": prompts_per_step, "samples_per_prompt": samples_per_prompt},
        **{"num_prompts": num_prompts, "epochs": epochs, "repeats": repeats},
    }
    execute("drafter", run, runs_dir, _settings(DrafterSettings, given), json_path, page, threads)


@group.command()
def bubbles(
    run: RunName,
    uses: Annotated[str | None, typer.Option(help="Uses of idle time, such as none,both; all by default.")] = None,
    drafter: Annotated[Path | None, typer.Option(help="Drafter to begin with; the run's own by default.")] = None,
    num_steps: Annotated[int | None, typer.Option(help="RL steps of each setting.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks on this machine.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Of pre-generated text: same or other.")] = None,
    prompts_per_step: Annotated[int | None, typer.Option(help="Prompts of a step.")] = None,
    samples_per_prompt: Annotated[int | None, typer.Option(help="Responses to a prompt.")] = None,
    max_response_tokens: Annotated[int | None, typer.Option(help="Longest response; the run's own by default.")] = None,
    json_path: JsonPath = None,
    page: PagePath = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of a rank; 1 by default.")] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """The same RL steps with every use of idle time, against plain synchronous decoding; who waited, and what for."""
    given = {
        **_lists(uses=uses),
        **{"drafter": drafter, "num_steps": num_steps, "ranks": ranks, "seeds": seeds, "threads": threads},
        **{"prompts_per_step": prompts_per_step, "samples_per_prompt": samples_per_prompt},
        **{"max_response_tokens": max_response_tokens},
    }
    execute("bubbles", run, runs_dir, _settings(BubbleSettings, given), json_path, page, 1)


@group.command()
def agreement(
    run: RunName,
    seeds: Annotated[str | None, typer.Option(help="Seeds, such as 1,2,3.")] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Held-out prompts; 64 by default.")] = None,
    samples_per_prompt: Annotated[int | None, typer.Option(help="Responses to a prompt; 4 by default.")] = None,
    json_path: JsonPath = None,
    page: PagePath = None,
    threads: Threads = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """How far engine and trainer agree about the same tokens, each in BF16 and in FP8; nothing is trained."""
    given = {**_lists(seeds=seeds), "num_prompts": num_prompts, "samples_per_prompt": samples_per_prompt}
    execute("agreement", run, runs_dir, _settings(AgreementSettings, given), json_path, page, threads)


@group.command()
def precision(
    run: RunName,
    num_steps: Annotated[int | None, typer.Option(help="RL steps of each setting and seed.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, such as 1,2,3.")] = None,
    correction: Annotated[str | None, typer.Option(help="Of the corrected setting: tis, icepop, seq-mask.")] = None,
    kv_cache: Annotated[str | None, typer.Option(help="Of engines with FP8 weights: bf16, fp8.")] = None,
    prompts_per_step: Annotated[int | None, typer.Option(help="Prompts of a step; 8 by default.")] = None,
    samples_per_prompt: Annotated[int | None, typer.Option(help="Responses to a prompt; 4 by default.")] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Held-out prompts for the accuracy; 64 by default.")] = None,
    json_path: JsonPath = None,
    page: PagePath = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the one rank; 2 by default.")] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """The same RL steps in BF16, with FP8 in generation, in both engines, and corrected: agreement and accuracy."""
    given = {
        **_lists(seeds=seeds),
        **{"num_steps": num_steps, "correction": correction, "kv_cache": kv_cache, "num_prompts": num_prompts},
        **{"prompts_per_step": prompts_per_step, "samples_per_prompt": samples_per_prompt, "threads": threads},
    }
    execute("precision", run, runs_dir, _settings(PrecisionSettings, given), json_path, page, 1)


def execute(
    name: str,
    run: str,
    runs_dir: Path,
    settings: Section,
    json_path: Path | None,
    page: Path | None,
    threads: int | None,
) -> None:
    """Run `specrl.bench.NAME.main:main` in a process of its own, with a rank's environment, until it ends.

    Raises:
        ConfigError: the run is not there or has not finished training.
        JobError: the benchmark failed.
    """
    run_dir = find_run(run, runs_dir)
    resources = find_subject(run_dir).config.resources_of("validate")
    page = (page or default_page(name)).absolute()
    job = BenchJob(
        entry=f"specrl.bench.{name}.main:main",
        run_dir=run_dir,
        settings=settings.model_dump(mode="json"),
        command=_command(name, run, settings),
        page=page,
        json_path=json_path.absolute() if json_path else None,
    )
    job_path = run_dir / "bench" / f"{name}.json"
    job.save(job_path)
    count = str(threads or min(resources.cpus_per_rank, len(os.sched_getaffinity(0))))
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, count), "TOKENIZERS_PARALLELISM": "false"}
    if not resources.gpus_per_rank:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    log = job_path.with_suffix(".log")
    with log.open("wb") as errors:
        process = [sys.executable, "-m", "specrl.bench.job", str(job_path), str(os.getpid())]
        code = subprocess.run(process, env=environment, stderr=errors, check=False).returncode
    if code:
        raise JobError(f"bench {name} failed: {last_error(log.read_text(errors='replace'))}; log: {log}")
    print(f"page: {page}")


def _lists(**values: str | None) -> dict[str, list[str] | None]:
    return {key: None if text is None else [part for part in text.split(",") if part] for key, text in values.items()}


def _settings(kind: type[S], given: dict[str, Any]) -> S:
    """
    Raises:
        ConfigError: a value that is not allowed, one line each.
    """
    try:
        return kind.model_validate({key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        raise ConfigError(explain(error, kind)) from error


def _command(name: str, run: str, settings: Section) -> str:
    """The command line that asks for these settings."""
    words = ["specrl", "bench", name, "--run", run]
    for key, value in settings.model_dump(mode="json", exclude_defaults=True).items():
        option = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return shlex.join(words)
