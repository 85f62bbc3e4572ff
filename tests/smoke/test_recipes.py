"""Each shipped recipe: read strictly, then trained for a few steps through Ray."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.job.spec import load_spec

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "jobs" / "recipes"
NAMES = ["cnn_idx", "custom", "default", "gpt_text", "lifecycle", "mlp_idx", "moe_hosts", "shakespeare", "tabular"]
RAY_LIMIT_S = 240


@pytest.fixture
def train(train_shared: Callable[..., Path]) -> Callable[..., Path]:
    """`train(recipe, *overrides)` trains in `tmp_path` with one worker and returns the finished run's folder."""

    def start(recipe: str, *overrides: str) -> Path:
        return train_shared(RECIPES / f"{recipe}.yaml", "scale.workers=1", *overrides, timeout=RAY_LIMIT_S)

    return start


def rows_of(run: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def check_finished(run: Path, *, steps: int) -> None:
    """A run that ended well: its result, its last train row, its weights and its page."""
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("done", steps)
    last = rows_of(run, "train")[-1]
    assert last["step"] == steps and last["loss"] == result["final_loss"] and math.isfinite(last["loss"])
    assert (run / "weights" / "model.safetensors").stat().st_size > 0
    assert "<html" in (run / "report" / "report.html").read_text()


def test_every_recipe_is_on_the_list() -> None:
    assert sorted(path.stem for path in RECIPES.glob("*.yaml")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_read(name: str) -> None:
    loaded = load_spec(RECIPES / f"{name}.yaml", ["optim.lr=0.5"])
    assert loaded.spec.optim.lr == 0.5
    assert loaded.sources["model.builder"] in ("file", "recipe")
    assert loaded.spec.name == name.replace("_", "-")


@pytest.mark.timeout(RAY_LIMIT_S + 30)
def test_gpt_text_trains(train: Callable[..., Path], tiny_text: Path) -> None:
    small = ("model.layers=1", "model.context=16", "loop.max_steps=3")
    check_finished(train("gpt_text", f"data.path={tiny_text}", *small), steps=3)


@pytest.mark.timeout(RAY_LIMIT_S + 30)
def test_moe_hosts_trains_with_its_experts_in_two_processes(train: Callable[..., Path]) -> None:
    small = ("model.layers=1", "model.context=16", "data.max_bytes=20000", "loop.eval_batches=1", "loop.log_every=1")
    run = train("moe_hosts", *small, "loop.max_steps=3", "precision.dtype=fp32")
    check_finished(run, steps=3)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (started,) = [event for event in events if event["kind"] == "expert_hosts"]
    assert len({host["pid"] for host in started["hosts"]}) == 2
    assert all(row["transport_s"] > 0 for row in rows_of(run, "train"))


@pytest.mark.timeout(RAY_LIMIT_S + 30)
@pytest.mark.covers("LOOP-20", "SRC-06")
def test_mlp_idx_learns_digits_in_two_epochs(
    train: Callable[..., Path], digits: Callable[..., Any], tmp_path: Path
) -> None:
    files = digits(tmp_path, count=4000, gz=True)
    run = train("mlp_idx", f"data.images={files.images}", f"data.labels={files.labels}")
    check_finished(run, steps=2 * math.ceil(3600 / 32))
    assert rows_of(run, "eval")[-1]["accuracy"] >= 0.95


@pytest.mark.timeout(RAY_LIMIT_S + 30)
def test_cnn_idx_trains(train: Callable[..., Path], digits: Callable[..., Any], tmp_path: Path) -> None:
    files = digits(tmp_path, count=100)
    run = train("cnn_idx", f"data.images={files.images}", f"data.labels={files.labels}", "loop.max_steps=3")
    check_finished(run, steps=3)


@pytest.mark.timeout(RAY_LIMIT_S + 30)
def test_tabular_trains_on_parquet(train: Callable[..., Path], table: Callable[..., Path], tmp_path: Path) -> None:
    rows = table(tmp_path / "rows.parquet", count=200)
    check_finished(train("tabular", f"data.path={rows}", "data.label=y", "loop.max_steps=3"), steps=3)


@pytest.mark.timeout(RAY_LIMIT_S + 30)
def test_custom_trains_the_code_that_the_readme_shows(train: Callable[..., Path], tmp_path: Path) -> None:
    readme = (ROOT / "jobs" / "README.md").read_text()
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", readme, re.DOTALL)
    assert {name for name, _ in blocks} == {"my_model.py", "my_data.py"}
    for name, code in blocks:
        (tmp_path / name).write_text(code)
    check_finished(train("custom", "loop.max_steps=3"), steps=3)


@pytest.mark.timeout(RAY_LIMIT_S + 30)
def test_lifecycle_changes_its_experts_sleeps_and_draws_them(train: Callable[..., Path]) -> None:
    small = ("model.layers=1", "model.width=32", "loop.max_steps=60", "experts.lifecycle.every=10",
             "experts.lifecycle.replay.every=30", "experts.lifecycle.replay.rows=32",
             "experts.lifecycle.birth.uncertainty=0", "experts.lifecycle.birth.cooldown_steps=10")  # fmt: skip
    run = train("lifecycle", *small)
    check_finished(run, steps=60)
    events = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert events.count("expert_born") >= 2 and events.count("sleep_cycle") >= 1
    assert (run / "report" / "expert_lifecycle.png").stat().st_size > 0
