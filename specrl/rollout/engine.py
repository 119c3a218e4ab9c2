"""The rollout engine of one rank: in-process vLLM, speculative and exact, refitted in place every step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from specrl.config import Config
from specrl.distributed import join
from specrl.models.directory import read_config
from specrl.models.families import family_of
from specrl.precision.recipe import RECIPE_FILE, KvScales, Mode, Recipe, recipe_of
from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.rollout.drafts.controller import Controller
from specrl.rollout.drafts.estimates import DraftLengths
from specrl.rollout.drafts.text_sources import StoredTextSource
from specrl.rollout.errors import RefitError
from specrl.rollout.requests import Generation, Request, Response, response_seed
from specrl.rollout.vllm.arguments import ENVIRONMENT, engine_arguments, generation_params, scoring_params, stop_tokens
from specrl.rollout.vllm.drafting import Drafting, agreed, draft_model, pick_drafts_faster, refuse_shared_head
from specrl.rollout.vllm.lifecycle import model_runner, output_tokens, require_version, sleep, start, stop, wake
from specrl.rollout.vllm.load import (
    Weights,
    assert_drafter_is,
    assert_policy_is,
    drafter_weight_names,
    policy_weight_names,
    refit_drafter,
    refit_policy,
)
from specrl.rollout.vllm.precision import EnginePrecision
from specrl.rollout.vllm.recorder import DraftObserver, Recorder
from specrl.rollout.vllm.sampler import InvariantSampler
from specrl.rollout.vllm.self_test import CraftedInputs
from specrl.rollout.vllm.timing import IterationTimes, iteration_times

__all__ = ["Engine", "Generation", "Request", "Response", "response_seed"]


def start_engine(config: Config, policy_dir: Path, drafter_dir: Path | None) -> Engine:
    """An engine on a trained policy, in the precision that its training ended with.

    Raises:
        ValueError: `precision` asks for FP8 and the training left no recipe for it.
    """
    recipe = recipe_of(policy_dir) if config.precision.uses_fp8 else None
    if recipe is None and config.precision.uses_fp8:
        raise ValueError(
            f"precision asks for FP8, but {policy_dir} has no {RECIPE_FILE}: its training used none, and the engine "
            'would silently compute in BF16; train it with this precision, or set all of it to "bf16"'
        )
    return Engine(policy_dir, drafter_dir, config=config, seed=config.seed, recipe=recipe)


class Engine:
    """In-process vLLM with the drafter-invariant sampler. Construction is collective over the process group's ranks."""

    def __init__(
        self,
        policy_dir: Path,
        drafter_dir: Path | None,
        *,
        config: Config,
        seed: int,
        speculate: bool = True,
        recipe: Recipe | None = None,
        overrides: Mapping[str, Any] | None = None,
        control: ControlSettings | None = None,
    ) -> None:
        """Start the engine and test its sampler.

        Args:
            policy_dir: Hugging Face directory; refits keep its architecture.
            drafter_dir: EAGLE-3 directory, for methods with a trained drafter. For "mtp" a directory of this policy
                with another multi-token-prediction layer, or none for the one in `policy_dir`.
            config: model, engine, speculation sections are read.
            seed: of vLLM's own generators and the controller's; no response depends on it.
            speculate: draft as `speculation` says; otherwise decode plainly.
            recipe: which FP8 `precision` means for this policy; without one everything is in `model.dtype`.
            overrides: vLLM engine arguments that replace the project's.
            control: the constants that steer drafting, for a benchmark that varies them; None for the project's.

        Raises:
            ValueError: EAGLE-3 without a drafter.
            SamplerError: the sampler's self-test failed.
        """
        os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
        join()
        require_version()
        self.config = config
        self.max_length = config.model.max_length
        self.max_k, self.max_replay_k = config.speculation.draft_lengths if speculate else (0, 0)
        longest = max(self.max_k, self.max_replay_k)
        self.precision = EnginePrecision(config.precision, recipe)
        arguments = engine_arguments(config, policy_dir, drafter_dir, seed, longest, self.precision)
        self._llm = start({**arguments, **(overrides or {})})
        self._runner = model_runner(self._llm)
        self.precision.loaded(self._runner.model, None)
        refuse_shared_head(self._runner, config.speculation.draft_method)
        pick_drafts_faster(self._runner)
        self._sampler = InvariantSampler(self._runner, longest)
        self._sampler.install()
        self._drafting = self._install_drafting(seed, control or ControlSettings()) if longest else None
        self._tokenizer = self._llm.get_tokenizer()
        self.stop_tokens = stop_tokens(policy_dir, self._tokenizer)
        self.is_whole = config.engine.tensor_parallel == 1
        """Whether this rank holds all of its engine's weights."""
        self._family = family_of(read_config(policy_dir))
        self._policy_names = policy_weight_names(policy_dir)
        self._drafter_names = drafter_weight_names(drafter_dir or policy_dir) if self._drafter else frozenset()
        self._num_requests = 0
        self._stopped = False
        self.version = 0
        """Version of the weights it holds, as given to `refit`."""
        self.set_k(None if config.speculation.adaptive else self.longest_k)
        self.self_test()

    def _install_drafting(self, seed: int, settings: ControlSettings) -> Drafting:
        controller = Controller(self.max_k, self.max_replay_k, seed, settings)
        drafting = Drafting(self._runner, self._sampler, self.config, controller, settings)
        drafting.install()
        return drafting

    @property
    def _drafter(self) -> torch.nn.Module | None:
        return draft_model(self._runner)

    def generate(
        self,
        requests: list[Request],
        *,
        on_progress: Callable[[int, int], None] | None = None,
        on_iteration: Callable[[], None] | None = None,
        stop: Callable[[], bool] | None = None,
        recall: bool = False,
    ) -> Generation:
        """Answer all requests.

        Args:
            requests: answered in any order, in batches of the engine's choice; neither changes a token.
            on_progress: called as `on_progress(finished, total)` whenever some finish.
            on_iteration: called after every iteration that leaves requests unfinished.
            stop: asked after every such iteration; once it returns true, unfinished responses are returned with the
                tokens they have and `finish_reason = "abort"`. The ranks of a tensor-parallel engine take the first
                one's answer, which costs a broadcast per iteration.
            recall: draft from responses that were asked for with `recall` before, and remember these. For rollouts:
                what is asked for again and again, as probes are, would be found in them word for word.

        Raises:
            ValueError: a prompt that leaves no room for a token within `model.max_length`.
        """
        started = time.perf_counter()
        stats, self._sampler.stats = self._sampler.stats, SpeculationStats()
        running: dict[str, tuple[int, str]] = {}
        responses: dict[int, Response] = {}
        params = [generation_params(request, self.max_length, self.stop_tokens) for request in requests]
        if self._drafting is not None:
            self._drafting.begin(recall)
        try:
            for index, (request, param) in enumerate(zip(requests, params, strict=True)):
                name, internal = self._add(request.prompt_tokens, param)
                running[name] = (index, internal)
            while running:
                finished = [output for output in self._llm.step() if output.finished]
                for output in finished:
                    index, internal = running.pop(output.request_id)
                    completion = output.outputs[0]
                    responses[index] = self._response(internal, list(completion.token_ids), completion.finish_reason)
                if finished and on_progress is not None:
                    on_progress(len(responses), len(requests))
                if running and on_iteration is not None:
                    on_iteration()
                if running and stop is not None and agreed(stop()):
                    break
            for index, internal in running.values():
                responses[index] = self._response(internal, output_tokens(self._llm, internal), "abort")
        finally:
            self._abort(internal for _, internal in running.values())
            stats, self._sampler.stats = self._sampler.stats, stats
        ordered = [responses[index] for index in range(len(requests))]
        num_tokens = sum(len(response.tokens) for response in ordered)
        return Generation(ordered, stats, time.perf_counter() - started, num_tokens)

    def set_k(self, k: int | None) -> None:
        """Draft up to `k` tokens in every iteration from now on; none gives the choice to the controller.

        `k` is the drafter's. Stored text beside a drafter keeps its own length, `speculation.replay_k`, but `k = 0`
        switches all drafts off; for `replay`, which has no drafter, `k` is the length of its drafts.
        """
        limit = self.longest_k
        if k is not None and not 0 <= k <= limit:
            raise ValueError(f"k = {k} is outside 0 to {limit}, the k this engine was started with")
        k = 0 if self._stopped else k
        self.k = k
        if self._drafting is not None:
            self._drafting.fixed = self._draft_lengths(k) if k is not None else None

    def _draft_lengths(self, k: int) -> DraftLengths:
        if self.max_k:
            return DraftLengths(k, self.max_replay_k if k else 0)
        return DraftLengths(0, k)

    def set_replay(
        self,
        texts: Mapping[tuple[int, ...], Sequence[Sequence[int]]],
        seeds: Mapping[tuple[int, ...], Sequence[int]] | None = None,
    ) -> None:
        """Replace the stored text: responses by prompt, the preferred first. For methods with replay.

        Args:
            seeds: that they were sampled with, in the same order, where known: a request follows the text of its own
                seed before all others.

        Raises:
            ValueError: `speculation.method` has no replay.
        """
        if self._stored is None:
            raise ValueError(f'speculation.method = "{self.config.speculation.method}" replays no stored text')
        self._stored.store(texts, seeds)

    def stored_for(self, request: Request) -> tuple[int, int]:
        """How many responses to its prompt are stored, and how many tokens of the one of its own seed."""
        return self._stored.index.stored(request.prompt_tokens, request.seed) if self._stored is not None else (0, 0)

    @property
    def _stored(self) -> StoredTextSource | None:
        return self._drafting.stored if self._drafting is not None else None

    @property
    def speculates(self) -> bool:
        """Whether it was started with a draft source, and not told to stop."""
        return self._drafting is not None and not self._stopped

    @property
    def longest_k(self) -> int:
        """The largest `k` that `set_k` takes: of the drafter, or without one of stored text."""
        return self.max_k or self.max_replay_k

    @property
    def controller(self) -> Controller | None:
        """Chooses how far to draft while no k is set; none where nothing is drafted."""
        return self._drafting.controller if self._drafting is not None else None

    @property
    def replays(self) -> bool:
        """Whether it takes stored text as drafts."""
        return self._stored is not None

    def stop_speculating(self) -> None:
        """Decode plainly from now on, whatever k is set."""
        self._stopped = True
        self.set_k(0)

    def recorder(self) -> Recorder:
        """Records what every token is picked from, as a context manager."""
        return Recorder(self._runner)

    def observe_drafts(self, k: int) -> DraftObserver:
        """Return a context manager that records the drafter's proposals after every token, and verifies none."""
        assert self._drafting is not None and self.max_k, "no drafter"
        return DraftObserver(self._drafting, k)

    def control_with(self, controller: Controller) -> None:
        """Let another controller choose how far to draft while no k is set."""
        assert self._drafting is not None, "an engine that does not draft"
        self._drafting.controller = controller

    def reset_prefix_cache(self) -> None:
        """Forget all prompts, so that the next generation prefills each anew."""
        self._llm.reset_prefix_cache()

    @property
    def mode(self) -> Mode:
        """How the policy inside computes FP8: `off` where no layer does."""
        return self.precision.mode(self._runner.model)

    def assert_quantised(self) -> None:
        """After a generation: an FP8 engine has quantised all weights it was given, and activations.

        Raises:
            NotQuantisedError: naming the first layer that computes in another precision than the recipe says.
        """
        self.precision.assert_quantised(self._runner.model, compiled=self.config.engine.compile)

    def refit(
        self,
        policy_weights: Weights,
        drafter_weights: Weights | None,
        version: int,
        kv_scales: KvScales | None = None,
    ) -> float:
        """Load new weights in place, by their on-disk names, and drop cached prefixes; returns seconds.

        FP8 weights are quantised as they arrive; new scales of an FP8 KV cache come with them.

        A tensor is read until the fused layer it belongs to is complete: the caller must not overwrite it before.

        Raises:
            RefitError: a tensor is missing or unknown; PolicyParityError: a tied head differs from the embeddings.
        """
        started = time.perf_counter()
        assert not self._llm.has_unfinished_requests(), "refit while generating"
        tied = bool(self._llm.model_config.hf_config.tie_word_embeddings)
        refit_policy(self._llm.vllm_config, self._runner.model, policy_weights, self._policy_names, tied)
        if drafter_weights is not None:
            self._load_drafter(drafter_weights)
        self.precision.loaded(self._runner.model, kv_scales)
        self.reset_prefix_cache()
        if self.controller is not None:
            self.controller.drafter_changed()
        self.version = version
        return time.perf_counter() - started

    def refit_drafter(self, weights: Weights) -> None:
        """Load the drafter alone, beside the policy as it is; errors as of `refit`."""
        self._load_drafter(weights)
        self.reset_prefix_cache()
        if self.controller is not None:
            self.controller.drafter_changed()

    def _load_drafter(self, weights: Weights) -> None:
        if self._drafter is None:
            raise RefitError("refit was sent a drafter, but the engine has none")
        refit_drafter(self._llm.vllm_config, self._drafter, weights, self._drafter_names)

    @property
    def cannot_verify(self) -> str | None:
        """The reason why `verify_policy` cannot judge this engine's weights, or None where it can."""
        if not self.is_whole:
            return f"engine.tensor_parallel = {self.config.engine.tensor_parallel} splits them over ranks"
        if self.mode == "native":
            return 'precision.generation = "fp8" rounds them on a GPU'
        return None

    def verify_policy(self, weights: Weights) -> None:
        """Compare the policy inside the engine with the trainer's tensors, one by one; slower than the parity probe.

        Raises:
            PolicyParityError: names the tensors that differ.
        """
        assert_policy_is(self._runner.model, weights, self._family)

    def verify_drafter(self, weights: Weights) -> None:
        """Compare the drafter inside the engine with the trainer's tensors, and its embeddings with the policy's.

        Raises:
            DrafterCollapseError: names the tensors that differ.
        """
        if self._drafter is None:
            raise RefitError("there is a drafter to compare with, but the engine has none")
        assert_drafter_is(self._drafter, weights, self._runner.model, self._family)

    def sequence_logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs of `tokens[1:]` of each sequence at temperature 1, from prefills without cached prefixes."""
        if any(len(tokens) > self.max_length for tokens in sequences):
            raise ValueError(f"a sequence is longer than model.max_length = {self.max_length}")
        params = scoring_params()
        running = {name: (i, key) for i, (name, key) in enumerate(self._add(tokens, params) for tokens in sequences)}
        results: dict[int, list[float]] = {}
        while running:
            for output in self._llm.step():
                index, internal = running.pop(output.request_id)
                self._sampler.records.pop(internal)
                pairs = zip(output.prompt_logprobs[1:], sequences[index][1:], strict=True)
                results[index] = [float(entry[token].logprob) for entry, token in pairs]
        return [results[index] for index in range(len(sequences))]

    def profile(self) -> AbstractContextManager[IterationTimes]:
        """Within it, where the time of its iterations goes; outside of it nothing is timed."""
        return iteration_times(self._llm)

    def self_test(self) -> None:
        """Crafted logits and drafts through the installed sampler, against a reference that shares no code with it.

        Raises:
            SamplerError: a token, a log-prob or a counter is not what it must be.
        """
        k = self.k
        self.set_k(self.longest_k)
        with CraftedInputs(self._runner, self._llm.model_config.get_vocab_size(), self.stop_tokens) as crafted:
            cases = crafted.requests()
            if self.replays:
                self.set_replay({tuple(case.prompt_tokens): [crafted.every_pair()] for case in cases})
            generation = self.generate(
                [Request(c.prompt_tokens, c.seed, c.max_tokens, c.temperature, c.top_p, c.top_k) for c in cases]
            )
            if self.replays:
                self.set_replay({})
        self.set_k(k)
        # Tokens were put into cached blocks that the crafted drafts, not the model's inputs, name.
        self._llm.reset_prefix_cache()
        for case, response in zip(cases, generation.responses, strict=True):
            crafted.check_logprobs(case, response.tokens, response.logprobs)
        crafted.check_counters(generation.stats, speculates=self.speculates)

    def sleep(self) -> None:
        """Give the GPU memory of weights and KV cache back to the trainer until `wake`.

        Raises:
            ValueError: it was started on a CPU or without `engine.sleep = true`.
        """
        sleep(self._llm)

    def wake(self) -> None:
        """Take the memory again, before a refit. An engine that is awake stays so."""
        wake(self._llm)

    def shutdown(self) -> None:
        """Free the engine; the process group stays."""
        stop(self._llm)

    def _add(self, prompt_tokens: list[int], params: Any) -> tuple[str, str]:
        """Queue a request; its name in outputs, and the engine's own."""
        name = str(self._num_requests)
        self._num_requests += 1
        return name, self._llm.add_request(name, {"prompt_token_ids": prompt_tokens}, params)

    def _abort(self, internal: Iterable[str]) -> None:
        names = list(internal)
        if names:
            self._llm.abort_request(names, internal=True)
        for name in names:
            self._sampler.records.pop(name, None)

    def _response(self, internal: str, tokens: list[int], finish_reason: str) -> Response:
        """Takes the request's record out; a request that was never worked on has none."""
        if self._drafting is not None:
            self._drafting.remember(tokens)
        record = self._sampler.records.pop(internal, None)
        now = time.time()
        if record is None:
            assert not tokens
            return Response([], [], "", finish_reason, 0, 0, 0, started_at=now, finished_at=now)
        # Tokens accepted past the end of a response were picked too, and are cut off.
        assert len(record.logprobs) >= len(tokens)
        return Response(
            tokens,
            record.logprobs[: len(tokens)],
            self._tokenizer.decode(tokens, skip_special_tokens=True),
            finish_reason,
            *record.counts,
            started_at=record.started_at,
            finished_at=now,
            by_source=record.by_source,
        )
