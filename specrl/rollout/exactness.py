"""Tests of exactness on the real policy, which `validate` runs.

The distribution of the first tokens is tested, and speculative responses are compared with plain ones, in an engine
like the one that made the rollouts, at the run's own sampling settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specrl.artifacts import ExactnessResult, ParityCounts
from specrl.config.rollout import MAX_TEMPERATURE
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.rollout.engine import Engine, Request
from specrl.rollout.sampling.chi_squared import ChiSquared, chi_squared, combined
from specrl.rollout.sampling.near_ties import Comparison, Noise, Trace, compare, measure_noise, worst

HIGH_TEMPERATURE = MAX_TEMPERATURE
"""The temperature of every second prompt of the chi-squared test. A trained policy may be so sure of its first tokens
that at the run's own temperature the test has nothing to tell apart."""
HIGH_TEMPERATURE_TOP_P = 0.95
"""The `top_p` of these prompts."""
P_VALUE = 1e-6
"""The p-value below which the chi-squared gate fails. An exact engine fails it in about one run of a million."""
FIRST_TOKENS = 4
"""The number of a response's first tokens that the chi-squared test looks at; all but the very first are drafted."""
SMALL_BATCH = 4
"""The smaller of the two batch sizes by which the noise of plain decoding is measured; the larger one has as many rows
as the verification of drafts."""
NOISE_REQUESTS = 8
"""The number of requests on which that noise is measured."""
Tokens = tuple[int, ...]


class ExactnessError(RuntimeError):
    """Speculation changed what is sampled; the rollouts are not the policy's."""


@dataclass(frozen=True)
class Parity:
    """The comparison of plain with speculative generation of the same requests."""

    comparison: Comparison
    noise: Noise

    def counts(self, *, greedy: bool) -> ParityCounts:
        """Return the figures for a result file, with the limit on near-ties of greedy or of sampled responses."""
        return ParityCounts(
            num_responses=self.comparison.num_responses,
            num_tokens=self.comparison.num_tokens,
            num_differences=len(self.comparison.divergences),
            num_unexplained=self.comparison.num_unexplained,
            cdf_noise=self.noise.cdf,
            logprob_gap_noise=self.noise.gap,
            limit=self.noise.limit(greedy=greedy),
            largest_distance=max((item.distance for item in self.comparison.divergences), default=0.0),
        )


@dataclass(frozen=True)
class Exactness:
    """What was measured, and the gates that it must pass."""

    first_tokens: ChiSquared
    """The chi-squared test of the first tokens."""
    drafts: SpeculationStats
    """The counters of the drafts for these tokens; the test says nothing about drafts unless some were
    accepted and some rejected."""
    sampled: Parity
    """Responses at the run's own sampling settings."""
    greedy: Parity
    """Greedy responses to the same prompts."""

    def result(self) -> ExactnessResult:
        """Return the figures for the result file of `validate`."""
        test = self.first_tokens
        return ExactnessResult(
            chi_squared=test.statistic,
            degrees_of_freedom=test.degrees_of_freedom,
            num_cells=test.num_cells,
            num_samples=test.num_samples,
            p_value=test.p_value,
            num_draft_tokens=self.drafts.num_draft_tokens,
            num_accepted_tokens=self.drafts.num_accepted_tokens,
            sampled=self.sampled.counts(greedy=False),
            greedy=self.greedy.counts(greedy=True),
        )

    def metrics(self) -> dict[str, float]:
        """Return the figures under their names in MLflow, which `specrl/metrics.py` defines."""
        parities = (self.sampled.comparison, self.greedy.comparison)
        return {
            "validate/chi_squared_p_value": self.first_tokens.p_value,
            "validate/differences_per_1000_tokens": parities[0].per_1000_tokens,
            "validate/greedy_differences_per_1000_tokens": parities[1].per_1000_tokens,
            "validate/unexplained_differences": float(sum(parity.num_unexplained for parity in parities)),
            "validate/cdf_noise": self.sampled.noise.cdf,
            "validate/exactness_accepted_tokens": float(self.drafts.num_accepted_tokens),
        }

    def check(self) -> None:
        """Raise ExactnessError if a gate fails, naming the gate, the figure and its limit."""
        test = self.first_tokens
        if test.p_value < P_VALUE:
            raise ExactnessError(
                f"speculative samples of first tokens do not follow the policy: chi-squared {test.statistic:.1f} on "
                f"{test.degrees_of_freedom} degrees of freedom, p = {test.p_value:.1e} below {P_VALUE:g}, "
                f"{test.num_samples} samples"
            )
        for name, parity in (("sampled", self.sampled), ("greedy", self.greedy)):
            if number := parity.comparison.num_unexplained:
                limits = [parity.noise.limit(greedy=greedy) for greedy in (False, True)]
                raise ExactnessError(
                    f"speculation changed {name} responses: near-ties do not explain {number} tokens; their limits "
                    f"are {limits[0]:.1e} of the CDF for sampled and {limits[1]:.1e} nats for greedy responses"
                )


def measure_exactness(engine: Engine, requests: list[Request], first: list[Request], k: int) -> Exactness:
    """Compare speculative generation, with drafts of up to `k` tokens, with plain generation.

    Args:
        requests: Requests for held-out prompts at the run's settings; they are answered both ways.
        first: Requests whose first tokens are tested, many for each prompt, each with a seed of its own.
        k: The longest draft, in tokens.
    """
    greedy = [replace(request, temperature=0.0, top_p=1.0, top_k=0) for request in requests]
    plain = traces(engine, requests, len(requests), 0)
    noise = noise_of_shapes(engine, requests, plain, k)
    if engine.replays:
        engine.set_replay(texts_to_replay(engine, requests, plain, first))
    test, drafts = first_tokens_test(engine, at_high_temperature(first), k)
    measured = Exactness(
        first_tokens=test,
        drafts=drafts,
        sampled=Parity(compare(plain, traces(engine, requests, len(requests), k), noise), noise),
        greedy=measure_parity(engine, greedy, k, noise),
    )
    if engine.replays:
        engine.set_replay({})
    return measured


def noise_of_shapes(engine: Engine, requests: list[Request], plain: list[Trace], k: int) -> Noise:
    """Measure how far plain decoding differs between batch sizes, up to one with as many rows as verifying `requests`.

    Args:
        plain: What plain decoding of `requests` in one batch picked.
        k: The longest draft, in tokens.
    """
    few = requests[:NOISE_REQUESTS]
    small = measure_noise(plain[: len(few)], traces(engine, few, min(SMALL_BATCH, max(1, len(few) // 2)), 0))
    rows = min(len(requests) * (k + 1), engine.config.engine.max_num_seqs)
    others = [
        replace(requests[i % len(requests)], seed=(requests[i % len(requests)].seed + 1 + i) % 2**63)
        for i in range(max(0, rows - len(few)))
    ]
    large = measure_noise(plain[: len(few)], traces(engine, [*few, *others], rows, 0)[: len(few)])
    return worst(small, large).or_rounding(engine.config.model.dtype)


def texts_to_replay(
    engine: Engine, requests: list[Request], plain: list[Trace], first: list[Request]
) -> dict[Tokens, list[list[int]]]:
    """Return text to replay, by prompt.

    For `requests` it is what plain decoding gave, with one wrong token for every second prompt; for each prompt of
    `first` it is one plain sample.
    """
    texts: dict[Tokens, list[list[int]]] = {}
    for index, (request, trace) in enumerate(zip(requests, plain, strict=True)):
        text = [trace[position].token for position in sorted(trace)]
        if index % 2:
            text[len(text) // 2] = text[0]
        texts[tuple(request.prompt_tokens)] = [text]
    samples = {tuple(request.prompt_tokens): request for request in first}
    engine.set_k(0)
    for prompt, response in zip(samples, engine.generate(list(samples.values())).responses, strict=True):
        texts.setdefault(prompt, []).append(response.tokens)
    return texts


def measure_parity(engine: Engine, requests: list[Request], k: int, noise: Noise) -> Parity:
    """Compare plain with speculative generation of the same batch, each with all prompts prefilled anew."""
    plain, speculative = (traces(engine, requests, len(requests), length) for length in (0, k))
    return Parity(compare(plain, speculative, noise), noise)


def at_high_temperature(requests: list[Request]) -> list[Request]:
    """Return the requests, with the highest temperature for those of every second prompt."""
    prompts = list(dict.fromkeys(tuple(request.prompt_tokens) for request in requests))
    return [
        replace(request, temperature=HIGH_TEMPERATURE, top_p=HIGH_TEMPERATURE_TOP_P)
        if prompts.index(tuple(request.prompt_tokens)) % 2
        else request
        for request in requests
    ]


def traces(engine: Engine, requests: list[Request], batch: int, k: int) -> list[Trace]:
    """Answer requests, `batch` at a time with drafts of up to `k` tokens; return what was picked for each."""
    engine.reset_prefix_cache()
    engine.set_k(k)
    with engine.recorder() as recorder:
        parts = [engine.generate(requests[i : i + batch]).responses for i in range(0, len(requests), batch)]
    responses = [response for part in parts for response in part]
    return [
        # Tokens that were accepted past the end of a response were recorded as well.
        {
            position: pick
            for position, pick in recorder.traces[request.seed].items()
            if position < len(request.prompt_tokens) + len(response.tokens)
        }
        for request, response in zip(requests, responses, strict=True)
    ]


def first_tokens_test(engine: Engine, requests: list[Request], k: int) -> tuple[ChiSquared, SpeculationStats]:
    """Test speculative samples of the first tokens against the engine's own plain distributions.

    Returns:
        The chi-squared test of all prompts together, and what became of the drafts.
    """
    engine.set_k(k)
    # The last token of a response is never drafted, so one more is generated than the test looks at.
    generation = engine.generate([replace(request, max_tokens=FIRST_TOKENS + 1) for request in requests])
    samples: dict[Tokens, list[Tokens]] = {}
    kinds: dict[Tokens, Request] = {}
    for request, response in zip(requests, generation.responses, strict=True):
        prompt = tuple(request.prompt_tokens)
        kinds[prompt] = request
        samples.setdefault(prompt, []).append(tuple(response.tokens[:FIRST_TOKENS]))
    engine.set_k(0)
    test = combined(
        [
            chi_squared(drawn, exact_probabilities(engine, kinds[prompt], len(drawn)))
            for prompt, drawn in samples.items()
        ]
    )
    return test, generation.stats


def exact_probabilities(engine: Engine, request: Request, num_samples: int) -> dict[Tokens, float]:
    """Return the probabilities of beginnings of a response, measured by plain prefills.

    These are the beginnings of `FIRST_TOKENS` tokens, and shorter ones that end with a stop token, that are expected at
    least once in `num_samples`.
    """
    least = 1.0 / num_samples
    level: dict[Tokens, float] = {(): 1.0}
    ended: dict[Tokens, float] = {}
    for _ in range(FIRST_TOKENS):
        rows = next_token_distributions(engine, request, list(level))
        grown = {
            (*prefix, token): level[prefix] * probability
            for prefix, row in zip(level, rows, strict=True)
            for token, probability in row.items()
        }
        grown = {tokens: probability for tokens, probability in grown.items() if probability >= least}
        ended |= {tokens: value for tokens, value in grown.items() if tokens[-1] in engine.stop_tokens}
        level = {tokens: value for tokens, value in grown.items() if tokens[-1] not in engine.stop_tokens}
    return ended | level


def next_token_distributions(engine: Engine, request: Request, prefixes: Sequence[Tokens]) -> list[dict[int, float]]:
    """Return the probabilities of likely next tokens after the request's prompt and each of the prefixes."""
    asked = [
        replace(request, prompt_tokens=[*request.prompt_tokens, *prefix], seed=seed, max_tokens=1)
        for seed, prefix in enumerate(prefixes)
    ]
    if not asked:
        return []
    with engine.recorder() as recorder:
        engine.generate(asked)
    return [recorder.likely[seed] for seed in range(len(asked))]
