"""Options of other launchers mean the keys that do the same here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from jobs.__main__ import main
from jobs.job.keys import INFERENCE, LAUNCHER, TRAINING, as_keys
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
    text, plan = planned("--experts=4", "--parallel_strategy=data_parallel", "--compile", "false")
    assert (plan["strategy"], plan["loop.compile"]) == ("data_parallel", "off"), text


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["--compile", "a.b=1"], ["loop.compile=default", "a.b=1"]),
        (["--compile", "True"], ["loop.compile=default"]),
        (["--compile=False", "job.yaml"], ["loop.compile=off", "job.yaml"]),
        (["--compile", "default"], ["loop.compile=default", "default"]),  # a recipe
    ],
)
def test_compile_is_a_switch_or_has_a_value(given: list[str], found: list[str]) -> None:
    assert as_keys(given, LAUNCHER | TRAINING) == found


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["--resume", "out", "-v", "a.b=1"], ["--resume", "out", "-v", "a.b=1"]),
        (["--output_dir=out", "--max-samples", "5"], ["--output_dir=out", "infer.max_samples=5"]),
    ],
)
def test_other_arguments_stay_as_they_are(given: list[str], found: list[str]) -> None:
    assert as_keys(given, LAUNCHER | INFERENCE) == found
    with pytest.raises(InputError, match="--data_source: got no value"):
        as_keys(["--data_source"], INFERENCE)
