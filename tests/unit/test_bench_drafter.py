"""The parts of `specrl bench drafter` on a file of prompts that need no engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.cli import invoke
from specrl.bench.drafter.main import read_candidate, rounds_of_prompts, write_instructions
from specrl.bench.options import DrafterOptions
from specrl.bench.rollouts.rounds import compared
from specrl.config import ConfigError, parse_config
from specrl.data.problems import Prompt
from specrl.data.prompts import PromptSource
from specrl.models.tiny import character_tokenizer
from specrl.rollout.drafts.acceptance import SpeculationStats, VerifiedDraft
from specrl.rollout.requests import Generation
from specrl.validation.answering import by_context, length_range
from specrl.validation.speed import Measurement


def folder(path: Path, **config: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_drafter_is_told_by_its_folder(tmp_path: Path) -> None:
    policy = folder(tmp_path / "policy", architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
    published = folder(tmp_path / "a", architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1, specrl_loss="kl")
    library = {"transformer_layer_config": {"num_hidden_layers": 2}, "architectures": ["Eagle3DraftModel"]}
    speculators = folder(tmp_path / "b", speculators_model_type="eagle3", **library)
    smaller = folder(tmp_path / "c", architectures=["LlamaForCausalLM"], num_hidden_layers=6)
    found = [read_candidate(one, policy) for one in (published, speculators, policy, smaller)]
    assert [(one.kind, one.layers, one.loss) for one in found] == [
        ("eagle3", 1, "kl"),
        ("eagle3", 2, None),
        ("mtp", 1, None),
        ("draft_model", 6, None),
    ]
    medusa = folder(tmp_path / "d", architectures=["MedusaModel"])
    with pytest.raises(ConfigError, match=r"MedusaModel in its config\.json is not a drafter to measure"):
        read_candidate(medusa, policy)


def test_general_prompts_are_not_those_of_the_task(tmp_path: Path) -> None:
    config = parse_config({"name": "run", "drafter": {"data": str(write_instructions(tmp_path))}})
    source = PromptSource(config, character_tokenizer(2048))
    general = source.drafter_data(6)
    assert len({prompt.text for prompt in general}) == 6
    assert not {prompt.text for prompt in general} & {prompt.text for prompt in source.pretraining(6)}


def test_every_round_asks_all_prompts_with_other_seeds_and_fills_a_batch() -> None:
    options = DrafterOptions(None, (), None, 3, 8, (3,), (1.0,), (4,), 2, (), 1)
    prompts = [Prompt(number, "", [number + 1], "") for number in range(3)]
    first, second = rounds_of_prompts(options, prompts, 4, 0.5)
    assert [request.prompt_tokens for request in first] == [[1], [2], [3], [1]]
    assert len({request.seed for request in (*first, *second)}) == 8
    assert {(request.max_tokens, request.temperature) for request in first} == {(8, 0.5)}


def test_drafts_are_counted_by_the_length_of_their_context() -> None:
    drafts = [VerifiedDraft(context, 3, accepted) for context, accepted in ((3, 0), (15, 3), (16, 1), (100, 2))]
    assert [length_range(length) for length in (0, 15, 16, 31, 32, 64)] == [
        (0, 15),
        (0, 15),
        (16, 31),
        (16, 31),
        (32, 63),
        (64, 127),
    ]
    found = by_context(drafts)
    assert {ends: stats.acceptance_length for ends, stats in found.items()} == {(0, 15): 2.5, (16, 31): 2, (64, 127): 3}
    assert SpeculationStats.of(drafts).acceptance_rate_per_pos == (0.75, 0.5, 0.25)


def test_rates_and_acceptance_are_compared_round_by_round() -> None:
    def measured(seconds: tuple[float, ...], accepted: int) -> Measurement:
        stats = (
            SpeculationStats.of([VerifiedDraft(5, 3, accepted), VerifiedDraft(5, 3, 3)])
            if accepted
            else SpeculationStats()
        )
        return Measurement([[Generation([], stats, took, 20)] for took in seconds])

    found = compared(measured((3.0, 6.0), accepted=1), measured((8.0, 16.0), accepted=0))
    assert (found["speedup"], found["speedup_min"], found["speedup_max"]) == pytest.approx((8 / 3, 8 / 3, 8 / 3))
    assert (found["acceptance_length"], found["acceptance_rate_per_pos"]) == (3, [1, 0.5, 0.5])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--model, --drafter, --data is missing; give --model, --drafter and --data, or --run"),
        (["--model", "m"], "--drafter, --data is missing"),
        (["--sources", "chat"], "--sources chat: allowed: none, general, task"),
        (["--model", "m", "--drafter", "d", "--data", "x.jsonl"], "--model m: there is no such folder"),
        (["--model", "p", "--drafter", "p", "--data", "x.csv"], "--data x.csv: it must be an existing file"),
        (["--temperatures", "3"], "--temperatures 3: allowed: 0 (greedy), or 0.01 to 2"),
        (["--ks", "0"], "--ks 0"),
    ],
)
def test_a_wrong_request_is_one_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "p")
    assert invoke(["bench", "drafter", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
