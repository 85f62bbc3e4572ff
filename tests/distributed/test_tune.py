"""The command `raytrain tune`: killed, interrupted, resumed, with trials that die; real Ray, real processes."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from cluster.devices.inventory import local_inventory
from jobs.job.spec import load_spec
from raytrain.report.plots import figure, png

LIMIT_S = 280
MIB = 2**20
LIMIT, ROW_MIB = 1000 * MIB, 8


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Complete lines of trials.jsonl."""
    file = folder / "trials.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def sweeps(place: Any) -> list[Path]:
    """Sweep folders, the oldest first."""
    return sorted((place.folder / "runs").glob("*-tune-*"))


@dataclass(frozen=True)
class Search:
    """A search below a memory ceiling that was killed and resumed."""

    place: Any
    file: str
    sweep: Path
    before: list[dict[str, Any]]
    printed: str
    run: Callable[..., Any]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return rows_of(self.sweep)

    @property
    def outcome(self) -> dict[str, Any]:
        return json.loads((self.sweep / "tune.json").read_text())


@pytest.fixture(scope="module")
def search(module_place: Any, start_module_python: Callable[..., Any]) -> Search:
    """24 MiB a row, a process of some hundred: 128 rows, the fastest, 64 and 32 are above the limit. A trial of 16 rows
    dies each time it is made, twice at most, so 8 are left."""
    place = module_place

    def run(*arguments: str) -> Any:
        return start_module_python("-m", "jobs", *arguments, cwd=place.folder, env=place.env).finish(timeout=LIMIT_S)

    job = place.job(
        name="searched",
        model={
            "builder": "guest_code:searched", "row_mib": ROW_MIB, "deadly": 16, "pause": 0.15,
            "note": str(place.folder / "resident.jsonl"),
        },
        loop={"global_batch_size": 128},
        precision={"dtype": "auto"},
        cluster={"memory_limit": LIMIT},
    )  # fmt: skip
    file = str(place.write(job))
    killed = start_module_python("-m", "jobs", "tune", file, cwd=place.folder, env=place.env)
    place.wait_for(lambda: sweeps(place) and len(rows_of(sweeps(place)[0])) >= 2, limit=LIMIT_S, command=killed)
    killed.signal_group(signal.SIGKILL)
    killed.process.wait(timeout=30)
    (sweep,) = sweeps(place)
    before = rows_of(sweep)
    resumed = run("tune", "--resume", str(sweep))
    assert resumed.code == 0, resumed.text
    return Search(place, file, sweep, before, resumed.text, run)


@pytest.mark.timeout(590)
@pytest.mark.covers("TUNE-05", "TUNE-10", "TUNE-13")
def test_a_search_below_a_memory_ceiling_is_killed_resumed_and_used(search: Search) -> None:
    place, sweep, rows, before = search.place, search.sweep, search.rows, search.before
    assert rows[: len(before)] == before, "what had ended is not run again"
    assert sorted({row["trial"] for row in rows}) == list(range(1, 1 + len({row["trial"] for row in rows})))
    check_rows(rows, LIMIT)
    assert {row["precision"] for row in rows} == precisions_here()
    check_best(sweep, LIMIT, search.printed)
    trained = search.run("train", "--from-tune", str(sweep), "loop.max_steps=3")
    assert trained.code == 0, trained.text
    plan, best = json.loads(Path(place.run.path, "plan.json").read_text()), load_spec(sweep / "best.yaml").spec
    used = plan["choices"]
    assert used["micro_batch_size"]["value"] == best.loop.micro_batch_size
    assert used["precision"]["value"] == best.precision.dtype
    assert place.end(within=20) == []


@pytest.mark.timeout(590)
@pytest.mark.covers("PERF-04")
def test_the_peak_of_the_chosen_batch_is_what_its_process_used_and_is_reported_as_a_share_of_the_limit(
    search: Search,
) -> None:
    """The model notes what is resident before the backward, which takes two thirds of what the rows take."""
    memory, chosen = search.outcome["memory"], search.outcome["values"]["loop.micro_batch_size"]
    peak = memory["peak_bytes"]
    assert memory == {"peak_bytes": peak, "limit_bytes": LIMIT, "used": peak / LIMIT}
    lines = map(json.loads, (search.place.folder / "resident.jsonl").read_text().splitlines())
    resident = [used for rows, used in lines if rows == chosen]
    behind = 2 * ROW_MIB * MIB * chosen
    assert min(abs(peak - used - behind) for used in resident) < 4 * MIB
    assert 0.4 < memory["used"] < 0.75, "of the sizes that do not die, the largest and half of it"
    assert f"memory      {memory['used']:.1%} used: a peak of" in search.printed


@pytest.mark.timeout(590)
def test_runs_find_the_micro_batch_of_sharded_models(run_cli: Callable[..., Any], tiny_text: Path, place: Any) -> None:
    """Trials are sharded runs of both workers; a search that measures in one process reports that it cannot shard."""
    job = {
        "name": "shards",
        "model": {"builder": "raytrain.models.gpt:gpt", "layers": 2, "heads": 2, "width": 16, "context": 16},
        "data": {"source": "text", "path": str(tiny_text)},
        "precision": {"dtype": "fp32"},
        "loop": {"global_batch_size": 8, "max_steps": 4, "log_every": 1},
        "scale": {"strategy": "fsdp", "workers": 2, "threads": 1},
        "telemetry": {"tensorboard": False},
    }
    file = str(place.write(job))
    refused = run_cli("tune", file, cwd=place.folder, env=place.env)
    assert refused.code == 2 and "scale.strategy" in refused.text and "tune.space=" in refused.text
    space = "tune.space={loop.micro_batch_size: [1, 4]}"
    tuned = run_cli("tune", file, space, "tune.metric=samples_per_s", cwd=place.folder, env=place.env, timeout=LIMIT_S)
    assert tuned.code == 0, tuned.text
    (sweep,) = sweeps(place)
    rows = rows_of(sweep)
    assert [(row["values"]["loop.micro_batch_size"], row["outcome"], row["steps"]) for row in rows] == [
        (1, "ok", 4), (4, "ok", 4),
    ]  # fmt: skip
    for row in rows:
        (attempt,) = place.run_at(row["run"]).events("attempt")
        assert attempt["sharded"]["own"] < attempt["sharded"]["whole"], "each worker held its rows alone"
    best = load_spec(sweep / "best.yaml").spec
    fastest = max(rows, key=lambda row: row["samples_per_s"])
    assert best.loop.micro_batch_size == fastest["values"]["loop.micro_batch_size"]
    assert best.scale.strategy == "fsdp" and best.scale.workers == 2
    assert place.end(within=20) == []


def precisions_here() -> set[str]:
    """What `precision.dtype: auto` tries on this CPU."""
    return {"fp32", "bf16"} if any(local_inventory().cpu_flags.values()) else {"fp32"}


def check_rows(rows: list[dict[str, Any]], limit: int) -> None:
    """One trial died and no other; raw values of every pass are there; none was above the ceiling but as a result."""
    dead = [row for row in rows if row["outcome"] == "died"]
    assert {row["micro_batch_size"] for row in dead} == {16}
    for number in {row["trial"] for row in dead}:
        assert len([row for row in dead if row["trial"] == number]) <= 2, "once in each of two commands"
    assert all("died" in row["measured"][0]["reason"] for row in dead)
    timed = [row for row in rows if row["measured"][0]["pass_s"]]
    assert len({row["micro_batch_size"] for row in timed}) >= 2
    fitted = [row["measured"][0]["peak_bytes"] for row in rows if row["outcome"] == "ok"]
    assert all(peak is None or peak <= limit for peak in fitted)


def check_best(sweep: Path, limit: int, text: str) -> None:
    """best.yaml is a job with reasons, below the ceiling; the rest of the result is there."""
    best = load_spec(sweep / "best.yaml").spec
    outcome = json.loads((sweep / "tune.json").read_text())
    peak = outcome["memory"]["peak_bytes"]
    assert 0 < peak <= limit and best.loop.micro_batch_size == 8
    assert best.loop.global_batch_size == 128 and best.precision.dtype in precisions_here()  # equally fast: both wait
    assert outcome["status"] == "done" and outcome["values"]["loop.micro_batch_size"] == 8
    table = outcome["decision"]["table"]
    assert {row["precision"] for row in table} == precisions_here() and len(table) >= 4, "the result table is saved"
    share = outcome["memory"]["used"]
    assert outcome["memory"]["limit_bytes"] == limit and share == peak / limit
    assert any(len(row["measured"]) > 1 for row in rows_of(sweep)), "the winner took turns with its rivals"
    words = " ".join((sweep / "best.yaml").read_text().replace("#", " ").split())
    assert "rows/s" in words and " times as fast as " in words and "of what a process may take" in words
    assert f"its peak is {share:.1%} of what a process may take" in words and f"memory      {share:.1%} used" in text
    assert "predicted peak: " in text and " at 2x this micro-batch" in text
    spec = json.loads((sweep / "tune_plot.json").read_text())
    drawn = {
        (line["label"], *at) for line in spec["panels"][0]["series"] for at in zip(line["x"], line["y"], strict=True)
    }
    timed = {(row["precision"], row["micro_batch_size"], row["rows_per_s"]) for row in table if row["rows_per_s"]}
    assert {at for at in drawn if at[2] is not None} == timed and len(timed) >= 3
    pixels = [imread(io.BytesIO(data)) for data in ((sweep / "tune.png").read_bytes(), png(figure(spec)))]
    assert np.array_equal(*pixels), "the file is the picture of this spec"


@pytest.mark.timeout(590)
@pytest.mark.covers("TUNE-07")
def test_runs_of_a_space_are_stopped_early_interrupted_and_resumed(
    start_cli: Callable[..., Any], run_cli: Callable[..., Any], guest_job: Callable[..., dict[str, Any]], place: Any
) -> None:
    """One good learning rate, one that overflows, two that do not learn; one at a time, since each takes all cores."""
    job = guest_job(
        name="space",
        model={"pause": 0.01},
        loop={"max_steps": 40, "eval_every": 4},
        scale={"threads": len(os.sched_getaffinity(0))},
        retry={"rollbacks": 0},
        tune={"space": {"optim.lr": [0.03, 1e30, 1e-9, 1e-10]}, "scheduler": "asha"},
    )
    stopped = start_cli("tune", str(place.write(job)), cwd=place.folder, env=place.env)
    place.wait_for(lambda: sweeps(place) and rows_of(sweeps(place)[0]), limit=LIMIT_S, command=stopped)
    stopped.process.send_signal(signal.SIGINT)
    ended = stopped.finish(timeout=90)
    (sweep,) = sweeps(place)
    assert ended.code == 130, ended.text
    assert f"raytrain tune --resume {sweep.relative_to(place.folder)}" in ended.out and "Traceback" not in ended.text
    before = rows_of(sweep)
    assert 1 <= len(before) < 4
    resumed = run_cli("tune", "--resume", str(sweep), cwd=place.folder, env=place.env, timeout=LIMIT_S)
    assert resumed.code == 0, resumed.text
    rows = rows_of(sweep)
    assert rows[: len(before)] == before
    by_rate = {row["values"]["optim.lr"]: row for row in rows}
    assert len(rows) == len(by_rate) == 4
    assert by_rate[0.03]["outcome"] == "ok" and by_rate[0.03]["steps"] == 40
    assert by_rate[1e30]["outcome"] == "error" and "finite" in by_rate[1e30]["reason"]
    assert [by_rate[rate]["outcome"] for rate in (1e-9, 1e-10)] == ["stopped", "stopped"]
    assert all(by_rate[rate]["steps"] < 40 for rate in (1e-9, 1e-10))
    assert load_spec(sweep / "best.yaml").spec.optim.lr == 0.03
    assert {path.name[:10] for path in (sweep / "runs").glob("trial-*")} == {f"trial-{n:04d}" for n in (1, 2, 3, 4)}
    done = run_cli("tune", "--resume", str(sweep), cwd=place.folder, env=place.env)
    assert done.code == 0 and "is done" in done.out
    assert place.end(within=20) == []
