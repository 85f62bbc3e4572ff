"""Training runs of `lines.py` through the command line. Each needs GPUs; `run.py` also runs those that a CPU can.

All train the same model on the same rows in fp32, so that the losses of every layout must be those of one process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lines import LINES, Line
from pyarrow import parquet
from safetensors.torch import load_file

from cluster.devices.inventory import local_inventory

ROOT = Path(__file__).resolve().parents[2]
STEPS = 40
JOB: dict[str, Any] = {
    "name": "gpu",
    "model": {"builder": "experts.models:moe_gpt", "layers": 2, "heads": 2, "width": 64, "context": 32},
    "data": {"source": "stdlib", "max_bytes": 200_000},
    "optim": {"lr": 2e-3},
    "precision": {"dtype": "fp32"},
    "loop": {"max_steps": STEPS, "global_batch_size": 16, "eval_every": 20, "eval_batches": 2, "log_every": 1},
    "experts": {"num_experts": 4, "top_k": 2, "hosts": 0, "noise": 0.0},
    "save": {"every": 10},
    "telemetry": {"tensorboard": False},
}
TOLERANCES = {"one-bf16": 0.05, "one-deterministic": 1e-3}


def folder() -> Path:
    """Where the runs stay."""
    return Path(os.environ["RAYTRAIN_GPU_FOLDER"])


def mapping_of(line: Line, *, on_cpu: bool) -> dict[str, Any]:
    """The job of a line."""
    made = json.loads(json.dumps(JOB)) | {"name": line.name}
    keys = {"scale.workers": 1, **line.job, "save.dir": str(folder() / "runs")}
    keys["scale.workers"] = workers_of(line)
    if on_cpu:
        keys |= {"scale.mode": "cpu", "scale.threads": 1}
    if os.environ.get("RAYTRAIN_GPU_ADDRESS"):
        keys["cluster.address"] = os.environ["RAYTRAIN_GPU_ADDRESS"]
    for key, value in keys.items():
        section, _, name = key.partition(".")
        made.setdefault(section, {})[name] = value
    return made


def workers_of(line: Line) -> int:
    """Workers of a line; across nodes, as many as make one process more than the largest node has GPUs."""
    workers = line.job.get("scale.workers", 1)
    if not line.across:
        return workers
    return int(os.environ["RAYTRAIN_GPU_LARGEST"]) + 1 - (line.gpus - workers)


def nodes_of(run: Path) -> int:
    """Nodes that the events of a run name; at most 2."""
    attempt = rows(run, "events.jsonl", "attempt")[-1]
    hosts = {host["node"] for row in rows(run, "events.jsonl", "expert_hosts") for host in row["hosts"]}
    return 2 if attempt["workers_on_node"] < attempt["workers"] or hosts - {attempt["node"]} else 1


def newest(name: str) -> Path | None:
    """The newest run folder of a line."""
    found = sorted((folder() / "runs").glob(f"{name}-[0-9]*"))
    return found[-1] if found else None


def rows(run: Path, file: str, kind: str) -> list[dict[str, Any]]:
    """The rows of a kind in metrics.jsonl or events.jsonl."""
    path = run / file
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if row.get("kind") == kind]


def losses(run: Path) -> dict[int, float]:
    """The loss of each step; after a restart, that of the last time it was computed."""
    return {row["step"]: float(row["loss"]) for row in rows(run, "metrics.jsonl", "train")}


def train(line: Line, *, on_cpu: bool) -> Path:
    """Train the job of a line, kill what it says in the middle, and return the run folder."""
    file = folder() / f"{line.name}.yaml"
    file.write_text(yaml.safe_dump(mapping_of(line, on_cpu=on_cpu)), encoding="utf-8")
    command = [sys.executable, "-m", "jobs", line.verb, str(file)]
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, **line.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parent}"},
    )  # fmt: skip
    if line.kills:
        kill_one(line, process)
    text, _ = process.communicate()
    assert process.returncode == 0, text
    if line.verb == "tune":
        return next(folder().rglob("best.yaml"))
    run = newest(line.name)
    assert run is not None, text
    return run


def answers(line: Line, run: Path, where: str, *keys: str) -> list[Any]:
    """What `infer` answers to 24 prompts with the weights of a run."""
    prompts, output = folder() / "prompts.jsonl", folder() / f"{line.name}-{where}-{time.time_ns()}"
    words = ("def ", "import ", "class Name", "return self.", "for row in ", "if not ")
    prompts.write_text("".join(json.dumps({"prompt": f"{word}{n}"}) + "\n" for word in words for n in range(4)))
    given = [f"infer.input={prompts}", f"infer.output={output}", "infer.max_new_tokens=8", "infer.unit_rows=6",
             "precision.dtype=fp32", *keys]  # fmt: skip
    if os.environ.get("RAYTRAIN_GPU_ADDRESS"):
        given.append(f"cluster.address={os.environ['RAYTRAIN_GPU_ADDRESS']}")
    command = [sys.executable, "-m", "jobs", "infer", str(run), *given]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    device = "cpu" if "scale.mode=cpu" in keys else "cuda"
    assert f"on {device}" in done.stdout, done.stdout
    table = parquet.read_table(output / "predictions.parquet")
    assert set(table["status"].to_pylist()) == {"ok"} and len(table) == 24
    return table["prediction"].to_pylist()


def check_answers(line: Line, run: Path, *, on_cpu: bool) -> None:
    """One worker answers as the CPU does; ties and rounding may change a few. Several answer as one."""
    device = ["scale.mode=cpu", "scale.threads=1"] if on_cpu else []
    found = answers(line, run, "one", "scale.workers=1", *device)
    if workers_of(line) > 1:
        assert answers(line, run, "all", f"scale.workers={workers_of(line)}", *device) == found
    plain = answers(line, run, "cpu", "scale.mode=cpu", "scale.threads=1")
    assert sum(one == other for one, other in zip(found, plain, strict=True)) >= 0.9 * len(plain), (found, plain)


def check_export(run: Path) -> None:
    """The weights that the run left are those of its last checkpoint."""
    target = folder() / f"exported-{run.name}"
    command = [sys.executable, "-m", "jobs", "export", str(run), "--step", "last", "--to", str(target)]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    left, exported = (load_file(path / "model.safetensors") for path in (run / "weights", target))
    assert left.keys() == exported.keys()
    assert all(torch.equal(value, exported[name]) for name, value in left.items())


def kill_one(line: Line, process: subprocess.Popen[str]) -> None:
    """Kill one process of the kind that the line names, once a checkpoint was saved."""
    while process.poll() is None:
        run = newest(line.name)
        if run is not None and max(losses(run), default=0) > STEPS // 3:
            own = processes_since(process.pid) if line.across else descendants(process.pid)
            victims = [pid for pid in own if line.kills in command_of(pid)]
            assert victims, f"no process of the run is named {line.kills}: is it on another node?"
            os.kill(victims[0], signal.SIGKILL)
            return
        time.sleep(0.05)
    raise AssertionError(f"the run ended before a process was killed: {(process.stdout and process.stdout.read())}")


def processes_since(pid: int) -> list[int]:
    """Ray's processes on this node that are younger than a process: a cluster's own are not its descendants."""

    def started(of: int) -> int:
        try:
            return int(Path(f"/proc/{of}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        except OSError:
            return -1

    found = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return [one for one in found if started(one) >= started(pid) and command_of(one).startswith("ray::")]


def command_of(pid: int) -> str:
    """The command line of a process; Ray's processes are named after what they run."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """The processes below a process."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, left = list[int](), [pid]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found


@pytest.mark.gpu
@pytest.mark.timeout(0)
@pytest.mark.parametrize("line", [pytest.param(one, id=f"line-{one.name}-end") for one in LINES if not one.test])
def test_a_run(line: Line) -> None:
    if "RAYTRAIN_GPU_FOLDER" not in os.environ:
        pytest.skip("run by tests/gpu/run.py")
    on_cpu = not os.environ.get("RAYTRAIN_GPU_ADDRESS") and not local_inventory().devices()
    if line.verb == "infer":
        one = next(other for other in LINES if other.name == "one")
        check_answers(line, newest("one") or train(one, on_cpu=on_cpu), on_cpu=on_cpu)
        return
    run = train(line, on_cpu=on_cpu)
    if line.verb == "tune":
        assert run.stat().st_size
        return
    recorded = (run / "plan.json").read_text(encoding="utf-8")
    for name, value in line.environ.items():
        assert f"{name}='{value}' shows" in recorded
    capabilities = [one["capability"] for node in json.loads(recorded)["inventory"]["nodes"] for one in node["devices"]]
    old = any(one is not None and one < [8, 0] for one in capabilities)
    plan = json.loads(recorded)["choices"]
    assert plan["device"]["value"] == ("cpu" if on_cpu else "cuda"), plan["device"]
    assert plan["workers"]["value"] == workers_of(line)
    if line.name.startswith("shared-") and not on_cpu:
        assert plan["backend"]["value"] == "gloo" and plan["processes_per_gpu"]["value"] > 1
    if line.job.get("precision.dtype") == "bf16":
        assert plan["precision"]["value"] == ("fp16" if old else "bf16"), plan["precision"]
    if not on_cpu and (line.across or line.gpus > int(os.environ.get("RAYTRAIN_GPU_LARGEST", "99"))):
        assert nodes_of(run) == 2, "all processes were on one node"
    if line.job.get("model.builder") == "hungry:moe_gpt":
        assert rows(run, "events.jsonl", "out_of_memory"), "the worker did not run out of memory"
    if lifecycle := line.job.get("experts.lifecycle"):
        assert rows(run, "events.jsonl", "expert_born"), "no expert was born"
        assert bool(rows(run, "events.jsonl", "sleep_cycle")) == ("replay" in lifecycle), "cycles of sleep"
    assert json.loads((run / "result.json").read_text(encoding="utf-8"))["status"] == "done"
    found = losses(run)
    assert sorted(found) == list(range(1, STEPS + 1))
    assert sum(found[step] for step in range(36, 41)) < 0.9 * sum(found[step] for step in range(1, 6)), found
    if line.kills:
        kind = "death" if line.kills == "ExpertHost" else "fault"  # a worker's death ends the attempt
        assert rows(run, "events.jsonl", kind), f"the death must be in the events, as a {kind}"
    if line.job.get("loop.deterministic"):
        assert losses(train(line, on_cpu=on_cpu)) == found, "two runs must be equal bit by bit"
    if line.equals:
        reference = newest(line.equals)
        if reference is None:
            reference = train(next(one for one in LINES if one.name == line.equals), on_cpu=on_cpu)
        assert found == pytest.approx(losses(reference), rel=TOLERANCES.get(line.name, 1e-3))
    if line.job.get("experts.hosts"):
        check_export(run)
    fallbacks = [row["reason"] for row in rows(run, "events.jsonl", "fallback")]
    kernels = all(one is None or one[0] in (9, 10) for one in capabilities)
    assert not kernels or not fallbacks, fallbacks  # the grouped product of bf16
