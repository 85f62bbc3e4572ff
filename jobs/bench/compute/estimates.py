"""Bench `estimates`: what the plan predicts for a step's time and memory, beside what is measured, over different jobs.

Each measurement is a process of its own (`python -m jobs.bench.compute.estimates SETTINGS.json`): times with torch's
usual allocation, memory where freed pages go back to the system at once (`memory.MALLOC`), above a floor of a small job
that has loaded torch's kernels. Layouts of experts are measured by `raytrain train` itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from cluster.config import Count
from jobs.bench.compute.memory import MALLOC, TIMEOUT_S
from jobs.bench.harness.measuring import BenchMeasurement, Check, Say
from jobs.bench.harness.options import BenchOptions
from raytrain.errors import InputError, RunError

STEPS_BEFORE, STEPS = 2, 3
TIME_FACTOR = 2.0
"""A predicted time is right within this factor of the measured one."""

ABOVE, BELOW = 1.25, 0.9
"""Predicted memory is right between these fractions of the measured peak."""

GPT = {"builder": "raytrain.models.gpt:gpt", "layers": 4, "heads": 4, "width": 128, "context": 128}
RECIPE_GPT = {"builder": "raytrain.models.gpt:gpt", "layers": 4, "heads": 4, "width": 128, "context": 64}
SHAKESPEARE = {"builder": "raytrain.models.gpt:gpt", "layers": 2, "heads": 2, "width": 192, "context": 32}
MOE = {"builder": "experts.models:moe_gpt", "layers": 4, "heads": 4, "width": 128, "context": 128}
WIDE_MOE = {"builder": "experts.models:moe_gpt", "layers": 2, "heads": 4, "width": 256, "context": 64}
TINY = {"builder": "raytrain.models.gpt:gpt", "layers": 1, "heads": 1, "width": 16, "context": 8}

JOBS: dict[str, dict[str, Any]] = {
    "gpt": {"model": GPT, "rows": 32},
    "gpt, blocks recomputed": {"model": GPT, "rows": 32, "loop": {"activation_checkpointing": True}},
    "gpt, bf16": {"model": GPT, "rows": 32, "dtype": "bf16"},
    "gpt, fp64": {"model": GPT, "rows": 16, "dtype": "fp64"},
    "gpt, muon, 4 micro-batches": {
        "model": GPT, "rows": 32, "loop": {"micro_batch_size": 8}, "optim": {"name": "muon"},
    },
    "gpt, sgd": {"model": RECIPE_GPT, "rows": 48, "optim": {"name": "sgd", "momentum": 0.0}},
    "shakespeare recipe": {"model": SHAKESPEARE, "rows": 48, "dtype": "bf16", "optim": {"name": "muon"}},
    "mlp": {"model": {"builder": "raytrain.models.mlp:mlp", "hidden": [2048, 2048]}, "rows": 2048, "data": "digits"},
    "cnn": {"model": {"builder": "raytrain.models.cnn:cnn", "channels": [16, 32]}, "rows": 512, "data": "digits"},
    "moe_gpt": {"model": MOE, "rows": 16, "experts": {"num_experts": 4, "top_k": 2, "hosts": 0}},
    "moe_gpt, 8 wide experts, bf16, recomputed": {
        "model": WIDE_MOE, "rows": 32, "dtype": "bf16", "experts": {"num_experts": 8, "top_k": 2, "hosts": 0},
        "loop": {"activation_checkpointing": True},
    },
    "own module": {
        "model": {"builder": "jobs.bench.compute.estimates_model:network", "width": 512, "depth": 4}, "rows": 1024,
        "data": "rows",
    },
    "transformers": {
        "model": {"builder": "raytrain.models.transformers:causal_lm", "init": "random", "path": ""}, "rows": 16,
    },
}  # fmt: skip

LAYOUTS: dict[str, dict[str, Any]] = {
    "default recipe": {"recipe": "default"},
    "8 wide experts": {
        "recipe": "default",
        "changes": ["model.width=256", "model.layers=2", "model.context=64", "experts.num_experts=8"],
    },
}


class EstimatesOptions(BenchOptions):
    """Predicted and measured step time and memory of different jobs, and of two layouts of experts."""

    MEASURES: ClassVar[str] = "the plan's step time and memory against what is measured, over many jobs"
    QUICK: ClassVar[dict[str, Any]] = {"only": ["gpt, sgd", "own module"], "layouts": [], "steps": 2}

    only: list[str] = Field(default_factory=lambda: list(JOBS), description="the jobs to measure")
    layouts: list[str] = Field(
        default_factory=lambda: list(LAYOUTS), description="the jobs whose experts are measured in process and on hosts"
    )
    steps: Count = Field(12, description="timed steps of each job, after two that warm up")


def run(options: EstimatesOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Predict and measure each job; see `EstimatesOptions`.

    Raises:
        InputError: a job that is not known.
        RunError: a process failed.
    """
    for key, known in (("only", JOBS), ("layouts", LAYOUTS)):
        for name in getattr(options, key):
            if name not in known:
                raise InputError(key, got=name, expected=f"names of {', '.join(known)}")
    found = BenchMeasurement(
        "estimates", quick, options.model_dump(), "predicted over measured, of a step's time and memory", unit="ratio"
    )
    rows: list[dict[str, Any]] = []
    for name in options.only:
        if name == "transformers" and importlib.util.find_spec("transformers") is None:
            say("transformers is not installed: left out")
            continue
        say(f"{name}: a process for its time, and one for its memory")
        rows.append({"job": name, **_in_processes(name, options)})
    layouts = [_layout_rows(name, options, say) for name in options.layouts]
    found.arms = {row["job"]: [row["time_ratio"]] for row in rows}
    found.values |= {"jobs": rows, "layouts": layouts, "table": table(rows, layouts)}
    found.gate(Check("every job ran", bool(rows or layouts), f"{len(rows)} jobs, {len(layouts)} with layouts"))
    for row in rows:
        time_text = f"{1e3 * row['predicted_s']:.3g} ms predicted, {1e3 * row['measured_s']:.3g} ms measured"
        inside = 1 / TIME_FACTOR <= row["time_ratio"] <= TIME_FACTOR
        found.claim(f"{row['job']}: predicted step time within a factor of {TIME_FACTOR:g}", inside, time_text)
        sizes = [row[key] / 2**20 for key in ("predicted_bytes", "measured_bytes")]
        memory_text = f"{sizes[0]:.1f} MiB predicted, {sizes[1]:.1f} MiB measured above the floor"
        held = BELOW <= row["memory_ratio"] <= ABOVE
        found.claim(f"{row['job']}: predicted memory from -10 % to +25 %", held, memory_text)
    for row in layouts:
        ranked = row["predicted"]["0"] < row["predicted"]["2"]
        holds = ranked == (row["measured"]["0"] < row["measured"]["2"])
        each = ", ".join(
            f"{hosts} hosts: {1e3 * row['predicted'][hosts]:.3g} ms predicted, {1e3 * spent:.3g} ms measured"
            for hosts, spent in row["measured"].items()
        )
        found.claim(f"{row['job']}: the faster layout is predicted", holds, each)
    for line in found.values["table"]:
        say(line)
    return found


def table(rows: list[dict[str, Any]], layouts: list[dict[str, Any]]) -> list[str]:
    """A Markdown table of all estimates beside their measurements."""
    lines = ["| job | step, predicted / measured | memory, predicted / measured |", "|---|---|---|"]
    for row in rows:
        times = f"{1e3 * row['predicted_s']:.3g} / {1e3 * row['measured_s']:.3g} ms = {row['time_ratio']:.2f}"
        sizes = f"{row['predicted_bytes'] / 2**20:.1f} / {row['measured_bytes'] / 2**20:.1f} MiB"
        lines.append(f"| {row['job']} | {times} | {sizes} = {row['memory_ratio']:.2f} |")
    for row in layouts:
        for hosts, spent in row["measured"].items():
            predicted = row["predicted"][hosts]
            times = f"{1e3 * predicted:.3g} / {1e3 * spent:.3g} ms = {predicted / spent:.2f}"
            lines.append(f"| {row['job']}, `experts.hosts {hosts}`, as a run | {times} | |")
    return lines


def _in_processes(name: str, options: EstimatesOptions) -> dict[str, Any]:
    settings = {"job": name, "steps": options.steps, "threads": options.threads, "seed": options.seed}
    timed = _ask({**settings, "measure": "time"}, {})
    sized = _ask({**settings, "measure": "memory"}, MALLOC)
    return {
        **timed,
        **sized,
        "time_ratio": timed["predicted_s"] / timed["measured_s"],
        "memory_ratio": sized["predicted_bytes"] / sized["measured_bytes"],
    }


def _ask(settings: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rtb-") as folder:
        path = Path(folder) / "settings.json"
        path.write_text(json.dumps({**settings, "folder": folder}))
        command = [sys.executable, "-m", "jobs.bench.compute.estimates", str(path)]
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    if done.returncode:
        raise RunError(f"{settings['job']}: {' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _layout_rows(name: str, options: EstimatesOptions, say: Say) -> dict[str, Any]:
    """Predicted and measured step seconds of a job with its experts in process, and on two hosts."""
    from jobs.driver.plan import plan_job
    from jobs.job.spec import load_spec

    layout = LAYOUTS[name]
    predicted, measured = {}, {}
    for hosts in ("0", "2"):
        say(f"{name}: a run with experts.hosts {hosts}")
        with tempfile.TemporaryDirectory(prefix="rtb-") as folder:
            changes = [
                *layout.get("changes", ()), f"experts.hosts={hosts}", f"loop.max_steps={STEPS_BEFORE + options.steps}",
                "loop.log_every=1", "loop.eval_every=1000", "precision.dtype=fp32", "experts.inflight=1",
                f"save.dir={folder}",
            ]  # fmt: skip
            command = [sys.executable, "-m", "jobs", "train", layout["recipe"], *changes]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            if done.returncode:
                raise RunError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
            lines = (Path(folder) / "latest" / "metrics.jsonl").read_text().splitlines()
            rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
            measured[hosts] = statistics.median(row["step_time_s"] for row in rows[STEPS_BEFORE:])
            plan = plan_job(load_spec(layout["recipe"], changes))
            predicted[hosts] = float(plan.value("step_time", 0.0))
    return {"job": name, "predicted": predicted, "measured": measured}


# ---------------------------------------------------------------- one process


def measure(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What one process finds: {"predicted_s", "measured_s", "times"}, or {"predicted_bytes", "measured_bytes"}."""
    import torch

    from jobs.bench.harness.sessions import SessionArm
    from raytrain.train.compute.calibrate import calibration_of_machine

    wanted = JOBS[settings["job"]]
    job, precision = _job(wanted, settings), wanted.get("dtype", "fp32")
    if settings["measure"] == "memory":
        return _memory(settings, job, precision)
    calibration_of_machine(torch.device("cpu"))
    arm = SessionArm(job, precision=precision)
    torch.set_num_threads(int(arm.session.job.planned("threads")))
    arm.run(STEPS_BEFORE)
    times = [arm.run(1) for _ in range(settings["steps"])]
    predicted = arm.session.job.plan.value("step_time", None)
    if predicted is None:
        raise RunError("the plan predicts no step time: the model could not be traced")
    return {"predicted_s": float(predicted), "measured_s": statistics.median(times), "times": times}


def _memory(settings: Mapping[str, Any], job: dict[str, Any], precision: str) -> dict[str, Any]:
    """Predicted and measured bytes above a process that has trained a tiny model."""
    import gc

    from cluster.telemetry.process import process_memory, reset_peak
    from jobs.bench.harness.sessions import SessionArm
    from jobs.driver.session import worker_job
    from raytrain.plan.rules.memory import PROCESS_BYTES
    from raytrain.train.memory.allocator import give_back_free_pages

    wanted = {**JOBS[settings["job"]], "model": TINY, "rows": 8}
    for name in ("experts", "data"):
        wanted.pop(name, None)
    wanted["loop"] = {key: value for key, value in wanted.get("loop", {}).items() if key == "activation_checkpointing"}
    worker_job(job)  # a trace of the model imports what a worker does not
    tiny = SessionArm(_job(wanted, settings), precision=precision)
    tiny.run(STEPS_BEFORE)
    tiny.session.close()
    tiny.session.release()
    del tiny
    gc.collect()
    give_back_free_pages()
    floor = process_memory().rss
    arm = SessionArm(job, precision=precision)
    arm.run(STEPS_BEFORE)
    gc.collect()
    give_back_free_pages()
    reset_peak()
    arm.run(STEPS)
    of_steps = max(arm.reporter.peaks[STEPS_BEFORE:])
    arm.session.evaluate(STEPS_BEFORE + STEPS)
    of_eval = process_memory().peak
    peak = max(of_steps, of_eval)
    predicted = int(arm.session.job.plan.value("memory", 0)) - PROCESS_BYTES
    return {"predicted_bytes": predicted, "measured_bytes": peak - floor, "floor": floor, "peaks": [of_steps, of_eval]}


def _job(wanted: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    rows, threads = wanted["rows"], settings["threads"]
    model = dict(wanted["model"])
    if "path" in model:
        model |= {"path": _transformers_folder(Path(settings["folder"]) / "model"), "context": 64}
    source = _source(wanted.get("data", "text"), rows=8 * rows, window=model.get("context", 1), seed=settings["seed"])
    return {
        "name": "bench-estimates",
        "seed": settings["seed"],
        "model": model,
        "data": {**source, "eval_fraction": 0.5},
        "optim": {"warmup_steps": 0, **wanted.get("optim", {})},
        "precision": {"dtype": wanted.get("dtype", "fp32")},
        "loop": {"max_steps": 100_000, "global_batch_size": rows, "log_every": 1, **wanted.get("loop", {})},
        "scale": {"workers": 1, "mode": "cpu", "threads": threads},
        **({"experts": wanted["experts"]} if "experts" in wanted else {}),
    }


def _source(kind: str, *, rows: int, window: int, seed: int) -> dict[str, Any]:
    """The `data` keys of a job with as many drawn rows."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    if kind == "text":
        return {"train": bytes(torch.randint(97, 123, ((rows + 2) * window,), generator=draw).tolist())}
    labels = torch.randint(10, (rows,), generator=draw)
    shape = (rows, 28, 28) if kind == "digits" else (rows, 64)
    values = torch.randint(255, shape, generator=draw).to(torch.uint8 if kind == "digits" else torch.float32)
    return {"train": {"x": values, "labels": labels}}


def _transformers_folder(path: Path) -> str:
    from transformers import GPT2Config

    GPT2Config(vocab_size=256, n_positions=64, n_embd=256, n_layer=4, n_head=4).save_pretrained(path)
    return str(path)


if __name__ == "__main__":
    began = time.monotonic()
    print(json.dumps({**measure(json.loads(Path(sys.argv[1]).read_text())), "seconds": time.monotonic() - began}))
