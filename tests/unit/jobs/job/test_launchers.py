"""Options of other launchers mean the keys that do the same here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from jobs.__main__ import main
from jobs.job.launchers import INFERENCE, LAUNCHER, TRAINING, as_keys
from raytrain.errors import InputError


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> object:
    """`plan(*arguments)`: what `infer --dry-run` prints for twelve questions."""
    rows = [json.dumps({"text": f"why {row}", "n": row}) for row in range(12)]
    (tmp_path / "in.jsonl").write_text("\n".join(rows))
    job = {
        "model": {"builder": "raytrain.models.gpt:gpt", "layers": 1, "heads": 2, "width": 16, "context": 64},
        "data": {"source": "stdlib", "max_bytes": 10000}, "infer": {"unit_rows": 1},
    }  # fmt: skip
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    monkeypatch.chdir(tmp_path)

    def printed(*arguments: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(["infer", "job.yaml", "--dry-run", *arguments])
        sys.stdout.flush()
        said = capsys.readouterr()
        assert stop.value.code == 0, said.err
        return said.out

    return printed


@pytest.mark.covers("CLI-22", "PAR-12")
def test_options_of_accelerate_give_workers_and_precision(plan: object) -> None:
    assert callable(plan)
    found = plan("infer.input=in.jsonl", "--num_processes", "4", "--num_machines=1", "--mixed_precision", "bf16")
    assert "4 workers" in found and "bf16 on cpu" in found
    assert "fp32 on cpu" in plan("infer.input=in.jsonl", "--mixed-precision", "no")
    with pytest.raises(InputError, match=r"--num_machines: got 4, expected 1, or the address of a Ray cluster"):
        as_keys(["--num_machines", "4"], LAUNCHER)
    given = ["--num_machines", "4", "--num_processes=16", "cluster.address=10.0.0.4:6379"]
    assert as_keys(given, LAUNCHER) == ["scale.workers=16", "cluster.address=10.0.0.4:6379"]


@pytest.mark.covers("CLI-18", "CLI-19")
def test_names_of_other_inference_commands_are_understood(plan: object) -> None:
    assert callable(plan)
    assert "12 rows" in plan("--data_source", "in.jsonl", "--max_samples", "None")
    assert "5 rows" in plan("--data_source=in.jsonl", "--max-samples", "5")


@pytest.mark.covers("CLI-03", "CLI-10", "CLI-15")
def test_options_of_other_training_commands_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    model = {"builder": "experts.models:moe_gpt", "layers": 1, "heads": 2, "width": 16, "context": 16}
    job.write_text(json.dumps({"model": model, "data": {"source": "stdlib", "max_bytes": 10000}}))

    def planned(*arguments: str) -> tuple[str, dict[str, str]]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(["plan", str(job), "scale.workers=2", *arguments])
        lines = capsys.readouterr().out.splitlines()
        assert stop.value.code == 0
        pairs = [line.strip().split("  #")[0].partition(": ") for line in lines]
        return "\n".join(lines), {name: value for name, _, value in pairs}

    text, plan = planned("--experts", "4", "--parallel-strategy", "expert_parallel", "--compile")
    assert (plan["strategy"], plan["expert hosts"]) == ("expert_parallel", "colocated"), text
    assert plan["experts"] == "4 on 2 workers" and plan["compile"] == "default"
    assert "telemetry.every: 10.0" in planned("--monitor-gpu", "--monitor-interval", "10", "--full")[0].replace(
        "  ", ""
    )
    text, plan = planned("--experts=4", "--parallel_strategy=data_parallel", "--compile", "false")
    assert (plan["strategy"], plan["loop.compile"]) == ("data_parallel", "off"), text


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["--compile", "a.b=1"], ["loop.compile=default", "a.b=1"]),
        (["--compile", "True"], ["loop.compile=default"]),
        (["--compile-mode", "max-autotune"], ["loop.compile=max-autotune"]),
        (["--monitor-gpu", "a.b=1"], ["telemetry.every=5.0", "a.b=1"]),
        (["--monitor_gpu", "false"], ["telemetry.every=0"]),
        (["--monitor-interval=10", "--monitor-gpu"], ["telemetry.every=5.0", "telemetry.every=10"]),
        (["--cudnn_benchmark", "false", "--compile=False"], ["loop.cudnn_benchmark=false", "loop.compile=off"]),
        (["--compile", "job.yaml"], ["loop.compile=default", "job.yaml"]),
        (["--compile", "default"], ["loop.compile=default", "default"]),  # a recipe
        (["--pin_memory", "a.b=1"], ["data.storage=pinned", "a.b=1"]),
        (["--pin-memory=False", "--log_gpu_memory"], ["data.storage=stream", "telemetry.log_memory=true"]),
        (["--pin_memory", "1", "--log-gpu-memory", "no"], ["data.storage=pinned", "telemetry.log_memory=false"]),
        (["--no-pin-memory", "--no_log_gpu_memory"], ["data.storage=stream", "telemetry.log_memory=false"]),
    ],
)
def test_switches_of_other_training_commands(given: list[str], found: list[str]) -> None:
    assert as_keys(given, LAUNCHER | TRAINING) == found


@pytest.mark.covers("CFG-10", "CFG-12")
@pytest.mark.parametrize(
    ("option", "key"), [("--pin_memory", "data.storage=pinned"), ("--log-gpu-memory", "telemetry.log_memory=true")]
)
def test_a_switch_that_is_neither_true_nor_false_says_what_to_type(option: str, key: str) -> None:
    for given in ([option, "maybe"], [f"{option}=maybe"]):
        with pytest.raises(InputError, match="got maybe, expected true or false") as caught:
            as_keys(given, LAUNCHER | TRAINING)
        assert caught.value.key == option and f"for example {option} true, which is {key}" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["--resume", "out", "-v", "a.b=1"], ["--resume", "out", "-v", "a.b=1"]),
        (["--strategy", "short"], ["infer.template=short"]),
        (["--output_dir=out", "--temperature", "0"], ["infer.output=out", "infer.temperature=0"]),
    ],
)
def test_other_arguments_stay_as_they_are(given: list[str], found: list[str]) -> None:
    assert as_keys(given, LAUNCHER | INFERENCE) == found
    with pytest.raises(InputError, match="--strategy: got no value"):
        as_keys(["--strategy"], INFERENCE)
