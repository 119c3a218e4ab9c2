"""`specrl samples`: prompts, responses and rewards of a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from rich.console import Console

from flows.commands.options import AsJson, RunName, RunsDir, option, print_json
from flows.folder import find_run_to_read
from specrl.config import ConfigError

Count = Annotated[int, option("How many of them to show.", "NUMBER", least=0)]
PROMPT = "Show all responses to this prompt instead, of all steps or of --step."


def samples(
    name: RunName,
    step: Annotated[int | None, option("The RL step, from 0; the last one by default.", "NUMBER", least=0)] = None,
    best: Count = 3,
    worst: Count = 3,
    longest: Count = 3,
    prompt: Annotated[int | None, option(PROMPT, "ID")] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Show prompts, responses and rewards of a run.

    Of a step, the responses with the highest and the lowest reward and the longest ones are shown.
    """
    from specrl.report.samples import SampleReader, print_samples

    run_dir = find_run_to_read(name, runs_dir)
    reader, console = SampleReader(run_dir), Console(soft_wrap=True)
    steps = reader.steps
    if not steps:
        raise ConfigError(f"run {run_dir.name} has no rollouts yet")
    if step is not None and step not in steps:
        raise ConfigError(f"--step {step}: run {run_dir.name} has rollouts of steps {steps[0]} to {steps[-1]}")
    if prompt is not None:
        found = list(reader.prompt(prompt, steps if step is None else [step]))
        if not found:
            raise ConfigError(f"--prompt {prompt}: no response to it; specrl samples prints the numbers of prompts")
        if as_json:
            print_json({"run": run_dir.name, "prompt": prompt, "samples": [asdict(sample) for sample in found]})
        else:
            print_samples(console, f"{len(found)} responses to prompt {prompt}", found)
        return
    shown = reader.step(steps[-1] if step is None else step, best, worst, longest)
    if as_json:
        print_json({"run": run_dir.name, **asdict(shown)})
        return
    print(f"step {shown.step}: {shown.num_responses} responses, mean reward {shown.reward_mean:.3f}\n")
    for why, chosen in shown.chosen.items():
        if chosen:
            print_samples(console, why, chosen)
