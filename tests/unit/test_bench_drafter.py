"""The parts of `specrl bench drafter` on a file of prompts that need no engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.cli import invoke
from specrl.bench.drafter.candidates import Candidate, read_candidate
from specrl.bench.drafter.evaluation import Cell, Part, Round, Variant
from specrl.bench.drafter.questions import QuestionFile
from specrl.config import ConfigError
from specrl.models.tiny import character_tokenizer
from specrl.rollout.drafts.outcome_log import VerifiedDraft, by_length, counters, length_range


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
    with pytest.raises(ConfigError, match=r"MedusaModel in its config\.json is not a drafter that can be measured"):
        read_candidate(medusa, policy)


def test_questions_are_text_turns_or_messages_and_spread_over_the_categories(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    rows: list[dict[str, Any]] = [
        *({"question": f"{'x' * index}", "category": "math"} for index in range(1, 5)),
        {"turns": ["first", "second"], "category": "chat"},
        {"messages": messages, "category": "chat"},
        {"prompt": "y" * 50},
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = character_tokenizer(64)
    found, too_long = QuestionFile(path, None, "category", "{prompt}").read(tokenizer, longest=20, count=4)
    assert too_long == 1
    texts = [(question.category, tokenizer.decode(question.tokens, skip_special_tokens=True)) for question in found]
    assert texts == [("chat", "first"), ("chat", "u"), ("math", "x"), ("math", "xx")]
    with pytest.raises(ConfigError, match=r"line 5 has no question in question"):
        QuestionFile(path, "question", "category", None).read(tokenizer, 20, 4)
    with pytest.raises(ConfigError, match="all 7 prompts have more than 0 tokens"):
        QuestionFile(path, None, "category", None).read(tokenizer, 0, 4)


def test_drafts_are_counted_by_the_length_of_their_context() -> None:
    drafts = [VerifiedDraft(1, context, 3, accepted) for context, accepted in ((3, 0), (15, 3), (16, 1), (100, 2))]
    assert [length_range(length) for length in (0, 15, 16, 31, 32, 64)] == [
        (0, 15),
        (0, 15),
        (16, 31),
        (16, 31),
        (32, 63),
        (64, 127),
    ]
    found = by_length(drafts, lambda draft: draft.context)
    assert {ends: stats.acceptance_length for ends, stats in found.items()} == {(0, 15): 2.5, (16, 31): 2, (64, 127): 3}
    assert counters(drafts).acceptance_rate_per_pos == (0.75, 0.5, 0.25)


def test_a_row_compares_with_plain_and_ngram_in_the_same_rounds(tmp_path: Path) -> None:
    def rounds(*seconds: tuple[float, float], accepted: int = 0) -> list[Round]:
        return [
            Round(
                parts=[Part("chat", 10, chat), Part("math", 10, math)],
                drafts=[VerifiedDraft(1, 5, 3, accepted), VerifiedDraft(2, 5, 3, 3)],
                responses={1: [1] * 10, 2: [2] * 10},
                categories={1: "chat", 2: "math"},
            )
            for chat, math in seconds
        ]

    plain, ngram = rounds((4.0, 4.0), (8.0, 8.0)), rounds((4.0, 2.0), (4.0, 2.0))
    fast = rounds((2.0, 1.0), (4.0, 2.0), accepted=1)
    candidate = Candidate("mine", "eagle3", 1, "kl", tmp_path)
    row = Cell(Variant(candidate, None, 3), 1.0, 4, fast, plain, ngram).row()  # type: ignore[arg-type]
    contract = {"drafter": "mine", "kind": "eagle3", "layers": 1, "loss": "kl", "k": 3, "temperature": 1.0, "batch": 4}
    assert contract.items() <= row.items()
    assert (row["speedup"], row["speedup_min"], row["speedup_max"]) == pytest.approx((8 / 3, 8 / 3, 8 / 3))
    assert row["speedup_over_ngram"] == pytest.approx(1.5)
    assert (row["acceptance_length"], row["acceptance_rate_per_pos"]) == (3, [1, 0.5, 0.5])
    assert (row["by_category"]["chat"]["speedup"], row["by_category"]["math"]["speedup"]) == (2, 4)
    assert row["by_category"]["chat"]["acceptance_length"] == 2
    assert list(row["by_response_tokens"]) == ["0-15"] and row["responses_equal"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to measure; give --model, --drafter and --data, or --run"),
        (["--model", "m"], "--drafter, --data is missing"),
        (["--model", "m", "--drafter", "d", "--data", "x.jsonl"], "--model m: there is no such folder"),
        (["--model", "p", "--drafter", "p", "--data", "x.csv"], "--data x.csv: it must be an existing file"),
        (["--temperatures", "3"], "3 must be 0 (greedy), or from 0.01 to 2"),
        (["--ks", "0"], "ks"),
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
