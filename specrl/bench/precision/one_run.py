"""The process of one setting and seed: `python -m specrl.bench.precision.one_run CONTEXT.json`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import torch

from specrl.artifacts import PretrainResult, write_json
from specrl.bench.precision.runs import END_RESULT_FILE, EndResult
from specrl.context import StageContext
from specrl.distributed import join, leave
from specrl.progress import Progress
from specrl.stages import train
from specrl.stages.train_results import precision_report
from specrl.tracking import Silent
from specrl.validation.answering import answer, held_out_sets


def run_one(path: Path) -> None:
    """Run the train stage without MLflow, measure the accuracy, and write `end-result.json` to the stage's folder."""
    context = StageContext.load(path)
    config, ranks = context.config, join()
    with Progress(context.stage_dir, enabled=False) as progress:
        trainer = train.build(context, ranks, Silent())
        first_step = trainer.restore(context.input("pretrain", PretrainResult).rollouts_dir)
        trainer.run(first_step, progress)
        engine, (held_out,) = trainer.engine, held_out_sets(config, trainer.generator.source)
        if engine.speculates:
            engine.set_k(engine.longest_k)
        score, stats = answer(engine, trainer.rewards, held_out, config.train.num_steps, ranks)
        report = precision_report(trainer)
        cuda = ranks.device.type == "cuda"
        end_result = EndResult(
            accuracy=score.accuracy,
            acceptance_length=stats.acceptance_length,
            quantised_layers=report.fp8_layers,
            engine_mode=report.generation_mode,
            training_mode=report.training_mode,
            memory_gib=torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        )
        write_json(context.stage_dir / END_RESULT_FILE, asdict(end_result))
        trainer.shutdown()
    leave()


if __name__ == "__main__":
    run_one(Path(sys.argv[1]))
