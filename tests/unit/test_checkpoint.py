"""Checkpoints on disk: rectangles, checksums, damage, retention, a full disk, and what the loop stores beside them."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import resource
import threading
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from specrl.artifacts import is_passing
from specrl.distributed import Ranks
from specrl.lineage.record import Continuation
from specrl.models.hf_io import write_tensors
from specrl.precision.recipe import KvScales
from specrl.training.checkpoint import checkpoints as checkpointing
from specrl.training.checkpoint import files, manifest
from specrl.training.checkpoint.checkpoints import Checkpoints, Retention
from specrl.training.checkpoint.files import checksum_of
from specrl.training.checkpoint.load import TrainState, load, load_newest
from specrl.training.checkpoint.manifest import CheckpointError, read_manifest
from specrl.training.checkpoint.policy_folder import write_policy_folder
from specrl.training.megatron.weights import bands, tensor_shapes
from specrl.training.pieces import KINDS, Band, Piece, Shard, cut
from tests.unit.test_weights import MODELS, make_map, parts, shapes_on_disk

ALONE = Ranks(0, 1, 0, torch.device("cpu"))


@given(st.sampled_from(MODELS), st.sampled_from([1, 2, 4]), st.data())
def test_pieces_are_the_elements_of_a_range_of_what_a_rank_holds(
    hf: LlamaConfig | Qwen2Config | Qwen3Config, size: int, data: st.DataObject
) -> None:
    weights = make_map(hf, 1)
    shapes = tensor_shapes(weights)
    parameter = data.draw(st.sampled_from(weights.parameters))
    rank = data.draw(st.integers(0, size - 1))
    tensors = [torch.randn(shape) for shape in shapes_on_disk(hf, parameter.hf)]
    assert [shapes[name] for name in parameter.hf] == [tuple(tensor.shape) for tensor in tensors]
    flat = weights.merge(parameter, parts(parameter, tensors, rank, size), size).flatten()
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(flat))] * 2)))
    by_name = {name: tensor.view(len(tensor), -1) for name, tensor in zip(parameter.hf, tensors, strict=True)}
    pieces = cut(bands(weights, parameter, rank, size), start, stop)
    found = [by_name[piece.tensor][slice(*piece.rows), slice(*piece.columns)].flatten() for piece in pieces]
    joined = torch.cat([*found, flat[:0]])
    assert torch.equal(joined, flat[start : start + len(joined)])
    assert not flat[start + len(joined) : stop].any()  # the padding of the vocabulary


class ToyPolicy:
    """One matrix of 6 x 4 on one rank."""

    ranks = ALONE
    shape_in_words = "toy"
    stores_reference = False
    lora = None

    def __init__(self, value: float = 0.0) -> None:
        self.state = {kind: torch.full((24,), value + index) for index, kind in enumerate(KINDS)}
        self.optimizer = self
        self.num_updates = 0

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (6, 4)}

    def shards(self) -> list[Shard]:
        return [Shard((Piece("weight", (0, 6), (0, 4)),), self.state, True)]

    def counters(self) -> dict[str, int]:
        return {"num_updates": self.num_updates}

    def restored(self, counters: Mapping[str, int]) -> None:
        self.num_updates = counters["num_updates"]

    def train(self) -> None:
        self.num_updates += 1
        for tensor in self.state.values():
            tensor.add_(1)


class ToyDrafter:
    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {"model/fc": torch.arange(6.0).view(2, 3), "updates": torch.tensor(3)}

    def state_dict(self) -> Mapping[str, Tensor]:
        return self.state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.state = dict(state)


def save_steps(folder: Path, retention: Retention, *steps: int, best: int | None = None) -> None:
    """A checkpoint for each step, in which every number says which one."""
    policy = ToyPolicy()
    checkpoints = Checkpoints(folder, policy, retention)
    for step in steps:
        while policy.num_updates < step:
            policy.train()
        drafter = ToyDrafter()
        checkpoints.save(TrainState(step, policy, drafter, KvScales([step], [0.5], [0.25])))
        policy.train()  # while it is written
        drafter.state["model/fc"].add_(1)
        checkpoints.wait()
        if step == best:
            checkpoints.mark_best(step)


def restored(folder: Path) -> tuple[int, float]:
    """The step and the first master weight that a new start finds."""
    policy = ToyPolicy()
    found = Checkpoints(folder, policy, Retention(2)).restore(ToyDrafter())
    assert found is not None and found.state.kv_scales == KvScales([found.state.step], [0.5], [0.25])
    return found.state.step, float(policy.state["master"][0])


def test_a_checkpoint_is_the_state_when_it_was_taken_and_only_safetensors_and_json(tmp_path: Path) -> None:
    save_steps(tmp_path, Retention(2), 3)
    assert restored(tmp_path) == (3, 3.0)
    folder = tmp_path / "step=000003"
    assert sorted(path.name for path in folder.iterdir()) == [
        "drafter.safetensors",
        "manifest.json",
        "policy-00000.safetensors",
    ]
    for name, tensor in ToyDrafter().state.items():
        assert torch.equal(load_file(folder / "drafter.safetensors")[name], tensor)
    assert Checkpoints(tmp_path / "none", ToyPolicy(), Retention(1)).restore(None) is None


def test_the_next_start_reckons_with_as_long_for_a_checkpoint_as_it_took_to_read(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, ToyPolicy(), Retention(1))
    assert checkpoints.restore(None) is None and checkpoints.seconds == 0
    save_steps(tmp_path, Retention(1), 1)
    assert checkpoints.restore(None) is not None and checkpoints.seconds > 0


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def test_a_checkpoint_is_read_again_after_a_failure_of_the_file_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, Retention(3), 1, 2, 3)
    failures, waits = [errno.ESTALE, errno.EIO], list[float]()

    def failing(path: Path) -> int:
        if failures:
            raise OSError(failures.pop(), "the server is starting")
        return checksum_of(path)

    monkeypatch.setattr(manifest, "checksum_of", failing)
    monkeypatch.setattr("time.sleep", waits.append)
    assert restored(tmp_path) == (3, 3.0)
    assert waits == [5.0, 60.0] and not list(tmp_path.glob("damaged-*"))


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("policy-00000.safetensors", flip, "policy-00000.safetensors has the wrong checksum"),
        ("drafter.safetensors", truncate, "bytes instead of"),
        ("policy-00000.safetensors", Path.unlink, "policy-00000.safetensors is missing"),
        ("manifest.json", Path.unlink, "manifest.json is missing"),
        ("manifest.json", truncate, "manifest.json is damaged"),
        ("manifest.json", make_folder, "manifest.json cannot be read (Is a directory)"),
        ("policy-00000.safetensors", make_loop, "policy-00000.safetensors cannot be read ("),
    ],
)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Callable[[Path], None], words: str
) -> None:
    save_steps(tmp_path, Retention(3), 1, 2, 3)
    damage(tmp_path / "step=000003" / name)
    with caplog.at_level(logging.WARNING):
        assert restored(tmp_path) == (2, 2.0)
    records = [record for record in caplog.records if record.name.startswith("specrl.")]
    (line,) = [record.message for record in records if record.levelno >= logging.WARNING]
    assert "step=000003" in line and words in line
    assert restored(tmp_path) == (2, 2.0)
    save_steps(tmp_path, Retention(3), 3)  # the next start writes it anew
    assert restored(tmp_path) == (3, 3.0)
    assert not list(tmp_path.glob("damaged-*"))


def test_without_a_whole_checkpoint_nothing_begins_anew_by_itself(tmp_path: Path) -> None:
    save_steps(tmp_path, Retention(2), 1, 2)
    for step in (1, 2):
        flip(tmp_path / f"step=00000{step}" / "drafter.safetensors")
    with pytest.raises(CheckpointError, match=r"no intact checkpoint .*restore one from a copy, or"):
        restored(tmp_path)
    with pytest.raises(CheckpointError, match="is damaged: drafter"):
        load(tmp_path / "step=000002", ToyPolicy(), None)
    assert len(list(tmp_path.glob("step=*"))) == 2


def test_a_start_from_a_damaged_checkpoint_takes_the_newest_whole_one_before_it(tmp_path: Path) -> None:
    save_steps(tmp_path / "checkpoints", Retention(4), 1, 2, 3, 4)
    for step in (2, 3):
        flip(tmp_path / "checkpoints" / f"step=00000{step}" / "policy-00000.safetensors")
    start = Continuation(run="run", key="train-0", step=3, stage_dir=tmp_path, counts_on=True)
    policy = ToyPolicy()
    found = load_newest(start.checkpoint_dirs, policy, None)
    assert (found.state.step, float(policy.state["master"][0])) == (1, 1.0)
    assert ["step=000003" in found.damaged[0], "step=000002" in found.damaged[1]] == [True, True]
    once = start.model_copy(update={"counts_on": False})
    with pytest.raises(CheckpointError, match=r"no intact checkpoint to start from .*step=000003.*--restart"):
        load_newest(once.checkpoint_dirs, policy, None)


def test_a_number_changed_in_the_manifest_is_damage(tmp_path: Path) -> None:
    save_steps(tmp_path, Retention(2), 1)
    path = tmp_path / "step=000001" / "manifest.json"
    path.write_text(path.read_text().replace('"num_updates": 1', '"num_updates": 7'))
    with pytest.raises(CheckpointError, match=r"manifest.json has the wrong checksum"):
        read_manifest(tmp_path / "step=000001")


def test_a_drafter_that_the_checkpoint_does_not_know_stays_and_another_policy_is_refused(tmp_path: Path) -> None:
    policy = ToyPolicy()
    checkpoints = Checkpoints(tmp_path, policy, Retention(1))
    checkpoints.save(TrainState(1, policy, None))
    checkpoints.wait()
    drafter = ToyDrafter()
    drafter.state["updates"] += 1
    assert checkpoints.restore(drafter) is not None and drafter.state["updates"] == 4
    policy.shape_in_words = "another"
    with pytest.raises(CheckpointError, match="holds a policy of toy, this run has another"):
        checkpoints.restore(None)


def test_a_failure_of_the_file_server_while_a_checkpoint_is_written_is_one_that_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that another job goes on from the checkpoint before, as after any other such failure."""

    def failing(path: Path, tensors: Mapping[str, Tensor]) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    policy = ToyPolicy()
    checkpoints = Checkpoints(tmp_path, policy, Retention(1))
    monkeypatch.setattr(checkpointing, "write_tensors", failing)
    checkpoints.save(TrainState(1, policy, None))
    with pytest.raises(OSError, match=r"for step 1 cannot be written .*\(rank 0: Stale file handle\)") as raised:
        checkpoints.wait()
    assert is_passing(raised.value)


def test_a_full_disk_is_one_line_at_the_next_boundary_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    save_steps(tmp_path, Retention(2), 1)
    policy = ToyPolicy()
    checkpoints = Checkpoints(tmp_path, policy, Retention(2))
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, most[1]))  # no file may be longer
    checkpoints.save(TrainState(2, policy, None))
    try:
        with pytest.raises(CheckpointError, match=r"for step 2 cannot be written .*File too large.*: make room"):
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert not (tmp_path / ".step=000002.tmp").exists()
    assert restored(tmp_path) == (1, 1.0)


def test_the_newest_the_best_and_every_so_manieth_are_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, Retention(2, every=4), *range(1, 11), best=3)
    kept = sorted(int(path.name.removeprefix("step=")) for path in tmp_path.glob("step=*"))
    assert kept == [3, 4, 8, 9, 10]
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 3}


def test_the_best_checkpoint_is_marked_once_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the one before stays marked, and is not removed. Mutation: marking it as it is begun."""
    save_steps(tmp_path, Retention(1), 1, best=1)
    policy, written = ToyPolicy(), threading.Event()
    checkpoints = Checkpoints(tmp_path, policy, Retention(1))

    def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
        written.wait()
        write_tensors(path, tensors)

    monkeypatch.setattr("specrl.training.checkpoint.checkpoints.write_tensors", write)
    checkpoints.save(TrainState(2, policy, None))
    checkpoints.mark_best(2)
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 1}
    written.set()
    checkpoints.wait()
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 2}
    checkpoints.mark_best(3)  # which is begun next
    checkpoints.save(TrainState(3, policy, None))
    checkpoints.wait()
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 3}
    assert [path.name for path in tmp_path.glob("step=*")] == ["step=000003"]


class PolicyInParts(ToyPolicy):
    """A matrix and a vector, each held in ranges that end in the middle of a row."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.weights = weights

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.weights.items()}

    def shards(self) -> list[Shard]:
        return [shard for name, tensor in self.weights.items() for shard in self.ranges(name, tensor)]

    def ranges(self, name: str, tensor: Tensor) -> list[Shard]:
        rows, flat = len(tensor), tensor.flatten()
        whole = Band(0, Piece(name, (0, rows), (0, len(flat) // rows)))
        ends = [0, len(flat) // 3, len(flat) // 2, len(flat)]
        return [
            Shard(tuple(cut([whole], start, stop)), dict.fromkeys(KINDS, flat[start:stop].clone()), True)
            for start, stop in itertools.pairwise(ends)
        ]


def test_the_policy_of_a_checkpoint_is_written_without_a_trainer(tmp_path: Path) -> None:
    weights = {"model.layers.0.weight": torch.randn(7, 5), "model.norm.weight": torch.randn(9)}
    base, written = tmp_path / "base", tmp_path / "policy"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}))
    (base / "tokenizer.json").write_text("{}")
    policy = PolicyInParts(weights)
    checkpoints = Checkpoints(tmp_path / "checkpoints", policy, Retention(1))
    checkpoints.save(TrainState(1, policy, None))
    checkpoints.wait()
    (folder,) = (tmp_path / "checkpoints").glob("step=*")
    write_policy_folder(folder, base, written, torch.bfloat16, ALONE)
    found = load_file(written / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor.to(torch.bfloat16)) for name, tensor in weights.items())
    assert json.loads((written / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert (written / "tokenizer.json").read_text() == "{}"
    (file,) = folder.glob("policy-*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"checkpoint .* is damaged: .* wrong checksum .*; use an earlier one"):
        write_policy_folder(folder, base, tmp_path / "other", torch.bfloat16, ALONE)
    assert not (tmp_path / "other").exists()


def test_rotated_channels_are_side_by_side_in_the_written_policy_of_a_family_that_has_them_so(tmp_path: Path) -> None:
    """Megatron, and so the checkpoint, has them in two halves of a head. Mutation: writing what is stored."""
    hf = {"architectures": ["Ernie4_5_MoeForCausalLM"], "head_dim": 8, "model_type": "ernie4_5_moe"}
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(hf))
    (base / "tokenizer.json").write_text("{}")
    save_file({"model.norm.weight": torch.ones(1)}, base / "model.safetensors")
    policy = PolicyInParts({"model.layers.0.self_attn.q_proj.weight": torch.arange(32.0).view(16, 2)})
    checkpoints = Checkpoints(tmp_path / "checkpoints", policy, Retention(1))
    checkpoints.save(TrainState(1, policy, None))
    checkpoints.wait()
    (folder,) = (tmp_path / "checkpoints").glob("step=*")
    write_policy_folder(folder, base, tmp_path / "policy", torch.float32, ALONE)
    (written,) = load_file(tmp_path / "policy" / "model.safetensors").values()
    rows = [0, 4, 1, 5, 2, 6, 3, 7]
    assert (written[:, 0] / 2).tolist() == [*rows, *(8 + row for row in rows)]


class OnGpu(Tensor):
    is_cuda = True


def test_the_copy_of_a_gpus_tensors_is_pinned_in_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: torch's own pinned memory, of which 5 GiB are 8 GiB."""
    pinned: dict[int, int] = {}
    cuda = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: 0 if pinned.setdefault(address, size) == size else 712,
        cudaHostUnregister=pinned.pop,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None if code == 0 else pytest.fail(f"{code}"))
    copy = files.HostCopy()
    for _ in range(2):  # the second time, into the same memory
        found = copy.fill({"a": torch.arange(5).as_subclass(OnGpu), "b": torch.ones(3)})["a"]
        assert found.tolist() == [0, 1, 2, 3, 4]
        assert pinned == {found.data_ptr(): 52}
    larger = copy.fill({"a": torch.arange(6).as_subclass(OnGpu)})["a"]
    assert pinned == {larger.data_ptr(): 48}
    del copy
    assert not pinned


def test_a_checksum_is_that_of_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", 10)
    content = Random(0).randbytes(47)
    (tmp_path / "file").write_bytes(content)
    assert files.checksum_of(tmp_path / "file") == zlib.crc32(content)
    (tmp_path / "file").write_bytes(content[:33] + b"?" + content[34:])
    assert files.checksum_of(tmp_path / "file") != zlib.crc32(content)
