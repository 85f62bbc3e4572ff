"""Habits of good training loops that the product keeps by itself, each shown by its effect on a real session."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from lab import BOX, MLP, Rows, class_rows, make_session, train
from torch import Tensor, nn

from jobs.driver.planning import plan_job
from jobs.job.spec import load_spec
from raytrain.data.prepare import DataPlan, prepare_source
from raytrain.data.rows.batches import Cursor, StepBatches
from raytrain.data.rows.residency import TRANSFERS, TransferCounts, to_device
from raytrain.data.sources.in_memory import memory_source
from raytrain.train.loader import BatchLoader
from raytrain.train.memory.device import give_back_free_pages

DATA = {"train": class_rows(64), "eval_fraction": 0.25}


class Watched(nn.Module):
    """A perceptron that counts how often it is moved and keeps weak references to what passes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
        self.moves, self.seen = 0, list[weakref.ref[Tensor]]()

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        self.moves += 1
        return super()._apply(fn, recurse)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.layers[:2](x)
        logits = self.layers[2](hidden)
        self.seen += [weakref.ref(tensor) for tensor in (x, labels, hidden, logits)]
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.covers("BP-02")
def test_a_model_is_moved_to_its_device_once() -> None:
    module = Watched()
    session = make_session({"module": module}, DATA, loop={"max_steps": 6, "eval_every": 2})
    moved = session.trainable.module
    assert isinstance(moved, Watched)
    train(session)
    assert moved.moves == 1 and len(moved.seen) > 24


@pytest.mark.covers("BP-08")
@pytest.mark.parametrize(("storage", "batches"), [("stream", 0), ("resident", 1)])
def test_nothing_of_a_step_outlives_it(storage: str, batches: int) -> None:
    """Once a row is written no activation, output or batch is alive, but of rows lent as views the newest batch, whose
    harm is looked for later. `gc` is off, so that nothing waits for it."""
    data = {**DATA, "storage": storage}
    session = make_session({"module": Watched()}, data, loop={"max_steps": 8, "micro_batch_size": 8, "eval_every": 4})
    module, alive = session.trainable.module, list[list[int]]()
    assert isinstance(module, Watched)

    class Counting(Rows):
        def metrics(self, row: dict[str, Any]) -> None:
            alive.append([place % 4 for place, tensor in enumerate(module.seen) if tensor() is not None])
            super().metrics(row)

    gc.collect()
    gc.disable()
    try:
        session.loop(reporter=Counting(), should_stop=lambda: False).run(session.state)
    finally:
        gc.enable()
    assert len(alive) == 8 + 2 and len(module.seen) >= 8 * 2 * 4
    assert max(map(len, alive)) == 2 * batches and not {2, 3} & {kind for kinds in alive for kind in kinds}, alive


@pytest.mark.covers("BP-13")
def test_a_careful_rate_a_clip_the_norm_and_a_warm_up_are_defaults_and_on_record() -> None:
    """Of a job without an optimizer section: Adam's default rate, scaled by the warm-up in the first step."""
    mapping = {"model": dict(MLP), "data": dict(DATA), "loop": {"max_steps": 60, "log_every": 1}}
    loaded = load_spec(mapping={**mapping, "telemetry": {"tensorboard": False}})
    record = plan_job(loaded, inventory=BOX).to_json()
    assert record["choices"]["lr"]["value"] == record["config"]["optim"]["lr"] == 1e-3
    assert record["config"]["optim"]["max_grad_norm"] == 1.0
    assert record["choices"]["warmup_steps"]["value"] == 3, "5 % of the steps"
    rows, _ = train(make_session(MLP, DATA, optim={"lr": 1e-3}, loop={"max_steps": 60}))
    rates, norms = rows.of("train", "lr"), rows.of("train", "grad_norm")
    assert rates[:4] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3]) and max(rates) == pytest.approx(1e-3)
    assert len(norms) == 60 and min(norms) > 0


class Spike(nn.Module):
    """Takes 96 MiB more for a moment in its second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(12, 4), 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        if self.calls == 2:
            torch.ones(24 << 20).sum()
        return {"loss": nn.functional.cross_entropy(self.linear(x), labels)}


@pytest.mark.covers("BP-05", "MEM-03")
def test_a_peak_of_the_first_epoch_does_not_count_for_the_second() -> None:
    give_back_free_pages()  # of the tests before
    data = {"train": class_rows(64), "eval_fraction": 0.0}
    rows, _ = train(make_session({"module": Spike()}, data, loop={"max_steps": 8, "global_batch_size": 16}))
    peaks, epochs = rows.of("train", "peak_memory_bytes"), rows.of("train", "epoch")
    assert epochs == [0] * 4 + [1] * 4
    assert peaks[1] - max(peaks[2:]) > 64 << 20  # the first row may count what the tests before give back only then


# ---------------------------------------------------------------- batches


def copies_of_epochs(storage: Any) -> TransferCounts:
    """Copies to another device while the batches of two epochs are made; `meta` represents a GPU."""
    device = torch.device("meta")
    source = memory_source(class_rows(64), None, fraction=0.0)
    source = prepare_source(source, DataPlan(storage), device=device, report=lambda kind, **fields: None)
    batches = StepBatches(source.train, seed=0, global_batch_size=16, micro_batch=8)
    loader, before, cursor = (
        BatchLoader(batches, device=device, weight=None, dtype=torch.float32),
        replace(TRANSFERS),
        Cursor(),
    )
    while cursor.epoch < 2:
        indices, cursor = loader.global_batch(cursor)
        assert all(micro.batch["x"].is_meta for micro in loader.micro_batches(indices))
    return TRANSFERS.since(before)


@pytest.mark.covers("BP-19", "VER-13")
def test_resident_rows_are_not_copied_in_the_loop() -> None:
    assert copies_of_epochs("resident").tensors == 0
    streamed = 2 * 2 * 64 // 8  # both tensors of each micro-batch: the counter does count
    assert copies_of_epochs("stream").tensors == streamed


class Pinned(Tensor):
    """Represents a tensor in pinned memory, which needs a GPU."""

    def is_pinned(self, device: Any = None) -> bool:
        return True


@pytest.mark.covers("VER-03", "TRB-15")
def test_the_loader_copies_every_batch_from_pinned_memory_and_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real path of a batch, and the counts of its copies; only the pinned memory is represented."""
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor.as_subclass(Pinned))
    copies, tensors = copies_of_epochs("pinned"), 2 * 2 * 64 // 8
    assert (copies.tensors, copies.pinned, copies.non_blocking, copies.blocking) == (tensors, tensors, tensors, 0)
    assert copies.bytes == 2 * 64 * (12 * 4 + 8), "12 floats and a label for each of 64 rows, twice"
    streamed = copies_of_epochs("stream")
    assert (streamed.pinned, streamed.non_blocking, streamed.pageable) == (0, 0, tensors)


@pytest.mark.covers("BP-20")
def test_items_whose_tensors_are_on_several_devices_become_batches_on_one() -> None:
    batch = {"image": torch.zeros(2, device="meta"), "boxes": [torch.ones(3), torch.zeros(1, device="meta")], "n": 3}
    before = replace(TRANSFERS)
    there = to_device(batch, "meta")
    assert there["image"] is batch["image"] and there["boxes"][0].is_meta and there["boxes"][1] is batch["boxes"][1]
    assert (TRANSFERS.since(before).tensors, TRANSFERS.since(before).in_place) == (1, 2)
