from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrl.config import Config, ConfigError, GeneratorConfig, parse_config
from specrl.data.check import check_data
from specrl.data.generators import ReasoningGym, make_generator
from specrl.data.prompts import PromptSource
from specrl.data.worked_sums import WorkedSums, worked_sum
from specrl.models.tiny import character_tokenizer

TOKENIZER = character_tokenizer(2048)
CHAIN_SUM = {"name": "chain_sum", "parameters": {"max_terms": 3, "max_digits": 2}}


def make_config(data: dict[str, Any] | None = None, **sections: Any) -> Config:
    model = {"source": "tiny", "max_length": 512}
    return parse_config({"name": "test", "model": model, "data": data or {}, **sections})


def source(data: dict[str, Any] | None = None, **sections: Any) -> PromptSource:
    return PromptSource(make_config(data, **sections), TOKENIZER)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def numbered_rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {number}", "answer": number} for number in range(count)]


@pytest.mark.parametrize("data", [None, {"generators": [{"name": "worked_sums"}, CHAIN_SUM]}], ids=["sums", "mixture"])
def test_a_batch_depends_on_seed_and_step_alone(data: dict[str, Any] | None) -> None:
    first, other = source(data), source(data)
    other.held_out(5)
    other.batch(7)
    assert first.batch(3) == other.batch(3)
    assert first.batch(3) != first.batch(4)
    assert first.batch(3) != source(data, seed=1).batch(3)


def test_a_fixed_number_of_problems_comes_again_in_the_same_order_with_the_same_ids() -> None:
    repeating = source({"num_problems": 10}, train={"prompts_per_step": 4})
    steps = [[prompt.id for prompt in repeating.batch(step)] for step in range(5)]
    order = [identity for step in steps for identity in step]
    assert order[10:] == order[:10] and len(set(order)) == 10
    with pytest.raises(ConfigError, match=r"data.num_problems = 3: it must be at least train.prompts_per_step = 4"):
        source({"num_problems": 3}, train={"prompts_per_step": 4})


SUMS = {"generators": [{"name": "worked_sums", "parameters": {"terms": [2], "high": 9, "large_share": 0}}]}


@pytest.mark.parametrize("data", [SUMS, {**SUMS, "num_problems": 40}, {"source": "file"}], ids=["sums", "few", "file"])
def test_a_refill_depends_on_seed_step_and_number_alone(tmp_path: Path, data: dict[str, Any]) -> None:
    """However often a problem is drawn in a step, each of its prompts has an id, and so seeds, of its own."""
    if data.get("source") == "file":
        path = write_jsonl(tmp_path / "train.jsonl", numbered_rows(30))
        data = {**data, "path": str(path), "reward": "exact_match"}
    first, other = source(data), source(data)
    other.refill(2, 3)
    other.batch(5)
    found = [first.refill(3, number) for number in (1, 2, 3)]
    assert [other.refill(3, number) for number in (3, 2, 1)] == found[::-1]
    assert all(len(prompts) == 16 for prompts in found)
    asked = [*first.batch(3), *(prompt for prompts in found for prompt in prompts)]
    assert len({prompt.id for prompt in asked}) == 64
    assert len({prompt.text for prompt in asked}) < 64  # or the ids would be told apart by the texts
    assert found[0] != first.refill(4, 1) and found[0] != source(data, seed=1).refill(3, 1)
    assert {prompt.text for prompt in asked}.isdisjoint(prompt.text for prompt in first.held_out(3))


def test_a_refill_from_a_fixed_number_of_problems_asks_the_others_first() -> None:
    prompts = source({"num_problems": 20}, train={"prompts_per_step": 4})
    texts = [prompt.text for number in range(1, 5) for prompt in prompts.refill(1, number)]
    everything = {prompt.text for step in range(5) for prompt in prompts.batch(step)}
    assert {*texts, *(prompt.text for prompt in prompts.batch(1))} == everything and len({*texts}) == 16
    assert {prompt.id for prompt in prompts.refill(1, 1)} < {p.id for step in range(5) for p in prompts.batch(step)}


def test_prompts_end_in_the_question_and_carry_their_tokens_and_answer() -> None:
    for prompt in source().batch(0):
        assert TOKENIZER.decode(prompt.tokens) == prompt.text
        assert sum(prompt.metadata["entry"]["terms"]) == int(prompt.answer)


def test_prompt_ids_are_63_bit_and_unique_within_a_batch_even_for_repeated_problems() -> None:
    few = {"generators": [{"name": "worked_sums", "parameters": {"terms": [2], "high": 3, "large_share": 0}}]}
    batch = source(few, train={"prompts_per_step": 32}).batch(0)
    assert len({prompt.text for prompt in batch}) <= 9
    assert len({prompt.id for prompt in batch}) == 32
    assert all(0 <= prompt.id < 2**63 for prompt in batch)


def test_held_out_problems_never_appear_in_another_stream() -> None:
    small = {
        "generators": [{"name": "worked_sums", "parameters": {"terms": [2], "high": 9, "large_share": 0}}],
        "validation_fraction": 0.3,
    }
    prompts = source(small)
    held_out = {prompt.text for prompt in prompts.held_out(15)}
    seen = [prompt.text for step in range(20) for prompt in prompts.batch(step)]
    seen += [prompt.text for prompt in prompts.pretraining(100)]
    seen += [prompt.text for prompt, _ in prompts.demonstrations(100)]
    assert len(held_out) == 15
    assert held_out.isdisjoint(seen)


def test_fewer_held_out_prompts_are_a_prefix_of_more() -> None:
    assert source().held_out(20)[:5] == source().held_out(5)


def test_streams_draw_different_prompts() -> None:
    prompts = source()
    pretraining = {prompt.text for prompt in prompts.pretraining(16)}
    assert pretraining != {prompt.text for prompt in prompts.batch(0)}
    assert pretraining != {prompt.text for prompt, _ in prompts.demonstrations(16)}


def test_asking_for_more_held_out_problems_than_there_are_is_one_clear_line() -> None:
    few = {"generators": [{"name": "worked_sums", "parameters": {"terms": [2], "high": 3, "large_share": 0}}]}
    with pytest.raises(ConfigError, match=r"distinct held-out problems of the 50 asked for"):
        source(few).held_out(50)


@given(st.lists(st.integers(0, 99), min_size=2, max_size=12))
def test_worked_steps_lead_to_the_sum_and_earn_full_reward(terms: list[int]) -> None:
    problem = worked_sum(terms)
    steps = problem.demonstration.split(". ")[0].split(", ")
    for step in steps:
        left, right = step.split(" = ")
        assert sum(map(int, left.split(" + "))) == int(right)
    assert WorkedSums().score(problem.demonstration, problem.answer, problem.entry) == 1.0


def test_response_lengths_of_worked_sums_have_a_long_tail() -> None:
    lengths = sorted(len(problem.demonstration) for problem in islice(WorkedSums().problems(0), 2000))
    assert lengths[1800] > 2.5 * lengths[1000]


@pytest.mark.parametrize("name", ["chain_sum", "list_functions", "acre", "word_ladder", "gcd", "letter_counting"])
def test_reasoning_gym_generators_are_a_function_of_the_seed_and_score_their_own_answer(name: str) -> None:
    generator = make_generator(GeneratorConfig(name=name))
    problems = list(islice(generator.problems(5), 3))
    assert problems == list(islice(generator.problems(5), 3))
    assert problems != list(islice(generator.problems(6), 3))
    for problem in problems:
        assert generator.score(problem.demonstration, problem.answer, problem.entry) == 1.0


def test_a_mixture_follows_its_weights() -> None:
    data = {"generators": [{"name": "worked_sums", "weight": 3.0}, CHAIN_SUM]}
    prompts = source(data, train={"prompts_per_step": 400}).batch(0)
    share = sum(prompt.metadata["generator"] == 0 for prompt in prompts) / 400
    assert 0.65 < share < 0.85


@pytest.mark.parametrize(
    ("generator", "message"),
    [
        ({"name": "chain_sun"}, "unknown generator 'chain_sun'; did you mean chain_sum"),
        (
            {"name": "chain_sum", "parameters": {"terms": 3}},
            "unknown parameter 'terms'; parameters: min_terms, max_terms",
        ),
        ({"name": "chain_sum", "parameters": {"min_terms": 0}}, "min_terms must be positive"),
        ({"name": "worked_sums", "parameters": {"max": 3}}, "worked_sums: max: .*parameters: terms, low, high"),
        ({"name": "worked_sums", "parameters": {"low": 30}}, "low must not exceed high"),
        (
            {"name": "worked_sums", "parameters": {"terms": [2], "low": 0, "high": 1, "large_share": 0.0}},
            r"^validate\.num_prompts = 128: data\.generators have only \d distinct held-out problems",
        ),
    ],
)
def test_a_wrong_generator_is_one_line_that_names_what_is_allowed(generator: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        check_data(make_config({"generators": [generator]}))
    assert "\n" not in str(error.value)


def test_generators_whose_prompts_are_all_too_long_are_named() -> None:
    message = r"no training problem in 2000 draws: of one that was left out, its prompt has \d+ tokens, and at most 4"
    with pytest.raises(ConfigError, match=message):
        source(sampling={"max_response_tokens": 508}).batch(0)


@pytest.mark.parametrize("template", ["no field", "{prompt} {other}", "{prompt", "{}"])
def test_a_template_without_the_prompt_alone_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.template"):
        source({"template": template})


def test_a_template_with_json_says_how_braces_are_written() -> None:
    with pytest.raises(ConfigError, match=r"braces .* are written twice, as in \{\{ and \}\}"):
        source({"template": '{prompt} Return {"answer": 1}.'})


def test_the_chat_template_of_the_tokenizer_is_applied() -> None:
    tokenizer = character_tokenizer(2048)
    config = make_config({"template": "chat"})
    with pytest.raises(ConfigError, match="no chat template"):
        PromptSource(config, tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    prompt = PromptSource(config, tokenizer).batch(0)[0]
    assert prompt.text == f"[{prompt.metadata['question']}]>"


def test_jsonl_and_parquet_give_the_same_prompts(tmp_path: Path) -> None:
    rows = numbered_rows(40)
    jsonl = write_jsonl(tmp_path / "rows.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    data = {"source": "file", "reward": "exact_match"}
    one = source({**data, "path": str(jsonl)}, train={"prompts_per_step": 8})
    two = source({**data, "path": str(tmp_path / "rows.parquet")}, train={"prompts_per_step": 8})
    assert one.batch(2) == two.batch(2)


@settings(deadline=None, max_examples=20)
@given(rows=st.integers(2, 30), per_step=st.integers(1, 12))
def test_a_file_is_gone_through_once_per_epoch(
    tmp_path_factory: pytest.TempPathFactory, rows: int, per_step: int
) -> None:
    path = write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", numbered_rows(rows))
    prompts = source({"source": "file", "path": str(path)}, train={"prompts_per_step": per_step})
    size = rows - max(1, round(rows * 0.1))
    drawn = [prompt.text for step in range(-(-2 * size // per_step)) for prompt in prompts.batch(step)]
    assert len(set(drawn[:size])) == size
    assert set(drawn[size : 2 * size]) == set(drawn[:size])
    assert set(drawn).isdisjoint(prompt.text for prompt in prompts.held_out(rows - size))


def test_another_number_of_prompts_per_step_leaves_no_row_out(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", numbered_rows(40))
    data = {"source": "file", "path": str(path)}
    before = source(data, train={"prompts_per_step": 4})
    after = PromptSource(make_config(data, train={"prompts_per_step": 6}), TOKENIZER, begun=(3, 12))
    drawn = [prompt.text for step in range(3) for prompt in before.batch(step)]
    drawn += [prompt.text for step in range(3, 7) for prompt in after.batch(step)]
    assert len(drawn) == len(set(drawn)) == 36


def test_a_held_out_row_that_is_also_a_training_row_is_not_trained_on(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", numbered_rows(10))
    held_out = write_jsonl(tmp_path / "held.jsonl", numbered_rows(3))
    data = {"source": "file", "path": str(path), "validation_path": str(held_out)}
    prompts = source(data, train={"prompts_per_step": 7})
    assert {prompt.text for prompt in prompts.batch(0)} == {f"question {number}" for number in range(3, 10)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n', "no column 'answer' .data.answer_column.; it has prompt"),
        ('{"prompt": "a", "answer": 1}\nnot json\n', "line 2 is not JSON"),
        ("[1]\n", "line 1 must be a JSON object"),
        ("", "is empty"),
        ('{"prompt": "", "answer": 1}\n', "line 1: prompt must be text"),
        ('{"prompt": "a", "answer": 1}\n', "no row left to train on"),
    ],
)
def test_an_unusable_file_is_one_line_that_names_it(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        source({"source": "file", "path": str(path)})
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_the_data_section_is_checked_without_torch() -> None:
    code = (
        "import sys; from specrl.config import parse_config; from specrl.data.check import check_data;"
        "data = {'generators': [{'name': 'worked_sums'}, {'name': 'chain_sum'}]};"
        "check_data(parse_config({'name': 'x', 'data': data}));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def file_data(path: Path, content: bytes | str, **settings: Any) -> dict[str, Any]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return {"source": "file", "path": str(path), "reward": "exact_match", **settings}


def row(prompt: Any, answer: Any = 1) -> str:
    return json.dumps({"prompt": prompt, "answer": answer}) + "\n"


@pytest.mark.parametrize("broken", [("half \ud800",), ("b", "\udfff"), ([{"role": "user", "content": "\ud800"}],)])
def test_half_a_character_is_refused_before_a_job(broken: tuple[Any, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 2: U\+D\w{3} is half of a surrogate pair"):
        check_data(make_config(file_data(tmp_path / "data.jsonl", row("a") + row(*broken))))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (row("a").encode() + b'{"prompt": "caf\xe9", "answer": 1}\n', r"line 2 is not UTF-8 text .*at its byte 15"),
        (("\ufeff" + row("a")).encode("utf-16"), "line 1 is not UTF-8 text"),
        (row("a") + '{"prompt": "b\0", "answer": 1}\n', "line 2 is not JSON: Invalid control character"),
        (row("a") + "[" * 100_000 + "\n", "line 2 is not JSON"),
        (row("a") + '{"prompt": "b", "answer": ' + "9" * 5000 + "}\n", "line 2 is not JSON"),
        (row("a") + '{"prompt": "' + "b" * 2**24 + '", "answer": 1}\n', "line 2 is longer than 16 MiB"),
        (row("a") + row("half \ud800 of a pair"), r"line 2: U\+D800 is half of a surrogate pair"),
        (row("a") + row("b", "\udfff"), r"line 2: U\+DFFF is half of a surrogate pair"),
        (row("a") + row(["b"]), "line 2: prompt must be text that is not empty, and is list"),
        (row("a") + row("b", None), "line 2: answer must be text that is not empty, a finite number, true"),
        (row("a") + row("b", float("nan")), "line 2: answer must be text that is not empty, a finite number"),
        (row("a") + row("b", float("inf")), "line 2: answer must be text that is not empty, a finite number"),
        (row("a") + row("b", " "), "line 2: answer must be text that is not empty, .* and is ' ', which no response"),
        (
            row("a") + row("[{'role': 'user', 'content': 'b'}]"),
            "line 2: the messages are a Python list printed as text, as",
        ),
        ('{"prompt": "<image>b", "images": ["b.png"], "answer": "1"}\n', "line 1: prompt asks about an image"),
        (row("a") + '{"prompt": "b", "solution": 1}\n', "line 2 has no column 'answer'.*; it has prompt, solution"),
        (row("b") * 5, "no row left to train on"),
    ],
    ids=range(17),
)
def test_every_bad_row_is_one_short_line_that_names_it(tmp_path: Path, content: bytes | str, message: str) -> None:
    data = file_data(tmp_path / "rows.jsonl", content)
    with pytest.raises(ConfigError, match=message) as error:
        source(data).check()
    assert str(error.value).startswith(f"data file {tmp_path / 'rows.jsonl'}")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400 + len(str(tmp_path))


def test_a_damaged_parquet_file_is_one_line(tmp_path: Path) -> None:
    whole = tmp_path / "whole.parquet"
    pq.write_table(pa.Table.from_pylist(numbered_rows(40)), whole)
    for content in (b"", whole.read_bytes()[:-20], whole.read_bytes()[:40] + whole.read_bytes()[60:]):
        with pytest.raises(ConfigError, match=r"is not readable as Parquet|cannot be read") as error:
            source(file_data(tmp_path / "rows.parquet", content))
        assert "\n" not in str(error.value)


def test_answers_of_any_type_are_text(tmp_path: Path) -> None:
    answers = ["text", 1, 1.5, True, ["a", "b"], {"x": "é"}]
    content = "".join(row(f"question {number}", answer) for number, answer in enumerate([*answers, "held out"]))
    data = file_data(tmp_path / "rows.jsonl", content)
    prompts = source(data, train={"prompts_per_step": 6}).batch(0)
    assert {prompt.answer for prompt in prompts} == {"text", "1", "1.5", "True", '["a", "b"]', '{"x": "é"}'}


LONG_ROWS = "".join(row(f"{number} " + "x" * (40 if number % 5 == 2 else 10) + f" {number}") for number in range(30))
LIMITED = {"max_prompt_tokens": 30, "validation_fraction": 0.2}


def test_overlong_prompts_are_dropped_for_good_and_counted(tmp_path: Path) -> None:
    data = file_data(tmp_path / "rows.jsonl", LONG_ROWS, **LIMITED)
    settings = {"train": {"prompts_per_step": 40}, "validate": {"num_prompts": 4, "exactness_prompts": 2}}
    prompts = source(data, **settings)
    report = prompts.check()
    everything = [*prompts.batch(0), *prompts.batch(4000), *prompts.held_out(4), *prompts.pretraining(50)]
    assert {len(prompt.tokens) for prompt in everything} <= set(range(31))
    assert (report.seen, report.overlong) == (30, 6)
    assert report.notes[-1].startswith(
        "6 of the 30 prompts looked at have more than 30 tokens (data.max_prompt_tokens)"
    )
    assert "has 19 rows to train on, fewer than train.prompts_per_step = 40" in report.notes[0]
    assert prompts.batch(7) == source(data, **settings).batch(7)


@pytest.mark.parametrize("rule", ["truncate_left", "truncate_right"])
def test_truncation_takes_from_the_question_and_leaves_the_template_whole(tmp_path: Path, rule: str) -> None:
    data = file_data(tmp_path / "rows.jsonl", LONG_ROWS, overlong=rule, template="<{prompt}>", **LIMITED)
    prompts = source(data, train={"prompts_per_step": 24}, validate={"num_prompts": 2, "exactness_prompts": 2})
    assert prompts.check().overlong == 6
    texts = [prompt.text for prompt in prompts.batch(0) if "x" * 15 in prompt.text]
    assert len(texts) >= 4
    for text in texts:
        assert len(TOKENIZER.encode(text)) == 30
        assert text.startswith("<x" if rule == "truncate_left" else "<")
        assert text.endswith("x>" if rule == "truncate_right" else "2>") or text.endswith("7>")


def test_an_overlong_prompt_may_be_an_error_that_names_the_row(tmp_path: Path) -> None:
    data = file_data(tmp_path / "rows.jsonl", LONG_ROWS, overlong="error", **LIMITED)
    with pytest.raises(
        ConfigError, match=r'line 3: its prompt has 4\d tokens, and at most 30 .*data\.overlong = "drop"'
    ):
        source(data)
    with pytest.raises(ConfigError, match=r"line 1: its prompt has \d+ tokens, and at most 3 are allowed"):
        source({**data, "overlong": "drop", "max_prompt_tokens": 3})
    with pytest.raises(ConfigError, match="leaves no room for a question"):
        source({**data, "overlong": "truncate_left", "template": "x" * 30 + "{prompt}"})
    with pytest.raises(ConfigError, match=r'data\.overlong = "error" with data\.source = "generators"'):
        make_config({"overlong": "error"})
    with pytest.raises(ConfigError, match=r"data\.max_prompt_tokens = 500: it must be at most \d+"):
        make_config({"max_prompt_tokens": 500})


class Unreliable(ReasoningGym):
    """A generator of reasoning-gym whose data sets fail on most of their items."""

    works: tuple[int, ...] = (3, 60)

    def _dataset(self, seed: int) -> Any:
        whole, works = super()._dataset(seed), self.works

        class Items:
            seed = whole.seed

            def __getitem__(self, index: int) -> Any:
                return whole[index] if index in works else whole[index // 0]

        return Items()


def test_an_item_that_its_generator_fails_on_is_left_out() -> None:
    generator = Unreliable("chain_sum", {})
    whole = list(islice(ReasoningGym("chain_sum", {}).problems(7), 128))
    assert list(islice(generator.problems(7), 4)) == [whole[index] for index in (3, 60, 67, 124)]
    generator.works = ()
    with pytest.raises(ConfigError, match=r"data\.generators: chain_sum fails on every item: integer division"):
        next(generator.problems(7))


def test_the_held_out_share_is_looked_at_once() -> None:
    prompts, other = (source(drafter={"num_prompts": 4}, validate={"num_prompts": 8}) for _ in range(2))
    other.batch(0)
    other.held_out(8)
    other.pretraining(4)
    assert prompts.check().seen == other._counts.seen


def test_overlong_generated_prompts_follow_the_same_rule() -> None:
    generators = [{"name": "worked_sums", "parameters": {"terms": [2, 12]}}, CHAIN_SUM]
    data = {"generators": generators, "max_prompt_tokens": 40}
    prompts = source(data, train={"prompts_per_step": 64})
    assert prompts.check().overlong > 0
    drawn = prompts.batch(3)
    assert len(drawn) == 64
    assert max(len(prompt.tokens) for prompt in drawn) <= 40
    assert drawn == source(data, train={"prompts_per_step": 64}).batch(3)


def test_a_chat_template_that_refuses_a_question_is_one_line_for_a_file_and_no_end_for_a_generator(
    tmp_path: Path,
) -> None:
    tokenizer = character_tokenizer(2048)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if '1' in m.content %}{{ raise_exception('no ones') }}{% endif %}{{ m.content }}"
        "{% endfor %}"
    )
    data = file_data(tmp_path / "rows.jsonl", row("a") + row("b") + row("1"), template="chat")
    with pytest.raises(ConfigError, match="line 3: the tokenizer's chat template refuses it: no ones"):
        PromptSource(make_config(data), tokenizer)
    prompts = PromptSource(make_config({"template": "chat"}, train={"prompts_per_step": 32}), tokenizer)
    assert not any("1" in prompt.text for prompt in prompts.batch(0))
    assert "generated problems make no prompt and were left out" in prompts.check().notes[-1]


def test_rows_that_ask_what_is_held_out_are_left_out_and_counted(tmp_path: Path) -> None:
    data = file_data(tmp_path / "rows.jsonl", row("a") + row("d") + row("b") + row("d", 2))
    prompts = source(data, validate={"num_prompts": 1, "exactness_prompts": 1})
    assert prompts.check().notes[0].endswith("rows left out because a held-out one asks the same: 1")
    assert {prompt.metadata["question"] for prompt in prompts.batch(0)} == {"a", "b"}


def test_repeated_rows_are_said(tmp_path: Path) -> None:
    content = row("a") + row("a", 2) + row("b") * 3 + row("c") + row("d")
    data = file_data(tmp_path / "rows.jsonl", content)
    [line, _] = source(data, validate={"num_prompts": 1, "exactness_prompts": 1}).check().notes
    assert line.endswith("training rows that repeat an earlier prompt: 3, with another answer: 1")


@pytest.mark.parametrize("template", ["{prompt:d}", "{prompt!x}", "{prompt.upper}"])
def test_a_template_that_cannot_be_applied_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.template"):
        check_data(make_config({"template": template}))
