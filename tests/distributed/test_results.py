"""What a run leaves behind: its best evaluation, its weights at the end and by the verb `export`, and its report."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import make_folder, write_lines
from matplotlib.image import imread
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from jobs.export import export_weights_of
from raytrain.errors import InputError
from raytrain.models.gpt import gpt
from raytrain.models.weights.headers import find_weights
from raytrain.report.plots import activations, figure, png
from raytrain.runs.folder import RunFolder
from tests.unit.raytrain.report.test_build import summary_from_text

LIMIT_S = 240
GPT = {"builder": "raytrain.models.gpt:gpt", "layers": 2, "heads": 2, "width": 16, "context": 8}
MOE = {**GPT, "builder": "experts.models:moe_gpt"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dense": {"model": GPT, "scale": {"workers": 2}, "loop": {"micro_batch_size": 1}},
    "fsdp": {"model": GPT, "scale": {"workers": 2, "strategy": "fsdp"}},
    "in_process": {"model": MOE, "experts": {"num_experts": 3, "hosts": 0, "trace_every": 1},
                   "loop": {"epochs": 2, "max_steps": None, "global_batch_size": 32, "log_every": 1, "eval_every": 2,
                            "patience": 100}},
    "hosts": {"model": MOE, "experts": {"num_experts": 3, "hosts": 2}},
    "colocated": {
        "model": MOE, "scale": {"workers": 2},
        "experts": {"num_experts": 3, "hidden": [16, 16, 24], "hosts": "colocated"},
    },
    "transformers": {},
}  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """A run whose best evaluation is not its last step."""

    path: Path
    evals: dict[int, float]
    result: dict[str, Any]
    plan: dict[str, Any]

    @property
    def folder(self) -> RunFolder:
        return RunFolder(str(self.path))

    @property
    def best(self) -> int:
        return min(self.evals, key=lambda step: (self.evals[step], step))

    def checkpoints(self) -> list[int]:
        return sorted(int(mark.parent.name[5:]) for mark in self.path.glob("checkpoints/step_*/COMPLETE"))


def job_of(folder: Path, layout: str) -> dict[str, Any]:
    """Eight steps on one word, evaluated on letters that it does not have: the longer, the worse."""
    text = folder / "text.txt"
    text.write_text("raining" * 130 + "xyz" * 33)
    job: dict[str, Any] = {
        "name": layout.replace("_", "-"),
        "data": {"source": "text", "path": str(text)},
        "optim": {"lr": 0.05, "warmup_steps": 0, "schedule": "constant"},
        "precision": {"dtype": "fp32"},
        "loop": {"max_steps": 8, "global_batch_size": 8, "eval_every": 2, "patience": 100},
        "save": {"keep": 1},
        "scale": {"workers": 1, "threads": 1},
        "telemetry": {"tensorboard": False},
    }
    if layout == "transformers":
        model = make_folder(folder / "model", "llama")
        train, held = folder / "train.jsonl", folder / "eval.jsonl"
        write_lines(train, [{"text": "the rain falls on the roof."}] * 64)
        write_lines(held, [{"text": "zebras query jazz vox."}] * 8)
        job["model"] = {"builder": "raytrain.models.transformers:causal_lm", "path": str(model)}
        job["data"] = {"source": "jsonl", "path": str(train), "eval_path": str(held), "text_field": "text"}
    for section, keys in LAYOUTS[layout].items():
        job[section] = {**job.get(section, {}), **keys}
    return job


@pytest.fixture(scope="module")
def trained(shared_driver: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """`trained(layout)`: each layout is trained once."""
    made: dict[str, Trained] = {}

    def run(layout: str) -> Trained:
        if layout not in made:
            folder = tmp_path_factory.mktemp(layout)
            (folder / "job.yaml").write_text(json.dumps(job_of(folder, layout)))
            path = shared_driver.train(folder / "job.yaml", cwd=folder, timeout=LIMIT_S)
            rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
            evals = {row["step"]: row["loss"] for row in rows if row["kind"] == "eval"}
            choices = json.loads((path / "plan.json").read_text())["choices"]
            made[layout] = Trained(path, evals, json.loads((path / "result.json").read_text()), choices)
        return made[layout]

    return run


def notes_in(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in right)


@pytest.mark.timeout(590)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_best_weights_are_kept_named_and_exported(
    layout: str, trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    run = trained(layout)
    best, loss = run.best, min(run.evals.values())
    assert best < 8 == max(run.evals) and run.checkpoints() == [best, 8], run.evals
    assert run.result["best_step"] == best and run.result["best_eval_loss"] == loss
    assert run.result["best_checkpoint"] == f"step_{best:08d}"
    assert run.plan["export"]["value"] == "best" and "patience" in run.plan["export"]["reason"]
    assert "leaves a checkpoint" in run.plan["best_saves"]["reason"]
    weights = run.path / "weights" / "model.safetensors"
    notes = notes_in(weights)
    assert notes["step"] == str(best) and float(notes["loss"]) == loss and notes["loss_kind"] == "eval"
    assert run.result["weights_step"] == best

    folder, told = export_weights_of(run.folder, "best", str(tmp_path / "best"))
    assert_same(load_file(Path(folder) / "model.safetensors"), load_file(weights))
    assert sorted(entry.name for entry in Path(folder).iterdir()) == sorted(
        entry.name for entry in weights.parent.iterdir()
    )
    assert {key: notes[key] for key in told} == told
    folder, told = export_weights_of(run.folder, "last", str(tmp_path / "last"))
    last = load_file(Path(folder) / "model.safetensors")
    assert told["step"] == "8" and float(told["loss"]) == run.evals[8]
    assert last.keys() == load_file(weights).keys()
    assert any(not torch.equal(last[name], tensor) for name, tensor in load_file(weights).items())


@pytest.mark.timeout(590)
def test_the_exported_weights_have_the_eval_loss_that_is_written_in_them(trained: Callable[[str], Trained]) -> None:
    """Evaluated by the model alone, over all windows of the held-out text at once."""
    run = trained("dense")
    weights = load_file(run.path / "weights" / "model.safetensors")
    model = gpt(**{key: GPT[key] for key in ("layers", "heads", "width", "context")}, vocab_size=256)  # type: ignore[arg-type]
    model.module.load_state_dict(weights, strict=False)
    model.module.eval()
    text = json.loads((run.path / "job.json").read_text())["data"]["path"]
    held = torch.frombuffer(bytearray(Path(text).read_bytes()), dtype=torch.uint8).long()
    held = held[int(len(held) * 0.9) :]
    count = (len(held) - 1) // 8
    rows = {"input_ids": held[: count * 8].view(count, 8), "labels": held[1 : count * 8 + 1].view(count, 8)}
    with torch.no_grad():
        assert float(model.loss(model.module, rows).loss) == pytest.approx(min(run.evals.values()), abs=1e-5)


@pytest.mark.timeout(590)
@pytest.mark.parametrize("layout", ["hosts", "colocated"])
def test_transplanted_experts_are_those_of_the_run(
    layout: str, trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    """The weights of a checkpoint start a new run in one process; a wrong order of experts would give another loss."""
    from lab import make_session

    run = trained(layout)
    export_weights_of(run.folder, "best", str(tmp_path / "best"))
    job = json.loads((run.path / "job.json").read_text())
    session = make_session(
        {**job["model"], "init_from": str(tmp_path / "best" / "model.safetensors")}, job["data"],
        experts={**job["experts"], "hosts": 0}, loop={"eval_every": 2, "global_batch_size": 8},
    )  # fmt: skip
    assert session.evaluate(0)["loss"] == pytest.approx(run.evals[run.best], abs=1e-5)
    with pytest.raises(InputError, match="raytrain export RUN --step N"):
        find_weights(str(run.path / "checkpoints" / f"step_{run.best:08d}"), key="model.init_from")


@pytest.mark.timeout(590)
def test_the_verb_explains_what_it_cannot_export(
    trained: Callable[[str], Trained], run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    run = trained("dense")
    done = run_cli("export", str(run.path), cwd=tmp_path)
    assert done.code == 0, done.text
    where = f"{run.path}/exports/step_{run.best:08d}"
    assert done.out == f"weights of step {run.best}, eval loss {min(run.evals.values()):.6g}: {where}\n"
    again = run_cli("export", str(run.path), cwd=tmp_path)
    assert again.code == 2 and "--to" in again.err and "holds model.safetensors" in again.err, again.text
    unknown = run_cli("export", str(run.path), "--step", "5", cwd=tmp_path)
    assert unknown.code == 2 and f"steps {run.best}, 8" in unknown.err, unknown.text
    empty = RunFolder.create(str(tmp_path), "empty")
    nothing = run_cli("export", empty.path, cwd=tmp_path)
    assert nothing.code == 2 and "without a complete checkpoint" in nothing.err, nothing.text
    part = run.path / "checkpoints" / "step_00000008" / "model.safetensors"
    content = part.read_bytes()
    try:
        part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        damaged = run_cli("export", str(run.path), "--step", "last", "--to", "out", cwd=tmp_path)
    finally:
        part.write_bytes(content)
    assert damaged.code == 1 and "step_00000008/model.safetensors: damaged" in damaged.err, damaged.text
    assert not (tmp_path / "out").exists()


def read_report(run: Trained, name: str) -> Any:
    return json.loads((run.path / "report" / name).read_text())


def rows_of(run: Trained, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


@pytest.mark.timeout(590)
@pytest.mark.covers("VIS-02")
def test_the_picture_of_the_training_shows_the_rows_of_the_run(trained: Callable[[str], Trained]) -> None:
    run = trained("in_process")
    spec, train, evals = read_report(run, "training_metrics.json"), rows_of(run, "train"), rows_of(run, "eval")
    drawn = figure(spec)
    pixels = imread(io.BytesIO((run.path / "report" / "training_metrics.png").read_bytes()))
    assert np.array_equal(pixels, imread(io.BytesIO(png(drawn)))), "the file is the picture of this spec"
    loss, accuracy, epochs = drawn.axes
    assert [axes.get_title(loc="left") for axes in (loss, accuracy, epochs)] == ["Loss", "Accuracy", "Epoch time"]
    for line, rows in zip(loss.lines, (train, evals), strict=True):
        assert list(line.get_xdata()) == [row["step"] for row in rows]
        assert list(line.get_ydata()) == [row["loss"] for row in rows]
    (line,) = accuracy.lines
    assert list(line.get_ydata()) == [row["accuracy"] for row in evals]
    with (run.path / "report" / "history.csv").open() as file:
        history = list(csv.DictReader(file))
    heights = [bar.get_height() for bar in epochs.patches]
    assert heights == [float(row["epoch_time_s"]) for row in history] and len(heights) == 2
    for epoch, height in enumerate(heights):
        assert height == pytest.approx(sum(row["step_time_s"] for row in train if row["epoch"] == epoch))


@pytest.mark.timeout(590)
@pytest.mark.covers("VIS-03")
def test_the_picture_of_the_experts_shows_the_choices_of_the_router(trained: Callable[[str], Trained]) -> None:
    """Counted here from the traces of every step, which know nothing of the counters."""
    run = trained("in_process")
    chosen: dict[int, np.ndarray] = {}
    for path in sorted((run.path / "routing").iterdir()):
        with np.load(path) as trace:
            chosen[int(trace["step"])] = trace["indices"]  # (L, B, S, K)
    assert sorted(chosen) == list(range(1, 9))
    counts = np.array([[np.bincount(layer.ravel(), minlength=3) for layer in chosen[step]] for step in sorted(chosen)])
    spec = read_report(run, "expert_activations.json")
    pixels = imread(io.BytesIO((run.path / "report" / "expert_activations.png").read_bytes()))
    drawn = activations(spec)
    assert np.array_equal(pixels, imread(io.BytesIO(png(drawn)))), "the file is the picture of this spec"
    assert len(drawn.axes) >= 6 and len(spec["panels"]) == 2
    for layer in range(2):
        heat, bars, recency = drawn.axes[3 * layer : 3 * layer + 3]
        assert [bar.get_width() for bar in bars.patches] == counts[:, layer].sum(0).tolist()
        used = [max(step for step in chosen if counts[step - 1, layer, expert]) for expert in range(3)]
        dots = {int(y): int(x) for x, y in recency.collections[0].get_offsets().tolist()}
        assert dots == dict(enumerate(used))
        even = 3 * counts[:, layer] / counts[:, layer].sum(1, keepdims=True)
        assert heat.collections[0].get_array().filled(0.0) == pytest.approx(even.T)


@pytest.mark.timeout(590)
@pytest.mark.covers("VIS-06")
def test_the_summary_says_what_the_run_was_and_did(trained: Callable[[str], Trained]) -> None:
    run = trained("in_process")
    text = summary_from_text((run.path / "report" / "performance_summary.txt").read_text())
    twin = read_report(run, "performance_summary.json")
    assert list(text) == list(twin)
    for name, value in twin.items():
        shown = text[name]
        assert (shown if isinstance(value, str) else None if shown == "-" else json.loads(shown)) == value, name
    train, evals = rows_of(run, "train"), rows_of(run, "eval")
    wall = run.result["wall_s"]
    rows = json.loads((run.path / "plan.json").read_text())["data_facts"]["train_rows"]
    exact = {
        "mode": "cpu", "strategy": "data_parallel", "precision": "fp32", "micro_batch": 32, "accumulation": 1,
        "effective_batch": 32, "experts_first": 3, "experts_last": 3, "compile": "off", "steps": 8, "epochs": 2,
        "attempts": 1, "status": "done", "workers": 1, "best_eval_step": run.best,
    }  # fmt: skip
    assert {name: twin[name] for name in exact} == exact and twin["devices"].startswith("1 x cpu")
    close = {
        **{f"{part}_s": spent for part, spent in run.result["time"].items()},
        "wall_s": wall, "accuracy": evals[-1]["accuracy"], "first_loss": train[0]["loss"],
        "final_loss": train[-1]["loss"], "best_eval_loss": min(run.evals.values()),
        "samples_per_s_median": float(np.median([row["samples_per_s"] for row in train])),
        "tokens_per_s_median": float(np.median([row["tokens_per_s"] for row in train])),
        "samples_per_s_run": 2 * rows / wall, "tokens_per_s_run": 2 * rows * 8 / wall,
        "step_ms_p50": 1e3 * float(np.median([row["step_time_s"] for row in train])),
        "step_ms_p95": 1e3 * float(np.percentile([row["step_time_s"] for row in train], 95)),
        "peak_memory_bytes": max(row["peak_memory_bytes"] for row in train),
    }  # fmt: skip
    assert {name: twin[name] for name in close} == pytest.approx(close, rel=1e-5)
    assert train[0]["step"] == 1
    apart = read_report(trained("dense"), "performance_summary.json")
    batch = {"workers": 2, "micro_batch": 1, "accumulation": 4, "effective_batch": 8, "experts_first": None}
    assert {name: apart[name] for name in batch} == batch and apart["devices"].startswith("2 x cpu")


@pytest.mark.timeout(590)
def test_a_finished_run_trains_more_epochs_and_a_failed_export_repeats_no_training(
    shared_driver: Any, tmp_path: Path
) -> None:
    """As a run that was as long from the start, where the learning rate does not depend on the length."""
    job = job_of(tmp_path, "dense")
    job["loop"] = {"epochs": 1, "global_batch_size": 32, "log_every": 1}
    job["scale"] = {"workers": 1, "threads": 1}
    (tmp_path / "job.yaml").write_text(json.dumps(job))

    def losses(path: Path) -> list[tuple[int, int, float]]:
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        return [(row["step"], row["epoch"], row["loss"]) for row in rows if row["kind"] == "train"]

    whole = shared_driver.train(tmp_path / "job.yaml", "loop.epochs=2", cwd=tmp_path, timeout=LIMIT_S)
    run = shared_driver.train(tmp_path / "job.yaml", cwd=tmp_path, timeout=LIMIT_S)
    assert [epoch for _, epoch, _ in losses(run)] == [0] * 4
    ask = {"job": None, "overrides": [], "cwd": str(tmp_path), "resume": str(run)}
    again = shared_driver.ask(ask, timeout=LIMIT_S)
    assert (again["status"], again["steps"]) == ("done", 4), "nothing was left to train"
    shutil.rmtree(run / "weights")
    (run / "weights").touch()  # as an object store that cannot be reached: every write fails
    failed = shared_driver.ask({**ask, "overrides": ["loop.epochs=2"]}, timeout=LIMIT_S)
    assert failed["error"].startswith("RunError: the training is complete and its checkpoint of step 8 is kept")
    assert f"{run / 'weights'}" in failed["error"] and f"`raytrain export {run}`" in failed["error"]
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["steps"], result["weights"]) == ("failed", 8, None)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [row["from_step"] for row in events if row["kind"] == "attempt"] == [0, 4], "it is not trained again"
    assert not [row for row in events if row["kind"] == "fault"]
    page = (run / "report" / "report.html").read_text()
    assert "weights could not be exported" in page and "when the cause is fixed" in page
    folder, told = export_weights_of(RunFolder(str(run)), "last", None)
    assert told["step"] == "8" and load_file(Path(folder) / "model.safetensors")
    (run / "weights").unlink()
    more = shared_driver.ask(ask, timeout=LIMIT_S)
    assert (more["status"], more["steps"], more["run"]) == ("done", 8, str(run))
    assert losses(run) == losses(whole) and [epoch for _, epoch, _ in losses(run)] == [0] * 4 + [1] * 4
    assert notes_in(run / "weights" / "model.safetensors")["step"] == "8"
