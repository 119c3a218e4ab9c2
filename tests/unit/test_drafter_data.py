"""`drafter.data`: what a file of chats or prompts asks, and the prompts that the policy gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specrl.config import ConfigError, parse_config
from specrl.data.files import read_requests
from specrl.data.prompts import PromptSource
from specrl.keys import run_keys
from specrl.models.sources import load_tokenizer, materialise_model

QUESTION, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}
CHATS: list[dict[str, Any]] = [
    {"messages": [QUESTION, ANSWER]},
    {"messages": [{"role": "system", "content": "Be brief."}, QUESTION, ANSWER, QUESTION]},
    {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
    {"prompt": "Why not?", "answer": "never read"},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_request_is_all_before_the_answer_to_be_given(tmp_path: Path) -> None:
    first, second, third, fourth = read_requests(write(tmp_path / "chats.jsonl", CHATS))
    assert first == third == [QUESTION]
    assert second == CHATS[1]["messages"]
    assert fourth == "Why not?"
    pq.write_table(pa.table({"prompt": ["a", "b"]}), tmp_path / "prompts.parquet")
    assert read_requests(tmp_path / "prompts.parquet") == ["a", "b"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "Why?"}, "line 1 must have messages, a list, or prompt, a text that is not empty"),
        ({"messages": "Why?"}, "line 1: messages must be a list of objects with role and content"),
        ({"messages": [ANSWER]}, "line 1: messages has no request before the assistant's words"),
    ],
)
def test_a_row_that_asks_nothing_is_one_line(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_requests(write(tmp_path / "chats.jsonl", [row]))


def test_the_prompts_are_in_an_order_of_the_seed_and_leave_room_for_a_response(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}" + " and more" * (10 * (number == 5))} for number in range(8)]
    path = write(tmp_path / "chats.jsonl", rows)
    values = {
        "name": "x",
        "model": {"source": "tiny", "max_length": 64},
        "sampling": {"max_response_tokens": 40},
        "drafter": {"data": str(path)},
    }
    config = parse_config(values)
    tokenizer = load_tokenizer(materialise_model(config.model, 0, tmp_path / "policy"))
    prompts = PromptSource(config, tokenizer).drafter_data(20)
    assert [prompt.text for prompt in prompts[:4]] == [prompt.text for prompt in prompts[8:12]]
    assert {prompt.text for prompt in prompts} == {f"{row['prompt']}\n" for row in rows}
    assert len({prompt.id for prompt in prompts}) == 20 and max(len(prompt.tokens) for prompt in prompts) == 24
    other = PromptSource(parse_config(values | {"seed": 1}), tokenizer).drafter_data(20)
    assert [prompt.text for prompt in other] != [prompt.text for prompt in prompts]
    before = run_keys(config, "code")
    path.write_text('{"prompt": "another"}\n')
    assert {stage for stage, key in run_keys(config, "code").items() if key == before[stage]} == {"prepare"}
