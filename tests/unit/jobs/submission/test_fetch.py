"""A fetched run: every file is verified before the folder appears."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from jobs.submission.fetch import unpack
from jobs.submission.on_cluster import pack
from raytrain.errors import RunError


def packed(tmp_path: Path) -> Path:
    """An archive of a run with two files."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "events.jsonl").write_text('{"kind": "driver_start", "ray_job": "mine"}\n')
    (run / "checkpoints" / "weights").write_bytes(bytes(range(256)))
    assert pack.pack(str(run), str(tmp_path / "run.tar")) == (tmp_path / "run.tar").stat().st_size
    return tmp_path / "run.tar"


def changed(archive: Path, change: dict[str, bytes | None]) -> io.BytesIO:
    """The archive with other contents of some files; None leaves one out."""
    out = io.BytesIO()
    with tarfile.open(archive) as old, tarfile.open(fileobj=out, mode="w") as new:
        for member in old:
            content = old.extractfile(member)
            data = change.get(member.name, content.read() if content else b"")
            if data is not None:
                member.size = len(data)
                new.addfile(member, io.BytesIO(data))
    out.seek(0)
    return out


def test_a_run_arrives_whole_or_not_at_all(tmp_path: Path) -> None:
    archive = packed(tmp_path)
    folder = unpack(changed(archive, {}), tmp_path / "to" / "run")
    assert (folder / "checkpoints" / "weights").read_bytes() == bytes(range(256))
    assert sorted(path.name for path in folder.rglob("*")) == ["checkpoints", "events.jsonl", "weights"]
    name = "checkpoints/weights"
    flipped = bytes([1, *range(1, 256)])
    for change, message in (
        ({name: flipped}, f"{name} differs"),
        ({name: b"short"}, f"{name} differs from the cluster's: 5 bytes"),
        ({name: None}, f"{name} is missing"),
        ({pack.LISTING: None}, "has no list of its files"),
    ):
        target = tmp_path / "bad" / str(len(message))
        with pytest.raises(RunError, match=message):
            unpack(changed(archive, change), target)
        assert not list(target.parent.iterdir())


def test_the_run_of_a_job_is_found_by_its_events(tmp_path: Path) -> None:
    packed(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "events.jsonl").write_text('{"kind": "driver_start", "ray_job": "another"}\n')
    (tmp_path / "latest").symlink_to(tmp_path / "other")
    assert pack.run_of(str(tmp_path), "mine") == str(tmp_path / "run")
    assert pack.run_of(str(tmp_path), "nobody") is None
    assert pack.run_of(str(tmp_path / "missing"), "mine") is None
