"""Data as users bring it: layouts of rows, formats of files, places of files, and what becomes of a conversation."""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from flows.cli import invoke
from flows.folder import anchor
from specrl.config import Config, ConfigError, dump_config, parse_config
from specrl.data.files import read_problems, read_requests
from specrl.data.held_out import make_problems
from specrl.data.problems import Counts, Problem, fit_all
from specrl.data.prompts import PromptSource
from specrl.data.rendering import Rendering
from specrl.keys import named_files, run_keys

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1=?"}
ANSWER = {"role": "assistant", "content": "2"}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is false %}<no>{% endif %}{% endif %}"
)


def llama(template: str | None = TEMPLATE) -> Any:
    """A tokenizer that adds <s> itself, and whose chat template writes <s> too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens(["<pad>", "<s>", "</s>"])
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = template
    return tokenizer


def config_of(data: dict[str, Any], **sections: Any) -> Config:
    base = {"name": "x", "model": {"source": "tiny", "max_length": 256}, "sampling": {"max_response_tokens": 64}}
    return parse_config({**base, "data": {"reward": "exact_match", **data} if data.get("source") else data, **sections})


def rows_file(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def problem(path: Path, **data: Any) -> Problem:
    """The first problem of a file."""
    config = config_of({"source": "file", "path": str(path), **data})
    return read_problems(path, config, fit_all, Counts())[0]


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "verl": ({"prompt": [SYSTEM, USER], "reward_model": {"style": "rule", "ground_truth": "2"}}, {}),
    "verl, dotted": (
        {"prompt": [SYSTEM, USER], "reward_model": {"style": "rule", "ground_truth": "2"}},
        {"answer_column": "reward_model.ground_truth"},
    ),
    "verl, the struct": (
        {"prompt": [SYSTEM, USER], "reward_model": {"ground_truth": "2"}},
        {"answer_column": "reward_model"},
    ),
    "verl as text": ({"prompt": json.dumps([SYSTEM, USER]), "reward_model": json.dumps({"ground_truth": "2"})}, {}),
    "messages": ({"messages": [SYSTEM, USER, ANSWER], "answer": 2}, {}),
    "ShareGPT": (
        {"system": "Be brief.", "conversations": [{"from": "human", "value": "1+1=?"}], "answer": "2"},
        {},
    ),
    "parts": (
        {
            "prompt": [
                {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
                {"role": "user", "content": [{"type": "text", "text": "1+1=?"}]},
            ],
            "answer": 2,
        },
        {},
    ),
    "dotted": (
        {"a": {"chat": [SYSTEM, USER]}, "b": [{"c": "2"}]},
        {"prompt_column": "a.chat", "answer_column": "b.0.c"},
    ),
    "a name with a dot": ({"the.chat": [SYSTEM, USER], "answer": "2"}, {"prompt_column": "the.chat"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_row_is_understood_as_other_systems_write_it(layout: str, suffix: str, tmp_path: Path) -> None:
    row, columns = LAYOUTS[layout]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        rows_file(path, [row])
    found = problem(path, **columns)
    assert (found.question, found.answer, found.context) == ("1+1=?", "2", [SYSTEM])
    text = Rendering(config_of({"template": "chat"}), llama()).text(found.question, found.context)
    assert text == "<s>[system]Be brief.[user]1+1=?[assistant]"
    plain = Rendering(config_of({}), llama()).text(found.question, found.context)
    assert plain == "Be brief.\n1+1=?"


TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "number"}}}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", "as text"])
def test_the_tools_of_a_row_reach_the_chat_template(suffix: str, tmp_path: Path) -> None:
    row = {"prompt": [SYSTEM, USER], "answer": "2", "tools": json.dumps(TOOLS) if suffix == "as text" else TOOLS}
    rows = [row, {**row, "tools": None}, {"prompt": "1+1=?", "answer": "2", "tools": TOOLS}]
    path = tmp_path / f"rows{'.jsonl' if suffix == 'as text' else suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows[:2]), path)  # its members without a value are null
    else:
        rows_file(path, rows)
    config = config_of({"source": "file", "path": str(path), "template": "chat"})
    template = "{% if tools %}<{{ tools | tojson }}>{% endif %}" + TEMPLATE
    rendering = Rendering(config, llama(template))
    found = read_problems(path, config, fit_all, Counts())
    texts = [rendering.text(one.question, one.context) for one in found]
    written = f"<{json.dumps(TOOLS)}><s>"
    assert texts[:2] == [
        f"{written}[system]Be brief.[user]1+1=?[assistant]",
        "<s>[system]Be brief.[user]1+1=?[assistant]",
    ]
    assert texts[2:] in ([], [f"{written}[user]1+1=?[assistant]"])
    assert [rendering.chat(request) for request in read_requests(path)] == texts
    for silent in (TEMPLATE, None):
        with pytest.raises(ConfigError, match="chat template.*tools" if silent else "chat template"):
            Rendering(config_of({}), llama(silent)).chat(read_requests(path)[0])
    with pytest.raises(
        ConfigError, match=r'line 1: only a chat template takes tools: data.template = "chat"|row 1: only'
    ):
        problem(path, template="{prompt}")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_arguments_of_calls_reach_the_chat_template_as_objects(suffix: str, tmp_path: Path) -> None:
    said = {"role": "assistant", "content": None, "tool_calls": None}
    calls = [
        {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": null}'}}
    ]  # as OpenAI's clients have it
    result = {"role": "tool", "content": "2", "tool_calls": None}
    chat = [{**USER, "tool_calls": None}, {**said, "tool_calls": calls}, result, {**said, "content": "2."}, USER]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([{"prompt": chat, "answer": "2"}]), path)
    else:
        rows_file(path, [{"prompt": chat, "answer": "2"}])
    template = "{% for m in messages if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endfor %}"
    template += "{{ messages[-1].content }}"
    rendering, found = Rendering(config_of({"template": "chat"}), llama(template)), problem(path)
    assert (
        rendering.text(found.question, found.context)
        == '{"name": "add", "arguments": {"a": 1, "b": null}}' + USER["content"]
    )


def test_the_command_that_tries_a_reward_sees_thoughts_that_a_chat_template_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specrl.models.sources.check_source", lambda model: None)
    monkeypatch.setattr("specrl.models.sources.load_tokenizer", lambda directory: llama(f"{TEMPLATE}<think>"))
    path = rows_file(tmp_path / "rows.jsonl", [{"prompt": f"1+1=? ({n})", "answer": "2"} for n in range(40)])
    data = f'source = "file"\npath = "{path}"\ntemplate = "chat"\nreward = "exact_match"'
    (tmp_path / "run.toml").write_text(f'name = "x"\n[data]\n{data}\n[validate]\nnum_prompts = 2\n')
    (tmp_path / "said.txt").write_text("perhaps Answer: 2")
    command = ["reward", str(tmp_path / "run.toml"), "--response", str(tmp_path / "said.txt")]
    for source, score in (("tiny", 1), (str(tmp_path), 0)):
        assert invoke([*command, "--set", f"model.source={source}"]) == 0
        assert f"score: {score} in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": [{"role": "user", "content": [{"type": "image_url"}]}], "answer": 1}, "a part of type image_url"),
        ({"prompt": [USER, ANSWER, {"role": "tool", "content": "4"}], "answer": 1}, "is of tool, not of the user"),
        ({"prompt": [{"role": "user", "content": None}], "answer": 1}, "the message of user has no content"),
        ({"prompt": [SYSTEM], "answer": 1}, "messages has no request"),
        ({"prompt": "a", "extra": {"answer": 1}}, "no column 'answer'.*like extra.answer"),
    ],
)
def test_a_row_that_cannot_be_asked_is_one_line_with_its_number(
    row: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"rows.jsonl, line 1.*{words}"):
        problem(rows_file(tmp_path / "rows.jsonl", [row]))


def write_all_formats(folder: Path, rows: list[dict[str, Any]]) -> list[Path]:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    texts = {
        "a.jsonl": lines,
        "b.json": json.dumps(rows, indent=1),
        "c.json": lines,
        "d.json": json.dumps({"version": 1, "data": rows}),
        "e.json": json.dumps({"train": rows}),
    }
    for name, text in texts.items():
        (folder / name).write_text("\ufeff" + text if name == "b.json" else text)
    for name in ("f.csv", "g.tsv"):
        with (folder / name).open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]), delimiter="\t" if name == "g.tsv" else ",")
            table.writeheader()
            table.writerows(rows)
    pq.write_table(pa.Table.from_pylist(rows), folder / "h.parquet")
    paths = sorted(folder.iterdir())
    for path in paths:
        (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    return sorted(folder.iterdir())


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f'question {number}, "quoted"\nä', "answer": f"00{number}"} for number in range(12)]
    paths = write_all_formats(tmp_path, rows)
    assert len(paths) == 16
    for path in paths:
        config = config_of({"source": "file", "path": str(path)})
        found = read_problems(path, config, fit_all, Counts())
        assert [(one.question, one.answer) for one in found] == [(row["prompt"], row["answer"]) for row in rows], path
    chats = rows_file(tmp_path / "chats.jsonl", [{"messages": [USER]}])
    (tmp_path / "chats.jsonl.gz").write_bytes(gzip.compress(chats.read_bytes()))
    assert read_requests(tmp_path / "chats.jsonl.gz") == read_requests(chats) == [[USER]]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl.gz", b"no gzip", "cannot be read: Not a gzipped file"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"prompt": "a", "answer": 1}\n' * 9, mtime=0)[:-12],
            "cannot be read: Compressed file",
        ),
        ("a.json", b"[1, 2", "is not JSON"),
        ("a.json", b"[1, 2]", "row 1 must be a JSON object"),
        ("a.csv", b"prompt,answer\na,1\nb\n", "row 2 has not the 2 fields"),
        ("a.csv", b"prompt,answer\na,1\nb,2,3\n", "row 2 has not the 2 fields"),
        ("a.csv", b"prompt,answer\na,\n", "row 1: answer must be text"),
        ("a.csv", b"prompt,answer\n\xff\xfe,1\n", "is not UTF-8 text"),
        ("a.csv", b'prompt,answer\n"a,1\n', "is not CSV"),
        ("a.txt", b"a", "the name must end in .jsonl"),
    ],
    ids=range(10),
)
def test_a_file_of_another_format_is_one_line(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words) as refused:
        problem(tmp_path / name)
    assert str(tmp_path / name) in str(refused.value) and "\n" not in str(refused.value)


def numbered(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {number}", "answer": number} for number in range(start, stop)]


def test_lists_folders_and_patterns_of_files_are_taken_and_each_gives_held_out_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = rows_file(tmp_path / "data/one.jsonl", numbered(0, 20))
    second = rows_file(tmp_path / "data/deep/two.jsonl", numbered(20, 40))
    (tmp_path / "data/.hidden.jsonl").write_text("no rows")
    (tmp_path / "data/README.md").write_text("no rows either")
    monkeypatch.chdir(tmp_path)
    for path in ([str(first), str(second)], "data", ["data/*.jsonl", "data/deep"], "data/**/[a-z]*.jsonl"):
        config = anchor(config_of({"source": "file", "path": path}))
        assert parse_config(json.loads(dump_config(config))) == config
        problems = make_problems(config, fit_all)
        assert {int(one.answer) for one in problems.draw("train", 0, 36)} | {
            int(one.answer) for one in problems.held_out(4)
        } == set(range(40))
    sets = anchor(config_of({"source": "file", "path": [str(first), str(second)]}))
    assert {one.answer for one in make_problems(sets, fit_all).held_out(4)} == {"18", "19", "38", "39"}
    before, keys = named_files(sets)["data.path"], run_keys(sets, "code")
    rows_file(second, numbered(20, 41))
    assert named_files(sets)["data.path"] != before and run_keys(sets, "code") != keys
    with pytest.raises(ConfigError, match=r"data file .*nothing-\*.jsonl does not exist"):
        make_problems(anchor(config_of({"source": "file", "path": "nothing-*.jsonl"})), fit_all)


def test_weights_decide_how_often_each_set_is_drawn_and_the_step_alone_decides_what(tmp_path: Path) -> None:
    paths = [
        str(rows_file(tmp_path / "a.jsonl", numbered(0, 100))),
        str(rows_file(tmp_path / "b.jsonl", numbered(100, 120))),
    ]
    config = config_of({"source": "file", "path": paths, "weights": [1, 3]})
    problems, again = (make_problems(config, fit_all) for _ in range(2))
    drawn = [int(one.answer) for step in range(27) for one in problems.draw("train", 16 * step, 16)]
    counts = Counter(drawn)
    assert sum(count for number, count in counts.items() if number >= 100) == 4 * 81  # of epochs of 108 rows
    assert max(counts[number] for number in range(100)) - min(counts[number] for number in range(90)) <= 4
    assert again.draw("train", 320, 16) == problems.draw("train", 320, 16)
    with pytest.raises(ConfigError, match=r"data.weights has 1 numbers, and data.path 2 entries"):
        config_of({"source": "file", "path": paths, "weights": [1]})


def test_a_data_set_of_the_hub_becomes_a_file_where_the_flow_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows_file(tmp_path / "set/train.jsonl", numbered(0, 20))
    rows_file(tmp_path / "set/test.jsonl", numbered(20, 24))
    monkeypatch.chdir(tmp_path)  # `datasets` takes the folder of a set in place of its name
    data = {"source": "file", "path": "hub:./set", "validation_path": "hub:./set#test"}
    config = anchor(config_of(data, runs_dir=str(tmp_path / "runs")))
    assert [path.parent for path in config.data.path or ()] == [tmp_path / "runs/.datasets"]
    problems = make_problems(config, fit_all)
    assert {one.answer for one in problems.held_out(4)} == {"20", "21", "22", "23"}
    assert len({one.answer for one in problems.draw("train", 0, 20)}) == 20
    for wrong in ("hub:./set#nothing", "hub:no/such-set", "hub:"):
        with pytest.raises(ConfigError, match=r"cannot be fetched|is hub:OWNER/NAME") as refused:
            anchor(config_of({"source": "file", "path": wrong}, runs_dir=str(tmp_path / "runs")))
        assert "\n" not in str(refused.value)


def test_a_dry_run_takes_the_files_of_verl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.parquet"
    rows = [
        {"prompt": [SYSTEM, {**USER, "content": f"{n}+1"}], "reward_model": {"ground_truth": str(n)}} for n in range(99)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    command = ["run", "configs/smoke.toml", "--dry-run", "--set", f"runs_dir={tmp_path / 'runs'}", "--set"]
    data = ["data.source=file", f'data.path="{path}"', "data.reward=exact_match", "warm_start.num_examples=0"]
    assert invoke(command + " --set ".join(data).split(" ")) == 0, capsys.readouterr().err


def test_one_beginning_of_a_sequence_whatever_the_way() -> None:
    for template in ("chat", "{prompt}", "<s>[user]{prompt}[assistant]", "<s>{prompt}"):
        rendering = Rendering(config_of({"template": template}), llama())
        for text, of_chat in (
            (rendering.text("2+2?"), False),
            (rendering.chat("2+2?"), True),
            (rendering.chat("2"), False),
        ):
            tokens = rendering.tokens(text, of_chat=of_chat)
            assert (tokens[0], tokens.count(1)) == (1, 1), (template, text)
    without = Rendering(config_of({}), llama(TEMPLATE.replace("{{ bos_token }}", "")))
    assert 1 not in without.tokens(without.chat("2+2?"), of_chat=True)  # as a server of this model would have it


def test_no_prompt_ends_with_the_token_that_a_tokenizer_of_fine_tuning_puts_behind_each_text() -> None:
    tokenizer = llama()
    tokens = Rendering(config_of({}), tokenizer).tokens("1+1=")
    ends = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer.backend_tokenizer.post_processor = ends
    rendering = Rendering(config_of({}), tokenizer)
    assert rendering.tokens("1+1=") == tokens and tokens[-1] != 2
    assert rendering.tokens("1+1=</s>") == [*tokens, 2]  # where the text has it


def test_a_chat_template_that_leaves_the_system_prompt_out_is_refused() -> None:
    silent = "{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}{% endfor %}"
    rendering = Rendering(config_of({"template": "chat", "system_prompt": "Think."}), llama(silent))
    with pytest.raises(ConfigError, match=r"chat template leaves data\.system_prompt out"):
        rendering.text("1+1=?")


@pytest.mark.parametrize(
    ("prompt", "written"), [("Be brief. /no_think", "Be brief. "), ("/think Be brief.", " Be brief."), ("/think", "")]
)
def test_a_chat_template_that_edits_the_system_prompt_is_taken(prompt: str, written: str) -> None:
    editing = TEMPLATE.replace("m['content']", "m['content'].replace('/no_think', '').replace('/think', '')")
    rendering = Rendering(config_of({"template": "chat", "system_prompt": prompt}), llama(editing))
    assert rendering.text("1+1=?") == f"<s>[system]{written}[user]1+1=?[assistant]"


def test_a_chat_template_that_leaves_the_question_out_is_refused() -> None:
    in_parts = (
        "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}Go:"
    )
    with pytest.raises(ConfigError, match=r"chat template leaves the question out"):
        Rendering(config_of({"template": "chat"}), llama(in_parts)).text("Q?")
    shouting = "{% for message in messages %}{{ message.content | upper }}{% endfor %}"
    assert Rendering(config_of({"template": "chat"}), llama(shouting)).text("why") == "WHY"


def test_a_chat_template_that_writes_a_system_prompt_of_its_own_instead_is_refused() -> None:
    stubborn = "{% for m in messages %}{{ 'Help.' if m['role'] == 'system' else m['content'] }}{% endfor %}"
    rendering = Rendering(config_of({"template": "chat", "system_prompt": "Think."}), llama(stubborn))
    with pytest.raises(ConfigError, match=r"chat template leaves data\.system_prompt out"):
        rendering.text("1+1=?")


def test_the_template_gets_the_system_prompt_and_the_arguments_of_the_configuration() -> None:
    chat = {"template": "chat", "system_prompt": "Think.", "chat_template_kwargs": {"enable_thinking": False}}
    rendering = Rendering(config_of(chat), llama())
    assert rendering.text("1+1") == "<s>[system]Think.[user]1+1[assistant]<no>"
    assert rendering.text("1+1", [SYSTEM]) == "<s>[system]Be brief.[user]1+1[assistant]<no>"
    assert rendering.chat("hello") == "<s>[user]hello[assistant]<no>"  # what a drafter will serve has its own
    with pytest.raises(
        ConfigError, match=r"data.chat_template_kwargs.enable_thinkin: the tokenizer's chat template does"
    ):
        Rendering(config_of({"template": "chat", "chat_template_kwargs": {"enable_thinkin": False}}), llama())
    with pytest.raises(ConfigError, match=r"data.system_prompt: a template of your own"):
        config_of({"system_prompt": "Think."})


def test_a_template_that_writes_the_date_makes_the_same_prompt_on_all_days() -> None:
    dated = "{% set day = day or strftime_now('%d %b %Y') %}Today is {{ day }}. {{ messages[0].content }}"
    assert Rendering(config_of({"template": "chat"}), llama(dated)).text("1+1=?") == "Today is 26 Jul 2024. 1+1=?"
    given = {"template": "chat", "chat_template_kwargs": {"day": "1 May 2026"}}
    assert Rendering(config_of(given), llama(dated)).text("1+1=?") == "Today is 1 May 2026. 1+1=?"


def test_a_demonstration_ends_the_thoughts_that_the_template_begins() -> None:
    template = TEMPLATE.replace("[assistant]{%", "[assistant]<think>{%")
    for given in ({"template": "chat"}, {"template": "{prompt} <think>\n"}):
        ((prompt, response),) = PromptSource(config_of(given), llama(template)).demonstrations(1)
        assert prompt.text.rstrip().endswith("<think>") and response.startswith("</think>\n")


def test_a_template_that_refuses_a_chat_says_which_row(tmp_path: Path) -> None:
    refusing = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
    )
    path = rows_file(tmp_path / "chats.jsonl", [{"messages": [USER]}, {"messages": [SYSTEM, USER]}])
    source = PromptSource(config_of({}, drafter={"data": str(path)}), llama(refusing))
    with pytest.raises(ConfigError, match=r"chats.jsonl, line 2: the tokenizer's chat template refuses it: no system"):
        source.check()
    data = rows_file(tmp_path / "rows.jsonl", [{"prompt": [SYSTEM, USER], "answer": 1}])
    with pytest.raises(ConfigError, match=r"rows.jsonl, line 1: the tokenizer's chat template refuses it: no system"):
        PromptSource(config_of({"source": "file", "path": str(data), "template": "chat"}), llama(refusing))


def test_the_requests_of_chats_keep_what_a_template_may_read(tmp_path: Path) -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    result = {"role": "tool", "content": "4", "tool_call_id": "1"}
    rows = [{"messages": [USER, calls, result]}, {"prompt": [SYSTEM, USER]}, {"messages": json.dumps([USER, ANSWER])}]
    found = read_requests(rows_file(tmp_path / "chats.jsonl", rows))
    assert found == [[USER, {**calls, "content": ""}, result], [SYSTEM, USER], [USER]]


def test_rows_with_one_question_and_other_messages_before_it_are_two(tmp_path: Path) -> None:
    systems = [{"role": "system", "content": str(number)} for number in range(10)]
    path = rows_file(tmp_path / "rows.jsonl", [{"prompt": [system, USER], "answer": 1} for system in systems])
    problems = make_problems(config_of({"source": "file", "path": str(path)}), fit_all)
    assert len({one.identity for one in problems.draw("train", 0, 9)}) == 9
