"""A fetched run: the copy is verified before the folder appears."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from jobs.submission import on_cluster
from jobs.submission.follow import unpack
from raytrain.errors import RunError


def packed(tmp_path: Path) -> tuple[bytes, dict[str, Any]]:
    """An archive of a run with two files and a link, and what its cluster says of it."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "events.jsonl").write_text('{"kind": "driver_start", "ray_job": "mine"}\n')
    (run / "checkpoints" / "weights").write_bytes(bytes(range(256)))
    (run / "newest").symlink_to(run / "checkpoints")
    answer = on_cluster.pack(str(run), str(tmp_path / "run.tar"))
    return (tmp_path / "run.tar").read_bytes(), answer


def test_a_run_arrives_whole_or_not_at_all(tmp_path: Path) -> None:
    archive, answer = packed(tmp_path)
    assert (answer["archive"], answer["bytes"]) == ("run.tar", len(archive))
    folder = unpack(io.BytesIO(archive), tmp_path / "to" / "run", answer)
    assert (folder / "checkpoints" / "weights").read_bytes() == bytes(range(256))
    assert sorted(path.name for path in folder.rglob("*")) == ["checkpoints", "events.jsonl", "weights"]
    at = archive.index(bytes(range(256)))
    for copy in (archive[:at] + b"\1" + archive[at + 1 :], archive[:-512], b""):
        with pytest.raises(RunError, match=f"differs: {len(copy)} of {len(archive)} bytes arrived"):
            unpack(io.BytesIO(copy), tmp_path / "bad" / "run", answer)
        assert not (tmp_path / "bad").exists()


def test_the_run_of_a_job_is_found_by_its_events(tmp_path: Path) -> None:
    packed(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "events.jsonl").write_text('{"kind": "driver_start", "ray_job": "another"}\n')
    (tmp_path / "latest").symlink_to(tmp_path / "other")
    assert on_cluster.run_of(str(tmp_path), "mine") == str(tmp_path / "run")
    assert on_cluster.run_of(str(tmp_path), "nobody") is None
    assert on_cluster.run_of(str(tmp_path / "missing"), "mine") is None
