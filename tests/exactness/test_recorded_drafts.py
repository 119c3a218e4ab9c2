"""`specrl bench control` replays recorded drafts as an engine drafts, of drafters with one pass and with several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specrl.bench.control.machine import Machine
from specrl.bench.control.record import observed_responses
from specrl.bench.control.recording import Recording
from specrl.bench.control.replay import Replay, Workload
from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts.estimates import DraftLengths
from tests.exactness.engines import mixed_requests, running
from tests.exactness.toy import toy_config, write_trained_drafter

pytestmark = pytest.mark.engine
K, COUNT, LENGTH = 3, 24, 40


@pytest.mark.parametrize("parallel", [False, True], ids=["serial", "parallel"])
def test_a_replay_takes_the_iterations_of_the_engine(
    parallel: bool, directories: tuple[Path, Path], tmp_path: Path
) -> None:
    policy_dir, trained = directories
    drafter = write_trained_drafter(tmp_path, policy_dir, epochs=6, parallel=True) if parallel else trained
    requests = [replace(request, max_tokens=LENGTH) for request in mixed_requests(COUNT, longest_prompt=30, seed=3)]
    with running(policy_dir, drafter, toy_config("eagle3", K, max_num_seqs=COUNT)) as engine:
        responses = observed_responses(engine, list(enumerate(requests)), drafter, drafter, K)
        engine.set_k(K)
        drafted = engine.generate(requests).stats
    prompts = [list(request.prompt_tokens) for request in requests]
    recording = Recording(K, 1, prompts, responses, [], [], [], parallel)
    workload = Workload("recorded", "eagle3", COUNT, COUNT, ("after",), fixed=DraftLengths(K, 0))
    replay = Replay(recording, Machine([1.0, *7 * [0.0]], parallel=parallel), workload, ControlSettings(), seed=0)
    assert len(responses) == COUNT
    assert replay.run().decode_steps == drafted.decode_steps < LENGTH - 5
