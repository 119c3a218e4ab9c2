"""`specrl bench step`: take the steps of both trainers in turn, then write the figures and the page."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

from specrl.artifacts import PrepareResult, write_json
from specrl.bench import arithmetic
from specrl.bench.interleaved.side import TrainSide, TrainStep, begin_anew, train_side
from specrl.bench.interleaved.turns import Worker
from specrl.bench.job import BenchJob, say
from specrl.bench.rollouts.machine import measure_machine
from specrl.bench.settings import StepSettings
from specrl.bench.step.contexts import make_context
from specrl.bench.step.page import write_page
from specrl.bench.step.results import PeerStep, StepFindings, UpdateProducts
from specrl.context import StageContext
from specrl.models.shapes import model_shape

PEER, PACKAGE = "TRL", "trl"


def main(job: BenchJob) -> None:
    """Take the steps, and write the figures and the page."""
    settings = StepSettings.model_validate(job.settings)
    folder = job.folder
    context = make_context(job, folder, settings)
    job.check_taken([context.config])
    path = begin_anew(context, folder)
    with start_peer(path, settings) as peer, train_side(context, folder) as own:
        peer.answer()
        own_steps, peer_steps = take_steps(own, peer, settings)
    products = update_products(context, own_steps[-1], settings)
    found = StepFindings(own_steps, peer_steps, PEER, version(PACKAGE), products)
    write_json(job.json_path, found.as_json())
    write_page(job, settings, context.config, found)


def start_peer(path: Path, settings: StepSettings) -> Worker:
    """Start TRL's trainer on the work of the context in this file, without waiting until it is ready."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(settings.threads))
    command = ["specrl.bench.step.peer", str(path), str(settings.peer_sequences), settings.peer_precision]
    worker = Worker(PEER, command, {**threads, "CUDA_VISIBLE_DEVICES": ""}, path.with_name("peer.log"))
    os.sched_setaffinity(worker.pid, sorted(os.sched_getaffinity(0))[: settings.threads])
    return worker


def take_steps(own: TrainSide, peer: Worker, settings: StepSettings) -> tuple[list[TrainStep], list[PeerStep]]:
    """Take the steps of both sides in turn, and return those after the warm-up."""
    own_steps, peer_steps = [], []
    for step in range(settings.warm_up + settings.steps):
        own_steps.append(own.step())
        peer.begin_step()
        peer_steps.append(PeerStep(**peer.answer()))
        one, other = own_steps[-1].seconds("step"), peer_steps[-1].step_s
        note = " (warm-up)" if step < settings.warm_up else ""
        say(f"step {step}{note}: specrl {one:.1f} s, {PEER} {other:.1f} s, {other / one:.2f}x")
    return own_steps[settings.warm_up :], peer_steps[settings.warm_up :]


def update_products(context: StageContext, step: TrainStep, settings: StepSettings) -> UpdateProducts:
    """Return what the matrix products of a step's update take at the rate that this machine reaches on them."""
    policy_dir = context.input("prepare", PrepareResult).policy_dir
    shape = model_shape(context.config.model.model_copy(update={"source": str(policy_dir)}))
    machine = measure_machine(shape, settings.threads)
    prompts: dict[int, int] = {}
    responses = 0
    for rollout in step.rollouts(context.stage_dir / "rollouts"):
        prompts[rollout.prompt_id] = len(rollout.prompt_tokens)
        responses += len(rollout.response_tokens)
    tokens = sum(prompts.values()) + responses
    seconds = arithmetic.training_products_s(shape, tokens, responses, machine)
    return UpdateProducts(tokens, seconds, machine.flops_per_s)
