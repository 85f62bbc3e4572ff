"""The examples of the guides, run as a user runs them: a bare command, a full one, a CPU, the README's Python."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240
TABLE = """
name: table
model:
  builder: raytrain.models.mlp:mlp
  hidden: [16]
data:
  source: csv
  path: {path}
  label: y
"""
SANITY = """
name: sanity
model: {{builder: experts.models:moe_gpt, layers: 1, heads: 2, width: 16, context: 16}}
data: {{source: text, path: {path}}}
loop: {{max_steps: 3}}
"""


def read(run: Path, name: str) -> dict[str, Any]:
    return json.loads((run / name).read_text())


def rows_of(run: Path, name: str, kind: str | None = None) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [row for row in rows if kind in (None, row["kind"])]


@pytest.fixture
def table_job(table: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """`table_job(count)`: a JOB.yaml that classifies a random table with `count` rows."""

    def write(count: int) -> Path:
        path = tmp_path / "job.yaml"
        path.write_text(TABLE.format(path=table(tmp_path / "rows.csv", count=count)))
        return path

    return write


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.covers("CLI-29", "TEST-09")
def test_three_steps_of_the_bare_command_leave_every_file_of_a_run(
    run_cli: Callable[..., Any], tiny_text: Path, tmp_path: Path
) -> None:
    """Without flags all `auto` values are resolved with a reason, and the command exits 0."""
    (tmp_path / "job.yaml").write_text(SANITY.format(path=tiny_text))
    done = run_cli("train", "job.yaml", cwd=tmp_path, timeout=LIMIT_S)
    assert done.code == 0, done.text
    run = (tmp_path / "runs" / "latest").resolve()
    result, plan = read(run, "result.json"), read(run, "plan.json")
    assert (result["status"], result["steps"]) == ("done", 3) and math.isfinite(result["final_loss"])
    assert all(choice["reason"] for choice in plan["choices"].values())
    assert {plan["sources"][key] for key in ("scale.workers", "scale.mode", "precision.dtype")} == {"default"}
    assert (run / "job.yaml").read_text() == (tmp_path / "job.yaml").read_text()
    files = (
        "environment.json", "preflight.json", "metrics.jsonl", "events.jsonl", "sample.json",
        "weights/model.safetensors", "report/report.html", "report/training_metrics.png",
        "report/performance_summary.txt", "logs/rank_00000.log",
        *(f"checkpoints/step_00000003/{name}" for name in ("model.safetensors", "manifest.json", "COMPLETE")),
    )  # fmt: skip
    for name in files:
        assert (run / name).is_file(), name
    assert any((run / "tensorboard").iterdir())
    assert [row["step"] for row in rows_of(run, "metrics.jsonl", "train")] == [1, 3]
    assert [row["step"] for row in rows_of(run, "metrics.jsonl", "eval")] == [3]


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.covers("CLI-28", "CLI-32", "VER-07")
def test_the_full_training_command_goes_through_the_whole_epoch_in_bf16(
    train_shared: Callable[..., Path], table_job: Callable[[int], Path]
) -> None:
    flags = ("precision.dtype=bf16", "loop.deterministic=false", "loop.log_every=100", "loop.global_batch_size=8")
    run = train_shared(table_job(1200), *flags, "optim.lr=0.02", timeout=LIMIT_S)
    steps = math.ceil(1080 / 8)
    result, rows = read(run, "result.json"), rows_of(run, "metrics.jsonl", "train")
    assert (result["status"], result["steps"]) == ("done", steps)
    assert [(row["step"], row["epoch"]) for row in rows] == [(1, 0), (100, 0), (steps, 0)]
    assert read(run, "plan.json")["choices"]["max_steps"]["reason"].endswith(f"1 epoch of {steps} steps")
    (attempt,) = rows_of(run, "events.jsonl", "attempt")
    assert (attempt["precision"], attempt["matmul"]["autocast"]) == ("bf16", "bfloat16")
    assert rows_of(run, "metrics.jsonl", "eval")[-1]["accuracy"] > 0.6, "a third would be chance"
    kinds = {row["kind"] for row in rows_of(run, "events.jsonl")}
    assert kinds and not kinds & {"fault", "failure", "death", "out_of_memory", "nonfinite"}, (
        "135 steps without an error"
    )


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.covers("CLI-30", "CLI-33", "CLI-21")
def test_accumulation_on_a_cpu_with_the_output_on_another_device(
    train_shared: Callable[..., Path], table_job: Callable[[int], Path], tmp_path: Path
) -> None:
    flags = ("scale.mode=cpu", "loop.global_batch_size=256", "loop.micro_batch_size=64", "save.dir=outputs/cpu/run0")
    run = train_shared(table_job(640), *flags, "loop.max_steps=4", timeout=LIMIT_S)
    choices = read(run, "plan.json")["choices"]
    values = {name: choices[name]["value"] for name in ("mode", "device", "micro_batch_size", "accumulation")}
    assert values == {"mode": "cpu", "device": "cpu", "micro_batch_size": 64, "accumulation": 4}
    assert choices["effective_batch"]["value"] == 256 and choices["mode"]["reason"] == "scale.mode"
    (attempt,) = rows_of(run, "events.jsonl", "attempt")
    assert attempt["device"] == "cpu"
    assert run.parent == tmp_path / "outputs" / "cpu" / "run0" and not (tmp_path / "runs").exists()
    assert (run / "result.json").is_file() and (run / "checkpoints").is_dir() and (run / "logs").is_dir()


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.covers("CLI-13", "CLI-36")
def test_an_automatic_batch_size_is_measured_with_training_steps_and_used_by_the_run(
    train_shared: Callable[..., Path], tiny_text: Path, tmp_path: Path
) -> None:
    """A limit near what is estimated leaves the micro-batch to a measurement; the batch of a step stays what it is."""
    (tmp_path / "job.yaml").write_text(SANITY.format(path=tiny_text))
    flags = ("loop.micro_batch_size=auto", "experts.hosts=0", f"cluster.memory_limit={900 << 20}")
    run = train_shared(tmp_path / "job.yaml", *flags, timeout=LIMIT_S)
    assert (read(run, "result.json")["status"], read(run, "result.json")["steps"]) == ("done", 3)
    planned = read(run, "plan.json")["choices"]["micro_batch_size"]
    found = read(run, "memory_probe.json")["micro_batch"]
    assert planned["how"] and planned["bounds"][0] <= found["value"] <= planned["bounds"][-1]
    assert found["trials"] and found["peak_bytes"] <= found["budget_bytes"] <= 900 << 20
    assert "one real step of" in found["reason"]
    decided = [row for row in rows_of(run, "events.jsonl", "decision") if row["what"] == "micro_batch"]
    assert decided[-1]["value"] == found["value"], "once more where another precision won"


SWITCHED = """
import torch
from torch import nn

class Switched(nn.Module):
    def __init__(self, hidden, num_features, num_classes):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(num_features, *hidden), nn.ReLU(), nn.Linear(*hidden, num_classes))
        self.told = False

    def forward(self, x, labels):
        if not self.told and not torch.compiler.is_compiling():
            self.told = True
            print("in the worker: cuDNN benchmark", torch.backends.cudnn.benchmark)
        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}

def build(hidden, num_features, num_classes):
    return Switched(hidden, num_features, num_classes)
"""


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.covers("CLI-02", "CLI-16")
@pytest.mark.parametrize(("mode", "search"), [("reduce-overhead", "true"), ("max-autotune", "false")])
def test_the_switches_of_another_command_reach_the_worker(
    run_cli: Callable[..., Any], table: Callable[..., Path], tmp_path: Path, mode: str, search: str
) -> None:
    (tmp_path / "switched.py").write_text(SWITCHED)
    job = TABLE.format(path=table(tmp_path / "rows.csv", count=200)).replace(
        "raytrain.models.mlp:mlp", "switched:build"
    )
    (tmp_path / "job.yaml").write_text(job)
    options = ("--compile-mode", mode, "--cudnn_benchmark", search, "loop.compile_parts=[net]", "loop.max_steps=4")
    done = run_cli("train", "job.yaml", *options, cwd=tmp_path, timeout=LIMIT_S)
    assert done.code == 0, done.text
    run = (tmp_path / "runs" / "latest").resolve()
    said = (run / "logs" / "rank_00000.log").read_text()
    assert f"in the worker: cuDNN benchmark {search.capitalize()}" in said
    plan = read(run, "plan.json")
    assert plan["config"]["loop"]["compile"] == mode and plan["sources"]["loop.compile"] == "command line"
    last = rows_of(run, "events.jsonl", "compile")[-1]
    assert last["requested"] == mode and last["achieved"] == "1 of 1 parts" and last["seconds"] > 0


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.covers("CLI-34", "CLI-38", "MEM-04")
def test_the_full_set_of_options_runs_on_a_cpu_with_every_decision_recorded(
    run_cli: Callable[..., Any], tiny_text: Path, tmp_path: Path
) -> None:
    """Precision by measurement, compiled, two micro-batches a step, monitored; memory is released in every seventh."""
    (tmp_path / "job.yaml").write_text(SANITY.format(path=tiny_text))
    options = ("--mixed_precision", "auto", "--compile", "--compile-mode", "default", "experts.hosts=0")
    keys = ("loop.global_batch_size=8", "loop.micro_batch_size=4", "loop.max_steps=25", "telemetry.every=0.2")
    done = run_cli("train", "job.yaml", *options, *keys, "loop.clear_every=7", cwd=tmp_path, timeout=LIMIT_S)
    assert done.code == 0, done.text
    run = (tmp_path / "runs" / "latest").resolve()
    result, plan = read(run, "result.json"), read(run, "plan.json")
    assert (result["status"], result["steps"]) == ("done", 25)
    choices = plan["choices"]
    assert (choices["accumulation"]["value"], choices["effective_batch"]["value"]) == (2, 8)
    assert choices["compile"]["value"] == "default" and all(choice["reason"] for choice in choices.values())
    decided = {row["what"]: row for row in rows_of(run, "events.jsonl", "decision")}
    (attempt,) = rows_of(run, "events.jsonl", "attempt")
    if choices["precision"].get("how"):  # a CPU without fast bf16 has nothing to measure
        assert decided["precision"]["value"] == attempt["precision"] and decided["precision"]["reason"]
    compiled = rows_of(run, "events.jsonl", "compile")[-1]
    assert compiled["requested"] == "default" and compiled["graphs"] > 0
    (eager,) = rows_of(run, "events.jsonl", "eager_step")
    assert eager["seconds"] > 0 and (eager["micro_batch"], eager["passes"]) == (4, 5)
    summary = (run / "report" / "performance_summary.txt").read_text()
    assert re.search(r"^compiled_over_eager +[\d.]+ times$", summary, re.MULTILINE), summary
    assert [row["memory_clears"] for row in rows_of(run, "metrics.jsonl", "train")] == [0, 1, 2, 3]
    (watched,) = (run / "telemetry").iterdir()
    assert len(watched.read_text().splitlines()) >= 2


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.covers("CLI-35", "PAR-02", "DEV-15")
def test_experts_on_two_workers_and_on_four_actors_train_as_in_one_process(
    run_cli: Callable[..., Any], train_shared: Callable[..., Path], tiny_text: Path, tmp_path: Path
) -> None:
    """By the options of another command, and by our key; weights after six steps agree, and so do all gradients. What
    an actor holds is what it writes to a checkpoint: experts, and nothing of a router."""
    (tmp_path / "job.yaml").write_text(SANITY.format(path=tiny_text))
    keys = ("precision.dtype=fp32", "loop.max_steps=6", "loop.log_every=1", "optim.name=sgd", "experts.num_experts=4")
    plain = train_shared(tmp_path / "job.yaml", "experts.hosts=0", *keys, timeout=LIMIT_S)
    expected = load_file(plain / "weights" / "model.safetensors")
    options = ("--num_processes", "2", "--parallel-strategy", "expert_parallel", "--experts", "4")
    for name, given, hosts, homes in (
        ("workers", options, "colocated", [0, 0, 1, 1]), ("actors", ("experts.hosts=4",), 4, [0, 1, 2, 3])
    ):  # fmt: skip
        done = run_cli("train", "job.yaml", *given, *keys, f"name={name}", cwd=tmp_path, timeout=LIMIT_S)
        assert done.code == 0, done.text
        run = (tmp_path / "runs" / "latest").resolve()
        choices = read(run, "plan.json")["choices"]
        assert choices["strategy"]["value"] == "expert_parallel" and choices["hosts"]["value"] == hosts
        (placed,) = rows_of(run, "events.jsonl", "placement")
        for layer in placed["layers"]:
            assert sorted(copies[0] for copies in layer["copies"]) == homes
        ours, theirs = (rows_of(one, "metrics.jsonl", "train") for one in (run, plain))
        for key in ("loss", "grad_norm"):
            assert [row[key] for row in ours] == pytest.approx([row[key] for row in theirs], rel=1e-5), (name, key)
        routers = {key for key in load_file(run / "checkpoints/step_00000006/model.safetensors") if "router" in key}
        assert "blocks.0.feed_forward.router.weight" in routers
        for host, path in enumerate(sorted((run / "checkpoints/step_00000006").glob("experts-*.safetensors"))):
            mine = {str(expert) for expert, home in enumerate(homes) if home == host}
            assert {key.split(".")[1] for key in load_file(path)} == mine
        weights = load_file(run / "weights" / "model.safetensors")
        assert weights.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.daily
@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.covers("SRC-05")
def test_the_python_of_the_readme_runs_as_a_script(shared_driver: Any, tmp_path: Path) -> None:
    """The README's lines, preceded by a net and a dataset and followed by printing the result."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "raytrain.train(" in block]
    before = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.linear(x), labels)}

net = Net()
x = torch.randn(320, 4, generator=torch.Generator().manual_seed(0))
dataset = [{"x": row, "labels": row[:3].argmax()} for row in x]
"""
    after = """
import json
print("ENDED", json.dumps([result.run, result.status, result.steps, len(result.history), result.weights]))
"""
    (tmp_path / "example.py").write_text(before + example + after)
    said = shared_driver.run_script(tmp_path / "example.py", timeout=LIMIT_S)
    answer = next(line for line in said.splitlines() if line.startswith("ENDED "))
    folder, status, steps, rows, weights = json.loads(answer.removeprefix("ENDED "))
    assert (status, steps) == ("done", 2 * math.ceil(288 / 32)) and rows >= 3
    assert Path(weights).is_file() and read(Path(folder), "result.json")["status"] == "done"
    assert read(Path(folder), "plan.json")["choices"]["workers"]["value"] == 2
