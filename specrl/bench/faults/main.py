"""`specrl bench faults`: inject each fault into the training of a run, and write the rows and the page."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from specrl.artifacts import RESULT_FILE, PretrainResult, read_result, write_json
from specrl.bench.faults.catalogue import FAULTS, Fault
from specrl.bench.faults.one_run import HEALTHY_STEPS, Finding
from specrl.bench.faults.page import write_page
from specrl.bench.job import BenchJob, say
from specrl.bench.pages import write_rows
from specrl.bench.precision.runs import find_inputs
from specrl.bench.settings import FaultSettings, train_plainly
from specrl.config import Config, parse_config
from specrl.context import StageContext


def main(job: BenchJob) -> None:
    """Inject the chosen faults one after another, each into a training of its own."""
    settings = FaultSettings.model_validate(job.settings)
    if unknown := set(settings.only) - {fault.name for fault in FAULTS}:
        raise ValueError(f"--only {min(unknown)}: allowed: {', '.join(fault.name for fault in FAULTS)}")
    config = job.config
    chosen = [fault for fault in FAULTS if not settings.only or fault.name in settings.only]
    job.check_taken([make_config(config, job.folder, fault, settings) for fault in chosen])
    has_drafter = config.speculation.draft_method.has_weights
    found: dict[Fault, Finding] = {}
    for fault in chosen:
        if fault.needs_drafter and not has_drafter:
            continue
        found[fault] = inject(job, config, fault, settings)
        said = found[fault]
        say(f"{fault.name}: {said.message or 'unnoticed'} ({said.where or 'nowhere'}, after {said.after_steps} steps)")
        write_rows(job.json_path, [{"fault": each.name, **asdict(finding)} for each, finding in found.items()])
    write_page(job, settings, config, found)


def inject(job: BenchJob, config: Config, fault: Fault, settings: FaultSettings) -> Finding:
    """Return what was said of one fault, in a process of its own.

    Raises:
        RuntimeError: The process failed with something that is no word about the fault.
    """
    folder = job.folder / fault.name.replace(" ", "-").replace(",", "").replace("'", "")
    shutil.rmtree(folder, ignore_errors=True)
    inputs = find_inputs(job.run_dir)
    if fault.damage_drafter is not None:
        inputs["pretrain"] = _damaged_drafter(inputs["pretrain"], folder / "pretrain", fault)
    context = StageContext(
        config=make_config(config, folder, fault, settings),
        stage="train",
        key="train-faults",
        stage_dir=folder / "stage",
        inputs=inputs,
        mlflow_run_id="",
    )
    context.save(folder / "context.json")
    output, log = folder / "finding.json", folder / "log.txt"
    with log.open("wb") as file:
        command = [sys.executable, "-m", "specrl.bench.faults.one_run", str(folder / "context.json"), fault.name]
        process = subprocess.run(
            [*command, str(output), str(os.getpid())], env=os.environ, stdout=file, stderr=file, check=False
        )
    if process.returncode:
        raise RuntimeError(f"bench faults, {fault.name}: failed; log: {log}")
    shutil.rmtree(folder / "stage" / "checkpoints", ignore_errors=True)
    return Finding(**json.loads(output.read_text()))


def _damaged_drafter(pretrained: Path, folder: Path, fault: Fault) -> Path:
    """Return the folder of a copy of the stage `pretrain` whose drafter the fault has damaged."""
    result = read_result(pretrained, PretrainResult)
    assert result.drafter_dir is not None and fault.damage_drafter is not None
    shutil.copytree(result.drafter_dir, folder / "drafter")
    fault.damage_drafter(folder / "drafter")
    values = json.loads((pretrained / RESULT_FILE).read_text()) | {"drafter_dir": str(folder / "drafter")}
    write_json(folder / RESULT_FILE, values)
    return folder


def make_config(config: Config, folder: Path, fault: Fault, settings: FaultSettings) -> Config:
    """Return the run's configuration for a few steps on one rank, in the precision that the fault needs."""
    data = json.loads(config.model_dump_json(by_alias=True))
    data |= {"name": folder.name, "runs_dir": str(folder.parent)}
    train_plainly(data, HEALTHY_STEPS + settings.num_steps)
    if fault.needs_fp8:
        data["precision"] |= dict.fromkeys(("generation", "training", "kv_cache"), "fp8")
    data["stage_resources"]["train"] = {"nodes": 1, "ranks_per_node": 1, "cpus_per_rank": settings.threads}
    for key in ("prompts_per_step", "samples_per_prompt"):
        data["train"][key] = getattr(settings, key)
    return parse_config(data)
