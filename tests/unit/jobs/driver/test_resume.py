"""`--resume`: which runs can be resumed, and which keys may change."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from jobs.driver.plan_table import ResumedFrom
from jobs.driver.run_folder import Resumed, changed_values, check_checkpoints, newest_unfinished, open_resumed
from jobs.job.spec import load_spec
from jobs.train import run_train
from raytrain.checkpoint.writer import CheckpointWriter
from raytrain.errors import InputError
from raytrain.plan.choice import Deferred, Resolved
from raytrain.plan.plan import Plan
from raytrain.runs.folder import RunFolder, this_process
from raytrain.runs.records import event

JOB: dict[str, Any] = {
    "name": "mine",
    "model": {"builder": "raytrain.models.mlp:mlp", "hidden": [8]},
    "data": {"source": "csv", "path": "rows.csv"},
    "loop": {"max_steps": 10},
}
NOBODY = {"host": "another-host", "pid": 1, "start": 1}


def run_in(folder: Path, *, status: str | None = None, owner: dict[str, Any] = NOBODY) -> RunFolder:
    """A run folder of JOB that `owner` worked on, ended with `status` (None: it was killed)."""
    run = RunFolder.create(str(folder), "mine", job={**JOB, "save": {"dir": str(folder)}})
    run.next_attempt(owner)
    if status is not None:
        run.write_json(run.result, {"status": status})
    return run


@pytest.mark.parametrize(
    ("status", "finished"), [(None, False), ("failed", False), ("interrupted", False), ("done", True)]
)
def test_an_ended_run_can_be_resumed_unless_it_is_done(tmp_path: Path, status: str | None, finished: bool) -> None:
    run = run_in(tmp_path, status=status)
    for name in (run.path, str(tmp_path / "latest"), run.path + "/"):
        resumed = open_resumed(name, None, [])
        assert resumed is not None and resumed.run.path == run.path
        assert resumed.finished is finished and resumed.changed == []
        assert resumed.loaded.spec.loop.max_steps == 10


def test_a_finished_run_that_shall_be_longer_is_not_finished(tmp_path: Path) -> None:
    run = run_in(tmp_path, status="done")
    resumed = open_resumed(run.path, None, ["loop.max_steps=30"])
    assert resumed is not None and not resumed.finished and resumed.changed == ["loop.max_steps"]
    assert resumed.loaded.spec.loop.max_steps == 30
    other = open_resumed(run.path, None, ["save.keep=7"])
    assert other is not None and other.finished and other.changed == ["save.keep"]


@pytest.mark.parametrize(
    ("override", "key"),
    [("optim.lr=0.5", "optim.lr"), ("seed=3", "seed"), ("save.dir=elsewhere", "save.dir"),
     ("model.hidden=[9]", "model.hidden"), ("loop.global_batch_size=8", "loop.global_batch_size"),
     ("precision.dtype=bf16", "precision.dtype")],
)  # fmt: skip
def test_keys_that_decide_the_results_may_not_change(tmp_path: Path, override: str, key: str) -> None:
    run = run_in(tmp_path)
    with pytest.raises(InputError, match="cannot change on resume") as refused:
        open_resumed(run.path, None, [override])
    assert refused.value.key == key
    assert key != "optim.lr" or "got the changed value 0.5 (a number), expected 0.001 (a number), with which" in str(
        refused.value
    )


@pytest.mark.parametrize(
    "override", ["loop.epochs=3", "loop.micro_batch_size=4", "scale.workers=2", "save.every=5", "telemetry.every=9",
                 "retry.rollbacks=1", "cluster.memory_fraction=0.5", "experts.placement=lpt"],
)  # fmt: skip
def test_keys_that_do_not_decide_the_results_may_change(tmp_path: Path, override: str) -> None:
    resumed = open_resumed(run_in(tmp_path).path, None, [override])
    assert resumed is not None and resumed.changed == [override.partition("=")[0]]


@pytest.mark.parametrize(
    ("experts", "hosts", "expected"),
    [
        ({"experts-00000.safetensors": [[0, 0]]}, 0, "any number of hosts above 0, or colocated"),
        ({"experts-00000.safetensors": [[0, 0]]}, 3, None),
        ({"experts-00000.safetensors": [[0, 0]]}, {"T4": 2}, None),
        ({"experts-00000.safetensors": [[0, 0]]}, "colocated", None),
        (None, "colocated", "0"),
        (None, 2, "0"),
        (None, 0, None),
        (None, "none", None),
    ],
)
def test_experts_are_stored_inside_the_model_or_separately(
    tmp_path: Path, experts: dict[str, Any] | None, hosts: Any, expected: str | None
) -> None:
    """A checkpoint of any number of hosts resumes with any other; a mismatch is found before anything starts."""
    run = run_in(tmp_path)
    resumed, plan = open_resumed(run.path, None, []), cast(Plan, SimpleNamespace(hosts=Resolved(hosts, "asked")))
    assert resumed is not None and resumed.checked_against(plan) is resumed.run, "nothing was saved yet"
    for step in (5, 10):
        run.write_json(f"checkpoints/step_{step:08d}/manifest.json", {} if experts is None else {"experts": experts})
        run.write_text(f"checkpoints/step_{step:08d}/COMPLETE", "")
    if expected is None:
        assert resumed.checked_against(plan) is resumed.run
        return
    with pytest.raises(InputError, match="step 10") as caught:
        resumed.checked_against(plan)
    assert (caught.value.key, caught.value.expected) == ("experts.hosts", expected) and "asked" in caught.value.got


def open_plan(**choices: Any) -> Plan:
    """A plan that leaves precision and micro-batch to a measurement, unless `choices` decide them."""
    found = {
        "precision": Deferred("measured", ("bf16", "fp32")), "micro_batch_size": Deferred("measured", (1, 48)),
        "global_batch_size": Resolved(48, "set"), "workers": Resolved(2, "set"),
    }  # fmt: skip
    return cast(Plan, SimpleNamespace(**found | choices))


def test_a_resumed_run_knows_where_it_continues_and_what_was_measured(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    resumed = open_resumed(run.path, None, [])
    assert resumed is not None
    nothing = resumed.taken_over(open_plan(), attempt=2)
    assert nothing == ResumedFrom(None, 2, {})
    assert nothing.text == "from step 0, as there is no checkpoint yet; attempt 2"
    settings = {"global_batch_size": 48, "workers": 2}
    run.write_json(
        run.memory_probe, {"precision": {"value": "fp32"}, "micro_batch": {"value": 6, "settings": settings}}
    )
    assert resumed.taken_over(open_plan(), attempt=2).measured == {"precision": "fp32", "micro_batch": 6}
    assert resumed.taken_over(open_plan(workers=Resolved(1, "set")), attempt=2).measured == {"precision": "fp32"}
    given = open_plan(precision=Resolved("fp32", "set"), micro_batch_size=Resolved(3, "set"))
    assert resumed.taken_over(given, attempt=2).measured == {}, "the plan itself says them"
    for step, complete in ((276, True), (286, False)):
        run.write_text(f"checkpoints/step_{step:08d}/manifest.json", "{}")
        run.write_text(f"checkpoints/step_{step:08d}/COMPLETE", "") if complete else None
    run.append_event(event("attempt", attempt=1, precision="bf16"))
    found = resumed.taken_over(open_plan(), attempt=3)
    assert (found.step, found.measured["precision"]) == (276, "bf16"), "the checkpoint's precision stays"
    assert found.text == "from step 276 (checkpoints/step_00000276), attempt 3"
    older = replace(resumed, step=126).taken_over(open_plan(), attempt=3)
    assert older.text.startswith("from step 126 (checkpoints/step_00000126)"), "where newer ones are damaged"
    run.append_event(event("decision", what="rollback", precision="fp32"))
    assert resumed.taken_over(open_plan(), attempt=3).measured["precision"] == "fp32"


def test_the_same_rule_holds_for_a_job_file(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    job = tmp_path / "job.yaml"
    text = "name: mine\nmodel: {builder: 'raytrain.models.mlp:mlp', hidden: [8]}\ndata: {source: csv, path: rows.csv}\n"
    job.write_text(f"{text}loop: {{max_steps: 20}}\nsave: {{dir: {tmp_path}}}\n")
    resumed = open_resumed(run.path, job, [])
    assert resumed is not None and resumed.changed == ["loop.max_steps"]
    job.write_text(f"{text}loop: {{max_steps: 20}}\nsave: {{dir: {tmp_path}}}\noptim: {{lr: 1}}\n")
    with pytest.raises(InputError) as refused:
        open_resumed(run.path, job, [])
    assert refused.value.key == "optim.lr"
    with pytest.raises(InputError, match=r"missing\.yaml"):
        open_resumed(run.path, tmp_path / "missing.yaml", [])


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    for name in ("other", "missing"):
        with pytest.raises(InputError, match="the folder of a run"):
            open_resumed(str(tmp_path / name), None, [])


def test_a_folder_that_is_no_run_is_answered_with_the_newest_run_nearby(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()

    def refused(name: str) -> str:
        with pytest.raises(InputError) as caught:
            open_resumed(name, None, [])
        return str(caught.value)

    assert refused("empty") == (
        "--resume: got empty, an empty folder, expected the folder of a run; "
        "`raytrain train` starts a run and prints its folder"
    )
    for age, name in ((300, "runs/a"), (100, "runs/b"), (200, "others/c")):
        Path(name).mkdir(parents=True)
        Path(name, "job.json").write_text("{}")
        os.utime(name, (10**9 - age, 10**9 - age))
    assert refused("empty").endswith("; for example runs/b"), "the newest"
    assert refused("others/none").endswith("; for example others/c"), "the one next to it first"
    assert refused("runs").startswith("--resume: did you mean runs/b? Got runs, which has no job.json")


def test_a_run_that_is_still_alive_is_refused_with_host_and_pid(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        owner = {**this_process(), "pid": other.pid, "start": _start_of(other.pid)}
        run = run_in(tmp_path, owner=owner)
        with pytest.raises(InputError, match=rf"pid {other.pid} on {owner['host']}"):
            open_resumed(run.path, None, [])
    finally:
        other.communicate(b"\n")
    assert open_resumed(run.path, None, []) is not None  # at once, the moment it is gone


def _start_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_auto_resumes_the_newest_unfinished_run_of_the_same_job(tmp_path: Path) -> None:
    mapping = {**JOB, "save": {"dir": str(tmp_path)}}
    loaded = load_spec(None, mapping=mapping)
    assert newest_unfinished(loaded) is None
    older = run_in(tmp_path, status="interrupted")
    newer = run_in(tmp_path)
    assert older.path != newer.path
    found = newest_unfinished(loaded)
    assert found is not None and found.run.path == newer.path
    newer.write_json(newer.result, {"status": "done"})
    found = newest_unfinished(loaded)
    assert found is not None and found.run.path == older.path
    changed = load_spec(None, ["loop.max_steps=11"], mapping=mapping)
    assert newest_unfinished(changed) is None
    assert os.path.basename(older.path) in os.listdir(tmp_path)


def test_only_a_complete_checkpoint_replaces_the_initial_weights(tmp_path: Path) -> None:
    """A run that is resumed without one begins with `model.init_from` again, which must still be there."""
    run = run_in(tmp_path)
    resumed = Resumed(run, load_spec(mapping=JOB), [])
    checkpoint = Path(run.checkpoint_dir(3))
    checkpoint.mkdir(parents=True)
    assert not resumed.run.saved_steps()
    (checkpoint / "COMPLETE").write_text("")
    assert resumed.run.saved_steps()


def test_what_a_resume_changed_holds_for_the_next_one(tmp_path: Path) -> None:
    run = run_in(tmp_path, status="interrupted")
    longer = open_resumed(run.path, None, ["loop.max_steps=30", "telemetry.observers=[a:b]", "save.keep=all"])
    assert longer is not None
    changes = changed_values(longer)
    assert changes == {"loop.max_steps": 30, "telemetry.observers": ["a:b"], "save.keep": "all"}
    run.append_event(event("driver_start", changed=longer.changed, changes=changes))
    run.append_event(event("driver_start", changed=[], changes={}))
    again = open_resumed(run.path, None, [])
    assert again is not None and again.changed == [] and changed_values(again) == changed_values(None) == {}
    assert (again.loaded.spec.loop.max_steps, again.loaded.spec.save.keep) == (30, "all")
    back = open_resumed(run.path, None, ["loop.max_steps=10"])
    assert back is not None and back.changed == ["loop.max_steps"] and back.loaded.spec.loop.max_steps == 10
    run.append_event(event("driver_start", changed=back.changed, changes=changed_values(back)))
    last = open_resumed(run.path, None, [])
    assert last is not None and (last.loaded.spec.loop.max_steps, last.loaded.spec.save.keep) == (10, "all")


def test_fewer_steps_than_the_run_has_reached_are_refused_and_its_own_number_is_not(tmp_path: Path) -> None:
    """A run that was killed between its last step and the export has to export."""
    run = run_in(tmp_path)
    for step in (4, 10):
        run.write_text(f"checkpoints/step_{step:08d}/COMPLETE", "")
    run.write_text("checkpoints/step_00000012/model.safetensors", "its write did not end")
    own = open_resumed(run.path, None, [])
    assert own is not None and own.loaded.spec.loop.max_steps == 10
    longer = open_resumed(run.path, None, ["loop.max_steps=11"])
    assert longer is not None and longer.changed == ["loop.max_steps"]
    with pytest.raises(InputError, match=r"loop\.max_steps: got 9, expected more than 10, the step of the newest"):
        open_resumed(run.path, None, ["loop.max_steps=9"])


def test_a_run_with_python_objects_resumes_with_the_same_objects(tmp_path: Path) -> None:
    """The run folder holds their classes only."""
    rows = {"x": [1.0, 2.0], "labels": [0, 1]}
    job = {**JOB, "data": {"train": rows}, "save": {"dir": str(tmp_path)}}
    recorded = {**job, "data": {"train": "<object dict>"}}
    run = RunFolder.create(str(tmp_path), "mine", job=recorded)
    run.next_attempt(NOBODY)
    resumed = open_resumed(run.path, None, ["save.keep=7"], mapping=job)
    assert resumed is not None and resumed.changed == ["save.keep"]
    assert resumed.loaded.spec.data.train is rows
    with pytest.raises(InputError, match=r"data\.train.*call jobs\.train\.train with the same object"):
        open_resumed(run.path, None, [])
    with pytest.raises(InputError, match=r"optim\.lr: .*cannot change on resume"):
        open_resumed(run.path, None, [], mapping={**job, "optim": {"lr": 0.5}})


def saved_run(folder: Path, *steps: int) -> RunFolder:
    """A run that was killed, with real checkpoints of these steps."""
    run = run_in(folder)
    run.write_text(run.job, "name: mine\n")
    with CheckpointWriter(run, keep=3, asynchronous=False) as writer:
        for step in steps:
            writer.save({"model": {"w": torch.full((64,), float(step))}}, {"step": step}, step=step)
    return run


def damage(run: RunFolder, step: int) -> None:
    """Change a byte of the weights: size and manifest remain."""
    file = Path(run.checkpoint_dir(step), "model.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("hashed", [1 << 20, 0])
def test_a_run_whose_checkpoints_are_all_damaged_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed: int
) -> None:
    """It would begin at step 0 again and lose its metrics. One valid checkpoint is enough, and so is none at all."""
    monkeypatch.setattr("jobs.driver.run_folder.HASHED_BYTES", hashed)
    run = saved_run(tmp_path, 4, 8)
    resumed = open_resumed(run.path, None, [])
    assert resumed is not None
    check_checkpoints(resumed)
    damage(run, 8)
    check_checkpoints(resumed)
    damage(run, 4)
    if not hashed:  # larger than what the driver reads: the workers find out
        check_checkpoints(resumed)
        return
    with pytest.raises(InputError, match=r"step_00000008.*SHA-256.*step_00000004.*SHA-256") as refused:
        check_checkpoints(resumed)
    assert refused.value.remedy == f"`raytrain train {run.path}/job.yaml` starts a new run of the same job"
    check_checkpoints(Resumed(run_in(tmp_path), resumed.loaded, []))


def test_a_named_run_with_damaged_checkpoints_is_an_error_and_auto_starts_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = saved_run(tmp_path, 4)
    damage(run, 4)
    run.write_text(run.metrics, '{"kind": "train", "step": 4, "loss": 1.0}\n')
    text = io.StringIO()
    printed = Console(file=text, width=400)
    with pytest.raises(InputError, match="are all damaged"):
        run_train(None, resume=run.path, console=printed)
    assert run.current_attempt() == 1 and run.read_rows(run.metrics), "nothing was touched"

    started: list[Any] = []
    monkeypatch.setattr("jobs.train.train_loaded", lambda loaded, **named: started.append(named["resumed"]))
    run_train(None, mapping={**JOB, "save": {"dir": str(tmp_path)}}, resume="auto", console=printed)
    assert started == [None]
    line = text.getvalue()
    assert line.startswith(f"not resumed: {run.path}, whose checkpoints are all damaged (") and line.count("\n") == 1
