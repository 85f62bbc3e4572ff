"""What the plan of an inference job says of a model that a device has no room for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from jobs.__main__ import main
from raytrain.infer.quantize import quantize
from raytrain.models.gpt import gpt
from raytrain.models.weights.stored import export_weights

KEYS = {"layers": 4, "heads": 2, "width": 128, "context": 32}


def mib(text: str) -> float:
    value, unit = text.split()
    return float(value) * {"KiB": 1 / 1024, "MiB": 1, "GiB": 1024}[unit]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """A model whose weights are in a file, and a job file beside it; returns the model."""
    module = gpt(**KEYS, vocab_size=256).module
    export_weights(module.state_dict(), str(tmp_path / "model.safetensors"))
    model = {"builder": "raytrain.models.gpt:gpt", "init_from": str(tmp_path / "model.safetensors"), **KEYS}
    job = {"model": model, "data": {"source": "stdlib", "max_bytes": 9000}}
    (tmp_path / "job.yaml").write_text(json.dumps({**job, "infer": {"batch_size": 1, "max_new_tokens": 4}}))
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n' * 8)
    monkeypatch.chdir(tmp_path)
    return module


def planned(limit: int, *more: str) -> str:
    arguments = ["job.yaml", "infer.input=in.jsonl", f"cluster.memory_limit={limit}", *more, "--dry-run"]
    done = CliRunner().invoke(main, ["infer", *arguments])
    return f"exit {done.exit_code}\n{done.output}"


@pytest.mark.covers("TRB-10", "TRB-11")
def test_a_model_without_room_is_divided_and_int8_is_offered_with_its_predicted_bytes(job: torch.nn.Module) -> None:
    weights = sum(parameter.numel() * 4 for parameter in job.parameters())
    whole = planned(1 << 30)
    assert "exit 0" in whole and "stage 0" not in whole and "int8" not in whole
    total = mib(re.findall(r"memory: about ([\d.]+ \w+) of", whole)[0])
    assert weights / 2**20 <= total < 1.5 * weights / 2**20

    divided = planned(int(0.6 * weights))
    assert "exit 0" in divided and "stage 0: " in divided and "stage 1: " in divided
    found = quantize(job)
    expected = total - (found.before - found.after) / 2**20
    (said,) = re.findall(r"or: infer.quantize=int8: about ([\d.]+ \w+), which fits one device", divided)
    assert mib(said) == pytest.approx(expected, rel=0.01) and expected < 0.6 * weights / 2**20

    refused = planned(int(0.02 * weights))
    assert "exit 2" in refused and "infer.stages: got weights of" in refused
    assert f"infer.quantize=int8 needs about {said} on one device of" in " ".join(refused.split())


@pytest.mark.usefixtures("job")
@pytest.mark.covers("TRB-37")
def test_the_plan_of_stages_says_which_parts_each_has_and_whether_they_compute_one_at_a_time() -> None:
    parts = ("infer.stages=3",)
    alone = planned(1 << 30, *parts, "infer.inflight=1")
    named = re.findall(r"^stage (\d): (.*)$", alone, re.MULTILINE)
    assert [number for number, _ in named] == ["0", "1", "2"] and "tokens" in named[0][1] and "head" in named[2][1]
    assert all("blocks." in text for _, text in named)
    waiting = (
        "in flight: 1 batch at a time in each replica: one stage computes while the others wait; infer.inflight auto"
    )
    assert waiting in " ".join(alone.split())
    two = " ".join(planned(1 << 30, *parts, "infer.inflight=2").split())
    assert "2 batches at a time in each replica: at most 2 of 3 stages compute while the others wait" in two
    all_of_them = planned(1 << 30, *parts)
    assert "in flight: 6 batches at a time in each replica\n" in all_of_them and "wait" not in all_of_them
