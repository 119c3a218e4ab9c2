"""RL steps of a tiny policy with experts: `python -m tests.exactness.expert_steps FOLDER`.

Leaves in FOLDER what the engine answers to the first step's requests without drafts, for the test to compare.
"""

from __future__ import annotations

import sys
from pathlib import Path

from specrl.artifacts import write_json
from specrl.config import Config
from specrl.distributed import join, leave
from specrl.progress import Progress
from specrl.rollout.collect import Origin, collect, deal
from tests.exactness.experts import write_expert_policy
from tests.exactness.rl_steps import config_of, prepare

NUM_STEPS = 2


def expert_config(folder: Path) -> Config:
    config = config_of("eagle3", folder)
    return config.model_copy(update={"train": config.train.model_copy(update={"num_steps": NUM_STEPS})})


def main(folder: Path) -> None:
    ranks, config = join(), expert_config(folder)
    trainer = prepare(config, write_expert_policy(folder / "policy"), folder / "inputs", ranks)
    trainer.refit_engine(version=0)
    engine, prompts = trainer.engine, trainer.generator.source.batch(0)
    engine.set_k(0)
    asked = deal(prompts, config.train.samples_per_prompt, 0, 1)
    unscored = collect(engine, asked, config, None, Origin(config.seed, 0))
    write_json(folder / "plain.json", [response.tokens for response in unscored.generation.responses])
    engine.set_k(engine.longest_k)
    trainer.run(0, Progress(folder, enabled=False))
    assert trainer.policy.routing is not None
    trainer.policy.routing.clear()
    trainer.refit.probe.check(engine, trainer.policy)
    write_json(folder / "probe.json", trainer.policy.routing.disagreement())
    engine.shutdown()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
