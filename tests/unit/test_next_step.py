"""What `validate` measures on is the step that would come after training: its requests and the text for them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from specrl.config import parse_config
from specrl.data.prompts import PromptSource
from specrl.distributed import Ranks
from specrl.models.tiny import character_tokenizer
from specrl.rollout.bubbles.texts import PregeneratedText, read_texts, write_texts
from specrl.rollout.engine import StoredText, response_seed
from specrl.schemas import Rollout, rollout_path, write_rollouts
from specrl.validation.speed import NextStep, recent_responses, write_next_step

TOKENIZER = character_tokenizer(2048)
CONFIG = parse_config(
    {
        "name": "run",
        "speculation": {"method": "replay", "recent_tokens": 7},
        "bubbles": {"use": "pregenerate"},
        "train": {"num_steps": 3, "prompts_per_step": 4, "samples_per_prompt": 2},
    }
)
ALONE = Ranks(0, 1, 0, torch.device("cpu"))


class TextEngine:
    """Keeps the text that it is given."""

    replays = is_first = True

    def set_recent(self, generations: Any) -> None:
        self.recent = generations

    def set_replay(self, texts: Any) -> None:
        self.texts = texts


def trained(folder: Path, texts: list[PregeneratedText]) -> None:
    """The folder of a train stage after three steps of two responses, the second finished first."""
    generator = SimpleNamespace(next_texts=texts, source=PromptSource(CONFIG, TOKENIZER))
    write_next_step(folder, 3, ALONE, cast(Any, generator), cast(Any, TextEngine()))
    for step in range(3):
        numbers = [10 * step, 10 * step + 1]
        rows = [Rollout(step, 0, i, 0, step, 0, 0, [1], [i] * 3, [0.0] * 3, "", "", "stop") for i in numbers]
        rows[0].finished_at, rows[1].finished_at = 2.0, 1.0
        write_rollouts(rollout_path(folder / "rollouts", step, 0), rows)
        write_rollouts(rollout_path(folder / "rollouts", step, 1), rows)  # another engine's


def test_texts_survive_their_file(tmp_path: Path) -> None:
    for texts in ([PregeneratedText(2**62, 2**62 + 1, [3, 1, 2]), PregeneratedText(1, 2, [])], []):
        write_texts(tmp_path / "texts.arrow", texts)
        assert read_texts(tmp_path / "texts.arrow") == texts


def test_recent_responses_are_the_first_engines_latest_in_the_order_of_their_ends(tmp_path: Path) -> None:
    trained(tmp_path, [])
    last = [[[11] * 3, [10] * 3], [[21] * 3, [20] * 3]]
    assert recent_responses(tmp_path / "rollouts", 3, 7) == last
    assert recent_responses(tmp_path / "rollouts", 3, 6) == last[1:]
    assert recent_responses(tmp_path / "rollouts", 2, 100) == [[[1] * 3, [0] * 3], last[0]]
    assert recent_responses(tmp_path / "rollouts", 3, 0) == recent_responses(tmp_path / "none", 3, 7) == []


def test_the_next_step_has_its_own_requests_and_the_text_made_for_them(tmp_path: Path) -> None:
    prompts = PromptSource(CONFIG, TOKENIZER).batch(3)
    seeds = [response_seed(CONFIG.seed, 3, prompts[1].id, sample) for sample in range(2)]
    trained(tmp_path, [PregeneratedText(prompts[1].id, seed, [7, 8]) for seed in seeds])
    found = NextStep.read(tmp_path, 3, CONFIG, PromptSource(CONFIG, TOKENIZER))
    requests = found.requests(6, CONFIG)
    assert [request.prompt_tokens for request in requests] == [prompts[i % 4].tokens for i in range(6)]
    assert [requests[1].seed, requests[5].seed] == seeds
    engine = TextEngine()
    found.give_texts(cast(Any, engine))
    assert engine.texts == [StoredText(prompts[1].tokens, [7, 8], seed) for seed in seeds]
    assert engine.recent == recent_responses(tmp_path / "rollouts", 3, 7)
    text = found.text()
    assert (text.step, text.num_responses, text.num_stored, text.stored_tokens) == (3, 8, 2, 4)
    assert (text.num_recent, text.recent_tokens) == (4, 12)


def test_the_step_after_the_best_policy_has_no_text_of_a_later_one(tmp_path: Path) -> None:
    prompts = PromptSource(CONFIG, TOKENIZER).batch(3)
    trained(tmp_path, [PregeneratedText(prompts[0].id, 5, [7])])
    found = NextStep.read(tmp_path, 2, CONFIG, PromptSource(CONFIG, TOKENIZER))
    assert not found.stored
    assert found.recent == recent_responses(tmp_path / "rollouts", 2, 7)
    assert found.prompts == PromptSource(CONFIG, TOKENIZER).batch(2)
