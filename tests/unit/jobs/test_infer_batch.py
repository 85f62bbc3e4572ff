"""`infer.batch_size: auto`: measured once, recorded before the first unit, and used again by `--resume`."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from jobs.infer import InferResult, infer
from jobs.inference import compute
from raytrain.infer import batch_size, ray_data
from raytrain.infer.batch_size import BatchChoice
from raytrain.infer.worker import InferenceWorker, Work

ROWS = 200
SIZES = ("model.hidden=[8]", "model.num_features=4", "model.num_classes=3")


def test_the_batch_is_measured_once_and_recorded_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch_size, "PLAIN_ROWS", 4)
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    columns = {"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 4)}
    parquet.write_table(pa.table(columns), tmp_path / "in.parquet")
    measured: list[int] = []
    original = InferenceWorker.measure_batch

    def measure(self: InferenceWorker, unit: Any, rows: int) -> Any:
        measured.append(rows)
        return original(self, unit, rows)

    monkeypatch.setattr(InferenceWorker, "measure_batch", measure)

    def run(*overrides: str, **options: Any) -> InferResult:
        given = (*SIZES, "infer.unit_rows=50", "scale.threads=1", *overrides)
        return infer("raytrain.models.mlp:mlp", input=str(tmp_path / "in.parquet"), overrides=given, **options)

    computed: list[int] = []
    answer = InferenceWorker.run

    def dies(self: InferenceWorker, unit: Any) -> Any:
        if computed:
            raise KeyboardInterrupt
        computed.append(unit.number)
        return answer(self, unit)

    monkeypatch.setattr(InferenceWorker, "run", dies)
    with pytest.raises(KeyboardInterrupt):
        run(output=str(tmp_path / "out"))
    begun = json.loads((tmp_path / "out/batch.json").read_text())
    assert measured == [ROWS] and begun["rows"] >= 4
    assert begun["measured"][0]["rows"] == 4 and begun["reason"].startswith("rows/s measured 4: ")
    printed = capsys.readouterr().out
    assert "batch: measured on some of the rows" in printed and f"batch: {begun['rows']} rows (rows/s" in printed

    monkeypatch.setattr(InferenceWorker, "run", answer)
    run(resume=str(tmp_path / "out"))
    assert measured == [ROWS] and "measured by the interrupted command" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/manifest.json").read_text())["batch"] == begun
    batches = set(parquet.read_table(tmp_path / "out/timing.parquet")["batch_rows"].to_pylist())
    assert max(batches) == begun["rows"]

    run("infer.max_samples=100", output=str(tmp_path / "few"))
    assert measured == [ROWS] and "(100 rows are too few for a search)" in capsys.readouterr().out


@pytest.mark.parametrize("workers", [1, 3])
def test_the_batch_that_is_measured_is_the_one_that_computes(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, and in each worker that Ray starts: their work has it."""
    monkeypatch.setattr(batch_size, "PLAIN_ROWS", 4)
    chosen, given = BatchChoice(23, "a test", (), 0.1), list[Work]()
    monkeypatch.setattr(batch_size.BatchSizeSearch, "run", lambda _search: chosen)
    monkeypatch.setattr(compute, "connected", lambda *_, **__: contextlib.nullcontext(SimpleNamespace(local=True)))
    monkeypatch.setattr(ray_data, "measure_batch", lambda *_, **__: chosen)

    def run_units(work: Work, units: Any, **_: Any) -> Any:
        given.append(work)
        return map(InferenceWorker(work, "a worker").run, units)

    monkeypatch.setattr(ray_data, "run_units", run_units)
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    columns = {"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 4)}
    parquet.write_table(pa.table(columns), tmp_path / "in.parquet")
    overrides = (*SIZES, "infer.unit_rows=50", "scale.threads=1", f"scale.workers={workers}")
    infer(
        "raytrain.models.mlp:mlp", input=str(tmp_path / "in.parquet"), output=str(tmp_path / "out"), overrides=overrides
    )
    assert "batch: 23 rows (a test" in capsys.readouterr().out
    assert len(given) == (workers > 1)
    rows = parquet.read_table(tmp_path / "out/timing.parquet")["batch_rows"].to_pylist()
    assert len(rows) == ROWS and set(rows) == {23, 50 - 2 * 23}, "units of 50 rows"
