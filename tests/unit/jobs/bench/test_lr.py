"""`raytrain bench lr`: the ramp, the advice from a curve, and that nothing else changes."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from jobs.bench.harness.options import bench_verb, options_of
from jobs.bench.lr import LrOptions, Ramp, advise, smoothed
from raytrain.config.sections import OptimConfig
from raytrain.errors import InputError

JOB = """\
name: letters
model: {builder: "raytrain.models.gpt:gpt", layers: 1, heads: 2, width: 16, context: 16}
data: {source: text, path: "%s"}
optim: {lr: 0.003}
precision: {dtype: fp32}
loop: {global_batch_size: 8}
"""


@pytest.mark.covers("LOOP-07")
def test_the_range_test_writes_a_curve_and_a_suggestion_and_changes_nothing_else(
    tmp_path: Path, tiny_text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB % tiny_text)
    before = torch.get_rng_state(), torch.get_num_threads()
    arguments = ["job.yaml", "optim.name=muon", "threads=1", "steps=40", "lowest=1e-4", "highest=100"]
    assert bench_verb("lr", arguments, out="found/lr.json", quick=True, as_json=False) == 0
    assert torch.equal(torch.get_rng_state(), before[0]) and torch.get_num_threads() == before[1]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "job.yaml", "lr.json", "lr.png", tiny_text.name,
    ]  # fmt: skip
    assert (tmp_path / "job.yaml").read_text() == JOB % tiny_text
    assert (tmp_path / "found" / "lr.png").read_bytes().startswith(b"\x89PNG")
    values = json.loads((tmp_path / "found" / "lr.json").read_text())["values"]
    rates, losses = values["lr"], values["loss"]
    assert values["optimizer"] == "muon" and values["own_lr"] == 0.003
    assert rates[0] == pytest.approx(1e-4) and len(rates) == len(losses) == len(values["smoothed"]) > 20
    rises = [b / a for a, b in pairwise(rates)]
    assert rises == pytest.approx([1e6 ** (1 / 39)] * len(rises))
    assert values["diverged"] is not None and len(rates) < 40, "the ramp continued after divergence"
    assert 1e-4 < values["suggested"] <= values["diverged"] / 10 and values["suggested"] <= values["steepest"]
    printed = capsys.readouterr().out
    assert f"optim.lr={values['suggested']:.2g}" in printed and "the job is unchanged" in printed


def test_a_curve_of_a_known_shape_gives_its_known_points() -> None:
    """The curve falls as a sigmoid around 1e-3; a parabola puts its minimum at 1e-1."""
    rates = [10 ** (-6 + 8 * index / 200) for index in range(201)]
    powers = [math.log10(rate) for rate in rates]
    losses = [4 - 2 / (1 + math.exp(-4 * (power + 3))) + max(0.0, power + 1) ** 2 for power in powers]
    free, stopped = advise(rates, losses, diverged=None), advise(rates, losses, diverged=5e-3)
    assert free.steepest == pytest.approx(1e-3, rel=0.1) == free.suggested
    assert free.lowest == pytest.approx(1e-1, rel=0.3) and free.diverged is None
    assert stopped.suggested == pytest.approx(5e-4), "at most a tenth of the diverging rate"


def test_without_a_fall_there_is_no_advice() -> None:
    rates = [10**-power for power in range(9, 0, -1)]
    for losses in ([2.0] * 9, [2.0 + 0.1 * index for index in range(9)], [2.0 - 0.001 * index for index in range(9)]):
        assert advise(rates, losses, diverged=None).suggested is None
    assert advise(rates, [3.0, 9.0, 9.0], diverged=1e-7).suggested is None


def test_smoothing_has_bias_correction() -> None:
    assert smoothed([3.0, 3.0, 3.0], 0.9) == pytest.approx([3.0] * 3)
    assert smoothed([1.0, 2.0], 0.5) == pytest.approx([1.0, 5 / 3])
    assert smoothed([1.0, 2.0], 0.0) == [1.0, 2.0]


def test_the_ramp_rises_geometrically_and_keeps_the_ratio_of_parameter_groups() -> None:
    groups = [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "lr": 0.005}]
    optimizer = torch.optim.SGD(groups, lr=0.05)
    ramp = Ramp(OptimConfig(), lr=0.05, lowest=1e-3, highest=10.0, steps=5)
    used = [ramp.apply([optimizer], step) for step in range(1, 6)]
    assert used == pytest.approx([1e-3, 1e-2, 1e-1, 1.0, 10.0])
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([10.0, 1.0])


def test_arguments_are_a_job_and_keys_of_the_job_and_of_the_bench() -> None:
    options = options_of("lr", ["a.yaml", "optim.lr=0.1", "steps=9", "loop.max_steps=3"], quick=False)
    assert isinstance(options, LrOptions) and (options.job, options.steps) == ("a.yaml", 9)
    assert options.changes == ["optim.lr=0.1", "loop.max_steps=3"]
    with pytest.raises(InputError, match=r"one JOB\.yaml"):
        options_of("lr", ["a.yaml", "b.yaml"], quick=False)
    with pytest.raises(InputError, match="lowest"):
        bench_verb("lr", ["lowest=1", "highest=0.1"], out=None, quick=True, as_json=False)
