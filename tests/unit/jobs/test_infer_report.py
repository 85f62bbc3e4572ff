"""The report page that `infer` leaves, and `raytrain report` writes again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from jobs.infer import infer
from jobs.report import report_verb


def test_a_job_leaves_its_report_and_the_verb_report_writes_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    x[7] = np.nan
    columns = {"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 4), "label": [n % 3 for n in range(40)]}
    parquet.write_table(pa.table(columns), tmp_path / "in.parquet")
    sizes = ("model.hidden=[8]", "model.num_features=4", "model.num_classes=3")
    infer(
        "raytrain.models.mlp:mlp", input=str(tmp_path / "in.parquet"), output=str(tmp_path / "out"),
        overrides=(*sizes, "infer.unit_rows=16", "infer.max_failures=1.0", "infer.label=label", "scale.threads=1"),
    )  # fmt: skip
    path = tmp_path / "out/report/report.html"
    assert str(path) in capsys.readouterr().out
    page = path.read_text()
    assert "39 of 40 rows have a prediction" in page and "no finite number" in page and "done, with failed rows" in page
    for section in ("speed", "workers", "failures", "quality", "files"):
        assert f'id="{section}"' in page
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert [one["rows"] for one in summary["times"]] == [16, 16, 8]
    assert [one["id"] for one in summary["failures"]] == [7] and list(summary["errors"].values()) == [1]

    path.unlink()
    assert report_verb([str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == str(path) and path.read_text() == page
