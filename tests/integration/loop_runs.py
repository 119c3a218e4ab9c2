"""RL loops on a toy policy, many in one process tree: `python -m tests.integration.loop_runs RUNS.json`.

Everything is imported once; ranks are forked from there, because importing takes longer than a toy run. The parent is
the launcher: it kills ranks where a run asks for it, ends the others as Slurm's launcher would, and starts them again.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from specrl.rollout.vllm.engine.arguments import ENVIRONMENT

os.environ.update(ENVIRONMENT, TORCHDYNAMO_DISABLE="1")  # compiling one small kernel takes longer than a run
import torch
from torch.distributed import PrefixStore

from specrl import lifetime
from specrl.artifacts import CalibrateResult, PrepareResult, PretrainResult, write_result
from specrl.config import Config, DrafterConfig, parse_config
from specrl.context import StageContext
from specrl.distributed import Ranks, join, leave
from specrl.lifetime import LeftJobError
from specrl.lineage.history import begin_continuation
from specrl.lineage.record import Continuation, saved_steps
from specrl.loop import Trainer
from specrl.models.families import LLAMA
from specrl.precision.recipe import KvScales, Recipe, write_recipe
from specrl.processes import free_port
from specrl.progress import Progress
from specrl.rollout.bubbles.generator import StepRollouts
from specrl.rollout.bubbles.pregeneration import Pregeneration
from specrl.schemas import Rollout, rollout_path, write_rollouts
from specrl.stages import train
from specrl.stages.train import finish
from specrl.stages.validate import measure_speed
from specrl.tracking.runs import stage_run, start_parent_run
from specrl.tracking.store import RUN_ID_FILE
from specrl.tracking.tracker import Tracker
from specrl.training.drafter.trainer import Drafter
from specrl.validation.speed import NextStep
from tests.exactness.toy import LAYERS, likely_tokens, policy_weights, write_policy
from tests.forks import import_engine
from tests.integration.loop_plan import SHAPE, LoopRun, toy_settings

END_LOGIT = -0.5
"""Of the end token: responses end after a dozen tokens on average, some only at their limit."""
KV_SCALE = 0.5
"""Of queries, keys and values, as calibrated."""
KILL_WITHIN_SECONDS = 1.0
AGAIN_CODE = 144
"""With which ranks exit that are to be started again."""
GRACE_SECONDS = 5.0
RUN_SECONDS = 600.0


def write_inputs(folder: Path) -> None:
    """What `prepare` and `pretrain` would have left: a policy that ends its responses now and then, and a drafter."""
    weights = policy_weights(0)
    weights["lm_head.weight"][2, 0] = END_LOGIT
    write_policy(folder / "policy", weights)
    alone = Ranks(0, 1, 0, torch.device("cpu"))
    draft_tokens = torch.tensor(sorted({*likely_tokens(), 2}))
    config = DrafterConfig.model_validate(SHAPE)
    Drafter.create(folder / "policy", config, draft_tokens, alone).save(folder / "drafter", 0)
    tokens = likely_tokens() * 3
    rows = [Rollout(0, 0, 0, i, 0, 0, 0, [5, 6, 7], tokens, [0.0] * 30, "", "", "stop") for i in range(4)]
    write_rollouts(rollout_path(folder / "rollouts", 0, 0), rows)
    write_result(folder / "prepare", PrepareResult(policy_dir=folder / "policy", seconds=1))
    far_too_large = KvScales(*[[KV_SCALE] * LAYERS] * 3)  # so that it shows which step has measured its own
    write_recipe(folder / "scales.json", Recipe(LLAMA, LAYERS, kv_scales=far_too_large), folder / "policy")
    calibrated = CalibrateResult(
        scales_path=folder / "scales.json", layers_path=folder, bf16_layers=[], kl_all_fp8=0, kl_chosen=0, seconds=1
    )
    write_result(folder / "calibrate", calibrated)
    for name, drafter_dir in (("with-drafter", folder / "drafter"), ("without", None)):
        result = PretrainResult(
            drafter_dir=drafter_dir, rollouts_dir=folder / "rollouts", num_responses=4, reward_mean=0, seconds=1
        )
        write_result(folder / name, result)


def make_context(folder: Path, run: LoopRun) -> StageContext:
    config = parse_config(toy_settings(folder, run))
    start = None
    if run.continues:
        other = folder / run.continues / "train-toy"
        *_, step = saved_steps(other)
        start = Continuation(
            run=run.continues,
            key="train-toy",
            step=step,
            stage_dir=other,
            counts_on=run.counts_on,
            num_prompts=8 * step,
        )
    pretrained = folder / ("with-drafter" if config.speculation.draft_method.has_weights else "without")
    return StageContext(
        config=config,
        stage="train",
        key="train-toy",
        stage_dir=config.run_dir / "train-toy",
        inputs={"prepare": folder / "prepare", "pretrain": pretrained, "calibrate": folder / "calibrate"},
        mlflow_run_id=parent_run(config) if any(run.outage) else "",
        continues=start,
    )


def work(context: StageContext, run: LoopRun, rank: int, port: int) -> None:
    """One rank, from the newest checkpoint to the end."""
    if run.leaves and rank == 0:
        lifetime.current().leave_by = time.monotonic()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": run.ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    ranks = join()
    tracked = stage_run(context, ranks) if context.mlflow_run_id else nullcontext(Tracker())
    with tracked as tracker, Progress(context.stage_dir, enabled=False) as progress:
        trainer = train.build(context, ranks, tracker)
        first_step = trainer.restore()
        if context.continues is not None:
            trainer.policy.save_pretrained(context.stage_dir / "start")
        (context.run_dir / f"ready-{rank}").write_text(str(first_step))
        if run.uneven:
            let_first_rank_wait(trainer)
        if run.dies_refilling and rank == run.ranks - 1:
            die_refilling(trainer, context.run_dir / "died")
        last = trainer.run(first_step, progress)
        finish(context, trainer, last, tracker, seconds=0.0)
        if run.measures:
            measure(context, trainer, last, progress)
    leave()


def let_first_rank_wait(trainer: Trainer) -> None:
    """Let the first rank begin a step's share when the last one has come to the last use of its idle time.

    The last one has a prompt in every step whose responses differ in reward, so that there is something to learn from.
    """
    ranks, store = trainer.ranks, PrefixStore("uneven", trainer.ranks.store())
    if ranks.rank == ranks.world_size - 1:
        use: Any = trainer.spot or Pregeneration
        work = use.work

        def tell(*arguments: Any) -> bool:
            worked: bool = work(*arguments)
            store.set(f"used in step {trainer.lifetime.step}", "")
            return worked

        use.work = tell
    elif ranks.is_first:
        generator: Any = trainer.generator
        generate = generator.generate

        def wait_first(step: int) -> StepRollouts:
            wait_until(lambda: store.check([f"used in step {step}"]))
            rollouts: StepRollouts = generate(step)
            return rollouts

        generator.generate = wait_first


def die_refilling(trainer: Trainer, died: Path) -> None:
    """Let this rank be killed in the middle of the second step, once."""
    generator: Any = trainer.generator
    refill = generator._refill

    def refill_or_die(prompts: Any, step: int, *counted: Any) -> Any:
        if step == 1 and not died.exists():
            died.write_text(str(step))
            os.kill(os.getpid(), signal.SIGKILL)
        return refill(prompts, step, *counted)

    generator._refill = refill_or_die


def measure(context: StageContext, trainer: Trainer, last: int, progress: Progress) -> None:
    """Write the matched pairs of `validate`, measured on the engine that has just trained."""
    following = NextStep.read(context.stage_dir, last, context.config, trainer.generator.source)
    pairs = measure_speed(trainer.engine, following, context.config, progress)
    if trainer.ranks.is_first:
        found = {"text": following.text().model_dump(), "pairs": [pair.model_dump() for pair in pairs]}
        (context.run_dir / "pairs.json").write_text(json.dumps(found))


def start(context: StageContext, run: LoopRun) -> list[int]:
    """Fork the ranks; their process ids."""
    port = free_port()
    gc.freeze()  # so that no rank copies what it only searches for garbage
    for path in context.run_dir.glob("ready-*"):
        path.unlink()
    processes = []
    for rank in range(run.ranks):
        if (process := os.fork()) == 0:
            code = 1
            try:
                work(context, run, rank, port)
                code = 0
            except LeftJobError:
                code = AGAIN_CODE
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        processes.append(process)
    return processes


def launch(folder: Path, run: LoopRun) -> dict[str, Any]:
    """Start the ranks until they get through; what happened on the way."""
    context = make_context(folder, run)
    if run.resumes:
        shutil.copytree(folder / run.resumes, context.run_dir)
        newest = sorted(context.run_dir.glob("train-toy/checkpoints/step=*"))[-1]
        if run.damaged:
            with (newest / "policy-00000.safetensors").open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.truncate()
        else:
            shutil.rmtree(newest)
    context.run_dir.mkdir(parents=True, exist_ok=True)
    if context.continues is not None and context.continues.counts_on:
        begin_continuation(
            context.stage_dir,
            context.continues.stage_dir,
            context.continues.step,
            [("settings", "train.num_steps = 3 -> 5")],
        )
    generator = random.Random(run.name)
    killed: list[dict[str, float]] = []
    num_left = 0
    while True:
        processes = start(context, run)
        kills_left = run.kills - len(killed)
        kill = kill_one(context, processes, generator, kills_left) if kills_left > 0 else None
        if any(run.outage):
            lock_database(context, *run.outage)
        codes = wait(processes)
        if run.dies_refilling and not killed and -signal.SIGKILL in codes:
            kill = {"rank": codes.index(-signal.SIGKILL)}
        if not any(codes):  # also when the rank to be killed was through before
            return {"kills": killed, "num_starts": len(killed) + num_left + 1}
        if set(codes) == {AGAIN_CODE}:
            num_left += 1
            continue
        assert kill is not None and -signal.SIGKILL in codes, f"{run.name} failed: {codes}"
        killed.append(kill)


def parent_run(config: Config) -> str:
    """Create the run in MLflow, in a process of its own: no connection to a database may outlive a fork."""
    if (process := os.fork()) == 0:
        code = 1
        try:
            start_parent_run(config)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(process, 0)[1] == 0, "MLflow has no run"
    return (config.run_dir / RUN_ID_FILE).read_text().strip()


def lock_database(context: StageContext, first: int, last: int) -> None:
    """Lock MLflow's database from the end of one step to the end of another, which must come all the same."""
    database = sqlite3.connect(context.config.runs_dir / "mlflow.db", timeout=RUN_SECONDS)
    wait_for_step(context, first)
    database.execute("BEGIN EXCLUSIVE")
    wait_for_step(context, last)
    database.rollback()
    database.close()


def wait_for_step(context: StageContext, step: int) -> None:
    wait_until((context.stage_dir / "steps" / f"step={step:06d}.json").exists)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + RUN_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kill_one(
    context: StageContext, processes: list[int], generator: random.Random, kills_left: int
) -> dict[str, float]:
    """Kill one rank at a random time after all are ready; on a fast machine earlier, so that a step is left for each of
    the `kills_left` kills, this one included."""
    wait_until(lambda: len(list(context.run_dir.glob("ready-*"))) == len(processes))
    pause, started = generator.uniform(0, KILL_WITHIN_SECONDS), time.monotonic()
    most_steps = context.config.train.num_steps - kills_left
    wait_until(lambda: time.monotonic() - started > pause or num_steps(context) >= most_steps)
    victim = generator.choice(processes)
    os.kill(victim, signal.SIGKILL)
    return {"after_s": time.monotonic() - started, "rank": processes.index(victim)}


def num_steps(context: StageContext) -> int:
    """The number of steps that have a record."""
    return len(list(context.stage_dir.glob("steps/*.json")))


def wait(processes: list[int]) -> list[int]:
    """Exit codes; when one fails the others get a moment to notice, and are then ended, as by Slurm's launcher."""
    codes: dict[int, int] = {}
    give_up_at = time.monotonic() + RUN_SECONDS
    while len(codes) < len(processes):
        for process in set(processes) - codes.keys():
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[process] = os.waitstatus_to_exitcode(status)
                if codes[process]:
                    give_up_at = min(give_up_at, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > give_up_at:
            for process in set(processes) - codes.keys():
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[process] for process in processes]


def main(folder: Path, runs: Path) -> None:
    import_engine()
    write_inputs(folder)
    for data in json.loads(runs.read_text()):
        run, started = LoopRun(**data), time.monotonic()
        outcome = launch(folder, run)
        (folder / run.name / "outcome.json").write_text(json.dumps({**outcome, "seconds": time.monotonic() - started}))
        print(run.name, f"{time.monotonic() - started:.1f} s", outcome, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
