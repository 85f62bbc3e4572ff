"""Names below paths and URIs, and local folders that are uploaded to an object store."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from raytrain.errors import RunError
from raytrain.runs.folder import MirroredFolder, RunFolder
from raytrain.runs.storage import join, part_below, split

QUERY = "?endpoint_override=127.0.0.1:9000&scheme=http"


@pytest.mark.parametrize(
    ("place", "name", "path"),
    [
        ("runs", "a", "runs/a"),
        ("/data/runs/", "a/b.json", "/data/runs/a/b.json"),
        ("/data/what?/runs", "a", "/data/what?/runs/a"),  # no URI: the mark belongs to the name
        ("s3://bucket/runs", "a", "s3://bucket/runs/a"),
        (f"s3://bucket/runs/{QUERY}", "a/b", f"s3://bucket/runs/a/b{QUERY}"),
        (f"s3://bucket{QUERY}", "a", f"s3://bucket/a{QUERY}"),
    ],
)
def test_a_name_is_joined_before_the_query_and_found_again(place: str, name: str, path: str) -> None:
    assert join(place, name) == path and part_below(place, path) == name
    folder, last = split(path)
    assert last == name.rpartition("/")[2] and join(folder, last) == path


def test_what_is_not_below_is_not_found() -> None:
    assert part_below("/runs/a", "/runs/ab") is None and part_below("/runs/a", "metrics.jsonl") is None
    assert part_below(f"s3://b/a{QUERY}", f"s3://b/ab/c{QUERY}") is None
    assert split("weights.safetensors") == (".", "weights.safetensors") and split("/x") == ("/", "x")
    assert join("runs", "") == "runs"


def test_a_run_with_a_query_names_its_files_and_finds_the_latest(tmp_path: Path) -> None:
    place = f"file://{tmp_path}/runs"
    run = RunFolder.create(place, "one")
    assert run.metrics == f"{run.path}/metrics.jsonl" and run.path.startswith(f"{place}/one-")
    run.write_text(run.job, "text")
    assert RunFolder.open(f"{place}/latest/").read_text("job.yaml") == "text"


def test_a_local_run_has_its_files_in_place(tmp_path: Path) -> None:
    with contextlib.closing(MirroredFolder(RunFolder(str(tmp_path)), "logs")) as folder:
        assert folder.path == str(tmp_path / "logs")
        (tmp_path / "logs" / "rank.log").write_text("line")
    assert (tmp_path / "logs" / "rank.log").read_text() == "line"


def test_files_are_uploaded_continued_and_only_when_they_have_changed(tmp_path: Path) -> None:
    run = RunFolder(f"file://{tmp_path}/run")
    with contextlib.closing(MirroredFolder(run, "logs", every_s=1000)) as folder:
        assert not Path(folder.path).is_relative_to(tmp_path), "an object store cannot append"
        Path(folder.path, "rank.log").write_text("first\n")
        Path(folder.path, "other.log").write_text("other")
        Path(folder.path, "state.json").write_text("1 of 9")
        folder._upload()
        Path(folder.path, "state.json").write_text("2 of 9")
        os.utime(Path(folder.path, "state.json"), ns=(1, 1))  # another time, also on a coarse clock
        (tmp_path / "run" / "logs" / "other.log").write_text("not uploaded again")
        with open(Path(folder.path, "rank.log"), "a") as file:
            file.write("second\n")
    assert run.read_text("logs/rank.log") == "first\nsecond\n"
    assert run.read_text("logs/other.log") == "not uploaded again"
    assert run.read_text("logs/state.json") == "2 of 9", "changed, with as many bytes"
    assert not Path(folder.path).exists()
    again = MirroredFolder(run, "logs", resumed=("rank.log", "none.log"))
    with open(Path(again.path, "rank.log"), "a") as file:
        file.write("third\n")
    again.close()
    again.close()
    assert run.read_text("logs/rank.log") == "first\nsecond\nthird\n"


def test_a_failed_upload_is_tried_again_and_the_last_one_is_reported(tmp_path: Path) -> None:
    run = RunFolder(f"file://{tmp_path}/run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").write_text("a file where the folder should be")
    folder = MirroredFolder(run, "logs", every_s=0.001)
    Path(folder.path, "rank.log").write_text("line")
    with pytest.raises(RunError, match=r"rank\.log: cannot be written"):
        folder.close()
    assert not Path(folder.path).exists()
