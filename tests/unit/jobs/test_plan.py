"""The verb `plan`: from a file to a table or JSON, without torch and without Ray."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from rich.console import Console

from cluster.devices.inventory import Device, Inventory, Node, TorchBuild
from jobs.__main__ import main
from jobs.driver.plan_table import config_rows, print_plan
from jobs.driver.planning import plan_job, show_only_picked
from jobs.job.facts import inventory_from_file, resolve_paths
from jobs.job.spec import load_spec
from jobs.plan import plan_verb
from raytrain.config.sections import DataConfig
from raytrain.errors import InputError
from raytrain.plan.choice import Deferred, Resolved
from raytrain.plan.plan import Plan

ROOT = Path(__file__).resolve().parents[3]
NODES = """
- host: a
  cpus: 16
  memory_gib: 64
  gpus:
    - {name: A100, memory_gib: 80, capability: 8.0, count: 2}
    - {name: T4, memory_gib: 16, capability: 7.5}
- {host: b, cpus: 8, memory_gib: 32}
"""
MACHINE = Inventory(
    nodes=(Node("a", 4, 8 << 30),), source="a test", cpu_model="c", cpu_flags={}, notes=("the driver shows no device",)
)

OWN_MODEL = """
import torch

def rows():
    return {"train": {"x": torch.zeros(50, 8), "labels": torch.zeros(50)}}

class Model(torch.nn.Linear):
    def forward(self, x, labels):
        return (super().forward(x).mean(1) - labels).square().mean()

def build(num_features: int, meta: bool = True):
    model = Model(num_features, num_features)
    if not meta:
        model.weight.abs().max().item()
    return model
"""


def job(tmp_path: Path, **sections: Any) -> dict[str, Any]:
    text = tmp_path / "input.txt"
    text.write_text("all work and no play makes a dull boy\n" * 200)
    return {
        "model": {"builder": "raytrain.models.gpt:gpt", "layers": 1, "heads": 2, "width": 8, "context": 16},
        "data": {"source": "text", "path": str(text)},
        **sections,
    }


def planned(mapping: dict[str, Any], *overrides: str, **arguments: Any) -> Plan:
    return plan_job(load_spec(mapping=mapping, overrides=overrides), inventory=MACHINE, **arguments)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# ---------------------------------------------------------------- the plan of a job


def gpu_node(host: str, name: str, size: int) -> Node:
    return Node(host, 16, 256 << 30, (Device("cuda", name, size << 30, (8, 0), f"GPU-{host}", 0),))


def test_the_default_recipe_has_its_experts_in_process_on_one_box_and_on_hosts_where_kinds_differ() -> None:
    alone = plan_job(load_spec(None), inventory=MACHINE)
    assert (alone.hosts.value_or(None), alone.strategy.value_or(None)) == (0, "data_parallel")
    assert alone.hosts.reason == "every worker has room for all experts"
    hosted = plan_job(load_spec(Path("moe_hosts")), inventory=MACHINE)
    assert (hosted.hosts.value_or(None), hosted.strategy.value_or(None)) == (2, "expert_parallel")

    nodes = (gpu_node("a", "NVIDIA A100-SXM4-80GB", 80), *(gpu_node(name, "Tesla T4", 15) for name in "bcde"))
    mixed = replace(MACHINE, nodes=nodes, notes=())
    # 14 GiB besides the experts, which a T4 cannot hold, and 7 GiB of experts, of which each T4 holds a quarter
    wide = ["model.width=4096", "model.layers=14", "model.heads=32", "experts.hidden=1024", "loop.micro_batch_size=1"]
    apart = plan_job(load_spec(None, wide), inventory=mixed)
    assert (apart.hosts.value_or(None), apart.workers.value_or(None)) == ({"T4": 4}, 1), apart.hosts.reason
    assert apart.hosts.reason == "the experts fit on 4 T4; too little memory in every worker"


@pytest.mark.covers("TRB-27", "TRB-30")
def test_the_plan_of_each_strategy_shows_its_bytes_and_where_unequal_experts_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixture = job(tmp_path)
    mixture["model"] = {**mixture["model"], "builder": "experts.models:moe_gpt", "layers": 1}
    (tmp_path / "moe.json").write_text(json.dumps(mixture))
    nodes = tmp_path / "nodes.yaml"
    nodes.write_text("- {host: a, cpus: 4, memory_gib: 8}\n- {host: b, cpus: 4, memory_gib: 8}\n")

    def shown(*changes: str) -> dict[str, str]:
        plan_verb(tmp_path / "moe.json", changes, inventory_file=nodes)
        lines = capsys.readouterr().out.splitlines()
        return dict(line.split(": ", 1) for line in lines if ": " in line)

    def memory(*changes: str) -> float:
        return float(shown("model.width=256", "scale.workers=2", *changes)["worker memory"].split()[0])

    alone = memory("experts.hosts=0")
    assert memory("experts.hosts=colocated") < alone > memory("scale.strategy=fsdp"), "in MiB"
    # 8 x hidden x 2 matrices; weights, gradients and two moments in fp32, in KiB: 16 for a width of 64, 64 for 256
    hosted = shown("experts.hidden=[64, 64, 64, 256]", "experts.hosts=2")["experts"]
    placed = re.findall(r"host \d: (\d), ([\d.]+) KiB", hosted)
    assert hosted.startswith("4 on 2 hosts  # ") and "the largest 64 KiB" in hosted
    assert sorted(placed) == [("1", "64"), ("3", "48")], "the work is equal, not the number"


def test_a_resumed_run_keeps_the_layout_that_auto_chose(tmp_path: Path) -> None:
    again = plan_job(load_spec(None), inventory=MACHINE, hosts_of_run=2)
    assert again.hosts == Resolved(2, "auto chose this for the run that is resumed")
    asked = plan_job(load_spec(None, ["experts.hosts=3"]), inventory=MACHINE, hosts_of_run=2)
    assert asked.hosts.value_or(None) == 3
    assert (
        plan_job(load_spec(mapping=job(tmp_path)), inventory=MACHINE, hosts_of_run="none").hosts.value_or(1) == "none"
    )


def test_built_in_models_and_data_are_sized_without_torch(tmp_path: Path) -> None:
    write(tmp_path / "job.yaml", json.dumps(job(tmp_path)))
    code = (
        "import sys; from jobs.plan import plan_verb\n"
        f"code = plan_verb({str(tmp_path / 'job.yaml')!r}, ['scale.accelerator=cpu'], as_json=True)\n"
        "heavy = [name for name in ('torch', 'ray', 'matplotlib') if name in sys.modules]\n"
        "print(code, heavy, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "0 []"
    record = json.loads(done.stdout)
    plan = Plan.from_json(record)
    assert plan.to_json() == record
    assert plan.model_facts is not None and plan.data_facts is not None
    # 200 lines of 38 bytes, a tenth held out, windows of 16 tokens and the one after
    assert plan.data_facts.train_rows == pytest.approx(0.9 * 7600 / 16, abs=2)
    assert isinstance(plan.parameters, Resolved)
    assert plan.parameters.value == plan.model_facts.parameters > 256 * 8


def test_a_users_model_is_sized_only_when_it_is_built(user_folder: Path) -> None:
    write(user_folder / "own_plan_model.py", OWN_MODEL)
    mapping = {"model": {"builder": "own_plan_model:build"}, "data": {"source": "own_plan_model:rows"}}
    before = planned(mapping)
    assert isinstance(before.max_steps, Deferred)
    assert isinstance(before.parameters, Deferred)
    assert "plan --build" in before.parameters.how
    built = planned(mapping, build=True)
    assert isinstance(built.parameters, Resolved)
    assert (built.parameters.value, built.parameters.reason) == (72, "built on the meta device")
    assert built.model_facts is not None
    assert built.model_facts.activation_bytes_per_sample == 4, "of its own, backward needs a row's difference"
    assert built.model_facts.flops_per_sample == 2 * 2 * 8 * 8, "forward, and the gradient of the weights"
    assert built.steps_per_epoch == Resolved(2, "45 rows / 32, rounded up")
    on_cpu = planned(mapping, "model.meta=false", build=True)
    assert isinstance(on_cpu.parameters, Resolved)
    assert (on_cpu.parameters.value, on_cpu.parameters.reason) == (72, "built on the CPU")


def test_a_builder_that_fails_is_the_inputs_fault(user_folder: Path) -> None:
    write(user_folder / "own_bad_model.py", "def build():\n    return {}['missing']\n")
    write(user_folder / "own_plan_data.py", "def make():\n    return {'train': [{'x': 1.0}] * 40}\n")
    mapping = {"model": {"builder": "own_bad_model:build"}, "data": {"source": "own_plan_data:make"}}
    with pytest.raises(
        InputError,
        match=r"model\.builder: got KeyError: 'missing', raised while the model.*\n  own_bad_model\.py:2 in build",
    ):
        planned(mapping, build=True)


def test_experts_are_distinguished_from_dense_models(tmp_path: Path) -> None:
    dense, mixture = job(tmp_path), job(tmp_path)
    mixture["model"] = {**mixture["model"], "builder": "experts.models:moe_gpt"}
    assert planned(dense).choices()["hosts"] == Resolved("none", "the model has no experts")
    hosts = planned(mixture).hosts
    assert isinstance(hosts, Resolved) and hosts.value == 0 and "room" in hosts.reason
    few, many = (planned(mixture, f"experts.num_experts={count}").parameters for count in (4, 8))
    assert isinstance(few, Resolved) and isinstance(many, Resolved)
    assert many.value - few.value == 4 * (2 * 8 * 32 + 8)


@pytest.mark.covers("EXP-18")
def test_bytes_scale_with_the_hidden_width_of_the_experts(tmp_path: Path) -> None:
    """As planned with the flag, and as built with it: each unit of width is a row and a column of 8 in fp32."""
    from experts.models import moe_gpt

    mixture = job(tmp_path)
    mixture["model"] = {**mixture["model"], "builder": "experts.models:moe_gpt"}
    planned_bytes, built_bytes = [], []
    for flag in ("experts.hidden=8", "experts.hidden=16", "experts.hidden=[8, 8, 8, 40]"):
        facts = planned(mixture, flag).model_facts
        assert facts is not None
        planned_bytes.append(facts.trainable_bytes)
        experts = load_spec(mapping=mixture, overrides=[flag]).spec.experts
        sizes = {name: value for name, value in mixture["model"].items() if name != "builder"}
        module = moe_gpt(**sizes, vocab_size=256, experts=experts).module
        built_bytes.append(sum(p.numel() * p.element_size() for p in module.parameters()))
    assert planned_bytes == built_bytes
    assert [bytes_ - built_bytes[0] for bytes_ in built_bytes] == [0, 32 * 2 * 8 * 4, 32 * 2 * 8 * 4]


@pytest.mark.covers("MON-18")
def test_the_record_holds_the_whole_configuration_with_its_sources(tmp_path: Path) -> None:
    path = write(tmp_path / "job.yaml", json.dumps(job(tmp_path, loop={"max_steps": 5})))
    loaded = load_spec(path, ["optim.lr=0.5"])
    plan = plan_job(loaded, inventory=MACHINE)
    rows = {key: (shown, source) for key, shown, source in config_rows(plan)}
    assert rows["loop.max_steps"] == ("5", "file")
    assert rows["optim.lr"] == ("0.5", "command line")
    assert rows["optim.betas"] == ("[0.9, 0.99]", "default")
    assert rows["model.width"] == ("8", "file")
    assert rows["seed"] == ("42", "default")
    assert set(rows) == set(loaded.sources)
    sections = {name for name, value in plan.config.items() if isinstance(value, dict)}
    leaves = {f"{name}.{key}" for name in sections for key in plan.config[name]}
    lifecycle = {key: value for key, value in plan.config["experts"]["lifecycle"].items() if isinstance(value, dict)}
    inner = {f"experts.lifecycle.{part}.{key}" for part, value in lifecycle.items() for key in value}
    inner |= {f"experts.lifecycle.{key}" for key in plan.config["experts"]["lifecycle"] if key not in lifecycle}
    assert leaves - {"experts.lifecycle"} | inner | (set(plan.config) - sections) == set(rows)


def test_an_unreadable_file_names_its_key(tmp_path: Path) -> None:
    mapping = job(tmp_path)
    mapping["data"]["path"] = str(tmp_path / "gone.txt")
    with pytest.raises(InputError) as caught:
        planned(mapping)
    assert caught.value.key == "data.path"


# ---------------------------------------------------------------- paths


def test_relative_paths_are_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = DataConfig(source="text", path=["a.txt", "s3://bucket/b.txt", "/c.txt"], vocabulary="bytes")
    keys = resolve_paths(data).keys
    assert keys == {"path": [str(tmp_path / "a.txt"), "s3://bucket/b.txt", "/c.txt"], "vocabulary": "bytes"}
    assert data.keys["path"][0] == "a.txt"


def test_a_users_keys_are_paths_only_where_they_name_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "here.txt", "x")
    data = DataConfig(source="a:b", train_file="here.txt", eval_file="gone.txt", split="here.txt")
    keys = resolve_paths(data).keys
    assert keys == {"train_file": str(tmp_path / "here.txt"), "eval_file": "gone.txt", "split": "here.txt"}


def test_the_label_column_of_a_table_is_not_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = DataConfig(source="csv", path="a.csv", label="y", features=["x"])
    assert resolve_paths(data).keys == {"path": str(tmp_path / "a.csv"), "label": "y", "features": ["x"]}


# ---------------------------------------------------------------- machines from a file


def test_machines_from_a_file(tmp_path: Path) -> None:
    inventory = inventory_from_file(write(tmp_path / "nodes.yaml", NODES))
    assert [node.host for node in inventory.nodes] == ["a", "b"]
    assert inventory.cpus == 24
    assert [(d.name, d.memory_bytes >> 30, d.capability, d.index) for d in inventory.devices()] == [
        ("A100", 80, (8, 0), 0), ("A100", 80, (8, 0), 1), ("T4", 16, (7, 5), 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ("- {host: a, cpus: 8}", "nodes[0].memory_gib", "nothing"),
        ("- {host: a, cpus: 0, memory_gib: 1}", "nodes[0].cpus", ">= 1"),
        ("- {host: a, cpus: 8, memory_gb: 1}", "nodes[0].memory_gb", "memory_gib"),
        ("- {host: a, cpus: 8, memory_gib: 1, gpus: [{name: T4}]}", "nodes[0].gpus[0].memory_gib", "nothing"),
        ("- &n {host: a, cpus: 8, memory_gib: 1}\n- *n", "nodes[1].host", "twice"),
    ],
)
def test_a_wrong_nodes_file_names_the_key(tmp_path: Path, text: str, key: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        inventory_from_file(write(tmp_path / "nodes.yaml", text))
    assert caught.value.key == key


@pytest.mark.parametrize("text", ["", "[]", "host: a", "- ["])
def test_a_file_without_a_list_of_nodes_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match=r"nodes\.yaml"):
        inventory_from_file(write(tmp_path / "nodes.yaml", text))
    with pytest.raises(InputError, match="--inventory"):
        inventory_from_file(tmp_path / "gone.yaml")


# ---------------------------------------------------------------- what is printed


def test_the_table_shows_values_reasons_warnings_and_sources(tmp_path: Path) -> None:
    plan = planned(job(tmp_path), "scale.mode=multi_gpu")
    out = io.StringIO()
    print_plan(plan, Console(width=200, file=out))
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["a test: 4 CPU cores, no GPU", "  the driver shows no device"]
    assert any(line.startswith("mode: cpu  # fell back: multi_gpu was asked for") for line in lines)
    assert any(line.startswith("warning: multi_gpu was asked for") for line in lines)
    assert "scale.mode: multi_gpu  # command line" in lines
    assert any(line.endswith("keys with their defaults (--full lists them)") for line in lines)
    assert "optim.lr" not in [line.split(":")[0] for line in lines]


A100 = "- {host: a, cpus: 12, memory_gib: 85, gpus: [{name: A100-SXM4-40GB, memory_gib: 40, capability: 8.0}]}"


GUIDE = A100.replace("memory_gib: 40, capability: 8.0", "memory_gib: 80, capability: 8.0, count: 4")


@pytest.mark.covers("COMPAT-09")
@pytest.mark.parametrize(("machines", "gpus", "memory"), [(GUIDE, 4, 320), (A100, 1, 40)])
def test_the_machines_of_the_guides_are_planned_for(tmp_path: Path, machines: str, gpus: int, memory: int) -> None:
    """Four A100 of 80 GB, and one of 40 GB: a worker for each, in bf16 if it is as good."""
    file, nodes = write(tmp_path / "job.yaml", json.dumps(job(tmp_path))), write(tmp_path / "nodes.yaml", machines)
    done = CliRunner().invoke(main, ["plan", str(file), "--inventory", str(nodes), "--json"])
    plan = Plan.from_json(json.loads(done.output))
    assert plan.workers.value_or(0) == gpus and plan.backend.value_or("") == "nccl"
    assert "bf16" in plan.precision.bounds and "8.0 has bf16" in plan.precision.reason  # type: ignore[union-attr]
    found = [device for node in plan.inventory["nodes"] for device in node["devices"]]
    assert sum(device["memory_bytes"] for device in found) == memory << 30 and len(found) == gpus


@pytest.mark.covers("PERF-01")
def test_the_verb_estimates_the_memory_of_a_full_model_on_one_a100_part_by_part(tmp_path: Path) -> None:
    """A GPT of 355 million parameters; tests/numerics compares the estimate of its rows with measured steps."""
    keys = {"layers": 24, "heads": 16, "width": 1024, "context": 1024, "vocab_size": 50257}
    full = job(tmp_path, loop={"global_batch_size": 60}, precision={"dtype": "fp32"}, data={"source": "stdlib"})
    full["model"] |= keys
    file, nodes = write(tmp_path / "job.yaml", json.dumps(full)), write(tmp_path / "nodes.yaml", A100)
    numbers = (50257 + 1024) * 1024 + 24 * (12 * 1024**2 + 2 * 1024) + 1024

    def told(rows: int, *overrides: str) -> tuple[float, dict[str, float]]:
        """The estimate of micro-batches of `rows` rows and its parts in GiB, as the command prints them."""
        words = [str(file), f"loop.micro_batch_size={rows}", "scale.accelerator=A100", *overrides]
        done = CliRunner().invoke(main, ["plan", *words, "--inventory", str(nodes)])
        assert done.exit_code == 0, done.output
        (line,) = [line for line in done.output.splitlines() if line.startswith("worker memory: ")]
        total, parts = re.match(r"worker memory: (\S+) GiB  # (.*); without CUDA's own$", line).groups()  # type: ignore[union-attr]
        units = {"GiB": 1.0, "MiB": 2**-10, "KiB": 2**-20}
        return float(total), {
            words[0]: float(words[-2]) * units[words[-1]] for words in (part.split() for part in parts.split(" + "))
        }

    total, parts = told(10)
    assert 20 < total < 30
    state = numbers / 2**30
    assert {name: parts[name] for name in ("weights", "gradients", "optimizer")} == pytest.approx(
        {"weights": 4 * state, "gradients": 4 * state, "optimizer": 8 * state}, rel=0.005
    )
    assert total == pytest.approx(sum(parts.values()), rel=0.005)
    fewer, by_sgd = told(5), told(10, "optim.name=sgd", "optim.momentum=0.9")
    assert fewer[1]["activations"] == pytest.approx(parts["activations"] / 2, rel=0.005)
    assert total - fewer[0] == pytest.approx(parts["activations"] / 2, rel=0.02)
    assert by_sgd[1]["optimizer"] == pytest.approx(4 * state, rel=0.005)


def test_rows_for_replay_and_a_copy_of_the_state_are_planned_where_the_worker_is_in_host_memory(tmp_path: Path) -> None:
    found = {}
    for limit in (None, 64 << 20):
        cycle: dict[str, object] = {"max_experts": 4, **({"replay": {"bytes": limit}} if limit else {})}
        one = job(tmp_path, experts={"num_experts": 2, "hosts": 0, "lifecycle": cycle})
        one["model"] |= {"builder": "experts.models:moe_gpt"}
        file, nodes = write(tmp_path / "job.yaml", json.dumps(one)), write(tmp_path / "nodes.yaml", A100)
        for machine in ("cpu", "auto"):
            words = [str(file), "--inventory", str(nodes), "--json", f"scale.mode={machine}"]
            done = CliRunner().invoke(main, ["plan", *words])
            assert done.exit_code == 0, done.output
            plan = Plan.from_json(json.loads(done.output))
            found[machine, limit is not None] = plan
    more = found["cpu", True].memory.value_or(0) - found["cpu", False].memory.value_or(0)
    assert more == (64 << 20) + 3 * 4 * found["cpu", True].parameters.value_or(0)
    assert found["auto", True].memory.value_or(1) == found["auto", False].memory.value_or(0), "a GPU's holds no rows"
    assert "up to 64 MiB of rows in host memory" in found["auto", True].experts.reason  # type: ignore[union-attr]


def test_the_verb_plans_for_machines_one_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "job.yaml", json.dumps(job(tmp_path)))
    nodes = write(tmp_path / "nodes.yaml", NODES)
    assert plan_verb(path, ["scale.accelerator=A100"], as_json=True, inventory_file=nodes) == 0
    plan = Plan.from_json(json.loads(capsys.readouterr().out))
    assert (plan.mode, plan.workers) == (Resolved("multi_gpu", "there are 2 GPUs"), Resolved(2, "one per GPU"))


def test_a_pipe_gets_full_lines_and_a_terminal_lines_of_its_width(tmp_path: Path) -> None:
    plan = planned(job(tmp_path))
    piped, seen = io.StringIO(), io.StringIO()
    print_plan(plan, Console(file=piped, width=80))
    print_plan(plan, Console(file=seen, width=80, force_terminal=True, color_system=None))
    lines = piped.getvalue().splitlines()
    once = {"device", "accelerator", "placement", "strategy", "backend", "accumulation", "effective_batch", "hosts"}
    for name, value, why in plan.rows():
        found = [
            line for line in lines if re.search(rf": {re.escape(value)}  # {re.escape(why)}( \([a-z ]+\))?$", line)
        ]
        assert len(found) == (0 if name in once else 1), (name, found)
    assert [line for line in lines if line != line.rstrip()] == [], "nothing is padded"
    assert max(map(len, seen.getvalue().splitlines())) <= 80


@pytest.mark.covers("DEV-03")
def test_a_missing_device_ends_the_command_with_the_existing_ones(tmp_path: Path) -> None:
    write(tmp_path / "job.yaml", json.dumps(job(tmp_path)))
    write(tmp_path / "nodes.yaml", NODES.replace("- {host: b, cpus: 8, memory_gib: 32}", ""))
    command = [sys.executable, "-m", "jobs", "plan", "job.yaml", "--inventory", "nodes.yaml"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(device: str) -> subprocess.CompletedProcess[str]:
        picked = [*command, f"scale.accelerator={device}"]
        return subprocess.run(picked, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)

    absent = run("cuda:7")
    assert absent.returncode == 2
    for part in ("scale.accelerator", "cuda:7", "cuda:0 A100, cuda:1 A100, cuda:2 T4"):
        assert part in absent.stderr.replace("\n", " ")
    assert "Traceback" not in absent.stderr
    there = run("cuda:2")
    assert (there.returncode, "single_gpu" in there.stdout) == (0, True)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ("{optm.lr: [1e-3]}", r"tune\.space\.optm\.lr: did you mean optim\.lr\?"),
        ("{optim.lr: [1e-3, -1]}", r"tune\.space\.optim\.lr: got -1"), ("{seed: [1, 2]}", r"tune\.space\.seed"),
        ("{optim.lr: 1e-3}", r"tune\.space\.optim\.lr: got 0\.001"),
    ],
)  # fmt: skip
def test_the_plan_checks_the_space_of_a_search(space: str, words: str) -> None:
    done = CliRunner().invoke(main, ["plan", f"tune.space={space}"])
    assert done.exit_code == 2 and re.search(words, done.stderr), done.stderr
    code = "import sys; from jobs.plan import plan; plan(overrides=['tune.space={optim.lr: [1e-3]}']); "
    code += "print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_only_the_picked_gpus_are_shown_to_a_local_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = write(tmp_path / "nodes.yaml", NODES.replace("- {host: b, cpus: 8, memory_gib: 32}", ""))
    inventory = inventory_from_file(nodes)

    def shown(*overrides: str, before: str | None = None) -> str | None:
        plan = plan_job(load_spec(mapping=job(tmp_path), overrides=overrides), inventory=inventory)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if before is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
        show_only_picked(plan.accelerator.value_or(None), inventory)
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    assert shown() is None
    assert shown("scale.accelerator=cpu") is None
    assert shown("scale.accelerator=T4") == "2"
    assert shown("scale.accelerator=A100", before="5,GPU-b, 7") == "5,GPU-b"
    assert shown("scale.accelerator=cuda:2", before="5,GPU-b, 7") == "7"


@pytest.mark.parametrize(("before", "expected"), [({}, "1"), ({"HIP_VISIBLE_DEVICES": "4,5,6"}, "5")])
def test_on_rocm_both_variables_show_the_picked_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: dict[str, str], expected: str
) -> None:
    """HIP and Ray read HIP_VISIBLE_DEVICES first."""
    inventory = inventory_from_file(write(tmp_path / "nodes.yaml", NODES.partition("- {host: b")[0]))
    monkeypatch.setattr("jobs.driver.planning.installed_torch", lambda: TorchBuild("2.13.0+rocm7.0", hip="7.0"))
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "to be removed after the test")
        monkeypatch.delenv(name)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    show_only_picked("cuda:1", inventory)
    assert [os.environ[name] for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")] == [expected, expected]


@pytest.mark.parametrize(
    ("override", "key"),
    [("scale.accelerator=cuda:7", "scale.accelerator"), ("scale.workers=[900, 901]", "scale.workers"),
     ("loop.global_batch_size=100000", "loop.global_batch_size"), ("scale.workers=9999", "scale.workers")],
)  # fmt: skip
def test_unavailable_resources_are_refused(tmp_path: Path, override: str, key: str) -> None:
    path = write(tmp_path / "job.yaml", json.dumps(job(tmp_path)))
    nodes = write(tmp_path / "nodes.yaml", NODES)
    with pytest.raises(InputError) as caught:
        plan_verb(path, [override], inventory_file=nodes)
    assert (caught.value.key, caught.value.exit_code) == (key, 2)


def test_a_key_below_a_key_is_shown_with_its_value() -> None:
    from jobs.driver.plan_table import _lookup

    config = {"name": "x", "experts": {"hosts": {"A100": 2, "T4": 8}}}
    assert [_lookup(config, key) for key in ("name", "experts.hosts.A100", "experts.hosts.T4")] == ["x", 2, 8]


def test_the_machines_shown_in_the_readme_and_in_the_help_can_be_read(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from jobs.__main__ import main

    shown = CliRunner().invoke(main, ["plan", "--help"]).output
    helped = textwrap.dedent(shown.partition("are optional:\n")[2].partition("\n\n")[0])
    readme = (ROOT / "jobs/README.md").read_text().partition("`gpus` and `capability` are optional:\n\n```yaml\n")[2]
    found = [inventory_from_file(write(tmp_path / "nodes.yaml", text)) for text in (helped, readme.partition("```")[0])]
    assert found[0] == found[1] and len(found[0].devices()) == 4
    assert [node.host for node in found[0].nodes] == ["a", "b"]


@pytest.mark.covers("NODE-10")
def test_the_answers_for_accelerate_become_a_job_file_that_decides_the_same(tmp_path: Path) -> None:
    """One machine, four GPUs, bf16; nothing asks, and the machine that plans needs no GPU."""
    (tmp_path / "four.yaml").write_text(
        "- {host: a, cpus: 32, memory_gib: 128, gpus: [{name: A100, memory_gib: 80, capability: 8.0, count: 4}]}\n"
    )
    machine = ["--inventory", str(tmp_path / "four.yaml")]
    asked = ["--num_processes", "4", "--num_machines", "1", "--mixed_precision", "bf16"]
    more = ["optim.betas=[0.8, 0.9]", "loop.patience=3", "save.dir='no: 1 #'"]
    printed = CliRunner().invoke(main, ["plan", *asked, *more, "--print", "yaml", *machine])
    assert printed.exit_code == 0, printed.output
    job = yaml.safe_load(printed.output)
    assert (job["scale"]["workers"], job["scale"]["mode"], job["precision"]["dtype"]) == (4, "multi_gpu", "bf16")
    assert (job["optim"]["betas"], job["save"]["dir"], job["loop"]["patience"]) == ([0.8, 0.9], "no: 1 #", 3)
    assert job["loop"]["micro_batch_size"] == "auto" and "# the largest that fits, measured" in printed.output
    assert (
        "scale.threads" not in asked and f"threads: {job['scale']['threads']}  # 32 usable cores / 4" in printed.output
    )
    (tmp_path / "job.yaml").write_text(printed.output)

    def decided(*arguments: str) -> dict[str, Any]:
        found = CliRunner().invoke(main, ["plan", *arguments, "--json", *machine])
        assert found.exit_code == 0, found.output
        choices = json.loads(found.output)["choices"]
        return {name: {key: row[key] for key in row if key != "reason"} for name, row in choices.items()}

    assert decided(str(tmp_path / "job.yaml")) == decided(*asked, *more)
