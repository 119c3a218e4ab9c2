"""`specrl bench gpu`: Triton kernels, interpreted here, against PyTorch; what steps train on which GPUs; its page."""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from specrl.bench.job import BenchJob
from tests.kernel_processes import use_interpreter

SAMPLING = ("pick", "pick, float32", "pick, top-p 0.95", "pick, top-k 50", "verify")


def measured(broken: str | None) -> list[dict[str, Any]]:
    """The rows of Triton's kernels at the smallest size, or of PyTorch with one operation that is `broken`."""
    import torch

    from specrl.bench.gpu import sampler
    from specrl.bench.gpu.models import SHORT

    pick, verify = sampler.PYTORCH.sampling
    wrong: dict[str, Any] = {
        "pick": lambda *given: (found := pick(*given))._replace(tokens=(found.tokens + 1) % SHORT.served.vocab_size),
        "verify": lambda *given: (found := verify(*given))._replace(counts=found.counts + 1),
    }
    own = sampler.kernels()
    if broken is not None:
        own = sampler.PYTORCH._replace(sampling=sampler.PYTORCH.sampling._replace(**{broken: wrong[broken]}))
    return list(sampler.compare(own, replace(SHORT, rows=(5,)), torch.device("cpu")))


def test_every_kernel_is_compared_with_pytorch_and_timed_beside_it() -> None:
    with ProcessPoolExecutor(1, get_context("spawn"), use_interpreter) as pool:
        rows = pool.submit(measured, None).result()
    assert [row["what"] for row in rows] == [*SAMPLING, "compare text", "draft from text"]
    assert {row["of"] for row in rows} == {"Triton"}
    assert all(row["unexplained"] == 0 and row["us"] > 0 and row["pytorch_us"] > 0 for row in rows)


@pytest.mark.parametrize("broken", ["pick", "verify"])
def test_what_pytorch_does_not_give_is_counted(broken: str) -> None:
    found = {row["what"] for row in measured(broken) if row["unexplained"]}
    assert found == {what for what in SAMPLING if what.startswith(broken)}


def test_a_section_whose_module_cannot_be_imported_loses_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(scale: object, folder: Path) -> list[dict[str, Any]]:
        """What is measured here."""
        return [{"what": "pick"}]

    monkeypatch.setattr("specrl.bench.gpu.sampler.measure", measure)
    monkeypatch.delitem(sys.modules, "specrl.bench.gpu.main", raising=False)
    for broken in ("specrl.bench.gpu.exactness", "specrl.bench.gpu.generation", "specrl.bench.gpu.training"):
        monkeypatch.setitem(sys.modules, broken, None)
    page = tmp_path / "gpu.md"
    BenchJob("gpu", {"section": "sampler", "short": True}, "specrl bench gpu", tmp_path / "gpu", page).run()
    assert "## Sampler\n\nWhat is measured here.\n\n**done in" in page.read_text()
    with pytest.raises(ModuleNotFoundError):
        BenchJob("gpu", {"section": "training", "short": True}, "specrl bench gpu", tmp_path / "gpu", page).run()


HOPPER, AMPERE, BLACKWELL = (9, 0), (8, 0), (10, 0)


@pytest.mark.parametrize(
    ("count", "gib", "capability", "expected"),
    [
        (1, 79, HOPPER, [(False, "bf16", "fp8")]),
        (2, 139, HOPPER, [(False, "bf16", "fp8"), (False, "bf16", "fp8")]),
        (4, 139, HOPPER, [(True, "fp8", "fp8"), (False, "bf16", "fp8")]),
        (8, 79, HOPPER, [(True, "fp8", "fp8"), (False, "bf16", "fp8")]),
        (8, 180, BLACKWELL, [(True, "bf16", "fp8"), (True, "bf16", "fp8")]),
        (8, 79, AMPERE, [(True, "bf16", "bf16"), (False, "bf16", "bf16")]),
    ],
)
def test_a_step_of_8b_trains_all_weights_where_the_plan_leaves_a_gpu_its_margin(
    count: int, gib: float, capability: tuple[int, int], expected: list[tuple[bool, str, str]], tmp_path: Path
) -> None:
    from specrl.bench.gpu.models import FULL, write_config
    from specrl.bench.gpu.step import POSITIONS, config_of, layouts
    from specrl.bench.run.main import planned_gib
    from specrl.config import load_config

    policy_dir = write_config(FULL.stepped, POSITIONS, tmp_path)
    configs = [config_of(FULL, policy_dir, layout, gib, capability) for layout in layouts(count)]
    own = [(config.policy.lora is None, config.precision.training, config.precision.generation) for config in configs]
    assert own == expected
    assert all(planned_gib(config, "GPU, trainer") <= 0.92 * gib for config in configs)
    for config in configs:  # the lengths, batch sizes and methods are those that are shipped
        shipped = load_config(Path("configs/qwen3-8b-rl-zero.toml"))
        for section in ("sampling", "speculation", "bubbles", "drafter"):
            assert getattr(config, section) == getattr(shipped, section)
        assert config.engine.max_num_seqs == shipped.engine.max_num_seqs and config.engine.compile
        assert config.policy.tokens_per_micro_batch == shipped.policy.tokens_per_micro_batch


def test_all_gpus_take_steps_together_and_then_two_as_one_engine() -> None:
    from specrl.bench.gpu.step import layouts

    assert layouts(1) == [(1, 1, 1)] and layouts(2) == [(2, 1, 2), (2, 2, 2)]
    assert [layouts(count)[0] for count in (3, 4, 6, 8, 16)] == [(3, 1, 1), (4, 1, 4), (6, 1, 2), (8, 1, 4), (8, 1, 4)]
