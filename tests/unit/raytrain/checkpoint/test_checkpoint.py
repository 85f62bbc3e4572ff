"""Checkpoints: exact round trips, nothing half-written that looks whole, no pickle ever read."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import pickle
import random
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from cluster.telemetry.processes import WORK
from raytrain.checkpoint.reader import (
    best_checkpoint,
    list_checkpoints,
    load,
    looks_like_pickle,
    newest_valid,
    read_weights,
)
from raytrain.checkpoint.safetensors import read_split, write_tensors
from raytrain.checkpoint.snapshot import Staging, flatten, take_snapshot, unflatten
from raytrain.checkpoint.writer import CheckpointWriter, discard_after, retain
from raytrain.errors import CheckpointError, InputError, RunError
from raytrain.infer.stages.stage import RangedTensors
from raytrain.models.weights.headers import find_weights
from raytrain.models.weights.stored import StartingWeights, StoredTensors, export_weights
from raytrain.runs import storage
from raytrain.runs.folder import RunFolder


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder.create(str(tmp_path / "runs"), "a")


def writer_of(run: RunFolder, *, keep=3, asynchronous=False, **options) -> CheckpointWriter:
    return CheckpointWriter(run, keep=keep, asynchronous=asynchronous, **options)


def files_of(run: RunFolder, step: int) -> Path:
    return Path(run.checkpoint_dir(step).removeprefix("file://"))


def assert_same(left, right) -> None:
    """Equal in type, order and every bit."""
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and left.shape == right.shape
        assert left.contiguous().reshape(-1).view(torch.uint8).equal(right.contiguous().reshape(-1).view(torch.uint8))
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    elif isinstance(left, dict):
        assert [(type(key), key) for key in left] == [(type(key), key) for key in right]
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert type(left) is type(right) and len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, float):
        assert isinstance(right, float)
        assert (math.isnan(left) and math.isnan(right)) or left.hex() == right.hex()
    else:
        assert type(left) is type(right) and left == right


def trained(optimizer_class, **options):
    """A small model after two steps, with its optimizer and schedule."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}]
    optimizer = optimizer_class(groups, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for _ in range(2):
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
        schedule.step()
    return model, optimizer, schedule


# -- round trips --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.AdamW, {"lr": 1e-3, "betas": (0.9, 0.99), "amsgrad": True}),
        (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
        (torch.optim.SGD, {"lr": 1e-2}),
    ],
)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_training_state_round_trips_exactly(run, optimizer_class, options, asynchronous):
    model, optimizer, schedule = trained(optimizer_class, **options)
    parts = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "rng": {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "generator": np.random.default_rng(3).bit_generator.state,
        },
    }
    state = {"loop": {"step": 2, "epoch": 0, "position": 12}, "best": math.inf, "world_size": 1}
    with writer_of(run, asynchronous=asynchronous, world_size=2) as writer:
        writer.save(parts, state, step=2, eval_loss=0.5, extra={"why": "test"})
    loaded = load(run.checkpoint_dir(2))
    assert (loaded.step, loaded.manifest["world_size"], loaded.manifest["extra"]) == (2, 2, {"why": "test"})
    parts["model"], parts["rng"]["numpy"] = dict(parts["model"]), tuple(parts["rng"]["numpy"])
    assert_same(parts, loaded.parts)
    assert_same(state, loaded.state)
    fresh_model, fresh_optimizer, fresh_schedule = trained(optimizer_class, **options)
    fresh_model.load_state_dict(loaded.parts["model"])
    fresh_optimizer.load_state_dict(loaded.parts["optimizer"])
    fresh_schedule.load_state_dict(loaded.parts["schedule"])
    assert_same(optimizer.state_dict(), fresh_optimizer.state_dict())


def test_every_kind_of_tensor_round_trips(run):
    values = torch.tensor([0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, 3e-8])
    floats = {str(dtype): values.to(dtype) for dtype in (torch.float64, torch.float32, torch.float16)}
    kinds = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
    part = {
        **floats,
        **{str(dtype): torch.arange(5).to(dtype) for dtype in kinds},
        "bf16": values.to(torch.bfloat16),
        "scalar": torch.tensor(3.25, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "empty bf16": torch.empty(0, dtype=torch.bfloat16),
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "strided": torch.arange(20)[::3],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "parameter": nn.Parameter(torch.ones(3)),
        "odd bytes": torch.arange(3, dtype=torch.uint8),
    }
    for step, asynchronous in ((1, True), (2, False)):
        with writer_of(run, asynchronous=asynchronous) as writer:
            writer.save({"all": part}, {}, step=step)
        wanted = {key: value.detach() for key, value in part.items()}
        assert_same(wanted, load(run.checkpoint_dir(step)).parts["all"])


def test_nested_states_keep_keys_kinds_and_floats():
    state = {
        0: {"step": torch.tensor(2.0), 1: [True, None, (1, 2.5, "x")]},
        "floats": [math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1, np.float64(0.25), np.float32(0.5)],
        None: {True: 1, 2.5: "half"},
        "big": 2**200,
        "empty": [{}, [], (), ""],
        "raw": b"\x00\x01",
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(1)},
        "tensor": {"tensor": "not one"},
        "array": np.arange(6, dtype=">i2").reshape(2, 3),
    }
    flat = flatten(state)
    skeleton = json.loads(json.dumps(flat.skeleton, allow_nan=False))
    back = unflatten(flat.tensors, skeleton)
    state["floats"][-2:] = [0.25, 0.5]
    assert_same(state, back)
    assert {"0.step", "a.b", "a.b~2"} <= set(flat.tensors)


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: 0, torch.float32, torch.ones(2).to_sparse()])
def test_a_value_that_cannot_be_saved_is_named(value):
    with pytest.raises(CheckpointError, match=r"outer\.0\.inner"):
        flatten({"outer": [{"inner": value}]})


@pytest.mark.parametrize("name", ["../evil", "a/b", "state", "manifest", "", "a.b"])
def test_a_part_must_be_a_plain_file_name(name):
    with pytest.raises(CheckpointError, match="cannot name a part"):
        take_snapshot({name: {"x": torch.ones(1)}}, {}, step=1)


def test_large_parts_are_split_over_files_that_safetensors_reads(run):
    part = {f"t{index}": torch.full((100,), float(index)) for index in range(7)}
    with writer_of(run, shard_bytes=1000) as writer:
        writer.save({"model": part}, {}, step=1)
    names = sorted(path.name for path in files_of(run, 1).glob("*.safetensors"))
    assert names == [f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)]
    assert_same(part, load(run.checkpoint_dir(1)).parts["model"])
    assert set(safetensors.torch.load_file(files_of(run, 1) / names[0])) == {"t0", "t1"}


def test_pieces_of_files_that_are_written_and_read_count_as_work(run, monkeypatch):
    """The driver distinguishes a long save, or a long set-up, from a stuck one by it."""
    monkeypatch.setattr("raytrain.checkpoint.safetensors.CHUNK_BYTES", 100)
    before = WORK.done
    with writer_of(run) as writer:
        writer.save({"model": {"w": torch.ones(1000)}}, {}, step=1)
    assert WORK.done - before >= 40
    before = WORK.done
    loaded = load(run.checkpoint_dir(1), check_hashes=False)
    assert loaded.step == 1 and WORK.done > before


def test_files_of_our_writer_can_be_read_by_the_library(tmp_path):
    tensors = {"b": torch.arange(5, dtype=torch.int8), "a": torch.randn(3, 3), "c": torch.randn(2).bfloat16()}
    with open(tmp_path / "x.safetensors", "wb") as file:
        written = write_tensors(file, tensors, metadata={"k": "v"})
    assert written.bytes == os.path.getsize(tmp_path / "x.safetensors")
    read = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert_same({key: tensors[key] for key in sorted(tensors)}, dict(sorted(read.items())))
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"k": "v"}
    with pytest.raises(CheckpointError, match="complex128"):
        write_tensors(io.BytesIO(), {"z": torch.zeros(1, dtype=torch.complex128)})


NEWER = (torch.complex64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
         torch.float8_e8m0fnu)  # fmt: skip


@pytest.mark.parametrize("dtype", NEWER, ids=str)
def test_newer_dtypes_keep_every_bit_in_checkpoints_shards_stages_and_exports(run, tmp_path, dtype):
    raw = torch.arange(1, 12 * dtype.itemsize + 1, dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(3, 4)
    part = {"plain": tensor, "turned": tensor.t(), "one": tensor[1, 2].clone(), "none": tensor[:0].clone()}
    if dtype.is_complex:
        part["conjugated"], part["negative"] = tensor.conj(), tensor.conj().imag

    def same(found):
        assert list(found) == sorted(found, key=list(part).index)
        for name, wanted in part.items():
            bits = [one.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
                    for one in (found[name], wanted)]  # fmt: skip
            assert found[name].dtype == wanted.dtype and found[name].shape == wanted.shape and torch.equal(*bits), name

    with writer_of(run, asynchronous=True) as writer:
        writer.save({"model": part}, {}, step=1)
    same(load(run.checkpoint_dir(1)).parts["model"])
    export_weights(part, run.weights)
    stored = find_weights(run.weights, key="")
    read = StoredTensors(stored).read_all()
    same({name: read[name] for name in part})
    same({name: RangedTensors(stored).read(name) for name in part})
    halves = []
    for rank, rows in enumerate((tensor[:2], tensor[2:])):
        halves.append(str(tmp_path / f"{rank}.safetensors"))
        with open(halves[-1], "wb") as file:
            write_tensors(file, {"plain": rows})
    joined = read_split(halves, ["plain"], None)["plain"]
    assert joined.dtype == dtype and torch.equal(joined.contiguous().reshape(-1).view(torch.uint8), raw)


# -- tied weights and export --------------------------------------------------------------------


class Tied(nn.Module):
    """A head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def test_tied_weights_are_written_once_and_tied_again(run):
    model = Tied()
    with writer_of(run, asynchronous=True) as writer:
        writer.save({"model": model.state_dict()}, {}, step=1)
    loaded = load(run.checkpoint_dir(1))
    assert loaded.manifest["tied"] == {"model": {"head.weight": "embed.weight"}}
    assert set(safetensors.torch.load_file(files_of(run, 1) / "model.safetensors")) == {"embed.weight"}
    state = loaded.parts["model"]
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    fresh = Tied()
    fresh.load_state_dict(state)
    assert fresh.head.weight is fresh.embed.weight and torch.equal(fresh.embed.weight, model.embed.weight)


@pytest.mark.covers("VIS-07")
def test_exported_weights_load_in_plain_pytorch_and_score_the_same(run):
    torch.manual_seed(1)
    model, fresh = Tied(), Tied()
    export_weights(model.state_dict(), run.weights, metadata={"name": "a"})
    assert os.listdir(Path(run.weights).parent) == ["model.safetensors"]
    safetensors.torch.load_model(fresh, run.weights)
    tokens = torch.arange(7)
    assert torch.equal(model(tokens), fresh(tokens)) and fresh.head.weight is fresh.embed.weight
    with safetensors.safe_open(run.weights, "pt") as file:
        assert list(file.keys()) == ["embed.weight"] and file.metadata()["name"] == "a"


class Noted(nn.Module):
    """A part of the state is no tensor, one part of that is; another module's is bytes."""

    def __init__(self, notes=None, raw=b"") -> None:
        super().__init__()
        self.linear, self.inner, self.notes = nn.Linear(2, 2), nn.Identity(), notes
        self.inner.raw = raw
        self.inner.__class__ = Raw

    def get_extra_state(self):
        return {"notes": self.notes, "bias": self.linear.bias}

    def set_extra_state(self, state):
        self.notes = state["notes"]


class Raw(nn.Identity):
    def get_extra_state(self):
        return self.raw

    def set_extra_state(self, state):
        self.raw = state


def test_extra_state_is_exported_and_read_again(run):
    notes = {"table": torch.arange(3), "why": [("a", None, 2.5)], 3: math.inf}
    model = Noted(notes, b"\x00\x01")
    export_weights(model.state_dict(), run.weights)
    stored = find_weights(run.weights, key="")
    assert sorted(stored.shapes) == ["linear.bias", "linear.weight"] and stored.parameters == 6
    assert sorted(StoredTensors(stored)) == sorted(stored.shapes), "what is inside is no weight"
    with writer_of(run) as writer:
        writer.save({"model": model.state_dict()}, {}, step=1)
    whole = read_weights(run.checkpoint_dir(1)).tensors
    for path in (run.weights, run.checkpoint_dir(1)):
        for state in (StoredTensors(path).read_all(), whole):
            fresh = Noted()
            fresh.load_state_dict(state)
            assert_same({**notes}, fresh.notes)
            assert fresh.inner.raw == b"\x00\x01" and torch.equal(fresh.linear.weight, model.linear.weight)
        fresh = Noted()
        StartingWeights(path).fill(fresh)
        assert_same({**notes}, fresh.notes)
    with pytest.raises(InputError, match=r"2 unexpected \(_extra_state, inner._extra_state\)"):
        plain = nn.Module()
        plain.linear = nn.Linear(2, 2)
        StartingWeights(run.weights).fill(plain)
    fresh = Noted("mine")
    of_others = {name: value for name, value in model.state_dict().items() if "extra" not in name}
    safetensors.torch.save_file(of_others, run.weights)
    StartingWeights(run.weights).fill(fresh)
    assert fresh.notes == "mine", "the file of another library has none"


# -- damage -------------------------------------------------------------------------------------


def two_checkpoints(run: RunFolder) -> Path:
    with writer_of(run) as writer:
        for step in (10, 20):
            weights = torch.full((50,), float(step))
            parts = {"model": {"w": weights}, "optimizer": {"state": {0: weights + 1}}}
            writer.save(parts, {"step": step}, step=step)
    return files_of(run, 20)


def flip_a_byte(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def truncate(folder: Path) -> None:
    os.truncate(folder / "optimizer.safetensors", 100)


def tear_the_manifest(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 40)


def change_the_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"step": 20', '"step": 30'))


DAMAGE = {
    "a flipped byte": (flip_a_byte, r"model\.safetensors: damaged.*SHA-256"),
    "a truncated file": (truncate, r"optimizer\.safetensors: got 100 bytes"),
    "a missing file": (lambda folder: (folder / "state.json").unlink(), r"state\.json: missing"),
    "a torn manifest": (tear_the_manifest, r"manifest\.json: damaged"),
    "a changed manifest": (change_the_manifest, r"manifest\.json: damaged"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), r"manifest\.json: missing"),
    "no COMPLETE": (lambda folder: (folder / "COMPLETE").unlink(), r"COMPLETE: missing"),
    "an empty COMPLETE": (lambda folder: os.truncate(folder / "COMPLETE", 0), r"manifest\.json: damaged"),
    "an unknown file": (lambda folder: (folder / "more.json").write_text("{}"), r"more\.json: not in the"),
    "a directory": (lambda folder: (folder / "sub").mkdir(), r"sub: not in the manifest"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_reported_and_the_previous_checkpoint_is_used(run, kind):
    damage, message = DAMAGE[kind]
    damage(two_checkpoints(run))
    with pytest.raises(CheckpointError, match=message):
        load(run.checkpoint_dir(20))
    good = newest_valid(run)
    assert good.checkpoint.step == 10 and good.checkpoint.parts["model"]["w"][0] == 10
    assert len(good.refused) == 1 and "step_00000020" in good.refused[0]


def test_without_a_valid_checkpoint_all_reasons_are_returned(run):
    two_checkpoints(run)
    assert newest_valid(RunFolder.create(str(Path(run.path).parent), "b")) == (None, [])
    for step in (10, 20):
        flip_a_byte(files_of(run, step))
    good = newest_valid(run)
    assert good.checkpoint is None and len(good.refused) == 2
    assert "step_00000020" in good.refused[0] and "step_00000010" in good.refused[1]


def seal(folder: Path, manifest: dict) -> None:
    """What somebody who forges a checkpoint would do: a consistent manifest and COMPLETE."""
    from hashlib import sha256

    data = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(data)
    (folder / "COMPLETE").write_text(sha256(data).hexdigest())


class Payload:
    """A pickle that leaves a trace when it is read."""

    def __init__(self, trace: Path) -> None:
        self.trace = str(trace)

    def __reduce__(self):
        return (os.mkdir, (self.trace,))


@pytest.mark.parametrize("name", ["evil.pt", ".metadata", "evil.bin", "model.safetensors", "notes"])
@pytest.mark.parametrize("form", ["pickle 2", "pickle 4", "torch.save"])
def test_a_planted_pickle_is_refused_by_name_and_nothing_runs(run, tmp_path, name, form):
    folder = two_checkpoints(run)
    payload = Payload(tmp_path / "executed")
    buffer = io.BytesIO()
    if form == "torch.save":
        torch.save(payload, buffer)
    else:
        pickle.dump(payload, buffer, protocol=int(form[-1]))
    (folder / name).write_bytes(buffer.getvalue())
    manifest = json.loads((folder / "manifest.json").read_text())
    from hashlib import sha256

    manifest["files"][name] = {"bytes": len(buffer.getvalue()), "sha256": sha256(buffer.getvalue()).hexdigest()}
    seal(folder, manifest)
    with pytest.raises(CheckpointError, match=rf"{name}: looks like a pickle.*refused"):
        load(run.checkpoint_dir(20))
    assert newest_valid(run).checkpoint.step == 10
    assert not (tmp_path / "executed").exists()
    read = torch.load if form == "torch.save" else pickle.load
    read(io.BytesIO(buffer.getvalue()), **({"weights_only": False} if form == "torch.save" else {}))
    assert (tmp_path / "executed").exists(), "the payload is real: reading it would have left the trace"


def test_a_safetensors_header_that_begins_like_a_pickle_is_accepted():
    assert not looks_like_pickle("model.safetensors", (640).to_bytes(8, "little") + b'{"a":{"d')
    assert looks_like_pickle("model.safetensors", b"\x80\x02" + b"}" * 14)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "sub/file", "..", "a\\b"])
def test_names_that_lead_out_of_the_checkpoint_are_refused(run, name):
    folder = two_checkpoints(run)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = manifest["files"]["state.json"]
    seal(folder, manifest)
    with pytest.raises(CheckpointError, match="leads out of the checkpoint"):
        load(run.checkpoint_dir(20))


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"files": {}},
        {"files": []},
        {"parts": {"model": ["gone.safetensors"]}},
        {"tied": {"model": {"x": "gone"}}},
        {"parts": {}},
    ],
)
def test_a_well_sealed_but_senseless_checkpoint_is_refused(run, change):
    folder = two_checkpoints(run)
    seal(folder, {**json.loads((folder / "manifest.json").read_text()), **change})
    with pytest.raises(CheckpointError):
        load(run.checkpoint_dir(20))
    assert newest_valid(run).checkpoint.step == 10


# -- writing ------------------------------------------------------------------------------------


class Gate:
    """A fence that holds the writing thread until it is opened."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(30)


def test_an_asynchronous_write_does_not_see_later_changes(run):
    gate = Gate()
    weights, moments, numbers = torch.ones(1000), torch.zeros(3, 3), {"position": [1]}
    with writer_of(run, asynchronous=True, fence=gate) as writer:
        parts = {"model": {"w": weights}, "optimizer": {0: {"m": moments, "lr": 0.5}}}
        writer.save(parts, numbers, step=1)
        assert gate.reached.wait(30)
        weights.fill_(2)
        moments.add_(1)
        parts["optimizer"][0]["lr"] = 9.0
        numbers["position"].append(2)
        assert newest_valid(run).checkpoint is None
        gate.opened.set()
    loaded = load(run.checkpoint_dir(1))
    assert loaded.parts["model"]["w"].eq(1).all() and loaded.parts["optimizer"][0]["m"].eq(0).all()
    assert loaded.parts["optimizer"][0]["lr"] == 0.5 and loaded.state == {"position": [1]}
    assert writer.last_bytes > 4000 and writer.last_write_s > 0


def test_staging_buffers_are_reused_and_bounded():
    staging = Staging()
    tensors = {"model": {"w": torch.arange(1000.0), "b": torch.ones(3)}}
    first = staging.copy(tensors)
    places = {name: tensor.data_ptr() for name, tensor in first["model"].items()}
    tensors["model"]["w"] += 1
    second = staging.copy(tensors)
    assert {name: tensor.data_ptr() for name, tensor in second["model"].items()} == places
    assert torch.equal(second["model"]["w"], tensors["model"]["w"])
    assert staging.nbytes == 4012
    staging.copy({"model": {"b": torch.ones(3, dtype=torch.float64)}})
    assert staging.nbytes == 24


def test_a_rehearsal_makes_the_buffers_and_writes_nothing(run):
    parts = {"model": {"w": torch.ones(1000)}}
    with writer_of(run, asynchronous=True) as writer:
        writer.rehearse(parts)
        assert writer.staged_bytes == 4000 and list_checkpoints(run) == []
    with writer_of(run) as writer:
        writer.rehearse(parts)
        assert writer.staged_bytes == 0


def test_a_second_save_touches_the_buffers_only_after_the_first_is_complete(run, monkeypatch):
    copy, complete = Staging.copy, []

    def watched(staging, parts):
        complete.append([info.step for info in list_checkpoints(run) if info.complete])
        return copy(staging, parts)

    monkeypatch.setattr(Staging, "copy", watched)
    gate = Gate()
    with writer_of(run, asynchronous=True, fence=gate) as writer:
        weights = torch.ones(1_000_000)
        writer.save({"model": {"w": weights}}, {}, step=1)
        gate.opened.set()
        writer.save({"model": {"w": weights + 1}}, {}, step=2)
    assert complete == [[], [1]]
    assert [load(run.checkpoint_dir(step)).parts["model"]["w"][-1] for step in (1, 2)] == [1, 2]


def test_every_file_is_on_the_disk_before_complete_appears(run, monkeypatch):
    """After a power loss at any moment there is no COMPLETE beside a file that never reached the disk."""
    synced: list[tuple[str, bool, set[str]]] = []  # (name, whether COMPLETE was visible, names in the directory)
    folder, fsync = files_of(run, 1), os.fsync

    def watched(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path.name, (folder / "COMPLETE").exists(), {entry.name for entry in folder.iterdir()}))
        fsync(descriptor)

    monkeypatch.setattr(storage.os, "fsync", watched)
    with writer_of(run, shard_bytes=64) as writer:
        writer.save({"model": {name: torch.ones(16) for name in "ab"}, "rng": {"x": torch.ones(1)}}, {}, step=1)
    written = set(json.loads((folder / "manifest.json").read_text())["files"])
    assert len(written) == 4, "two shards of the model, the generators, the state"
    names = [name for name, *_ in synced]
    mark = next(index for index, name in enumerate(names) if "COMPLETE" in name)
    before = names[:mark]
    assert set(before) == {*written, "manifest.json", folder.name} and before[-2:] == ["manifest.json", folder.name]
    assert not any(visible for _, visible, _ in synced[: mark + 1]), "COMPLETE is visible only when it is on the disk"
    assert {*written, "manifest.json"} <= synced[mark - 1][2], "the directory is synced when it has all names"
    assert names[mark + 1] == folder.name and synced[mark + 1][1]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("nth", [1, 2, 3, 4, 5])
def test_a_full_disk_leaves_no_checkpoint_that_looks_complete(run, monkeypatch, asynchronous, nth):
    two_checkpoints(run)
    calls = iter(range(1, 100))
    fsync = os.fsync

    def full(descriptor):
        if next(calls) >= nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    writer = writer_of(run, asynchronous=asynchronous)
    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(RunError, match=r"step_00000030.*No space left.*MiB free.*save\.keep.*save\.dir"):
        writer.save({"model": {"w": torch.ones(5)}}, {}, step=30)
        writer.wait()
    assert [info.step for info in list_checkpoints(run)] == [10, 20]
    monkeypatch.setattr(storage.os, "fsync", fsync)
    writer.save({"model": {"w": torch.ones(5)}}, {}, step=40)
    writer.close()
    assert newest_valid(run).checkpoint.step == 40


def test_a_file_size_limit_stops_a_real_write(run):
    """The kernel itself refuses the bytes (EFBIG), in a process of its own."""
    code = f"""
        import resource, signal, torch
        from raytrain.checkpoint.writer import CheckpointWriter
        from raytrain.errors import RunError
        from raytrain.runs.folder import RunFolder
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        writer = CheckpointWriter(RunFolder({run.path!r}), keep=3, asynchronous=True)
        writer.save({{"model": {{"w": torch.ones(10)}}}}, {{}}, step=1)
        writer.save({{"model": {{"w": torch.ones(100_000)}}}}, {{}}, step=2)
        try:
            writer.close()
        except RunError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "model.safetensors: cannot be written: File too large" in done.stdout
    assert [(info.step, info.complete) for info in list_checkpoints(run)] == [(1, True)]


@pytest.mark.parametrize("at", range(1, 6))
def test_a_newer_attempt_stops_the_write_before_complete(run, at):
    class Superseded(RunError):
        """A newer attempt owns the folder."""

    asked = iter(range(1, 100))

    def fence():
        if next(asked) >= at:
            raise Superseded("attempt 2 owns this run")

    with pytest.raises(Superseded), writer_of(run, asynchronous=True, fence=fence) as writer:
        writer.save({"model": {"w": torch.ones(1)}}, {}, step=1)
    assert not (files_of(run, 1) / "COMPLETE").exists()
    assert newest_valid(run).checkpoint is None


def test_a_failed_write_surfaces_at_the_next_save_and_once(run):
    failures = iter([RunError("boom")])

    def fence():
        for failure in failures:
            raise failure

    writer = writer_of(run, asynchronous=True, fence=fence)
    writer.save({"model": {"w": torch.ones(1)}}, {}, step=1)
    with pytest.raises(RunError, match="boom"):
        writer.save({"model": {"w": torch.ones(1)}}, {}, step=2)
    writer.save({"model": {"w": torch.ones(1)}}, {}, step=3)
    writer.close()
    writer.close()
    assert [info.step for info in list_checkpoints(run)] == [3]


def test_leftovers_of_a_killed_writer_are_cleared(run):
    for step in (1, 2):
        run.write_text(f"checkpoints/step_0000000{step}/stale.safetensors", "half")
    run.write_text("checkpoints/mine.txt", "not ours")
    with writer_of(run) as writer:
        writer.save({"model": {"w": torch.ones(1)}}, {}, step=2)
    assert [info.step for info in list_checkpoints(run)] == [2]
    assert load(run.checkpoint_dir(2)).step == 2 and run.exists("checkpoints/mine.txt")


def test_retention_keeps_the_newest_and_the_best(run):
    losses = {1: 0.9, 2: 0.1, 3: None, 4: math.nan, 5: 0.5, 6: 0.4}
    with writer_of(run, keep=2) as writer:
        for step, loss in losses.items():
            writer.save({"model": {"w": torch.ones(1)}}, {}, step=step, eval_loss=loss)
    assert [info.step for info in list_checkpoints(run)] == [2, 5, 6]
    assert best_checkpoint(list_checkpoints(run)).step == 2
    with writer_of(run, keep="all") as writer:
        for step in (7, 8):
            writer.save({"model": {"w": torch.ones(1)}}, {}, step=step)
    assert [info.step for info in list_checkpoints(run)] == [2, 5, 6, 7, 8]
    assert discard_after(run, 6) == [7, 8]
    assert [info.step for info in list_checkpoints(run)] == [2, 5, 6]


def test_checkpoints_of_an_earlier_course_of_the_run_do_not_displace_the_newest(run):
    """Complete ones that could not be loaded are kept where a run starts from step 0 again."""
    with writer_of(run, keep="all") as writer:
        for step in (1, 2, 50, 60):
            writer.save({"model": {"w": torch.ones(1)}}, {}, step=step, eval_loss=1 / step)
    assert retain(run, keep=1, newest=2) == [1]
    assert [info.step for info in list_checkpoints(run)] == [2, 50, 60]


@pytest.mark.parametrize("place", ["local", "object store"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EACCES])
def test_a_read_error_does_not_count_as_damage_and_keeps_the_checkpoint(tmp_path, monkeypatch, place, number):
    run = RunFolder.create(f"{'file://' if place == 'object store' else ''}{tmp_path}/runs", "a")
    two_checkpoints(run)

    def refuses(*_arguments):
        raise OSError(number, os.strerror(number))

    kind = storage.ObjectStore if place == "object store" else storage.LocalStore
    with monkeypatch.context() as patch:
        patch.setattr(kind, "local_copy", refuses)
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            newest_valid(run)
        assert not isinstance(caught.value, CheckpointError)
        with pytest.raises(OSError, match=os.strerror(number)):
            load(run.checkpoint_dir(20))
    assert newest_valid(run).checkpoint.step == 20


def test_without_a_loaded_checkpoint_complete_ones_are_kept(run):
    two_checkpoints(run)
    run.write_text("checkpoints/step_00000030/stale.safetensors", "half")
    for step in (10, 20):
        flip_a_byte(files_of(run, step))
    good = newest_valid(run)
    assert good.checkpoint is None and len(good.refused) == 3
    assert discard_after(run, 0) == [30]
    assert [info.step for info in list_checkpoints(run)] == [10, 20]
    with writer_of(run, keep=1) as writer:
        for step in (2, 4):
            writer.save({"model": {"w": torch.ones(1)}}, {}, step=step)
            assert newest_valid(run).checkpoint.step == step, "not crowded out by later ones that cannot be read"
    assert [info.step for info in list_checkpoints(run)] == [4, 10, 20]


def test_a_file_that_disappears_while_it_is_read_counts_as_damaged(run, monkeypatch):
    two_checkpoints(run)
    copies = storage.LocalStore.local_copy

    def gone(store, name, scratch):
        path = copies(store, name, scratch)
        if "step_00000020" in path and name.startswith("model"):
            os.unlink(path)
        return path

    monkeypatch.setattr(storage.LocalStore, "local_copy", gone)
    good = newest_valid(run)
    assert good.checkpoint.step == 10 and "step_00000020: a file of it is missing" in good.refused[0]


def test_a_checkpoint_half_deleted_is_incomplete(run, monkeypatch):
    two_checkpoints(run)

    def killed(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(storage.LocalStore, "delete_tree", killed)
    with pytest.raises(KeyboardInterrupt):
        discard_after(run, 10)
    assert [(info.step, info.complete) for info in list_checkpoints(run)] == [(10, True), (20, False)]


def test_checkpoints_in_an_object_store(tmp_path):
    run = RunFolder.create(f"file://{tmp_path}/bucket", "a")
    parts = {"model": {"w": torch.arange(600.0).bfloat16()}, "optimizer": {0: {"step": torch.tensor(3.0)}}}
    with writer_of(run, keep=2, asynchronous=True, shard_bytes=500) as writer:
        for step in (1, 2, 3):
            writer.save(parts, {"step": step}, step=step)
    assert [info.step for info in list_checkpoints(run)] == [2, 3]
    flip_a_byte(files_of(run, 3))
    good = newest_valid(run)
    assert good.checkpoint.step == 2 and "step_00000003/model.safetensors: damaged" in good.refused[0]
    assert_same(parts, good.checkpoint.parts)
    export_weights(Tied().state_dict(), run.weights)
    safetensors.torch.load_model(Tied(), run.weights.removeprefix("file://"))


# -- kills --------------------------------------------------------------------------------------

KILLS = """
    import os, random, select, signal, sys, torch
    from raytrain.checkpoint.reader import newest_valid
    from raytrain.checkpoint.writer import CheckpointWriter
    from raytrain.runs.folder import RunFolder

    run, rng, newest, torn = RunFolder(sys.argv[1]), random.Random(7), 0, 0

    def content(step):
        return {"w": torch.full((20_000,), float(step)), "m": {step: torch.arange(step % 7)}}

    def train(start, pipe):
        writer = CheckpointWriter(run, keep=2, asynchronous=True)
        for step in range(start + 1, 10**9):
            writer.save({"model": content(step)}, {"step": step}, step=step)
            os.write(pipe, b".")

    for _ in range(20):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            train(newest, writing)
        for _ in range(rng.randint(2, 3)):  # a save returns after the one before it is complete
            os.read(reading, 1)
        select.select([], [], [], rng.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading), os.close(writing)
        loaded, refused = newest_valid(run)
        torn += len(refused)
        assert loaded.step > newest, (loaded.step, newest, refused)
        newest, wanted = loaded.step, content(loaded.step)
        assert loaded.state == {"step": newest} and list(loaded.parts["model"]["m"]) == [newest]
        assert torch.equal(loaded.parts["model"]["w"], wanted["w"])
        assert torch.equal(loaded.parts["model"]["m"][newest], wanted["m"][newest])
    print(newest, torn)
"""


def test_after_a_kill_at_any_moment_the_latest_valid_checkpoint_is_complete(run):
    command = [sys.executable, "-c", textwrap.dedent(KILLS), run.path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    newest, torn = map(int, done.stdout.split())
    assert newest >= 20 and torn > 0, "the kills hit nothing"


def test_a_save_that_nothing_postpones_is_written_although_the_next_replaces_a_postponed_one(run: RunFolder) -> None:
    """The thread that writes may not have begun when the next save comes, on a busy machine."""
    busy = threading.Event()
    writer = writer_of(run, asynchronous=True)
    assert writer._executor is not None
    writer._executor.submit(busy.wait)
    parts, wait = {"model": nn.Linear(2, 2)}, writer.wait
    writer.save(parts, {}, step=3)
    writer.wait = lambda: (busy.set(), wait())[1]  # type: ignore[method-assign]
    writer.save(parts, {}, step=4, eval_loss=1.0, replaces=True)
    writer.close()
    assert [info.step for info in list_checkpoints(run) if info.complete] == [3, 4]
