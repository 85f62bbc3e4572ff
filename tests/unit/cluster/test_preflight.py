"""Checks before a run: each outcome is a value that names its key."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hardware import Nvml

from cluster import preflight
from cluster.devices.inventory import Inventory, Node
from cluster.preflight import (
    check_disk,
    check_memory,
    check_place,
    check_seen_by_all,
    check_shared_memory,
    check_storage,
    check_visible_devices,
    run_preflight,
)


def machine(free: int) -> Inventory:
    return Inventory((Node("a", 2, free),), source="test", cpu_model="c", cpu_flags={})


def test_loading_does_not_change_the_storage(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "runs"
    result = check_storage(str(folder))
    assert result.status == "ok"
    assert list(folder.iterdir()) == []


def test_storage_by_uri(tmp_path: Path) -> None:
    result = check_storage(f"file://{tmp_path}/runs")
    assert result.status == "ok"
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_file_in_the_way_fails_naming_the_key(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    result = check_storage(str(tmp_path / "runs" / "inner"))
    assert (result.status, result.key) == ("fail", "save.dir")
    assert str(tmp_path / "runs") in result.seen


def test_an_unknown_scheme_fails_naming_the_key() -> None:
    result = check_storage("nowhere://bucket/runs")
    assert "credentials" in result.remedy and "folder" not in result.expected
    assert (result.status, result.key) == ("fail", "save.dir")


def test_a_disk_without_room_for_three_checkpoints_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=3 << 30)

    monkeypatch.setattr("shutil.disk_usage", usage)
    folder = str(tmp_path / "not" / "there")
    assert check_disk(folder, 900 << 20).status == "ok"
    full = check_disk(folder, 1 << 30)
    assert (full.status, full.key) == ("fail", "save.dir")
    assert "3 GiB free" in full.seen
    assert asked == [tmp_path, tmp_path]
    more = check_disk(folder, 1 << 30, saved=1)
    assert (more.status, more.expected) == ("ok", "2.06 GiB free: two checkpoints more and 64 MiB")
    assert check_disk(folder, 2 << 30, saved=5).expected == "2.06 GiB free: one checkpoint more and 64 MiB"
    nearly = check_disk(folder, ((3 << 30) - (64 << 20) + 10) // 3 + 1)
    assert nearly.seen.endswith(f"free in {tmp_path} (1 MiB too little)"), "3.0 of 3.0 GiB says nothing"
    spaced = check_disk(f"file://{tmp_path}/with%20space/runs", 1 << 30)
    assert spaced.status == "fail" and asked[-1] == tmp_path
    (tmp_path / "with space").mkdir()
    check_disk(f"file://{tmp_path}/with%20space/runs", 1)
    assert asked[-1] == tmp_path / "with space"


def test_free_disk_space_of_an_object_store_is_not_checked() -> None:
    assert check_disk("s3://bucket/runs", 1).status == "na"


def test_memory_counts_every_process_of_a_node() -> None:
    need = 3 << 29
    enough = check_memory(need, inventory=machine(3 << 30), local_workers=2, on_gpu=False)
    assert enough.status == "ok" and "3 GiB for 2 workers of 1.5 GiB" in enough.expected, "the process is in it"
    short = check_memory(need, inventory=machine((3 << 30) - 1), local_workers=2, on_gpu=False)
    assert (short.status, short.key) == ("warn", "loop.micro_batch_size")
    assert check_memory(need, inventory=machine(2 << 30), local_workers=2, on_gpu=True).status == "ok"
    unknown = check_memory(None, inventory=machine(2 << 30), local_workers=2, on_gpu=False)
    assert "for 2 workers of 600 MiB" in unknown.expected
    assert check_memory(need, inventory=machine(0), local_workers=2, on_gpu=False).status == "na"


@pytest.mark.covers("TRB-40")
@pytest.mark.covers("COMPAT-08")
def test_small_shared_memory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container has 64 MiB unless it is given more, as the documentation says."""
    documented = (Path(__file__).parents[3] / "cluster/README.md").read_text()
    assert "64 MiB of `/dev/shm`" in documented and "docker run --shm-size=" in documented
    assert check_shared_memory(root=tmp_path).status == "na"
    (tmp_path / "dev/shm").mkdir(parents=True)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    small = check_shared_memory(root=tmp_path)
    assert small.status == "warn"
    assert small.seen == "64 MiB free in /dev/shm" and small.expected == "256 MiB free"
    assert "docker run --shm-size=" in small.remedy
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    enough = check_shared_memory(root=tmp_path)
    assert enough.status == "ok" and enough.seen == "1 GiB free in /dev/shm"


def test_variables_that_clash_or_name_nothing_are_a_warning(tmp_path: Path) -> None:
    assert check_visible_devices(environ={}).status == "ok"
    assert check_visible_devices(environ={"CUDA_VISIBLE_DEVICES": "1"}, nvml=Nvml("T4", "T4")).status == "ok"
    unknown = check_visible_devices(environ={"CUDA_VISIBLE_DEVICES": "0,7"}, nvml=Nvml("T4", "T4"))
    assert unknown.status == "warn" and "'7'" in unknown.seen
    for text in ("7", "GPU-1234", "0,1"):
        nothing = check_visible_devices(environ={"CUDA_VISIBLE_DEVICES": text}, nvml=Nvml(), root=tmp_path)
        assert (nothing.status, nothing.seen) == ("warn", f"CUDA_VISIBLE_DEVICES={text!r}: this machine has no GPU")
    for hides_all in ("", "-1"):
        hidden = check_visible_devices(environ={"CUDA_VISIBLE_DEVICES": hides_all}, nvml=Nvml(), root=tmp_path)
        assert hidden.status == "ok"
    amd = tmp_path / "sys/class/kfd/kfd/topology/nodes/1/properties"
    amd.parent.mkdir(parents=True)
    amd.write_text("simd_count 80\n")
    assert check_visible_devices(environ={"CUDA_VISIBLE_DEVICES": "0"}, nvml=Nvml(), root=tmp_path).status == "ok"
    clash = check_visible_devices(environ={"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"})
    assert clash.status == "warn" and "HIP_VISIBLE_DEVICES" in clash.seen


def test_all_checks_together_are_json(tmp_path: Path) -> None:
    results = run_preflight(
        save_dir=str(tmp_path), inventory=machine(8 << 30), checkpoint_bytes=None, worker_bytes=None,
        local_workers=1, on_gpu=False,
    )  # fmt: skip
    rows = json.loads(json.dumps([result.to_json() for result in results]))
    assert [row["name"] for row in rows] == ["storage", "disk", "memory", "shared_memory", "visible_devices"]
    assert {"name", "status", "seen", "expected", "remedy", "key"} == set(rows[0])


def test_a_path_that_one_node_does_not_see_is_refused_with_its_key_and_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask(paths: list[str]) -> dict[str, list[str]]:
        assert paths == ["/shared/a.txt", "/home/me/runs"]  # the URI is the same everywhere
        return {"10.0.0.1": [], "10.0.0.2": ["/home/me/runs"]}

    paths = {"data.path": "/shared/a.txt", "save.dir": "/home/me/runs", "data.eval_path": "s3://bucket/b.txt"}
    monkeypatch.setattr(preflight, "_ask_nodes", ask)
    seen, blind = check_seen_by_all(paths)
    assert (seen.status, seen.key) == ("ok", "data.path")
    assert (blind.status, blind.key) == ("fail", "save.dir")
    assert "10.0.0.2" in blind.seen and "10.0.0.1" not in blind.seen


def test_the_space_of_a_place_that_cannot_be_written_is_no_second_failure(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    storage, disk = check_place(str(tmp_path / "a file" / "runs"), 1 << 60)
    assert (storage.status, disk.status) == ("fail", "na")
    assert [one.status for one in check_place(str(tmp_path / "runs"), 1 << 60)] == ["ok", "fail"]
