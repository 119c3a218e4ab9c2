from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from specrl.rollout.sampling import gumbel
from specrl.rollout.sampling.gumbel import GROUP, logprobs_of, noise, philox, pick, weights

# Known answers for philox4x32-10 of Random123 (Salmon et al., 2011): counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


LN_2 = math.log(2)


def at(count: int, position: int = 0) -> tuple[Tensor, Tensor]:
    """Seeds and positions of so many rows."""
    return torch.arange(count) * 2**40 + 17, torch.full((count,), position)


def rows(count: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    return torch.full((count,), temperature), torch.full((count,), top_k), torch.full((count,), top_p)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), (k0, k1))) == expected


def test_noise_has_a_gumbel_distribution() -> None:
    seeds = torch.randint(0, 2**63 - 1, (200,), generator=torch.Generator().manual_seed(1))
    values = noise(seeds, torch.arange(200), 501)
    assert values.shape == (200, 501) and values.dtype == torch.float32 and bool(values.isfinite().all())
    in_nats = values.flatten().double().numpy() * LN_2 - math.log(LN_2)
    assert stats.kstest(in_nats, "gumbel_r").pvalue > 1e-4
    assert torch.equal(values[7:8, :100], noise(seeds[7:8], torch.tensor([7]), 100))


def test_noise_inside_a_group_is_that_of_independent_tokens() -> None:
    """The largest noise is any token's, and the next ones are as far behind as by chance."""
    seeds = torch.randint(0, 2**63 - 1, (300,), generator=torch.Generator().manual_seed(2))
    grouped = noise(seeds, torch.arange(300), 64 * GROUP).view(-1, GROUP)
    variables = (-grouped.double() * LN_2).exp() * LN_2  # exponential, with a mean of 1
    ascending = variables.sort(-1).values
    for place in range(3):
        spacings = (ascending[:, place] - (ascending[:, place - 1] if place else 0)) * (GROUP - place)
        assert stats.kstest(spacings.numpy(), "expon").pvalue > 1e-4
    counts = torch.bincount(variables.argmin(-1), minlength=GROUP)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 12.0])
@pytest.mark.parametrize("likely", [1, 3, gumbel.LIKELY])
def test_groups_that_cannot_win_are_left_out_and_no_others(
    monkeypatch: pytest.MonkeyPatch, spread: float, likely: int
) -> None:
    monkeypatch.setattr(gumbel, "LIKELY", likely)
    logits = torch.randn(60, 30_011, generator=torch.Generator().manual_seed(int(spread))) * spread
    logits[::3, 29_000] += 20
    temperature = torch.tensor([1.0, 0.5, 2.0, 0.01])[torch.arange(60) % 4]
    distances = (logits - logits.amax(-1, keepdim=True)) * gumbel._scales(temperature)
    expected = (distances + noise(*at(60), 30_011)).argmax(-1)
    assert torch.equal(pick(logits, temperature, *rows(60)[1:], *at(60)).tokens, expected)


def test_noise_of_neighbouring_seeds_positions_and_tokens_is_uncorrelated() -> None:
    by_seed, by_position = (
        noise(seeds, positions, 400).numpy()
        for seeds, positions in ((torch.arange(400), torch.zeros(400)), (torch.zeros(400), torch.arange(400)))
        for seeds, positions in [(seeds.long(), positions.long())]
    )
    for values in (by_seed, by_position, by_seed.T):
        assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.01


def test_policies_that_differ_little_seldom_pick_different_tokens() -> None:
    """Daliri, Musco, Suresh (2024): with probability 2 TV / (1 + TV) at most."""
    generator, draws = torch.Generator().manual_seed(3), 20_000
    logits = torch.randn(200, generator=generator)
    moved = logits + 0.05 * torch.randn(200, generator=generator)
    one, other = (pick(of.expand(draws, 200), *rows(draws), *at(draws)).tokens for of in (logits, moved))
    variation = float((logits.softmax(-1) - moved.softmax(-1)).abs().sum()) / 2
    most = 2 * variation / (1 + variation)
    assert float((one != other).float().mean()) < most + 4 * math.sqrt(most / draws)


@pytest.mark.parametrize("vocab", [3, 64, 128, 200, 4096])
def test_the_token_with_the_largest_sum_of_logit_and_noise_is_picked(vocab: int) -> None:
    logits = torch.randn(300, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    tokens, logprobs, log_kept_mass = pick(logits, *rows(300, temperature=0.7), *at(300))
    expected = torch.log_softmax(logits.double() / np.float64(np.float32(0.7)), -1)
    races = expected + noise(*at(300), vocab).double() * LN_2
    assert bool((races.gather(-1, tokens[:, None])[:, 0] > races.amax(-1) - 1e-5).all())
    torch.testing.assert_close(logprobs.double(), expected.gather(-1, tokens[:, None])[:, 0], atol=1e-4, rtol=0)
    assert bool((log_kept_mass == 0).all())


@pytest.mark.parametrize("vocab", [100, 640, 30_011])
def test_of_logits_in_bf16_no_masked_token_is_picked(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(64, vocab, generator=generator) * 3).bfloat16()
    logits[:, ::3] = -torch.inf
    logits[1::2, :70] = -torch.inf  # a whole block before the first token that can be picked
    logits = torch.cat((logits, torch.full((64, 34), 9.0).bfloat16()), 1)[:, :vocab]  # a padded vocabulary
    temperature = torch.tensor([1.0, 0.7, 1.4])[torch.arange(64) % 3]
    tokens, logprobs, _ = pick(logits, temperature, *rows(64)[1:], *at(64))
    expected = (logits.double() / temperature[:, None].double()).log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), expected.gather(-1, tokens[:, None])[:, 0], atol=2e-5, rtol=0)
    races = expected + noise(*at(64), vocab).double() * LN_2
    assert bool((races.gather(-1, tokens[:, None])[:, 0] > races.amax(-1) - 1e-5).all())
    assert bool(torch.isfinite(logits.gather(-1, tokens[:, None])).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    count, vocab = 48, 30_000
    # The engine's vocabulary is padded: its rows lie apart, but one alone is contiguous.
    logits = (torch.randn(count, vocab + 16, generator=generator) * 3).to(dtype)[:, :vocab]
    seeds, positions = torch.randint(2**62, (2, count), generator=generator) >> torch.tensor([[0], [40]])
    temperature = torch.tensor([1.0, 0.6, 0.0, 1.3])[torch.arange(count) % 4]
    top_k, top_p = torch.tensor([0, 20, 0])[torch.arange(count) % 3], torch.tensor([1.0, 0.9])[torch.arange(count) % 2]
    settings = temperature, top_k, top_p, seeds, positions
    tokens, logprobs, log_kept_mass = pick(logits, *settings)
    threads = torch.get_num_threads()
    try:
        for size in (1, 5, 16):
            torch.set_num_threads(1 + size % 2)
            for start in range(0, count, size):
                part = slice(start, start + size)
                alone = pick(logits[part], *(value[part] for value in settings))
                assert torch.equal(alone[0], tokens[part])
                assert torch.equal(alone[1], logprobs[part])
                assert torch.equal(alone[2], log_kept_mass[part])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("threads", [1, 3, 5, 7])
def test_a_probability_does_not_depend_on_the_thread_that_computes_it(threads: int) -> None:
    """The vocabularies leave threads with values that do not fill a vector, which torch computes in another way."""
    default = torch.get_num_threads()
    try:
        for vocab in (50_257, 101):
            logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
            torch.set_num_threads(1)
            alone = torch.cat([weights(row[None], *rows(1, temperature=0.9)) for row in logits])
            torch.set_num_threads(threads)
            assert torch.equal(weights(logits, *rows(9, temperature=0.9)), alone)
    finally:
        torch.set_num_threads(default)


@pytest.mark.parametrize("vocab", [500, 640])
def test_temperature_zero_is_greedy_with_certainty(vocab: int) -> None:
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(3))
    logits[2, 77:] = logits[2].max() + 1  # the first of equals
    tokens, logprobs, log_kept_mass = pick(logits, *rows(8, temperature=0.0), *at(8))
    assert torch.equal(tokens, logits.argmax(-1)) and tokens[2] == 77
    assert bool((logprobs == 0).all() and (log_kept_mass == 0).all())


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (0, 0.3), (5, 1.0), (40, 0.8), (700, 0.95), (1, 1.0)])
def test_top_k_then_top_p_keep_the_smallest_set_of_most_probable_tokens(top_k: int, top_p: float) -> None:
    logits = torch.randn(20, 1000, generator=torch.Generator().manual_seed(4)) * 2
    kept = weights(logits, *rows(20, top_k=top_k, top_p=top_p)) > 0
    for row in range(20):
        probs, order = torch.softmax(logits[row].double(), -1).sort(descending=True)
        if top_k:
            probs, order = probs[:top_k], order[:top_k]
        probs = probs / probs.sum()
        size = int((probs.cumsum(0) < top_p - 1e-9).sum()) + 1 if top_p < 1 else len(probs)
        assert set(torch.nonzero(kept[row]).flatten().tolist()) == set(order[:size].tolist())


def test_tokens_tied_with_the_last_kept_one_stay() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, -2.0]])
    assert (weights(logits, *rows(1, top_k=2)) > 0).tolist() == [[True, True, True, True, False]]


def test_an_impossible_token_is_never_picked() -> None:
    logits = torch.full((2000, 3000), -torch.inf)
    logits[:, [70, 71, 2900]] = torch.tensor([0.0, 1.0, -4.0])
    tokens, logprobs, log_kept_mass = pick(logits, *rows(2000), *at(2000))
    assert set(tokens.tolist()) == {70, 71, 2900}
    assert bool(logprobs.isfinite().all() and (log_kept_mass == 0).all())


@pytest.mark.parametrize("largest", [-65.0, -64.5, -3000.0, 64.5])
def test_a_block_without_a_possible_token_changes_no_log_prob(largest: float) -> None:
    logits = torch.full((2, 2048), -torch.inf)
    logits[:, :10] = largest
    for settings in (rows(2), rows(2, top_k=4)):
        picked = pick(logits, *settings, *at(2))
        torch.testing.assert_close(picked.logprobs, torch.full((2,), -math.log(10)), atol=1e-5, rtol=0)


def test_the_noise_of_the_least_and_the_greatest_word_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    def exponential(word: int, bits: int) -> float:
        return -math.log2(1 - min((word + 0.5) * 2.0**-bits, 1 - 2.0**-24))

    for word in (0, gumbel.LOW_32):
        monkeypatch.setattr(gumbel, "philox", lambda counter, _, word=word: (torch.full_like(counter[0], word),) * 4)
        found = noise(*at(1), GROUP)[0]
        least, winner = exponential(word >> 5, 27) / GROUP, word % GROUP
        assert float(found[winner]) == pytest.approx(-math.log2(least), rel=1e-6)
        assert float(found[winner - 1]) == pytest.approx(-math.log2(least + exponential(word, 32)), rel=1e-6)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 0.9)])
def test_picks_follow_the_processed_distribution(temperature: float, top_p: float) -> None:
    vocab, draws = 24, 40_000
    logits = (torch.randn(1, vocab, generator=torch.Generator().manual_seed(5)) * 1.5).expand(draws, vocab)
    settings = rows(draws, temperature=temperature, top_p=top_p)
    tokens = pick(logits, *settings, *at(draws, 9)).tokens
    expected = weights(logits[:1], *(value[:1] for value in settings))[0].double()
    expected = expected / expected.sum() * draws
    counts = torch.bincount(tokens, minlength=vocab).double()
    assert bool((counts[expected == 0] == 0).all())
    common = expected >= 5
    observed = [*counts[common].tolist(), float(counts[~common].sum())]
    wanted = [*expected[common].tolist(), float(expected[~common].sum())]
    if wanted[-1] < 1:
        observed, wanted = observed[:-1], (np.array(wanted[:-1]) * sum(observed[:-1]) / sum(wanted[:-1])).tolist()
    assert stats.chisquare(observed, wanted).pvalue > 1e-4


def test_a_weight_does_not_depend_on_where_it_stands() -> None:
    """Vector units work on the ends of arrays differently, and may round exponentials differently there."""
    values = torch.randn(1 << 18, generator=torch.Generator().manual_seed(6)).abs() * -8
    expected = gumbel._powers(values.clone())
    torch.testing.assert_close(expected / gumbel.UNIT, values.exp2(), rtol=3e-7, atol=1e-19)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for length in (*range(1, 70), 1000, 4097, 65_537, 200_003):
                for start in (0, 1, 7, 33, 12_345):
                    part = slice(start, start + length)
                    assert torch.equal(gumbel._powers(values[part].clone()), expected[part])
    finally:
        torch.set_num_threads(threads)


def test_rows_that_are_not_finite_are_told_from_the_others() -> None:
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(7))
    logits[1, 5], logits[2, 2999], logits[3], logits[4, ::2] = torch.nan, torch.inf, -torch.inf, -torch.inf
    for settings in (rows(6), rows(6, top_p=0.9), rows(6, temperature=0.0)):
        picked = pick(logits, *settings, *at(6))
        assert picked.logprobs.isfinite().tolist() == [True, False, False, False, True, True]
        assert picked.tokens[1:4].tolist() == [0, 0, 0]


@pytest.mark.parametrize("offset", [-3e3, -200.0, -40.0, 65.0, 100.0, 3e3])
def test_logits_of_any_size_are_sampled_as_if_they_were_around_zero(offset: float) -> None:
    generator = torch.Generator().manual_seed(9)
    logits = (torch.randn(40, 1000, generator=generator) * 3 * 64).round() / 64  # exact in FP32 with any offset
    for settings in (rows(40), rows(40, top_p=0.9), rows(40, temperature=0.5, top_k=30)):
        tokens, logprobs, log_kept_mass = pick(logits, *settings, *at(40))
        far = torch.arange(40)[:, None] % 3 == 0  # beside rows that stay where they are
        moved = pick(torch.where(far, logits + offset, logits), *settings, *at(40))
        assert torch.equal(moved[0], tokens)
        torch.testing.assert_close(moved[1], logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(moved[2], log_kept_mass, atol=1e-5, rtol=0)


@pytest.mark.parametrize("offset", [0.0, -3000.0, 3000.0])
def test_log_probs_of_given_tokens_are_those_of_a_softmax(offset: float) -> None:
    logits = torch.randn(40, 30_011, generator=torch.Generator().manual_seed(5)) * 3 + offset
    tokens = torch.arange(40) * 7
    expected = logits.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs_of(logits, tokens).double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (2**63 - 1, 2**31 - 1), (2**40 + 5, 777)])
def test_noise_is_that_of_philox_in_python_integers(seed: int, position: int) -> None:
    low = 2**32 - 1

    def word(number: int, kind: int) -> int:
        c0, c1, c2, c3, k0, k1 = position, number // 4, kind, 0, seed & low, seed >> 32
        for _ in range(10):
            product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
            c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & low, (product0 >> 32) ^ c3 ^ k1, product0 & low
            k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
        return (c0, c1, c2, c3)[number % 4]

    found = noise(torch.tensor([seed]), torch.tensor([position]), 4100)[0]
    for token in (0, 1, 6, 31, 32, 1023, 1024, 4099):
        group, place = divmod(token, 32)
        drawn = word(group, 1)
        least = -math.log1p(-((drawn >> 5) + 0.5) * 2.0**-27) / 32
        more = 0 if drawn % 32 == place else -math.log1p(-(word(token, 0) + 0.5) * 2.0**-32)
        assert float(found[token]) == pytest.approx(-math.log2((least + more) / LN_2), rel=1e-5, abs=1e-6)


def test_a_logarithm_does_not_depend_on_where_it_stands() -> None:
    values = torch.rand(1 << 16, generator=torch.Generator().manual_seed(8)).clamp(min=1e-30)
    expected = gumbel._log2(values)
    torch.testing.assert_close(expected.double(), values.double().log2(), rtol=2e-7, atol=2e-6)
    for start, length in ((0, 1), (1, 7), (33, 65), (12_345, 4097)):
        assert torch.equal(gumbel._log2(values[start : start + length].clone()), expected[start : start + length])
