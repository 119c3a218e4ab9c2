"""The rollout engine of one rank: in-process vLLM, speculative and exact, refitted in place every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from numpy.typing import NDArray

from specrl.config import Config
from specrl.distributed import join
from specrl.models.directory import read_model_config
from specrl.models.families import family_of
from specrl.models.sources import load_tokenizer
from specrl.precision.recipe import RECIPE_FILE, KvScales, Mode, Recipe, recipe_of
from specrl.rollout.drafting import Drafting
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.rollout.drafts.text_store import StoredText
from specrl.rollout.own_text import read_ahead
from specrl.rollout.requests import Generation, Request, Response, response_seed
from specrl.rollout.stop_strings import StopStrings
from specrl.rollout.vllm.engine.arguments import (
    engine_arguments,
    generation_params,
    gpu_memory,
    scoring_params,
    stop_tokens,
    without_weights,
)
from specrl.rollout.vllm.engine.lifecycle import VllmEngine, require_version, set_environment
from specrl.rollout.vllm.engine.running import RunningRequest
from specrl.rollout.vllm.precision import EnginePrecision
from specrl.rollout.vllm.self_test import CraftedInputs
from specrl.rollout.vllm.weights.comparison import Expected
from specrl.rollout.vllm.weights.load import Weights, drafter_weight_names, policy_weight_names

__all__ = ["Engine", "Generation", "Request", "Response", "StoredText", "response_seed"]


def start_engine(
    config: Config, policy_dir: Path, drafter_dir: Path | None, *, gpu_share: float | None = None
) -> Engine:
    """Start an engine without a trainer, in the precision in which the policy's training ended (collective).

    Args:
        gpu_share: The share of the GPU's memory to use beside other engines; None for most of it.
    """
    recipe = recipe_of(policy_dir, join()) if config.precision.uses_fp8 else None
    if recipe is None and config.precision.uses_fp8:
        raise ValueError(
            f"precision asks for FP8, but {policy_dir} has no {RECIPE_FILE}: its training used none, and the engine "
            'would silently compute in BF16; train it with this precision, or set all of it to "bf16"'
        )
    overrides = gpu_memory(gpu_share) if gpu_share is not None else None
    return Engine(
        policy_dir, drafter_dir, config=config, seed=config.seed, recipe=recipe, alone=True, overrides=overrides
    )


class Engine(VllmEngine):
    """In-process vLLM with the drafter-invariant sampler. The ranks of one engine call its methods together."""

    def __init__(
        self,
        policy_dir: Path,
        drafter_dir: Path | None,
        *,
        config: Config,
        seed: int,
        speculate: bool = True,
        recipe: Recipe | None = None,
        alone: bool = False,
        reads_policy: bool = True,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the engine and test its sampler.

        Args:
            policy_dir: The policy's Hugging Face directory. Refits keep its architecture.
            drafter_dir: The directory of a trained drafter. For multi-token prediction, a directory of this policy
                with another such layer, or None for the layer in `policy_dir`.
            seed: The seed of vLLM's own random generators; no response depends on it.
            speculate: Whether to draft as `config.speculation` says.
            recipe: The FP8 recipe of this policy; without one everything is computed in `model.dtype`.
            alone: Whether there is no trainer: the engine may then use most of the GPU's memory, keeps no routes and
                cannot sleep.
            reads_policy: Whether to read the policy's weights; otherwise a refit must follow.
            overrides: Arguments of vLLM's `EngineArgs` that replace the project's.

        Raises:
            ValueError: The method needs a drafter and there is none, or the device lacks what `precision` or `engine`
                asks for.
            SamplerError: The sampler's self-test failed.
        """
        join()  # chooses this rank's GPU, which the environment depends on
        set_environment(batch_invariant=config.engine.batch_invariant)
        require_version()
        self.config, self.max_length = config, config.model.max_length
        longest = max(config.speculation.draft_lengths) if speculate else 0
        self.precision = EnginePrecision(config.precision, recipe)
        self._family = family_of(read_model_config(policy_dir))
        keeps_routes = self._family.router is not None and not alone
        arguments = engine_arguments(
            config, policy_dir, drafter_dir, seed, longest, self.precision, alone=alone, keeps_routes=keeps_routes
        )
        if not reads_policy:
            arguments = without_weights(arguments)
        super().__init__({**arguments, **(overrides or {})})
        self.precision.loaded(self.policy, None)
        self.tokenizer: Any = load_tokenizer(policy_dir)
        """The policy's tokenizer."""
        self.stop_tokens = stop_tokens(policy_dir, self.tokenizer)
        self._directories = policy_dir, drafter_dir or policy_dir
        self.drafting = Drafting(self, config) if longest else None
        """Chooses the draft length while no `k` is set; None if nothing is drafted."""
        self._stopped = False
        self.set_k(self.longest_k)
        self.self_test()
        if self.drafting is not None and config.speculation.adaptive:
            self.set_k(None)

    @cached_property
    def _policy_names(self) -> frozenset[str]:  # read late: a policy with random weights has no files, and no refits
        return policy_weight_names(self._directories[0])

    @cached_property
    def _drafter_names(self) -> frozenset[str]:
        return drafter_weight_names(self._directories[1]) if self.drafter else frozenset()

    def generate(
        self,
        requests: list[Request],
        *,
        on_progress: Callable[[int, int], None] | None = None,
        on_response: Callable[[int, Response], None] | None = None,
        stop: Callable[[], bool] | None = None,
        recall: bool = False,
        learn: bool = True,
        routes: bool = False,
    ) -> Generation:
        """Answer all requests.

        Args:
            on_progress: Called as `on_progress(finished, total)` whenever requests finish.
            on_response: Called with the index in `requests` and the response as soon as it is finished.
            stop: Called after every decoding iteration that leaves requests unfinished. Once it is true on the
                engine's first rank, unfinished responses are returned as they are, with `finish_reason = "abort"`.
            recall: Whether to draft from earlier responses generated with `recall`, and to remember these; for
                rollouts. A probe repeats its requests, and would find its own earlier responses.
            learn: Whether the choice of drafts learns from this generation.
            routes: Whether to return the experts to which the tokens were routed, if the policy has experts.

        Raises:
            ValueError: A prompt leaves no room for a token within `model.max_length`.
        """
        started = time.perf_counter()
        responses: dict[int, Response] = {}
        with self._generation(requests, recall=recall, learn=learn) as running:

            def end(finished: list[RunningRequest]) -> None:
                for request in finished:
                    index = running.pop(request)
                    responses[index] = self._response(requests[index], request, routes=routes)
                    if on_response is not None:
                        on_response(index, responses[index])
                if finished and on_progress is not None:
                    on_progress(len(responses), len(requests))

            decode_steps = self.decode_steps
            running |= {request: index for index, request in enumerate(self._begin(requests))}
            end([request for request in running if request.finish_reason is not None])
            while running:
                finished = self.step()
                if self.drafting is not None:
                    self.drafting.follow(self.last)
                end(finished)
                if running and stop is not None and self.agreed(stop())[0]:
                    break
            responses |= {index: self._response(requests[index], request) for request, index in running.items()}
        ordered = [responses[index] for index in range(len(requests))]
        drafts = chain.from_iterable(response.drafts for response in ordered)
        stats = SpeculationStats.of(drafts, self.decode_steps - decode_steps)
        num_tokens = sum(len(response.tokens) for response in ordered)
        return Generation(ordered, stats, time.perf_counter() - started, num_tokens)

    def set_k(self, k: int | None) -> None:
        """Draft up to `k` tokens in every iteration; None leaves the choice to the cost model, 0 disables drafting.

        Text drafts beside a drafter keep their own length, `replay_k`.
        """
        assert k is None or 0 <= k <= self.longest_k, f"k = {k} is outside 0 to {self.longest_k}"
        k = 0 if self._stopped else k
        self.k = k
        if self.drafting is not None:
            self.drafting.set_length(k)

    def set_replay(self, texts: Iterable[StoredText]) -> None:
        """Replace the stored text, for methods with replay; at a tie the earlier response is used."""
        assert self.replays and self.drafting is not None, "an engine that replays no stored text"
        self.drafting.texts.store(texts)

    def set_recent(self, generations: Sequence[Sequence[Sequence[int]]]) -> None:
        """Replace the responses remembered from generations with `recall`, as tokens, the oldest generation first."""
        assert self.drafting is not None, "an engine that does not draft"
        self.drafting.texts.forget_recent()
        for responses in generations:
            for response in responses:
                self.drafting.texts.remember(response)

    def stored_for(self, request: Request) -> tuple[int, int]:
        """The number of stored responses to the request's prompt, and of tokens in the one with its seed."""
        return self.drafting.texts.stored(request.prompt_tokens, request.seed) if self.drafting else (0, 0)

    @property
    def replays(self) -> bool:
        """Whether stored responses to the same prompt serve as drafts."""
        return self.drafting is not None and self.config.speculation.draft_method.replays

    @property
    def speculates(self) -> bool:
        """Whether anything may be drafted."""
        return self.drafting is not None and not self._stopped

    @property
    def longest_k(self) -> int:
        """The largest `k` that `set_k` accepts."""
        return self.drafting.k if self.drafting is not None else 0

    def stop_speculating(self) -> None:
        """Decode without drafts from now on, whatever `k` is set."""
        self._stopped = True
        self.set_k(0)

    @property
    def mode(self) -> Mode:
        """How the policy's layers compute FP8; `off` if none does."""
        return self.precision.mode(self.policy)

    def assert_quantised(self) -> None:
        """Check that the policy's layers compute in the precision that the recipe prescribes.

        Raises:
            NotQuantisedError: A layer computes in another precision.
        """
        self.precision.assert_quantised(self.policy)

    def refit(
        self, policy_weights: Weights, drafter_weights: Weights | None, *, kv_scales: KvScales | None = None
    ) -> None:
        """Load all weights in place, by their on-disk names, and drop cached prefixes.

        A tensor must not be overwritten before the fused layer to which it belongs is complete.

        Args:
            drafter_weights: None leaves the drafter as it is.
            kv_scales: New scales of an FP8 KV cache; None keeps the old ones.

        Raises:
            RefitError: A tensor is missing or unknown, or there are drafter weights but no drafter.
        """
        self.load_policy(policy_weights, self._policy_names)
        self.precision.loaded(self.policy, kv_scales)
        self.refit_drafter(drafter_weights)

    def refit_drafter(self, weights: Weights | None) -> None:
        """Load only the drafter, and drop cached prefixes; raises what `refit` raises."""
        if weights is not None:
            self.load_drafter(weights, self._drafter_names)
        self.reset_prefix_cache()
        if self.drafting is not None:
            self.drafting.costs.acceptance.fade()

    def expected_policy(self) -> Expected | None:
        """The record of the trainer's policy tensors, to be taken on their way to `refit` and checked after it.

        None if they cannot be compared: native FP8 rounds experts, and kernels rearrange them.
        """
        is_rearranged = self.mode == "native" and self._family.router is not None
        return None if is_rearranged else Expected(self.policy, self._family)

    def verify_drafter(self, weights: Weights) -> None:
        """Compare this rank's part of the drafter with the trainer's tensors, and its embeddings with the policy's.

        Raises:
            DrafterCollapseError: Tensors differ on this rank; it names them.
        """
        assert self.drafter is not None, "an engine without a drafter"
        expected = Expected(self.drafter, self._family, policy=self.policy)
        expected.take(weights)
        expected.check()

    def score(self, sequences: list[list[int]]) -> tuple[list[list[float]], list[NDArray[Any] | None]]:
        """Compute the log-probs, in nats, of each sequence's tokens but the first, and their `Response.routes`.

        The temperature is 1, and no cached prefixes are used.
        """
        assert all(len(tokens) <= self.max_length for tokens in sequences), "longer than model.max_length"
        params = scoring_params()
        logprobs: list[list[float]] = [[] for _ in sequences]
        routes: list[NDArray[Any] | None] = [None] * len(sequences)
        if self.drafting is not None:
            self.drafting.set_length(0)
        with self._generation([]) as running:
            for index, tokens in enumerate(sequences):
                running[self.add(tokens, params)] = index
            while running:
                for request in self.step():
                    index = running.pop(request)
                    logprobs[index] = request.prompt_logprobs
                    routes[index] = request.routes(len(sequences[index]) - 1)
        self.set_k(self.k)
        return logprobs, routes

    def self_test(self) -> None:
        """Send crafted logits and drafts through the installed sampler, and compare its output with a reference.

        Raises:
            SamplerError: A token, a log-prob or a counter is wrong.
        """
        k = self.k
        self.set_k(self.longest_k)
        with CraftedInputs(self.sampler, self.vocab_size, self.stop_tokens) as crafted:
            cases = crafted.requests()
            generation = self.generate(cases, learn=False)
        self.set_k(k)
        # Cached blocks are named after the crafted drafts, but were computed from the drafts that the model read.
        self.reset_prefix_cache()
        for case, response in zip(cases, generation.responses, strict=True):
            crafted.check(case, response)
        crafted.check_drafts(speculates=self.speculates)

    def _begin(self, requests: Sequence[Request]) -> list[RunningRequest]:
        # Queues all requests but those whose responses ended with the text of their own seed.
        prompts = [asked.prompt_tokens for asked in requests]
        params = [generation_params(asked, self.max_length, self.stop_tokens) for asked in requests]
        stops = {asked.stop: StopStrings(self.tokenizer, asked.stop) for asked in requests if asked.stop}
        begun = [RunningRequest(len(asked.prompt_tokens), stops.get(asked.stop)) for asked in requests]
        if self.replays and self.k != 0:
            assert self.drafting is not None
            own = [self.drafting.texts.own(asked.prompt_tokens, asked.seed) for asked in requests]
            read_ahead(self, prompts, params, dict(enumerate(own)), begun, self.stop_tokens)
        for index in self._longest_first(prompts):
            asked, request = params[index], begun[index]
            asked.max_tokens -= len(request.tokens)
            if request.finish_reason is None:
                self.add(prompts[index], asked, request)
        return begun

    def _longest_first(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        # If not all requests fit at once, a long one that begins last runs alone at the end.
        if self.drafting is None:
            return list(range(len(prompts)))
        found = [self.drafting.texts.longest(prompt) for prompt in prompts]
        usual = fmean([length for length in found if length is not None] or [0])
        lengths = [usual if length is None else length for length in found]
        return sorted(range(len(prompts)), key=lambda index: -lengths[index])

    @contextmanager
    def _generation(
        self, requests: Sequence[Request], *, recall: bool = False, learn: bool = False
    ) -> Iterator[dict[RunningRequest, int]]:
        # Yields the indices of the running requests, kept up to date by the block; none is left however it ends.
        if self.drafting is not None:
            self.drafting.begin(requests, self.stop_tokens, recall=recall, learn=learn)
        try:
            yield {}
        finally:
            self.end()
        if self.drafting is not None:
            self.drafting.end()

    def _response(self, asked: Request, request: RunningRequest, *, routes: bool = False) -> Response:
        if self.drafting is not None:
            self.drafting.remember(request.tokens, asked.prompt_tokens)
        text = self.tokenizer.decode(request.tokens, skip_special_tokens=True)
        rest = request.stops.rest(request.tokens) if request.stops is not None else ""
        truncates = asked.temperature > 0 and (asked.top_k > 0 or asked.top_p < 1)
        return Response(
            request.tokens,
            request.logprobs,
            request.log_kept_mass if truncates and request.tokens else None,
            text.removesuffix(rest),
            request.finish_reason or "abort",
            started_at=request.started_at,
            finished_at=request.finished_at,
            drafts=request.drafts,
            routes=request.routes(request.prompt_length + len(request.tokens) - 1) if routes else None,
        )
