"""Which rows a step has and of which type: `data.drop_last`, `loop.micro_batch_size: whole`, float64 columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gang import run_gang
from lab import train
from row_counts import Clock, Pairs, Seen, as_arrays, batches_of, dropping, numbered, plain_losses, session_of

from raytrain.errors import InputError, RunError

# ---------------------------------------------------------------- data.drop_last


@pytest.mark.parametrize(("rows", "batch"), [(21, 8), (24, 8), (9, 8)])
def test_without_the_last_rows_a_run_is_the_plain_loop_that_leaves_them_out(rows: int, batch: int) -> None:
    module, data = Seen(norm=True), numbered(rows)
    session = session_of(module, data, batch=batch, data={"drop_last": True})
    assert session.job.planned("steps_per_epoch") == session.loader.batches.steps_per_epoch == rows // batch
    reporter, outcome = train(session)
    expected = batches_of(data, batch, epochs=2)
    assert outcome.kind == "done" and session.state.step == len(expected) == 2 * (rows // batch)
    assert reporter.losses == plain_losses(module, expected)
    assert [row["step"] for row in reporter.rows if row.get("ends_epoch")] == [rows // batch, 2 * (rows // batch)]


def test_it_resumes_in_mid_epoch_with_another_number_of_workers(tmp_path: Path) -> None:
    two = run_gang(dropping, str(tmp_path), None, 2, world_size=2)
    expected = batches_of(numbered(23), 6, epochs=2)
    seen = [row for one in two for rows in one["rows"] for row in rows]
    assert sorted(seen) == sorted(row for batch in expected for row in batch["row"].tolist())
    assert two[0]["losses"] == pytest.approx(plain_losses(Seen(), expected), rel=1e-5)
    for world, micro in ((1, 6), (3, 2)):
        again = run_gang(dropping, str(tmp_path), 2, micro, world_size=world)
        rest = sorted(row for one in again for rows in one["rows"] for row in rows)
        assert rest == sorted(row for batch in expected[2:] for row in batch["row"].tolist())
        assert again[0]["losses"] == pytest.approx(two[0]["losses"][2:], rel=1e-5)


def test_a_global_batch_of_more_rows_than_there_are_is_refused() -> None:
    with pytest.raises(InputError, match=r"loop\.global_batch_size: got 8, expected at most 7"):
        session_of(Seen(), numbered(7), batch=8, data={"drop_last": True})


def test_a_last_row_that_a_batch_norm_cannot_be_trained_on_ends_with_the_keys() -> None:
    with pytest.raises(RunError, match=r"step 2: .*data\.drop_last.*loop\.global_batch_size") as caught:
        train(session_of(Seen(norm=True), numbered(9), batch=8))
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(RunError, match=r"step 1: .*loop\.micro_batch_size"):  # of a full global batch
        train(session_of(Seen(norm=True), numbered(9), batch=9, loop={"micro_batch_size": 1}))


# ---------------------------------------------------------------- loop.micro_batch_size: whole


def test_a_loss_between_rows_is_that_of_the_plain_loop_with_whole_batches() -> None:
    data = numbered(40)
    session = session_of(Pairs(), data, batch=8, loop={"micro_batch_size": "whole"}, eval_rows=numbered(20, seed=9))
    assert session.loader.batches.micro_batch == 8
    reporter, _ = train(session)
    assert reporter.losses == plain_losses(Pairs(), batches_of(data, 8, epochs=2))
    evaluated = [rows for training, rows in session.trainable.module.batches if not training]
    assert max(map(len, evaluated)) == 8, "an evaluation compares as many rows as training does"
    split = train(session_of(Pairs(), data, batch=8, loop={"micro_batch_size": 4}))[0]
    assert abs(split.losses[0] - reporter.losses[0]) > 0.1, "the halves have another loss"


def test_an_out_of_memory_splits_a_global_batch_unless_it_is_whole() -> None:
    data = numbered(16)
    session = session_of(Pairs(fails=1), data, batch=8)
    train(session)
    assert [len(rows) for _, rows in session.trainable.module.batches][:3] == [8, 4, 4]
    session = session_of(Pairs(fails=1), data, batch=8, loop={"micro_batch_size": "whole"})
    with pytest.raises(RunError, match=r"step 1.*planted.*loop\.micro_batch_size whole forbids"):
        train(session)
    assert [len(rows) for _, rows in session.trainable.module.batches] == [8]


# ---------------------------------------------------------------- float64 columns


class Items:
    """The rows as a map-style dataset of numpy's float64."""

    def __init__(self, rows: dict[str, torch.Tensor]) -> None:
        self.rows = as_arrays(rows)

    def __len__(self) -> int:
        return len(self.rows["row"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: values[index] for name, values in self.rows.items()}


KINDS = {"arrays": as_arrays, "tensors": dict, "a dataset": Items}


@pytest.mark.parametrize("storage", ["resident", "stream"])
@pytest.mark.parametrize("kind", KINDS)
def test_float64_columns_train_as_float32_ones_do(kind: str, storage: str) -> None:
    held, data = numbered(12, seed=9), numbered(22, dtype=torch.float64)
    wide = {"eval_rows": KINDS[kind](numbered(12, dtype=torch.float64, seed=9)), "data": {"storage": storage}}
    session = session_of(Seen(), KINDS[kind](data), batch=8, **wide)
    reporter, _ = train(session)
    assert session.trainable.module.types == {torch.float32}
    narrow, _ = train(session_of(Seen(), numbered(22), batch=8, eval_rows=held))
    assert reporter.losses == narrow.losses
    assert reporter.of("eval", "loss") == narrow.of("eval", "loss")
    assert reporter.losses == plain_losses(Seen(), batches_of(numbered(22), 8, epochs=2, drop=False))


def test_a_float64_run_keeps_every_digit() -> None:
    session = session_of(Seen(), numbered(16, dtype=torch.float64), batch=8, precision="fp64")
    train(session)
    assert session.trainable.module.types == {torch.float64}


def timed(rows: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(4)
    time = 1.7e9 + draw.random(rows) * 86400
    return {"time": time, "x": draw.standard_normal(rows), "labels": np.sin((time - 1.7e9) / 3600)}


def test_a_model_that_reads_float64_itself_keeps_what_float32_would_lose() -> None:
    data = timed(16)
    session = session_of(Clock(), data, batch=8)
    reporter, _ = train(session)
    assert list(session.loader.float64.kept) == ["time"]
    tensors = {name: torch.from_numpy(values) for name, values in data.items()}
    expected = {name: values if name == "time" else values.float() for name, values in tensors.items()}
    assert reporter.losses == plain_losses(Clock(), batches_of(expected, 8, epochs=2))
    rounded = {name: values.float() for name, values in tensors.items()}
    assert reporter.losses != plain_losses(Clock(), batches_of(rounded, 8, epochs=2)), "what rounding would train"


def test_a_model_that_cannot_read_float64_is_told_the_column() -> None:
    data = numbered(16, dtype=torch.float64)
    data["x"] = 1.7e9 + data["x"]
    with pytest.raises(RunError, match=r"step 1: .*float64.*: x, as float32 would round 1\d+\.\d+ to .*astype"):
        train(session_of(Seen(), data, batch=8))


def test_labels_that_float32_would_round_stay_float64_as_in_the_plain_loop() -> None:
    data = numbered(16, dtype=torch.float64)
    data["x"], data["labels"] = data["x"].float(), 2.0**24 + torch.arange(16, dtype=torch.float64)[:, None]
    session = session_of(Seen(), data, batch=8)
    reporter, _ = train(session)
    assert session.trainable.module.types == {torch.float32, torch.float64}
    assert reporter.losses == plain_losses(Seen(), batches_of(data, 8, epochs=2))


def test_other_errors_of_a_step_stay_as_they_are() -> None:
    class Failing(Seen):
        def forward(self, **_: Any) -> Any:
            raise ValueError("of the user's own")

    session = session_of(Failing(), numbered(16), batch=8)
    with pytest.raises(ValueError, match="of the user's own"):
        train(session)
