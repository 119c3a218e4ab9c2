"""The index of texts on the device, and the choice and the counters of drafts, against plain Python."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from specrl.rollout.drafts.device_drafts import NUM_FACTS, Batch, DeviceDrafts, Requests
from specrl.rollout.drafts.text_index import (
    ANY_PROMPT,
    DRAFTERS,
    END,
    LONGEST,
    NOTHING,
    SOURCES,
    STORED,
    Text,
    TextIndex,
    number_of,
)
from specrl.rollout.drafts.text_store import StoredText, TextStore
from specrl.rollout.engine import Engine
from tests.text_drafting import Run, candidates, continued, follow, laid_out, last_tokens

K = 5
TOKENS = st.lists(st.integers(0, 2), max_size=24)
TEXTS = st.lists(st.builds(Text, TOKENS, st.sampled_from([ANY_PROMPT, 0, 1])), max_size=6)


@settings(max_examples=300)
@given(TEXTS, st.lists(st.tuples(st.integers(0, 1), TOKENS.filter(len)), min_size=1, max_size=4))
def test_the_index_finds_what_a_search_of_all_text_finds(texts: list[Text], asked: list[tuple[int, list[int]]]) -> None:
    index = TextIndex(texts)
    found = index.find(
        torch.tensor([last_tokens(output) for _, output in asked]), torch.tensor([prompt for prompt, _ in asked])
    )
    ahead = index.ahead(found.places, K).tolist()
    for (prompt, output), kinds, rows in zip(asked, found.kinds.tolist(), ahead, strict=True):
        right = {one.kind: one.tokens for one in candidates(texts, output, prompt, K)}
        given_ = {kind: [token for token in row if token != END] for kind, row in zip(kinds, rows, strict=True)}
        assert {kind: row for kind, row in given_.items() if row} == right


def test_text_is_followed_again_after_a_token_that_was_wrong() -> None:
    text = list(range(20, 60))
    output = [*text[:5], 99, *text[6 : 6 + LONGEST]]
    index = TextIndex([Text(text, 0)])
    for length, goes_on in ((5, True), (6, False), (7, False), (8, True), (6 + LONGEST, True)):
        found = index.find(torch.tensor([last_tokens(output[:length])]), torch.tensor([0]))
        assert (index.ahead(found.places, 3)[0, 0].tolist() == text[length : length + 3]) == goes_on


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.lists(TOKENS.filter(len), min_size=1, max_size=7), st.integers(1, 3), st.booleans())
def test_drafts_are_chosen_and_compared_as_in_plain_python(
    texts: list[Text], answers: list[list[int]], slots: int, ghosts: bool
) -> None:
    stop = 3
    ended = [[*answer, stop] if index % 2 else answer for index, answer in enumerate(answers)]
    run = Run(texts, ended, slots, stop, K)
    worth = [5, 4, 3, 2, 4.5, 3.5, 2.5, 1.5, 1, 1]
    run.run(worth, ghosts)  # it checks what is chosen
    counts = run.drafts.counts()
    seen, right = np.zeros((NOTHING + 1, K), np.int64), np.zeros((NOTHING + 1, K), np.int64)
    for index, (answer, prompt) in enumerate(zip(ended, run.asks, strict=True)):
        found = follow(texts, prompt, answer, run.limits[index] - run.prompts[index], K, worth)
        seen, right = seen + found.seen, right + found.right
    assert (counts.seen == seen).all()
    assert (counts.right == right).all()


def test_what_was_not_drafted_is_compared_as_well() -> None:
    answer = list(range(10, 40))
    run = Run([Text(answer, 0), Text([*answer[:10], 99, *answer[11:]])], [answer], 1, 3, K)
    run.run([9.0] * 4 + [1.0] * 6, False)
    counts = run.drafts.counts()
    assert counts.right[:4].sum() == counts.seen[:4].sum() > 20
    assert 0 < counts.right[4:].sum() < counts.seen[4:].sum()
    assert counts.offered[:4].sum() == 5


def test_the_drafter_drafts_where_it_is_expected_to_do_better() -> None:
    drafts = DeviceDrafts(4, K)
    drafts.index = TextIndex([Text([5, 6, 7, 8, 9], 0)])
    drafts.begin([])
    expected = np.ones((K + 1, NOTHING))
    expected[:, 0] = 2
    expected[2, DRAFTERS] = 3
    drafts.expect(expected, recalls=False)
    tokens = torch.tensor([[1, 1, 5, 0]] * 4, dtype=torch.int32)
    asked = laid_out([(0, 1, 0, 2, 3, 60, 1), (3, 2, 0, 2, 3, 5, 1)], tokens)
    drafter = torch.tensor([[50, 51, 52]] * 2)
    assert drafts.choose(*asked, drafter, K).tolist() == [[6, 7, 8, 9, 5], [6, 5, 5, 5, 5]]
    assert drafts.choose(*asked, drafter, 2).tolist() == [[50, 51, 52, 5, 5], [50, 5, 5, 5, 5]]
    assert drafts.counts().offered.tolist() == [2, *[0] * 7, 2, 0, 0]


@settings(max_examples=100, deadline=None)
@given(TEXTS, TOKENS.filter(len), st.lists(st.integers(0, 2), min_size=1, max_size=3), st.integers(0, 2**32))
def test_text_goes_on_behind_the_drafters_tokens(
    texts: list[Text], output: list[int], drafter: list[int], seed: int
) -> None:
    drafts = DeviceDrafts(1, K)
    drafts.index = TextIndex(texts)
    worth = (1 + np.random.default_rng(seed).permutation(NOTHING)) / 100
    worth[DRAFTERS:] = 20
    drafts.expect(np.outer(range(K + 1), worth), recalls=True)
    tokens = torch.tensor([[9, 9, *output]], dtype=torch.int32)
    asked = laid_out([(0, 1, 0, 2, 2 + len(output), 99, 1)], tokens)
    wanted = continued(texts, output, 0, drafter, K, worth.tolist())
    found = drafts.choose(*asked, torch.tensor([drafter]), K)
    assert found.tolist() == [[*wanted, *[output[-1]] * (K - len(wanted))]]
    assert SOURCES[int(drafts.sources[0])] == ("continued" if len(wanted) > len(drafter) else "drafter")
    assert int(drafts.lengths[0]) == len(wanted)


def test_recent_text_goes_on_behind_the_drafters_tokens_only_where_it_may_be_drafted() -> None:
    drafts = DeviceDrafts(1, K)
    drafts.index = TextIndex([Text([5, 6, 7, 8, 9])])
    tokens = torch.tensor([[1, 1, 5, 0]], dtype=torch.int32)
    for recalls, draft in ((True, [6, 7, 8, 9, 5]), (False, [6, 7, 5, 5, 5])):
        drafts.expect(np.outer(range(K + 1), np.ones(NOTHING)), recalls)
        asked = laid_out([(0, 1, 0, 2, 3, 60, 1)], tokens)
        assert drafts.choose(*asked, torch.tensor([[6, 7]]), K).tolist() == [draft]


def test_what_text_behind_the_drafters_tokens_is_worth_counts_only_where_all_of_these_are_right() -> None:
    drafts = DeviceDrafts(1, K)
    expected = np.outer(range(K + 1), np.full(NOTHING, 0.5))
    expected[:, DRAFTERS] = [0, 0.9, 1.5, 1.5, 1.5, 1.5]  # both of its tokens are right in six of ten drafts
    drafts.expect(expected, recalls=True)
    assert drafts.behind[K, 2, STORED] == pytest.approx(1.5 + 0.6 * 1.5)
    assert drafts.behind[K, 2, NOTHING] == pytest.approx(1.5)
    assert drafts.behind[2, 2, STORED] == pytest.approx(1.5)


def test_the_store_keeps_the_latest_responses_and_the_prompts_own_texts() -> None:
    store = TextStore(6)
    store.store(StoredText((1, 2), tokens, seed) for tokens, seed in (([5, 6], 10), ([5, 7, 8], 11), ([9], 11)))
    for response in ([1, 2, 3], [4, 5, 6], [7, 8]):
        store.remember(response)
    assert store.stored((1, 2), 11) == (3, 3)
    assert store.stored((1, 2), 12) == (3, 0)
    assert store.stored((9,), 11) == (0, 0)
    assert [store.own((1, 2), seed) for seed in (10, 11, 12)] == [[5, 6], [5, 7, 8], []]
    index = store.index("cpu")
    assert [token for token in index.tokens.tolist() if token != END] == [5, 6, 5, 7, 8, 9, 7, 8, 4, 5, 6]
    store.remember([1, 1])
    assert store.index("cpu") is index
    store.remember([2] * 6)
    assert [token for token in store.index("cpu").tokens.tolist() if token != END] == [5, 6, 5, 7, 8, 9, *[2] * 6]
    store.forget_recent()
    assert [token for token in store.index("cpu").tokens.tolist() if token != END] == [5, 6, 5, 7, 8, 9]


def test_requests_whose_prompts_have_long_texts_begin_first_and_others_are_taken_to_be_as_long_as_usual() -> None:
    store = TextStore()
    store.store([StoredText((1,), [5]), StoredText((2,), [5] * 2), StoredText((2,), [5] * 9)])
    engine: Any = SimpleNamespace(drafting=SimpleNamespace(texts=store))
    prompts = [(1,), (3,), (2,), (4,), (2,)]
    assert Engine._longest_first(engine, prompts) == [2, 4, 1, 3, 0]
    engine.drafting = None
    assert Engine._longest_first(engine, prompts) == [0, 1, 2, 3, 4]


def test_finished_siblings_are_drafts_for_the_rest_of_their_group() -> None:
    store = TextStore(100)
    store.store([StoredText((1,), [5, 6, 7])])
    store.begin([[1], [2, 3], [2, 3], [4]])
    number = number_of([2, 3])
    store.remember([8, 9, 10], [2, 3])
    store.remember([11, 12], [4])

    def ahead(prompt: int) -> list[int]:
        asked = torch.tensor([last_tokens([8])]), torch.tensor([prompt])
        index = store.index("cpu")
        return [token for token in index.ahead(index.find(*asked).places, 3)[0, 0].tolist() if token != END]

    assert store.has_siblings
    assert (ahead(number), ahead(number_of([4])), ahead(number_of([1]))) == ([9, 10], [], [])
    store.remember([8, 8], [2, 3])  # the last of its group
    assert ahead(number) == [9, 10]
    store.begin()
    assert not store.has_siblings
    assert ahead(number) == []


class Waits(TorchDispatchMode):
    """Notes all operations, and those that wait for a device or copy between it and the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, moves = str(func), (kwargs or {}).get("device") is not None
        self.calls.append(name)
        if any(part in name for part in ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select")) or (
            "_to_copy" in name and moves
        ):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def without_values(mode: FakeTensorMode, holder: Any) -> None:
    """Replace an object's tensors by some without values: what needs a value raises an error."""
    for name, value in vars(holder).items():
        if isinstance(value, torch.Tensor):
            setattr(holder, name, mode.from_tensor(value))


def test_neither_choice_nor_count_waits_for_the_device() -> None:
    drafts = DeviceDrafts(4, K)
    drafts.index = TextIndex([Text([1, 2, 3], 0)])
    drafts.begin([3])
    mode = FakeTensorMode()
    without_values(mode, drafts)
    without_values(mode, drafts.index)
    with mode, Waits() as waits:
        lengths = torch.zeros(4, dtype=torch.int32)
        facts = torch.zeros(4, NUM_FACTS, dtype=torch.int64)
        requests = Requests(facts, lengths, torch.zeros(4, 80, dtype=torch.int32))
        batch = Batch(*(torch.zeros(2, dtype=torch.int32) for _ in Batch._fields))
        drafts.observe(requests, batch)
        found = drafts.choose(requests, batch, torch.zeros(2, 3, dtype=torch.int64), K)
    assert found.shape == (2, K)
    assert waits.found == []


@pytest.mark.parametrize("name", ["_local_scalar_dense", "nonzero"])
def test_a_wait_would_be_noted(name: str) -> None:
    with Waits() as waits:
        values = torch.ones(3)
        values.nonzero() if name == "nonzero" else values.sum().item()
    assert any(name in found for found in waits.found)
