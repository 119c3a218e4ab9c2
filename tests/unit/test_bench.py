"""The parts of `specrl bench` that need no engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.cli import invoke
from specrl.bench.arithmetic import Machine
from specrl.bench.job import BenchJob
from specrl.bench.pages import Page
from specrl.bench.rollouts import engines
from specrl.bench.rollouts.roofline import Network, Roofline, drafter_networks, policy_network
from specrl.bench.rollouts.rounds import orders
from specrl.bench.rollouts.workloads import workloads
from specrl.bench.settings import LossSettings, RolloutSettings, methods_of, middle_of, speculation_of
from specrl.bench.subject import Subject
from specrl.bench.tables import Spread, markdown_table, per_position, ratios
from specrl.config import Config, ConfigError, DrafterConfig, SpeculationConfig, parse_config
from specrl.report.plots import line_charts
from specrl.rollout.requests import Request, Response

MACHINE = Machine(bytes_per_s=1e9, flops_per_s=1e11)


def test_ratios_are_taken_within_each_round() -> None:
    assert ratios([10, 30, 60], [10, 10, 30]) == Spread(2.0, 1.0, 3.0)


def test_few_rows_cost_the_reading_of_the_weights_and_many_the_arithmetic() -> None:
    network = Network(weights=1_000_000, bytes_per_weight=2)
    assert network.seconds(1, MACHINE) == pytest.approx(2e-3)
    assert network.seconds(200, MACHINE) == pytest.approx(4e-3)


def test_a_speculative_iteration_runs_the_policy_once_and_the_drafter_k_times() -> None:
    policy, drafter = Network(1_000_000, 2), Network(100_000, 2)
    line = Roofline(policy, drafter, None, MACHINE)
    assert line.plain_seconds(1) == pytest.approx(2e-3)
    assert line.speculative_seconds(1, 3) == pytest.approx(2e-3 + 3 * 2e-4)
    assert line.speedup(1, 3, 2.6) == pytest.approx(2.0)
    assert Roofline(policy, None, None, MACHINE).speedup(1, 3, 2.0) == pytest.approx(2.0)


def test_weights_are_counted_from_the_shape() -> None:
    shape = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "vocab_size": 100,
        "draft_vocab_size": 10,
    }
    attention, mlp = 8 * 2 * (4 + 4) + 4 * 2 * 8, 3 * 8 * 16
    assert policy_network(shape, 2).weights == 3 * (attention + mlp) + 800
    own = {"num_hidden_layers": 2, "eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}
    drafter, fusion = drafter_networks(shape | own, 2)
    assert drafter.weights == (16 * 2 * 8 + 64 + mlp) + (attention + mlp) + 80
    assert fusion.weights == 4 * 8 * 8


def test_variants_of_a_drafters_training_set_what_they_name() -> None:
    settings = LossSettings(variants=("loss=lk_hybrid+position_decay=measured", "ttt_growth=0.5+lr=1e-2"), epochs=4)
    drafter = DrafterConfig(epochs=2, clip_grad=2.0)
    first, second = (settings.drafter_config(variant, drafter) for variant in settings.variants)
    assert (first.loss.name, first.position_decay, first.epochs, first.clip_grad) == ("lk_hybrid", "measured", 4, 2.0)
    assert (second.loss.name, second.ttt_growth, second.lr) == ("cross_entropy", 0.5, 0.01)
    parallel = LossSettings(variants=("parallel=true", "parallel=true+ttt_steps=2"))
    assert parallel.drafter_config("parallel=true", drafter).parallel
    with pytest.raises(ConfigError, match=r"parallel=true\+ttt_steps=2: drafts have .*ttt_steps = 3 tokens"):
        parallel.check(parse_config({"name": "run"}))
    with pytest.raises(ValueError, match="'num_layers=2' sets 'num_layers'; allowed: loss, position_decay"):
        LossSettings(variants=("num_layers=2",))
    with pytest.raises(ConfigError, match=r"drafter\.loss = .*kl.*: allowed: cross_entropy"):
        LossSettings(variants=("loss=kl",)).check(parse_config({"name": "run"}))
    with pytest.raises(ConfigError, match=r"bench losses makes new drafters .* this run has drafter\.source = 'a/b'"):
        LossSettings().check(parse_config({"name": "run", "drafter": {"source": "a/b"}}))


def test_every_side_runs_once_in_every_round_and_none_is_always_first() -> None:
    rounds = orders(3, 6)
    assert all(sorted(order) == [0, 1, 2] for order in rounds)
    assert {order[0] for order in rounds} == {0, 1, 2}


def test_a_fixed_batch_takes_requests_that_last_and_other_ones_in_each_round() -> None:
    requests = [Request([1], seed, 50, 1.0) for seed in range(64)]
    lengths = [50 if index % 4 == 0 else 3 for index in range(64)]
    responses = [Response([1] * length, [0.0] * length, None, "", "stop", 0, 0, 0, 0.0, 0.0) for length in lengths]
    one, large, tail = workloads(requests, responses, [1, 32, "tail64"], 3, 20)
    lasting = list(range(0, 64, 4))
    assert [[request.seed for request in asked] for asked in one.rounds] == [lasting[:8], lasting[8:], lasting[:8]]
    assert {request.max_tokens for requests in one.rounds for request in requests} == {20}
    assert [len(requests) for requests in large.rounds] == [32] * 3
    assert len({request.seed for request in large.rounds[0]}) == 32
    assert tail.rounds == [requests] * 3
    assert tail.batch == 64


def test_tables_are_markdown() -> None:
    assert markdown_table(["a", ">b"], [("x", "1")]) == "| a | b |\n| --- | ---: |\n| x | 1 |\n"
    assert per_position([0.5, 0.25]) == "0.50 / 0.25"
    assert per_position([]) == "-"


def test_plots_become_files_beside_the_page(tmp_path: Path) -> None:
    page = Page(tmp_path / "2030-01-01-x.md")
    page.plot("speedup", line_charts({"a < b": [(1, 1.0), (4, 2.0)]}, "x", "y", log_x=True), "what it shows")
    page.write()
    assert page.path.read_text() == "![what it shows](2030-01-01-x-speedup.svg)\n"
    svg = (tmp_path / "2030-01-01-x-speedup.svg").read_text()
    assert svg.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert "a &lt; b" in svg
    assert ">4</text>" in svg  # the x axis is named in batch sizes, not in their logarithms


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    settings = RolloutSettings(ks=(1, "adaptive")).model_dump(mode="json")
    job = BenchJob("m:f", tmp_path, settings, "specrl bench", tmp_path / "p.md", tmp_path / "rows.json")
    job.save(tmp_path / "job.json")
    assert BenchJob.load(tmp_path / "job.json") == job
    assert RolloutSettings.model_validate(job.settings).ks == (1, "adaptive")


def test_methods_are_those_that_the_drafter_of_the_run_allows() -> None:
    eagle = parse_config({"name": "run", "speculation": {"method": "eagle3"}})
    ngram = parse_config({"name": "run", "speculation": {"method": "ngram"}})
    assert methods_of(RolloutSettings(), eagle) == ("eagle3", "eagle3+replay", "ngram", "replay")
    assert methods_of(RolloutSettings(), ngram) == ("ngram", "replay")
    with pytest.raises(ConfigError, match="eagle3 needs a run"):
        methods_of(RolloutSettings(methods=("eagle3",)), ngram)


@pytest.mark.parametrize(("ks", "middle"), [((1, 3, 5, 7, "adaptive"), 3), ((1, 3, 5), 3), ((5,), 5)])
def test_the_middle_draft_length_stands_for_the_others(ks: tuple[int | str, ...], middle: int) -> None:
    assert middle_of(ks) == middle


@pytest.mark.parametrize("compiled", [False, True])
def test_engines_that_live_at_once_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    shares: list[float] = []

    def start(*_: object, gpu_share: float) -> SimpleNamespace:
        shares.append(gpu_share)
        return SimpleNamespace(replays=False)

    monkeypatch.setattr(engines, "start_engine", start)
    settings = RolloutSettings(methods=("ngram", "eagle3"), compile=compiled)
    config = Config(name="shared", speculation=SpeculationConfig(method="eagle3"))
    started = engines.Engines(Subject(config, tmp_path, tmp_path, tmp_path, tmp_path), settings)
    for method in settings.methods:
        started._variant(method, 3, compiled)
    default = started._config("none", compiled).engine.gpu_memory_fraction
    assert len(shares) == 3 + compiled
    assert sum(shares) + default <= 0.85


def test_only_its_own_method_takes_the_draft_model_of_the_run(tmp_path: Path) -> None:
    run = SpeculationConfig(method="draft_model", draft_model=tmp_path)
    assert speculation_of(run, "draft_model", 5) == run.model_copy(update={"k": 5})
    assert all(speculation_of(run, method, 3).draft_model is None for method in ("ngram", "replay", "eagle3"))
    assert speculation_of(run, "none", 0).draft_model is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ks", "1,x"], "'x' is neither a positive number nor adaptive nor whole"),
        (["--batches", "0"], "'0' is neither a positive number nor tail64"),
        (["--methods", "none"], "methods: 'none' is not one of eagle3"),
        (["--ks", ","], "ks: name at least one"),
        (["--repeats", "0"], "repeats = 0"),
        ([], "no run nobody"),
    ],
)
def test_a_wrong_request_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["bench", "rollouts", "--run", "nobody", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert words in lines[0]


def test_the_folder_of_a_run_is_not_taken_for_a_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "bench-plan"
    run.mkdir()
    (run / "config.json").write_text("{}")
    assert invoke(["bench", "plan", "--runs-dir", str(tmp_path)])
    assert "which is the folder of a run" in capsys.readouterr().err
    assert (run / "config.json").exists()
