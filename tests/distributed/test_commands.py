"""Commands from start to end: mistakes, the Python API, concurrent commands, and the files of a run."""

from __future__ import annotations

import csv
import json
import os
import platform
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from raytrain.runs.folder import RunFolder, this_process

pytestmark = pytest.mark.daily

Job = Callable[..., dict[str, Any]]
MANY = Path(__file__).parent / "guest" / "many_commands.py"
LIMIT_S = 280

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
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # as in the evaluation
    loss = model(**rows()["eval"])["loss"]
print(json.dumps({"loss": loss.item(), "ours": [name for name in sys.modules if name.split(".")[0] == "raytrain"]}))
"""


@dataclass(frozen=True)
class Pair:
    """One short job, trained by the command line and by the Python API in one folder."""

    place: Any
    command: Any
    printed: str
    by_command: Any
    by_door: Any
    answer: dict[str, Any]


@pytest.fixture(scope="module")
def pair(module_place: Any, start_module_python: Callable[..., Any], shared_driver: Any) -> Pair:
    """Both at once: two steps in bf16, each logged; for the command, FutureWarnings are errors and a minute is all."""
    place = module_place
    loop = {"max_steps": 2, "log_every": 1}
    place.write(
        place.job(model={"dropout": 0.0}, precision={"dtype": "bf16"}, loop=loop, telemetry={"tensorboard": True})
    )
    (place.folder / "door.py").write_text(PYTHON_DOOR)
    env = place.env | {"PYTHONWARNINGS": "error::FutureWarning"}
    minute = 60 * max(1.0, os.getloadavg()[0] / 2)
    started = start_module_python("-m", "jobs", "train", "job.yaml", cwd=place.folder, env=env)
    printed = shared_driver.run_script(place.folder / "door.py", timeout=minute)
    command = started.finish(timeout=minute)
    assert command.code == 0, command.text
    answer = json.loads((place.folder / "door.json").read_text())
    runs = [place.run_at(path) for path in (place.folder / "runs").glob("guest-*")]
    (by_command,) = [run for run in runs if str(run.path) != answer["run"]]
    return Pair(place, command, printed, by_command, place.run_at(answer["run"]), answer)


@pytest.mark.timeout(590)
@pytest.mark.covers("LOOP-09", "CLI-27", "SRC-11")
def test_a_run_of_two_steps_writes_all_files_without_warnings(pair: Pair) -> None:
    assert pair.command.err == "" and "Warning" not in pair.command.out, pair.command.text
    run = pair.by_command
    assert [step for step, _ in run.losses()] == [1, 2] and run.plan["precision"]["value"] == "bf16"
    for name in (
        "job.yaml", "plan.json", "environment.json", "preflight.json", "metrics.jsonl", "events.jsonl", "result.json",
        "checkpoints/step_00000002/COMPLETE", "weights/model.safetensors", "logs/rank_00000.log",
        "report/report.html", "report/training_metrics.png", "report/performance_summary.txt", "report/history.csv",
    ):  # fmt: skip
        assert (run.path / name).exists(), name
    assert list((run.path / "tensorboard").iterdir())


@pytest.mark.timeout(590)
@pytest.mark.covers("VER-10", "TRB-20")
def test_the_log_says_where_all_rows_are_kept_and_their_size_before_the_first_step(pair: Pair) -> None:
    out = pair.command.out
    lines = {name: rest for name, _, rest in (line.partition(" ") for line in out.splitlines())}
    assert "CPU" in lines["machine"] and "no GPU" in lines["machine"], "whether one is used"
    assert re.search(r"rows.*, [\d.]+ [KM]iB, resident$", lines["data"]), lines["data"]
    assert lines["batch"].endswith(f"{pair.by_command.plan['steps_per_epoch']['value']} per epoch")
    assert out.index("resident") < out.index("starting workers")


@pytest.mark.timeout(590)
@pytest.mark.covers("DEV-16")
def test_a_run_records_its_hardware_driver_and_versions(pair: Pair) -> None:
    (machine,) = [line for line in pair.command.out.splitlines() if line.startswith("machine ")]
    record = json.loads((pair.by_command.path / "environment.json").read_text())
    model = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    total = re.search(r"^MemTotal:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert model is not None and record["cpu_model"] == model[1].strip()
    assert total is not None and 1 << 30 < record["memory_bytes"] <= int(total[1]) << 10
    assert f"{record['cores']} CPU core" in machine and record["cores"] <= (os.cpu_count() or 1)
    assert all(isinstance(has, bool) for has in record["cpu_flags"].values()) and "amx_bf16" in record["cpu_flags"]
    assert record["driver"] is None and record["gpus"] == [] and "no GPU" in machine, "of NVIDIA; there is none here"
    assert record["versions"]["torch"] == torch.__version__ and record["versions"]["ray"] == version("ray")
    assert record["host"] == socket.gethostname() and record["python"] == platform.python_version()
    (node,) = record["inventory"]["nodes"]
    assert node["cpus"] == record["cores"] and node["memory_bytes"] == record["memory_bytes"]


@pytest.mark.timeout(590)
@pytest.mark.covers("LOOP-18", "SRC-10")
def test_the_python_api_gives_the_same_run_as_the_command_line(pair: Pair) -> None:
    assert pair.printed == "", "quiet=True"
    ours, other = pair.by_door, pair.by_command
    assert ours.losses() == other.losses() and len(other.losses()) == 2
    assert ours.evals() == other.evals() and len(other.evals()) == 1
    weights, others = (load_file(run.path / "weights" / "model.safetensors") for run in (ours, other))
    assert sorted(weights) == sorted(others) and all(bool((weights[name] == others[name]).all()) for name in weights)
    assert pair.answer["status"] == "done" and pair.answer["weights"] == str(ours.path / "weights/model.safetensors")
    said = [(row["step"], row["loss"]) for row in pair.answer["history"] if row["kind"] == "train"]
    assert said == ours.losses()


@pytest.mark.timeout(590)
@pytest.mark.covers("LOOP-14")
def test_plain_pytorch_reads_the_weights_and_finds_the_same_eval_loss(
    pair: Pair, start_module_python: Callable[..., Any]
) -> None:
    script = pair.place.folder / "plain.py"
    script.write_text(PLAIN_PYTORCH)
    plain = start_module_python(str(script), pair.answer["weights"], cwd=pair.place.folder).finish(timeout=LIMIT_S)
    assert plain.code == 0, plain.text
    read = json.loads(plain.out)
    assert read["loss"] == pytest.approx(pair.by_door.evals()[-1][1], rel=1e-6) and read["ours"] == []


@pytest.mark.timeout(400)
@pytest.mark.covers("LOOP-15", "LOOP-01", "PAR-14")
def test_observers_change_nothing_in_a_run_of_two_workers_and_may_fail(
    fit: Callable[..., Any], guest_job: Job, place: Any
) -> None:
    run = fit(
        guest_job(
            optim={"lr": 0.03},
            loop={"max_steps": None, "epochs": 3, "eval_every": 20},
            save={"every": 20},
            scale={"workers": 2},
            telemetry={"observers": ["guest_code:Watcher", "guest_code:Fragile"]},
        )
    )
    assert run.result["status"] == "done"
    assert [step for step, _ in run.losses()] == list(range(1, 61))
    assert run.evals()[-1][1] < 0.5 * run.losses()[0][1] and run.result["best_eval_loss"] == run.evals()[-1][1]
    assert run.plan["strategy"]["value"] == "data_parallel" and run.plan["workers"]["value"] == 2
    manifests = [json.loads((run.checkpoint(step) / "manifest.json").read_text()) for step in (20, 40, 60)]
    assert [(row["step"], row["eval_loss"]) for row in manifests] == run.evals()
    assert {row["world_size"] for row in manifests} == {2}
    watched = [json.loads(line) for line in (place.folder / "watched.jsonl").read_text().splitlines()]
    assert watched == [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    (failed,) = run.events("observer_failed")
    assert failed["observer"] == "Fragile" and "planted in an observer" in failed["traceback"]
    history = list(csv.DictReader((run.path / "report" / "history.csv").read_text().splitlines()))
    assert [int(row["epoch"]) for row in history] == [0, 1, 2]
    losses = [loss for _, loss in run.losses()]
    for epoch, row in enumerate(history):
        assert float(row["train_loss"]) == pytest.approx(sum(losses[20 * epoch : 20 * epoch + 20]) / 20)
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
        ("table.yaml",): "data.path: got no file at",
        ("table.yaml", "data.path=empty.csv"): "data.path: got 0 rows",
        ("table.yaml", "data.path=nan.csv"): "data.path: got NaN in column 'x' row 1",
        ("job.yaml", "data.bad=3"): "data.source, train of guest_code:rows: got NaN in column 'x' row 3",
        ("job.yaml", "loop.global_batch_size=1000"): "loop.global_batch_size: got 1000, expected at most 240",
        ("job.yaml", "scale.workers=100000"): "scale.workers: got 100000, expected at most",
        ("job.yaml", "model.builder=nowhere:net"): "model.builder: got nowhere:net",
        ("job.yaml", "model.builder=guest_code:absent"): "model.builder: got guest_code:absent",
        (
            "job.yaml",
            "model.widht=3",
        ): "model.widht: did you mean model.width? Got a key that guest_code:net does not accept",
        ("job.yaml", "telemetry.observers=[guest_code:Absent]"): "telemetry.observers: got guest_code:Absent",
        ("job.yaml", "save.dir=file/runs"): "save.dir: got file/runs",
        ("absent.yaml",): "absent.yaml: got no such file",
    }


@pytest.mark.timeout(LIMIT_S + 20)
def test_a_program_that_has_imported_ray_before_gets_a_cluster_with_its_token(
    start_python: Callable[..., Any], place: Any
) -> None:
    """Ray reads its environment once, at the latest when ray.data is imported."""
    program = """
import ray.data
from jobs.driver.runtime import connected
with connected("local", num_cpus=1, num_gpus=0, verbose=False):
    mode = ray._raylet.get_authentication_mode() == ray._raylet.AuthenticationMode.TOKEN
    print(ray.get(ray.remote(lambda: 2 + 2).remote()), mode, *(node["NodeManagerAddress"] for node in ray.nodes()))
"""
    ended = start_python("-c", program, cwd=place.folder, env=place.env).finish(timeout=LIMIT_S)
    assert ended.code == 0 and ended.out.split() == ["4", "True", "127.0.0.1"], ended.text


@pytest.mark.timeout(400)
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
        ("--resume", alive.path): f"which is still running with pid {os.getpid()} on {this_process()['host']}",
        ("--resume", ended.path, "job.yaml", "model.width=3"): "model.width: got the changed value 3",
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
