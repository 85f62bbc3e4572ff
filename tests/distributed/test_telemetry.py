"""Telemetry, diagnosis and the live view of real runs, each with a planted fault."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raytrain.report.records import read_records
from raytrain.runs.folder import RunFolder

PLANTED = Path(__file__).parent / "guest" / "planted.py"
LIMIT_S = 200


def planted_job(place: Any, *, model: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """A job on the planted model and rows."""
    shutil.copy(PLANTED, place.folder)
    return place.job(
        model={"builder": "planted:net", **(model or {})},
        **{"data": {"source": "planted:rows", "eval_fraction": 0.0}, **sections},
    )


@dataclass(frozen=True)
class Watched:
    """A run of two workers of which rank 1 is slow, what was seen while it ran, and the ends of three commands."""

    run: Any
    metrics: str
    command: Any
    viewer: Any
    stopped_viewer: Any


@pytest.fixture(scope="module")
def watched(module_place: Any, start_module_python: Callable[..., Any]) -> Iterator[Watched]:
    place, start = module_place, start_module_python
    job = planted_job(
        place,
        model={"slow_rank": 1, "delay_s": 0.05},
        loop={"max_steps": 400, "global_batch_size": 16, "log_every": 5},
        scale={"workers": 2, "threads": 1},
        telemetry={"every": 0.2, "tensorboard": False},
    )
    env = {**place.env, "RAY_metrics_report_interval_ms": "500"}
    command = start("-m", "jobs", "train", str(place.write(job)), cwd=place.folder, env=env)
    place.wait_for(place.steps_of(1, more_than=1), limit=90, command=command)
    viewers = [
        start("-m", "jobs", "report", "--follow", str(place.run.path), cwd=place.folder, env=place.env)
        for _ in range(2)
    ]
    ports = [file.read_text() for file in place.temp.glob("*/r/session_*/metrics_export_port_*")]
    found: list[str] = []

    def scraped() -> bool:
        for port in ports:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                    text = answer.read().decode()
            except OSError:
                continue
            if "raytrain_memory_used_bytes" in text:
                found.append(text)
        return bool(found)

    place.wait_for(scraped, limit=60, command=command)
    shown = viewers[1].process.stdout
    assert shown is not None and shown.readline()  # it follows
    viewers[1].process.send_signal(signal.SIGINT)
    stopped = viewers[1].finish(timeout=30)
    ended = command.finish(timeout=LIMIT_S)
    yield Watched(place.run, found[0], ended, viewers[0].finish(timeout=30), stopped)


def telemetry_of(run: Any) -> list[dict[str, Any]]:
    (file,) = (run.path / "telemetry").iterdir()
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.timeout(LIMIT_S + 100)
@pytest.mark.covers("MON-13", "MON-05", "CLI-37")
def test_each_node_has_one_file_with_a_row_every_interval_until_the_end(watched: Watched) -> None:
    assert watched.command.code == 0, watched.command.text
    rows = telemetry_of(watched.run)
    seconds = rows[-1]["time"] - rows[0]["time"]
    assert 10 < len(rows) <= seconds / 0.2 + 2, "one sampler: with two the rows would come twice as often"
    assert {row["attempt"] for row in rows} == {1} and rows[-1]["step"] >= 350
    last = rows[-1]
    workers = [one for one in last["processes"] if "RayTrainWorker" in one["name"]]
    assert len(workers) == 2 and all(one["rss"] > 100 << 20 for one in workers)
    cpu = last["devices"][0]
    assert 0 < cpu["utilisation"] <= 100 and cpu["memory_run"] >= sum(one["rss"] for one in workers)


@pytest.mark.covers("MON-15")
def test_the_figures_of_the_run_are_on_the_prometheus_endpoint(watched: Watched) -> None:
    node = telemetry_of(watched.run)[0]["node"]
    line = next(line for line in watched.metrics.splitlines() if line.startswith("ray_raytrain_memory_total_bytes{"))
    assert f'node="{node}"' in line and f'run="{watched.run.path.name}"' in line and 'device="cpu"' in line
    assert float(line.rpartition(" ")[2]) == telemetry_of(watched.run)[0]["devices"][0]["memory_total"]
    assert watched.metrics.count("ray_raytrain_process_rss_bytes{") >= 2


@pytest.mark.covers("MON-10")
def test_a_slow_rank_is_named_with_its_figures_and_a_key(watched: Watched) -> None:
    named = [line for line in watched.command.out.splitlines() if line.startswith("finding: ")]
    assert len(named) == 1 and "Rank 1 holds the others up: rank 1 works" in named[0] and "scale.shares" in named[0]
    rows = [row for row in watched.run.rows("train") if row["step"] > 200]
    assert {row["slowest_rank"] for row in rows} == {1}
    assert all(row["work_time_s_max"] - row["work_time_s_median"] > 0.04 for row in rows)


def test_the_rows_and_the_report_hold_the_memory_and_the_curves_of_the_devices(watched: Watched) -> None:
    for row in watched.run.rows("train"):
        assert (
            50 << 20 < row["memory_allocated_bytes"] < row["memory_reserved_bytes"] <= row["peak_memory_bytes"] * 1.05
        )
    page = (watched.run.path / "report" / "report.html").read_text()
    assert all(title in page for title in ("Utilisation (%)", "Memory in use (GiB)", "Memory of the run (GiB)"))
    records = read_records(RunFolder(str(watched.run.path)))
    assert len(records.telemetry) == len(telemetry_of(watched.run))


@pytest.mark.covers("VER-09", "VER-14", "MON-02")
def test_every_worker_computed_and_the_rows_hold_memory_and_its_device(watched: Watched) -> None:
    """Busy by the clock of its steps; the slow rank sleeps, which counts as its work."""
    (account,) = watched.run.events("account")
    (attempt,) = watched.run.events("attempt")
    assert len(account["busy"]) == 2 == len(attempt["ranks"]) and min(account["busy"]) > 0.02
    assert account["busy"][1] > 2 * account["busy"][0], "rank 0 waits for rank 1, which is slow"
    page = (watched.run.path / "report" / "report.html").read_text()
    table = page.partition("<h3>Workers</h3>")[2].partition("</table>")[0]
    assert re.findall(r">(\d+%)</td>", table) == [f"{share:.0%}" for share in account["busy"]]
    (copies,) = watched.run.events("transfers")
    assert (copies["device"], copies["workers"], copies["tensors"]) == ("cpu", 2, 0) and len(copies["ranks"]) == 2
    assert copies["reason"].startswith("no copies") and copies["reason"] in page
    assert [rank["device"] for rank in attempt["ranks"]] == ["cpu", "cpu"] and table.count(">cpu</td>") == 2
    assert sorted(rank["pid"] for rank in attempt["ranks"]) == sorted(
        one["pid"] for one in telemetry_of(watched.run)[-1]["processes"] if "RayTrainWorker" in one["name"]
    )
    rows = [row["devices"][0] for row in telemetry_of(watched.run) if row["step"] > 20]
    assert rows and all(row["device"] == "cpu" and row["utilisation"] > 0 for row in rows)
    assert all(0 < row["memory_run"] <= row["memory_used"] <= row["memory_total"] for row in rows)
    for row in watched.run.rows("train"):
        keys = ("memory_allocated_bytes", "memory_reserved_bytes", "peak_memory_bytes")
        assert 0 < row[keys[0]] < row[keys[1]] and row[keys[2]] > 0


def test_another_process_follows_the_run_and_ends_with_its_exit_code(watched: Watched) -> None:
    viewer, stopped = watched.viewer, watched.stopped_viewer
    assert viewer.code == 0, viewer.text
    assert "attempt 1: 2 workers on cpu" in viewer.out and re.search(r"training  step \d+/400  loss \d", viewer.out)
    assert re.search(r"  \d:\d\d:\d\d left\n", viewer.out) and re.search(r": cpu \d+ %, .* GiB of ", viewer.out)
    assert "Rank 1 holds the others up" in viewer.out and viewer.out.rstrip().splitlines()[-1].startswith(
        "Done: 400 steps"
    )
    assert stopped.code == 130 and "the run continues" in stopped.out and watched.command.code == 0


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.covers("MON-10", "CLI-17")
def test_slow_rows_are_input_bound_and_every_0_takes_no_samples(fit: Callable[..., Any], place: Any) -> None:
    run = fit(
        planted_job(
            place,
            data={
                "source": "planted:rows",
                "seconds": 0.003,
                "eval_fraction": 0.0,
                "loader_workers": 0,
                "storage": "stream",
            },
            loop={"max_steps": 16, "log_every": 1, "global_batch_size": 8},
            telemetry={"every": 0, "tensorboard": False},
        )
    )
    assert not (run.path / "telemetry").exists()
    page = (run.path / "report" / "report.html").read_text()
    assert "Input-bound: steps wait for data" in page and "data.loader_workers" in page


@pytest.mark.timeout(LIMIT_S)
def test_an_unbalanced_router_and_memory_above_a_soft_limit_are_named(fit: Callable[..., Any], place: Any) -> None:
    shutil.copy(PLANTED, place.folder)
    job = place.job(
        model={"builder": "planted:skewed", "width": 8, "num_features": 8, "num_classes": 4},
        data={"source": "planted:rows", "eval_fraction": 0.0},
        experts={"num_experts": 4, "hidden": 8, "hosts": 0, "top_k": 1, "balance": "none"},
        loop={"max_steps": 16, "log_every": 1, "global_batch_size": 8},
        cluster={"memory_soft_limit": 64 << 20},  # less than torch itself takes
        telemetry={"every": 0.05, "tensorboard": False},
    )
    run = fit(job)
    (warned,) = run.events("warning")
    assert (warned["what"], warned["total"]) == ("soft_limit", 64 << 20) and warned["used"] > 64 << 20
    listed = (run.path / "logs" / "rank_00000.tensors").read_text().splitlines()
    assert len(listed) == len(warned["tensors"])
    assert "A process uses much memory" in (run.path / "report" / "report.html").read_text()
    page = (run.path / "report" / "report.html").read_text()
    assert "Experts are loaded unevenly" in page and "4 times the mean load" in page and "experts.balance: both" in page


@pytest.mark.timeout(LIMIT_S)
def test_a_healthy_run_has_no_finding(fit: Callable[..., Any], place: Any) -> None:
    run = fit(
        planted_job(
            place,
            loop={"max_steps": 600, "log_every": 1, "global_batch_size": 64},
            telemetry={"every": 0.2, "tensorboard": False},
        )
    )
    page = (run.path / "report" / "report.html").read_text()
    assert 'class="card finding warning"' not in page and 'class="card finding error"' not in page
    assert run.events("warning") == [] and len(telemetry_of(run)) >= 1


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.covers("NODE-09")
def test_a_stopped_rank_and_a_stuck_one_are_named_with_all_stacks_and_the_workers_restart(
    place: Any, start_python: Callable[..., Any]
) -> None:
    """The first does not respond; the second does, in code of the user that never returns."""
    stuck_by = place.folder / "stuck"
    job = planted_job(
        place,
        model={"slow_rank": 1, "delay_s": 0.02, "stuck_by": str(stuck_by)},
        loop={"max_steps": 300, "global_batch_size": 16, "log_every": 5},
        save={"every": 10},
        scale={"workers": 2, "threads": 1},
        retry={"host_silence_s": 12.0, "hang_s": 20.0},
    )
    command = start_python("-m", "jobs", "train", str(place.write(job)), cwd=place.folder, env=place.env)
    place.wait_for(place.steps_of(1, more_than=3), limit=90, command=command)
    pids = [pid for pid in place.processes() if b"RayTrainWorker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    rank_1 = next(pid for pid in pids if any("rank_00001.log" in str(os.readlink(one)) for one in open_files(pid)))
    os.kill(rank_1, signal.SIGSTOP)
    (hang,) = place.wait_for(lambda: place.run.events("hang"), limit=60, command=command)
    own, other = (place.run.path / f"logs/rank_{rank:05d}.stacks" for rank in (0, 1))
    place.wait_for(other.exists, limit=30, command=command)
    assert "_one_step" in own.read_text() and len(other.read_text()) > 20
    place.wait_for(place.steps_of(2, more_than=3), limit=90, command=command)
    stuck_by.touch()
    ended = command.finish(timeout=120)
    hangs = place.run.events("hang")
    assert ended.code == 0 and all(one["reason"] in ended.out for one in hangs), ended.text
    assert hang["ranks"] == hang["silent"] == [1] and 5 <= hang["seconds"] < 40
    assert f"rank 1 on 127.0.0.1 (pid {rank_1}) does not respond" in hang["reason"]
    assert "rank 0 waits in" in hang["reason"] and hang == hangs[0] and len(hangs) == 2
    assert hangs[1]["ranks"] == [1] and hangs[1]["silent"] == [] and "is in hang_by (planted.py:" in hangs[1]["reason"]
    assert "planted.py" in other.read_text() and not stuck_by.exists()
    first, second = place.run.events("hang_ended")
    assert first["rank"] == second["rank"] == 1
    silent = re.search(r"has not responded for (\d+) s", first["reason"])
    assert silent is not None and 12 <= int(silent[1]) < 40, "the limit, and what loaded cores add to it"
    assert re.search(r"rank 1 is stuck \(step \d+ has not ended for (2|3)\d s\): its process", second["reason"])
    assert [row["attempt"] for row in place.run.events("attempt")] == [1, 2, 3] and place.run.result["steps"] == 300


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.covers("NODE-09")
def test_ranks_that_hang_in_an_evaluation_and_in_a_save_are_named_and_ended_and_not_awaited_by_a_stop(
    place: Any, start_python: Callable[..., Any]
) -> None:
    """Their processes respond, and no step is late."""
    stuck_by = place.folder / "stuck"
    in_eval, in_save = stuck_by.with_suffix(".eval"), stuck_by.with_suffix(".save")
    job = planted_job(
        place,
        model={"slow_rank": 1, "delay_s": 0.02, "stuck_by": str(stuck_by)},
        data={"source": "planted:rows", "eval_fraction": 0.1},
        loop={"max_steps": 600, "global_batch_size": 16, "log_every": 5, "eval_every": 100},
        save={"every": 10},
        scale={"workers": 2, "threads": 1},
        retry={"hang_s": 8.0, "stop_grace_s": 3.0},
    )
    in_eval.touch()
    command = start_python("-m", "jobs", "train", str(place.write(job)), cwd=place.folder, env=place.env)
    place.wait_for(lambda: place.run.events("hang_ended"), limit=150, command=command)
    place.wait_for(lambda: place.run.losses()[-1][0] > 100, limit=60, command=command)
    in_save.touch()
    place.wait_for(lambda: len(place.run.events("hang_ended")) == 2, limit=60, command=command)
    in_eval.touch()
    place.wait_for(lambda: not in_eval.exists(), limit=90, command=command)
    command.process.send_signal(signal.SIGTERM)
    ended = command.finish(timeout=60)
    assert ended.code == 130, ended.text
    left = "exited without waiting for the workers: they did not save within 3 s"
    newest = f"the newest checkpoint is of step {place.run.checkpoints()[-1]}"
    assert f"\n{left} (retry.stop_grace_s); {newest}\n" in ended.out and place.run.result["reason"] == left
    of_eval, of_save = place.run.events("hang")
    assert of_eval["reason"] in ended.out and of_save["reason"] in ended.out
    assert of_eval["reason"].startswith("the evaluation after step 100 has not advanced for ")
    assert "rank 1 on" in of_eval["reason"] and "is in hang_by (planted.py:" in of_eval["reason"]
    assert "rank 0 waits in" in of_eval["reason"] and (of_eval["ranks"], of_eval["step"]) == ([1], 100)
    assert re.match(r"saving the checkpoint of step \d+0 has not advanced for \d+ s: rank 0 on", of_save["reason"])
    assert "is in hang_by (planted.py:" in of_save["reason"] and of_save["ranks"] == [0]
    assert [row["rank"] for row in place.run.events("hang_ended")] == [1, 0]
    assert "rank 1 is stuck (the evaluation after step 100 has not advanced for" in ended.out
    first, second, third = [row["from_step"] for row in place.run.events("attempt")]
    assert (first, second) == (0, 90) and third > 90
    steps = [step for step, _ in place.run.losses()]
    assert steps == [1, *range(5, steps[-1] + 1, 5)] and steps[-1] % 100 == 0


def open_files(pid: int) -> list[Path]:
    """The open files of a process, which may close some meanwhile."""
    return [one for one in Path(f"/proc/{pid}/fd").iterdir() if one.exists()]
