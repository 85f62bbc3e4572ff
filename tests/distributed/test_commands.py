"""Whole commands as people give them: mistakes, the Python door, two at once, and what a run leaves behind."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from raytrain.attempts import this_process
from raytrain.run_folder import RunFolder

Job = Callable[..., dict[str, Any]]
MANY = Path(__file__).parent / "guest" / "many_commands.py"
LIMIT_S = 150

PYTHON_DOOR = """
import json, sys
import torch
from guest_code import net, rows
from jobs.train import train

job = json.load(open("job.yaml"))
torch.manual_seed(42)  # as the command does before it builds
keys = {name: value for name, value in job["model"].items() if name != "builder"}
tables = rows()
result = train({**job, "model": {"module": net(**keys)}, "data": tables}, workers=1, quiet=True)
json.dump({"run": result.run, "status": result.status, "history": result.history, "weights": result.weights},
          open("door.json", "w"))
"""

PLAIN_PYTORCH = """
import json, sys
import torch
from safetensors.torch import load_model
from guest_code import net, rows

model = net(dropout=0.0)
load_model(model, sys.argv[1])
model.eval()
with torch.no_grad():
    loss = model(**rows()["eval"])["loss"]
print(json.dumps({"loss": loss.item(), "ours": [name for name in sys.modules if name.split(".")[0] == "raytrain"]}))
"""


@pytest.mark.timeout(400)
@pytest.mark.covers("LOOP-18", "SRC-10", "LOOP-14")
def test_the_python_door_beside_the_command_line_gives_the_same_run(
    start_cli: Callable[..., Any], start_python: Callable[..., Any], guest_job: Job, place: Any
) -> None:
    place.write(guest_job(model={"dropout": 0.0}, loop={"max_steps": 8}))
    (place.folder / "door.py").write_text(PYTHON_DOOR)
    (place.folder / "plain.py").write_text(PLAIN_PYTORCH)
    both = [
        start_cli("train", "job.yaml", cwd=place.folder, env=place.env),
        start_python("-W", "error::FutureWarning", "door.py", cwd=place.folder, env=place.env),
    ]
    command, door = (started.finish(timeout=LIMIT_S) for started in both)
    assert (command.code, door.code) == (0, 0), command.text + door.text
    assert door.out == door.err == "", door.text
    result = json.loads((place.folder / "door.json").read_text())
    runs = sorted((place.folder / "runs").glob("guest-*"))
    assert len(runs) == 2
    ours = place.run_at(result["run"])
    (other,) = [place.run_at(path) for path in runs if path != ours.path]
    assert ours.losses() == other.losses() and len(other.losses()) == 8
    assert ours.evals() == other.evals() and len(other.evals()) == 1
    weights, others = load_file(result["weights"]), load_file(other.path / "weights" / "model.safetensors")
    assert sorted(weights) == sorted(others) and all(bool((weights[name] == others[name]).all()) for name in weights)
    assert [row["loss"] for row in result["history"] if row["kind"] == "train"] == [loss for _, loss in ours.losses()]
    plain = start_python("plain.py", result["weights"], cwd=place.folder).finish(timeout=60)
    assert plain.code == 0, plain.text
    read = json.loads(plain.out)
    assert read["loss"] == pytest.approx(ours.evals()[-1][1], rel=1e-6) and read["ours"] == []


@pytest.mark.timeout(590)
@pytest.mark.covers("LOOP-09", "CLI-27", "SRC-11")
def test_a_quick_run_of_two_steps_writes_everything(run_cli: Callable[..., Any], place: Any, guest_job: Job) -> None:
    job = guest_job(precision={"dtype": "bf16"}, loop={"max_steps": 2, "log_every": 1}, telemetry={"tensorboard": True})
    env = place.env | {"PYTHONWARNINGS": "error::FutureWarning"}
    minute = 60 * max(1.0, os.getloadavg()[0] / 2)  # on two idle cores
    quick = run_cli("train", str(place.write(job)), cwd=place.folder, env=env, timeout=minute)
    assert quick.code == 0 and quick.err == "", quick.text
    assert "Warning" not in quick.out
    run = place.run
    assert len(run.losses()) == 2 and run.plan["precision"]["value"] == "bf16"
    for name in (
        "job.yaml", "plan.json", "environment.json", "preflight.json", "metrics.jsonl", "events.jsonl", "result.json",
        "checkpoints/step_00000002/COMPLETE", "weights/model.safetensors", "logs/rank_00000.log",
        "report/report.html", "report/training_metrics.png", "report/performance_summary.txt", "report/history.csv",
    ):  # fmt: skip
        assert (run.path / name).exists(), name
    assert list((run.path / "tensorboard").iterdir())


@pytest.mark.timeout(200)
@pytest.mark.covers("LOOP-15")
def test_observers_watch_every_row_change_nothing_and_may_fail(
    fit: Callable[..., Any], guest_job: Job, place: Any
) -> None:
    run = fit(
        guest_job(
            loop={"max_steps": None, "epochs": 3, "global_batch_size": 80, "eval_every": 3},
            telemetry={"observers": ["guest_code:Watcher", "guest_code:Fragile"]},
        )
    )
    assert run.result["status"] == "done"
    assert [step for step, _ in run.losses()] == list(range(1, 10))
    watched = [json.loads(line) for line in (place.folder / "watched.jsonl").read_text().splitlines()]
    assert watched == [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    (failed,) = run.events("observer_failed")
    assert failed["observer"] == "Fragile" and "planted in an observer" in failed["traceback"]
    history = list(csv.DictReader((run.path / "report" / "history.csv").read_text().splitlines()))
    assert [int(row["epoch"]) for row in history] == [0, 1, 2]
    losses = [loss for _, loss in run.losses()]
    for epoch, row in enumerate(history):
        assert float(row["train_loss"]) == pytest.approx(sum(losses[3 * epoch : 3 * epoch + 3]) / 3)
        assert float(row["eval_loss"]) == run.evals()[epoch][1]


def wrong_commands(place: Any, guest_job: Job) -> dict[tuple[str, ...], str]:
    """Arguments of a command -> what its message must say, the key first."""
    place.write(guest_job())
    table = {"model": {"builder": "raytrain.models.mlp:mlp"}, "data": {"source": "csv", "path": "no.csv", "label": "y"}}
    place.write(table, "table.yaml")
    (place.folder / "empty.csv").write_text("x,y\n")
    (place.folder / "nan.csv").write_text("x,y\n1.0,0\nnan,1\n2.0,1\n")
    (place.folder / "file").touch()
    return {
        ("table.yaml",): "data.path: seen no file at",
        ("table.yaml", "data.path=empty.csv"): "data.path: seen 0 rows",
        ("table.yaml", "data.path=nan.csv"): "data.path: seen NaN in column 'x' row 1",
        ("job.yaml", "data.bad=3"): "data.source, train of guest_code:rows: seen NaN in column 'x' row 3",
        ("job.yaml", "loop.global_batch_size=1000"): "loop.global_batch_size: seen 1000, expected at most the 240",
        ("job.yaml", "scale.workers=100000"): "scale.workers: seen 100000, expected at most",
        ("job.yaml", "model.builder=nowhere:net"): "model.builder: seen nowhere:net",
        ("job.yaml", "model.builder=guest_code:absent"): "model.builder: seen guest_code:absent",
        ("job.yaml", "model.widht=3"): "model.widht: seen a key that guest_code:net does not take",
        ("job.yaml", "telemetry.observers=[guest_code:Absent]"): "telemetry.observers: seen guest_code:Absent",
        ("job.yaml", "save.dir=file/runs"): "save.dir: seen file/runs",
        ("absent.yaml",): "absent.yaml: seen no such file",
    }


@pytest.mark.timeout(200)
def test_wrong_input_is_one_message_exit_2_and_nothing_started(
    start_python: Callable[..., Any], guest_job: Job, place: Any
) -> None:
    wrong = wrong_commands(place, guest_job)
    job = json.loads((place.folder / "job.yaml").read_text())
    alive = RunFolder.create(str(place.folder / "alive"), "guest", job=job)
    alive.next_attempt(this_process())
    ended = RunFolder.create(str(place.folder / "ended"), "guest", job=job)
    ended.next_attempt({"host": "elsewhere", "pid": 1, "start": 1})
    done = {"status": "done", "steps": 6, "final_loss": 1.0, "best_eval_loss": None, "reason": ""}
    ended.write_json(ended.result, done)
    before = sorted(place.folder.rglob("*"))
    resumed = {
        ("--resume", alive.path): f"still being trained by pid {os.getpid()} on {this_process()['host']}",
        ("--resume", ended.path, "job.yaml", "model.width=3"): "model.width: seen a change beside --resume",
    }
    commands = [["train", *arguments] for arguments in (wrong | resumed)]
    (place.folder / "commands.json").write_text(json.dumps([*commands, ["train", "--resume", ended.path]]))
    process = start_python(str(MANY), "commands.json", cwd=place.folder, env=place.env).finish(timeout=LIMIT_S)
    answers = [json.loads(line) for line in process.out.splitlines()]
    assert len(answers) == len(commands) + 1, process.text
    for answer, (arguments, message) in zip(answers, (wrong | resumed).items(), strict=False):
        assert answer["code"] == 2 and message in answer["err"], (arguments, answer)
        assert answer["err"].startswith("error: ") and "Traceback" not in answer["err"], (arguments, answer)
    finished = answers[-1]
    assert finished["code"] == 0 and "is done; nothing is left to train" in finished["out"], finished
    assert not any(answer["ray"] for answer in answers)
    left = [path for path in sorted(place.folder.rglob("*")) if path not in before and "__pycache__" not in path.parts]
    assert left == [place.folder / "commands.json"]
