"""A Ray Dataset that a user's function returns: written once by a separate process, read in an exact order."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from raytrain.config.sections import DataConfig
from raytrain.data.sources import ray_dataset as ray_source
from raytrain.data.sources.open import open_source, source_from_driver
from raytrain.errors import InputError

CODE = """
import ray.data

def rows(count=300):
    made = ray.data.range(count).map(lambda row: {"x": [float(row["id"]), 1.0], "labels": int(row["id"]) % 3})
    return {"train": made}

def plain():
    return {"train": {"x": [[1.0], [2.0]], "labels": [0, 1]}, "eval": None}
"""


def order_of(source: Any) -> list[int]:
    indices = source.train.order(7, 0)[0:1000]
    return source.train.gather(indices)["x"][:, 0].long().tolist()


@pytest.mark.timeout(180)
def test_it_is_written_once_and_read_in_the_same_order_ever_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray_rows.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONWARNINGS", "error::UserWarning,error::FutureWarning,error::DeprecationWarning")
    data = DataConfig(source="ray_rows:rows", count=300)  # pyright: ignore[reportCallIssue]
    source = open_source(data, context=None)
    assert len(source.train) == 270 and source.eval is not None and len(source.eval) == 30
    assert source.facts.kind == "groups" and set(source.train.gather(source.train.eval_order()[:4])) >= {"x", "labels"}

    def no_process(*arguments: Any, **named: Any) -> Any:
        raise AssertionError("written already")

    monkeypatch.setattr(subprocess, "run", no_process)
    again, worker = open_source(data, context=None), source_from_driver(source.worker_data, data, context=None)
    assert worker is not None and order_of(again) == order_of(source) == order_of(worker)
    assert sorted(order_of(source)) != order_of(source) and len(set(order_of(source))) == 270


def test_the_limit_of_the_process_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray_words.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    said = ['{"written": false}', '{"mixed": "a dict for eval together with a Ray Dataset"}']
    failed = [False, False, True]

    environments: list[dict[str, str]] = []
    clusters: list[dict[str, Any]] = []

    def run(command: list[str], **named: Any) -> Any:
        environments.append({name: value for name, value in named["env"].items() if name.startswith("RAY_")})
        cluster = json.loads(command[-1])["cluster"]
        clusters.append({"address": cluster["address"], **cluster["options"]})
        folder = os.path.dirname(clusters[-1].get("_temp_dir", ""))
        assert not folder or stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        bad = failed.pop(0)
        return subprocess.CompletedProcess(command, int(bad), "" if bad else said.pop(0), "ValueError: no such bucket")

    monkeypatch.setattr(ray_source.subprocess, "run", run)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):  # as a run before this one left them
        monkeypatch.setenv(name, "token")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    data = DataConfig(source="ray_words:plain", eval_fraction=0.0)
    assert len(open_source(data, context=None).train) == 2, "called here after all"
    with pytest.raises(InputError, match="a dict for eval together with a Ray Dataset, expected Ray Datasets for both"):
        open_source(data, context=None)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(InputError, match="ray_words:plain, which failed: ValueError: no such bucket"):
        open_source(data, context=None)
    for environment, cluster in zip(environments[:2], clusters[:2], strict=True):
        folder = os.path.dirname(cluster["_temp_dir"])
        assert cluster["address"] == "local" and cluster["_node_ip_address"] == "127.0.0.1"
        assert environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0", "on every interface"
        assert environment["RAY_AUTH_MODE"] == "token" and environment["RAY_AUTH_TOKEN_PATH"].startswith(f"{folder}/")
        assert not os.path.exists(folder)
    assert (
        clusters[2] == {"address": "127.0.0.1:1", "log_to_driver": False}
        and environments[2]["RAY_AUTH_TOKEN_PATH"] == "token"
    )
