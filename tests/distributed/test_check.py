"""`raytrain check` on this machine (test_nodes.py: on two nodes): its verdict follows what it did."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.devices.limits import cpu_description
from cluster.wording import seconds, size

MACHINE = [
    "storage",
    "shared_storage",
    "disk",
    "memory",
    "shared_memory",
    "network",
    "visible_devices",
    "devices",
    "load",
    "kernel_caches",
]


@pytest.fixture(scope="module")
def checked(start_module_python: Callable[..., Any], module_place: Any) -> tuple[Path, Any]:
    """The folder of a whole check of a job, with a bundle, and the check. Each row of its data takes a millisecond."""
    folder, env = module_place.folder, {"MY_TOKEN": "not-for-support"}
    data = {"source": "guest_code:slow_rows", "pause": 0.001, "storage": "stream"}
    module_place.write(module_place.job(data=data, precision={"dtype": "auto"}))
    started = start_module_python("-m", "jobs", "check", "job.yaml", "--json", "--bundle", "b.zip", cwd=folder, env=env)
    done = started.finish(timeout=200)
    assert done.code == 0, done.text
    return folder, done


@pytest.mark.timeout(240)
@pytest.mark.covers("VER-02", "TRB-41", "SRC-02")
def test_a_bundle_holds_the_machine_and_the_training_and_each_worker_trained_on_its_device(
    checked: tuple[Path, Any],
) -> None:
    folder, done = checked
    assert "b.zip" in done.err and "loop.max_steps=5" in done.err
    with zipfile.ZipFile(folder / "b.zip") as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    assert not any("not-for-support" in text for text in files.values()) and "MY_TOKEN" in files["README.txt"]
    report = json.loads(files["check.json"])
    assert report == json.loads(done.out)
    trained = [row for row in report["training"] if row["what"] == "training"]
    assert trained and all(row["devices"] == [row["device"]] for row in trained)
    (fp32,) = [check for check in report["checks"] if check["name"] == "training in fp32"]
    assert fp32["status"] == "ok" and fp32["seen"].endswith(f"on {trained[0]['device']}") and report["nodes"]


@pytest.mark.timeout(240)
@pytest.mark.covers("DEV-10", "VER-04", "CLI-26")
def test_every_format_of_this_machine_trains_in_one_fit(checked: tuple[Path, Any]) -> None:
    tmp_path, done = checked
    report = json.loads(done.out)
    formats = ["fp32", "bf16"] if any(cpu_description()[1].values()) else ["fp32"]
    names = [check["name"] for check in report["checks"]]
    assert names == [
        "python", "torch", "ray", "platform", *MACHINE, "clocks", "repeated_products", "rates",
        "memory_monitoring", "collectives",
        *(f"training in {dtype}" for dtype in formats), "batch_copies",
        "job data", "job precision", "job memory", "job loaders",
    ]  # fmt: skip
    (copies,) = [check for check in report["checks"] if check["name"] == "batch_copies"]
    assert copies["status"] == "na" and copies["seen"].startswith("not shown: ")
    assert {check["status"] for check in report["checks"]} <= {"ok", "na", "warn"} and report["status"] == "ok"
    trained = [row for row in report["training"] if row["what"] == "training"]
    assert [(row["rank"], row["precision"]) for row in trained] == [(rank, f) for rank in (0, 1) for f in formats]
    for row in trained:
        first, second = row["losses"]
        assert second < first < 1.05 * math.log(256) and row["moved"]
    assert [row["losses"] for row in trained[: len(formats)]] == [row["losses"] for row in trained[len(formats) :]]
    moved = [row for row in report["training"] if row["what"] == "collectives"]
    assert all(row["all_reduce"] > 0 < row["all_to_all"] and row["world_size"] == 2 for row in moved)
    assert not (tmp_path / "runs").exists(), "nothing is left where it wrote"
    record = next(iter(report["nodes"].values()))
    assert record["environment"]["versions"]["torch"] and record["devices"][0]["kind"] in ("cpu", "cuda", "rocm")


@pytest.mark.timeout(240)
@pytest.mark.covers("BP-21", "TUNE-11", "TRB-22")
def test_a_named_job_is_measured_on_its_own_data_in_precision_memory_and_loaders(checked: tuple[Path, Any]) -> None:
    """Each of the four answers states what was measured."""
    report = json.loads(checked[1].out)
    seen = {check["name"]: check["seen"] for check in report["checks"] if check["name"].startswith("job ")}
    half, fp32, *others = report["job"]
    bf16 = next(row for row in others if row["precision"] == "bf16")
    assert (half["rows_asked"], fp32["rows_asked"], bf16["rows_asked"]) == (6, 12, 12)
    assert (
        f"bf16 {seconds(bf16['step_s'])}, {fp32['step_s'] / bf16['step_s']:.2f} times as fast" in seen["job precision"]
    )
    losses = fp32["losses"]
    assert len(losses) == 12 and f"losses {losses[0]:.4g} to {losses[-1]:.4g}" in seen["job data"]
    assert seen["job data"].startswith("240 rows of guest_code:slow_rows; 12 steps of 12 rows in fp32: losses ")
    assert 0 < fp32["peak_bytes"] < fp32["budget"]
    assert f"a peak of {size(fp32['peak_bytes'])} of {size(fp32['budget'])}" in seen["job memory"]
    steps = {row["loaders"]: row["step_s"] for row in [fp32, *others] if row["precision"] == "fp32"}
    assert list(steps) == [0, 1, 2, 4] and all(
        f"{seconds(step)} a step" in seen["job loaders"] for step in steps.values()
    )
    best = min(count for count, step in steps.items() if step <= 1.05 * min(steps.values()))
    assert f"best data.loader_workers={best} (0: " in seen["job loaders"], "the fewest processes of the fastest"
    assert fp32["data_s"] > 12 * 0.001 and steps[0] > 12 * 0.001, "the rows' own time"


@pytest.mark.timeout(120)
@pytest.mark.covers("DEV-14", "DEV-09", "CLI-25")
def test_storage_that_cannot_be_written_turns_the_verdict_and_ends_with_1(
    run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    broken = run_cli("check", "save.dir=file/runs", cwd=tmp_path)
    assert broken.code == 1, broken.text
    assert "FAILED" in broken.out and "storage" in broken.out and "training            left out" in broken.out
    assert "set save.dir to a folder" in " ".join(broken.out.split())
    wrong = run_cli("check", "cluster.address=127.0.0.1:1", cwd=tmp_path)
    assert wrong.code == 2 and "cluster.address" in wrong.text
    (tmp_path / "job.yaml").write_text(
        '{"model": {"builder": "no_such:net", "context": 8}, "data": {"source": "stdlib"}}'
    )
    wrong = run_cli("check", "job.yaml", cwd=tmp_path)
    assert wrong.code == 2 and "model.builder" in wrong.err and "python " not in wrong.out, "before Ray starts"
    typo = run_cli("check", "scale.worker=2", cwd=tmp_path)
    assert typo.code == 2 and "scale.workers" in typo.text


@pytest.mark.timeout(120)
@pytest.mark.covers("COMPAT-07", "TRB-25")
def test_the_check_needs_no_tool_of_the_system_and_can_be_one_line(run_cli: Callable[..., Any], tmp_path: Path) -> None:
    """No nvidia-smi, no rocm-smi: facts come from the driver's library and the kernel."""
    bare = {"PATH": str(tmp_path / "no tools")}
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "one.so").write_bytes(bytes(3 << 20))
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kernels"), "CUDA_CACHE_PATH": str(tmp_path / "none")}
    plain = run_cli("check", "--quick", cwd=tmp_path, env=bare | kept)
    assert f"no CUDA; kept: torch.compile 3 MiB in {tmp_path / 'kernels'}" in plain.out and "none" not in plain.out
    assert "torch               2." in plain.out
    short = run_cli("check", "--short", "--quick", cwd=tmp_path, env=bare)
    assert short.code == 0, short.text
    (line,) = short.out.splitlines()
    assert line.startswith("ok: 1 node, 1 x ") and "CUDA devices 0; torch 2." in line and " 0 failed" in line


def in_a_container(*command: str) -> list[str]:
    """Arguments of Python that run `python -m jobs COMMAND` where /dev/shm has 64 MiB, as in a container by default."""
    script = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    arguments = [
        "unshare",
        "--mount",
        "--map-root-user",
        "sh",
        "-c",
        script,
        "sh",
        sys.executable,
        "-m",
        "jobs",
        *command,
    ]
    return ["-c", f"import os; os.execvp('unshare', {arguments!r})"]


@pytest.mark.timeout(240)
@pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "--map-root-user", "true"]).returncode != 0,
    reason="this system lets no user make a mount namespace",
)
@pytest.mark.covers("DEV-12", "MEM-19", "CFG-13")
def test_a_container_with_little_shared_memory_and_lesser_devices_than_wanted_is_warned_of_and_trains(
    start_python: Callable[..., Any], tmp_path: Path
) -> None:
    """The loader processes read ahead 2 x 2 batches of 24 MiB, more than /dev/shm holds: they do not use it."""
    wanted = ("cluster.wanted_memory=9000000000000", "cluster.wanted_capability=99")
    checked = start_python(*in_a_container("check", "--quick", "--json", *wanted), cwd=tmp_path).finish(timeout=100)
    assert checked.code == 0, checked.text
    found = {check["name"]: check for check in json.loads(checked.out)["checks"]}
    shared, devices = found["shared_memory"], found["wanted_devices"]
    assert shared["status"] == "warn" and shared["seen"] == "64 MiB free in /dev/shm"
    assert shared["expected"] == "256 MiB free" and "docker run --shm-size=" in shared["remedy"]
    assert devices["status"] == "warn" and devices["key"] == "cluster.wanted_memory"
    assert devices["expected"] == "8.19 TiB of memory and compute capability 99.0"
    total = json.loads(checked.out)["nodes"][devices_node(checked)]["limits"]["memory_total_bytes"]
    assert f"has {size(total)} and no compute capability" in devices["seen"]

    shutil.copy(Path(__file__).parent / "guest" / "large_rows.py", tmp_path)
    job = [
        "model.builder=large_rows:sums", "data.source=large_rows:rows", "data.eval_fraction=0", "data.loader_workers=2",
        "data.storage=stream", "loop.epochs=2", "loop.global_batch_size=24", "name=large", *wanted,
    ]  # fmt: skip
    (tmp_path / "job.yaml").write_text("model: {builder: large_rows:sums}\n")
    trained = start_python(*in_a_container("train", "job.yaml", *job), cwd=tmp_path).finish(timeout=200)
    assert trained.code == 0, trained.text
    result = json.loads((tmp_path / "runs" / "latest" / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("done", 4)
    events = (tmp_path / "runs" / "latest" / "events.jsonl").read_text().splitlines()
    (worker,) = [row["ranks"][0]["pid"] for row in map(json.loads, events) if row["kind"] == "attempt"]
    read = [line.split() for line in (tmp_path / "readers.txt").read_text().splitlines()]
    loaded = [(pid, int(index)) for pid, index in read if pid.startswith(f"{worker}-")]
    assert len({pid for pid, _ in loaded}) == 2, "the loader processes of the first epoch read the second one too"
    assert min(Counter(index for _, index in loaded).values()) >= 2 and {index for _, index in loaded} == set(range(48))
    plan = json.loads((tmp_path / "runs" / "latest" / "plan.json").read_text())
    assert any("cluster.wanted_memory: the job is meant for" in line for line in plan["warnings"])


def devices_node(checked: Any) -> str:
    """The only node's name."""
    (node,) = json.loads(checked.out)["nodes"]
    return node
