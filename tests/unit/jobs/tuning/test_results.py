"""What a sweep leaves: best.yaml, the best of whole runs, errors of the verb."""

from __future__ import annotations

import contextlib
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.devices.inventory import local_inventory
from jobs.driver.runtime import Cluster
from jobs.driver.signals import StopSignals
from jobs.job.spec import load_spec
from jobs.tune import found_job, open_sweep, run_tune, tune
from jobs.tuning.driver import TuneCommand
from raytrain.autotune.batch_search import SearchResults
from raytrain.autotune.measurement import Candidate, Measurement
from raytrain.errors import InputError
from raytrain.runs.folder import SweepFolder, this_process
from raytrain.runs.records import event

JOB: dict[str, Any] = {
    "name": "small",
    "model": {"builder": "raytrain.models.mlp:mlp", "layers": [8, 8], "dropout": 0.0},
    "data": {"source": "text", "path": "/a b/#1.txt"},
    "loop": {"global_batch_size": 64},
    "tune": {"space": {"optim.lr": [1]}},
}


def test_best_yaml_is_the_job_with_the_found_values_and_their_reasons(tmp_path: Path) -> None:
    values = {"precision.dtype": "bf16", "loop.micro_batch_size": 16, "optim.lr": 3.3333333333333335e-05}
    reasons = {"loop.micro_batch_size": "812 rows/s; " + "because " * 40, "precision.dtype": "1.9 times as fast: # yes"}
    made = TuneCommand.__new__(TuneCommand)
    made.job_mapping = lambda: JOB
    made.sweep = SweepFolder(str(tmp_path))
    made.write_best(values, reasons, note="second line")
    file = tmp_path / "best.yaml"
    text = file.read_text()
    assert text.startswith("# Found by raytrain tune on ") and "\n# second line\n" in text
    assert all(len(line) <= 120 for line in text.splitlines())
    assert "  # 1.9 times as fast: # yes\n  dtype: bf16\n" in text
    best = load_spec(file).spec
    assert (best.precision.dtype, best.loop.micro_batch_size, best.optim.lr) == ("bf16", 16, 3.3333333333333335e-05)
    assert best.tune.space is None
    kept = load_spec(mapping=JOB).spec
    assert (best.name, best.model, best.data) == (kept.name, kept.model, kept.data)
    assert best.loop.global_batch_size == 64


def test_the_best_run_is_one_that_finished() -> None:
    from jobs.tuning.space import best_of

    def trial(number: int, loss: float, pace: float, outcome: str = "ok") -> dict[str, Any]:
        return {"trial": number, "values": {"optim.lr": number}, "outcome": outcome, "eval_loss": loss,
                "samples_per_s": pace}  # fmt: skip

    rows = [trial(1, 2.0, 10.0), trial(2, 1.0, 5.0), trial(3, 0.5, 50.0, "stopped"), trial(4, math.nan, 1.0, "error")]
    best = best_of(rows, metric="eval_loss")
    assert best is not None and best[0]["trial"] == 2 and "next 2 with optim.lr 1" in best[1]
    fastest = best_of(rows, metric="samples_per_s")
    assert fastest is not None and fastest[0]["trial"] == 1
    assert best_of(rows[2:], metric="eval_loss") is None


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["precision.dtype=fp32", "loop.micro_batch_size=4"], "tune"),
        (["tune.objective=goodput"], "tune.objective"),  # a key of earlier versions
        (["cluster.memory_limit=1000000"], "cluster.memory_limit"),
        (["tune.spase={}"], "tune.spase"),
        (["tune.space.optim.lr=[]"], "tune.space.optim.lr"),
        (["scale.accelerator=H100"], "scale.accelerator"),
    ],
)
def test_an_impossible_sweep_is_refused_and_writes_nothing(
    overrides: list[str], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        run_tune(None, overrides, console=Console(quiet=True))
    assert error.value.key == key
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "got"),
    [
        (["scale.workers=1"], "scale.threads: got 3, expected at most 2 (1 worker needs 3 CPU"),
        (["scale.workers=[2,4]"], "scale.threads: got 3, expected at most 2 (2 workers need 3 CPU each"),
        (["scale.workers=3", "scale.threads=2"], "scale.workers: got 3 workers, expected at most 2 (3 workers need 2"),
        (["tune.space={optim.lr: [0.1, 0.2]}", "scale.workers=1"], "scale.threads: got 3, expected at most 2 (1 proc"),
    ],
)
def test_a_search_for_a_run_that_no_node_can_hold_is_refused_before_the_first_trial(
    overrides: list[str], got: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = replace(local_inventory().nodes[0], cpus=2, devices=())
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}] * 2)
    monkeypatch.setattr("jobs.driver.watch.autoscales", lambda: False)
    two = replace(local_inventory(), nodes=(here, replace(here, host="other")))
    monkeypatch.setattr("jobs.tuning.driver.inventory_from_ray", lambda: two)
    there = contextlib.nullcontext(Cluster(False, "head:6379", str(tmp_path)))
    monkeypatch.setattr("jobs.tuning.driver.connected", lambda *_, **__: there)
    with pytest.raises(InputError, match=re.escape(got)):
        run_tune(None, ["scale.threads=3", "cluster.address=head:6379", *overrides], console=Console(quiet=True))
    assert not list(tmp_path.iterdir())


def test_only_a_sweep_can_be_continued_and_without_other_arguments(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    for resume, overrides in ((str(tmp_path / "none"), []), (str(tmp_path / "run"), []), (str(tmp_path), ["seed=1"])):
        with pytest.raises(InputError) as error:
            run_tune(None, overrides, resume=resume, console=Console(quiet=True))
        assert error.value.key == "--resume"


@pytest.mark.parametrize(
    ("key", "value"), [("objective", "goodput"), ("fresh", True), ("found", {"precision": "bf16"})]
)
def test_a_search_that_an_earlier_version_began_goes_on_without_the_keys_that_are_gone(
    key: str, value: Any, tmp_path: Path
) -> None:
    job = {**JOB, "tune": {key: value, "max_trials": 3}}
    sweep = SweepFolder.create(str(tmp_path), "small-tune", job=job, latest=False)
    sweep.append_event(event("driver_end"))
    sweep.flush()
    _, loaded = open_sweep(sweep.path, None, [])
    assert loaded.spec.tune.max_trials == 3
    with pytest.raises(InputError, match=rf"tune\.{key}"):
        load_spec(mapping=job)


def test_a_search_from_python_takes_names_instead_of_objects(tmp_path: Path) -> None:
    rows = {"data": {"train": {"x": [1.0]}}, "model": JOB["model"]}
    with pytest.raises(InputError, match=r"data\.train: got a dict object, expected a name such as module:function"):
        tune(rows, overrides=[f"save.dir={tmp_path}"], quiet=True)
    with pytest.raises(InputError, match="got a job as well"):
        tune(rows, resume=str(tmp_path), quiet=True)
    assert not list(tmp_path.iterdir())


def test_a_search_whose_command_ended_is_not_alive_though_its_process_is(tmp_path: Path) -> None:
    """As in a notebook, where the next cell resumes it."""
    signals = StopSignals()
    command = TuneCommand(
        load_spec(mapping={**JOB, "save": {"dir": str(tmp_path)}}), sweep=None, signals=signals, verbose=False,
        console=Console(quiet=True),
    )  # fmt: skip
    command.close()  # before there is a folder
    command.open_sweep(local_inventory())
    assert SweepFolder(command.the_sweep.path).alive()
    command.close()
    assert SweepFolder(command.the_sweep.path).alive() is None
    again = SweepFolder(command.the_sweep.path)
    again.next_attempt(this_process())
    assert again.alive(), "resumed, though it has written no event yet"


def test_train_uses_the_result_of_a_finished_sweep(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("{}")
    with pytest.raises(InputError, match=f"raytrain tune --resume {tmp_path}"):
        found_job(str(tmp_path))
    (tmp_path / "best.yaml").write_text("name: a")
    assert found_job(str(tmp_path)) == tmp_path / "best.yaml"
    with pytest.raises(InputError, match="one job"):
        found_job(str(tmp_path), beside="job.yaml")


def test_nothing_imports_ray_before_its_environment_is_set() -> None:
    code = "import sys, jobs.tune, jobs.tuning.batch, jobs.tuning.space; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.covers("TUNE-09")
def test_the_advice_gives_the_peak_at_half_once_and_twice_the_micro_batch_and_the_free_memory() -> None:
    from jobs.tuning.batch import peak_advice

    def peak(size: int) -> Measurement:
        return Measurement(Candidate("fp32", size), "ok", (size * 0.01,) * 3, (0.01,) * 3, (100 + 10 * size) << 20, 1)

    known = SearchResults([peak(2), peak(8)])
    line = peak_advice(known, Candidate("fp32", 8), 300 << 20)
    told = "predicted peak: 140 MiB at 0.5x, 180 MiB at 1x, 260 MiB at 2x this micro-batch"
    assert line == f"{told}; a process may use 300 MiB"
    assert peak_advice(SearchResults(), Candidate("fp32", 8), None) == ""
