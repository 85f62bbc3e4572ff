"""Every key of a job does something: on the plan, in a session, in a worker or in the command. No Ray is started.

`FLAGS` names, for each key, two values and what must differ between them. A key that is in no table fails the first
test, so that none is added which is read and then forgotten.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import importlib
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner
from pyarrow import parquet
from ray import cloudpickle
from rich.console import Console
from torch import nn

from cluster.devices.inventory import Device, Inventory, Node
from experts.config import LayerShape
from experts.placement.policy import PlacementRules, starting_placement
from experts.placement.values import HostSpec
from jobs.__main__ import main
from jobs.driver.check_job import check_on_driver, train_job
from jobs.driver.planning import plan_job
from jobs.driver.runtime import Cluster
from jobs.driver.signals import StopSignals
from jobs.infer import infer_target
from jobs.inference.target import target_of, weights_of
from jobs.job.spec import JobSpec, LoadedSpec, load_spec
from jobs.tuning.batch import find_search
from jobs.tuning.space_points import find_points
from raytrain.config.decode import apply_overrides, dump_yaml, encode, parse_override
from raytrain.config.messages import key_rows
from raytrain.data.sources.open import open_source
from raytrain.errors import InputError
from raytrain.execution.driver_channel import AttemptResult
from raytrain.execution.recovery import decide
from raytrain.execution.worker import Worker
from raytrain.infer.predictor import TextPredictor
from raytrain.models.gpt import gpt
from raytrain.models.weights.stored import export_weights
from raytrain.plan.choice import Deferred, Resolved
from raytrain.plan.plan import Plan
from raytrain.runs.faults import Fault
from raytrain.runs.folder import RunFolder, this_process
from raytrain.train.job import build_trainable, source_facts
from raytrain.train.parallel.collectives import Workers
from raytrain.train.session import Session

HOSTS = [HostSpec(host, 1.0, None) for host in range(3)]
ROOT = Path(__file__).resolve().parents[3]
SECTIONS = ("optim", "precision", "loop", "save", "scale", "retry", "experts", "tune", "infer", "telemetry", "cluster")


# ---------------------------------------------------------------- machines and jobs


def machine(*gpus: tuple[str, tuple[int, int]], amx: bool = False) -> Inventory:
    """One invented node of 8 cores, with GPUs of a name and a capability."""
    devices = tuple(
        Device("cuda", name, 16 << 30, capability, f"GPU-{index}", index)
        for index, (name, capability) in enumerate(gpus)
    )
    flags = {"amx_bf16": amx, "avx512_bf16": False}
    return Inventory((Node("box", 8, 16 << 30, devices=devices),), source="a test", cpu_model="c", cpu_flags=flags)


BOX = machine()
GPUS = machine(("NVIDIA A100", (8, 0)), ("NVIDIA A100", (8, 0)))
FIXED = (
    "precision.dtype=fp32", "scale.mode=cpu", "scale.threads=1", "loop.max_steps=4", "loop.log_every=1",
    "loop.global_batch_size=16", "optim.lr=0.01", "optim.warmup_steps=0", "telemetry.tensorboard=false",
)  # fmt: skip


def class_rows(count: int = 64, *, columns: int = 12) -> dict[str, torch.Tensor]:
    """DET: drawn features, and the largest of four fixed combinations of them."""
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(count, columns, generator=generator)
    return {"x": x, "labels": (x @ torch.randn(columns, 4, generator=generator)).argmax(-1)}


class Net(nn.Module):
    """Somebody's module, with the loss of the transformers convention; `scale` spoils it."""

    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 4))
        self.scale = scale

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels) * self.scale}


def rows_job(folder: Path) -> dict[str, Any]:
    """A small classifier on rows in memory."""
    return {"model": {"builder": "raytrain.models.mlp:mlp"}, "data": {"train": class_rows()}}


class Listed:
    """The same rows, one by one."""

    def __init__(self) -> None:
        self.rows = class_rows()

    def __len__(self) -> int:
        return len(self.rows["x"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self.rows.items()}


def items_job(folder: Path) -> dict[str, Any]:
    """A small classifier on a dataset that is read as it trains."""
    model = {"builder": "raytrain.models.mlp:mlp", "num_classes": 4}
    return {"model": model, "data": {"train": Listed(), "storage": "stream"}}


def negated_collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Somebody's collate function."""
    return {"x": -torch.stack([item["x"] for item in items]), "labels": torch.stack([item["labels"] for item in items])}


def collate_job(folder: Path) -> dict[str, Any]:
    """`items_job` next to a module with a collate function."""
    sys.modules["flag_collate"] = module = ModuleType("flag_collate")
    module.negated = negated_collate  # type: ignore[attr-defined]
    return items_job(folder)


@cache
def weights_file() -> str:
    """Weights of the small classifier, drawn with another seed."""
    loaded = load_spec(mapping={**rows_job(Path()), "seed": 7}, overrides=FIXED)
    place = tempfile.TemporaryDirectory(prefix="weights-")
    atexit.register(place.cleanup)
    path = Path(place.name) / "model.safetensors"
    export_weights(session_of(loaded).trainable.module.state_dict(), str(path))
    return str(path)


def nan_job(folder: Path) -> dict[str, Any]:
    """A module whose loss is never a number."""
    return {"model": {"module": Net(8, math.nan)}, "data": {"train": class_rows()}}


class Tight(Net):
    """Has no memory for a whole window, the first time."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training and len(x) == 16 and not hasattr(self, "_short"):
            self._short = True
            raise torch.OutOfMemoryError("planted")
        return super().forward(x, labels)


def tight_job(folder: Path) -> dict[str, Any]:
    """A module that runs out of memory once."""
    return {"model": {"module": Tight(8)}, "data": {"train": class_rows()}}


def experts_job(folder: Path) -> dict[str, Any]:
    """A small mixture of experts on token windows."""
    tokens = torch.randint(31, (64, 13), generator=torch.Generator().manual_seed(0))
    sizes = {"layers": 1, "heads": 2, "width": 16, "context": 12, "vocab_size": 31}
    return {
        "model": {"builder": "experts.models:moe_gpt", **sizes},
        "data": {"train": {"input_ids": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}},
    }


def file_job(folder: Path) -> dict[str, Any]:
    """A file that can be read as a table and as a text."""
    path = folder / "rows.csv"
    path.write_text("a,b\n" + "1.5,2\n" * 200)
    sizes = {"layers": 1, "heads": 1, "width": 8, "context": 8}
    return {"model": {"builder": "raytrain.models.gpt:gpt", **sizes}, "data": {"path": str(path)}}


def prompts_job(folder: Path) -> dict[str, Any]:
    """A language model without training, and prompts with a label for it."""
    rows = [{"prompt": f"why {n}", "other": f"is {n} so?", "key": f"k{n}", "kind": "ab"[n % 2]} for n in range(20)]
    for name, some in (("in.jsonl", rows), ("less.jsonl", rows[:10])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in some))
    sizes = {"layers": 1, "heads": 2, "width": 16, "context": 32}
    model = {"builder": "raytrain.models.gpt:gpt", **sizes}
    section = {"input": str(folder / "in.jsonl"), "max_new_tokens": 6, "batch_size": 4, "unit_rows": 8}
    templates = {"asked": "Q: {prompt}", "told": "{other}"}
    return {
        "model": model,
        "data": {"source": "stdlib", "max_bytes": 9000},
        "infer": {**section, "templates": templates},
    }


def stages_job(folder: Path) -> dict[str, Any]:
    """`prompts_job` with a model of two blocks whose weights are in a file, so that it can be divided."""
    job = prompts_job(folder)
    job["model"]["layers"] = 2
    keys = {name: value for name, value in job["model"].items() if name != "builder"}
    export_weights(gpt(**keys, vocab_size=256).module.state_dict(), str(folder / "w.safetensors"))
    return job | {"model": {**job["model"], "init_from": str(folder / "w.safetensors")}}


# ---------------------------------------------------------------- where a key shows


@dataclass(frozen=True)
class Place:
    """Where an observer may write, and what it may patch."""

    folder: Path
    patch: pytest.MonkeyPatch


def planned(loaded: LoadedSpec, place: Place, *, inventory: Inventory = BOX) -> dict[str, Any]:
    """Each decision with its value and reason, or the refusal."""
    try:
        plan = plan_job(loaded, inventory=inventory)
    except InputError as error:
        return {"refused": str(error)}
    decisions = {name: (value, reason) for name, value, reason in plan.rows()}
    return {"refused": None, "warnings": plan.warnings, **decisions}


def planned_on_gpus(loaded: LoadedSpec, place: Place) -> dict[str, Any]:
    """The same on a machine with two GPUs."""
    return planned(loaded, place, inventory=GPUS)


def session_of(loaded: LoadedSpec, *, run: RunFolder | None = None) -> Session:
    """A session of the plan, in this process."""
    spec = loaded.spec
    source = open_source(spec.data, context=spec.model.keys.get("context"))
    plan = plan_job(loaded, inventory=BOX, data_facts=source.facts)
    return Session(train_job(spec, plan, run or RunFolder("unused"), attempt=1), workers=Workers(), source=source)


class Rows:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.traced: list[int] = []
        self.events: list[dict[str, Any]] = []

    def metrics(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def event(self, kind: str, **fields: Any) -> None:
        """Keep the event."""
        self.events.append({"kind": kind, **fields})

    def interval(self, row: dict[str, Any], traces: dict[int, bytes]) -> None:
        """Record the steps with a routing trace."""
        self.traced += traces

    def of(self, kind: str, name: str) -> list[Any]:
        """One column of the rows of a kind; NaN as text, so that it equals itself."""
        values = [row[name] for row in self.rows if row["kind"] == kind]
        return ["nan" if isinstance(value, float) and math.isnan(value) else value for value in values]


def trained(loaded: LoadedSpec, place: Place | None = None) -> dict[str, Any]:
    """A whole run of a session: what its rows say, and what its forward passes were given."""
    session, rows = session_of(loaded), Rows()
    session.prepare(str(session.job.planned("precision")))
    batches: list[int] = []
    dtypes: set[torch.dtype] = set()

    def look(layer: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        if layer.training:
            batches.append(len(inputs[0]))
            dtypes.add(output.dtype)

    module = session.trainable.module
    next(part for part in module.modules() if isinstance(part, nn.Linear)).register_forward_hook(look)
    outcome = session.loop(reporter=rows, should_stop=lambda: False).run(session.state)
    pool = session.loader.pool
    session.close()
    return {
        "loaders": (0, 0) if pool is None else (len(pool.pids), pool.high_water),
        "losses": rows.of("train", "loss"),
        "steps": rows.of("train", "step"),
        "epochs": rows.of("train", "epoch"),
        "scales": rows.of("train", "loss_scale"),
        "evals": list(zip(rows.of("eval", "step"), rows.of("eval", "loss"), strict=True)),
        "eval_steps": rows.of("eval", "step"),
        "traced": rows.traced,
        "changes": [(row["kind"], row["step"], row["ids"]) for row in rows.events if "ids" in row],
        "cycles": [
            {name: value for name, value in row.items() if name not in ("seconds", "graph")}
            for row in rows.events
            if row["kind"] == "sleep_cycle"
        ],
        "outcome": outcome.kind,
        "batches": batches,
        "dtypes": dtypes,
        "weights_are": {parameter.dtype for parameter in module.parameters()},
        "parameters": {name: tuple(value.shape) for name, value in module.named_parameters()},
        "masks": [row.get("mask_cache") for row in rows.rows if row["kind"] == "train"],
        "storage": type(session.loader.batches.split).__name__,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def evaluated(loaded: LoadedSpec, place: Place) -> dict[str, Any]:
    """How often evaluations, and how often steps, give memory back."""
    times: dict[str, list[Any]] = {"evaluation": [], "loop": []}
    for module, calls in zip(("step", "loop"), times.values(), strict=True):
        place.patch.setattr(f"raytrain.train.{module}.release_cached", calls.append)
    trained(loaded, place)
    return {module: len(calls) for module, calls in times.items()}


def inferred(loaded: LoadedSpec, place: Place) -> dict[str, Any]:
    """A whole inference job: its answers, and what was written beside them."""
    place.patch.chdir(place.folder.parent)
    try:
        target = target_of(loaded, "flags", BOX)
        result = infer_target(target, BOX, resume=None, dry_run=False, verbose=False, console=Console(quiet=True))
    except InputError as error:
        return dict.fromkeys(("answers", "columns", "units", "batches", "files", "folder"), str(error))
    assert result is not None
    output = Path(result.output)
    timing = parquet.read_table(output / "timing.parquet").to_pydict()
    table = result.table() if (output / "predictions.parquet").exists() else None
    return {
        "answers": None if table is None else table["prediction"].to_pylist(),
        "ids": timing["id"], "columns": None if table is None else table.column_names,
        "units": timing["unit"], "batches": timing["batch_rows"], "tokens": timing["tokens"],
        "files": sorted(entry.name for entry in output.iterdir()),
        "folder": output.name[:4], "quality": result.summary["quality"] is None,
        **_of_stages(result.summary["stages"]), "int8": result.summary["quantized"] is not None,
    }  # fmt: skip


def _of_stages(stages: dict[str, Any] | None) -> dict[str, Any]:
    """How many stages a summary names, what they hold, and the batches in flight."""
    if stages is None:
        return {"stages": 1, "held": None, "inflight": None}
    return {"stages": len(stages["stages"]), "held": stages["stages"], "inflight": stages["inflight"]}


class Silent:
    """The line to a driver that is not there: what is said is lost, and waiting fails as it does without Ray."""

    def __getattr__(self, name: str) -> Any:
        import ray.exceptions

        def remote(*arguments: Any) -> None:
            if name == "wait_for_stop":
                raise ray.exceptions.RayError("no driver")

        return SimpleNamespace(remote=remote)


class AsksOnly:
    """A connection to three hosts that nobody serves: what a builder asks of it is kept."""

    def join(self, shapes: list[LayerShape], rules: PlacementRules) -> Any:
        self.asked = {**asdict(rules), "placement": starting_placement(rules, shapes, HOSTS)}
        raise ConnectionAbortedError


def placed(loaded: LoadedSpec, place: Place) -> dict[str, Any]:
    """What a builder asks of the hosts, and where the experts would begin."""
    source, asked = open_source(loaded.spec.data, context=12), AsksOnly()
    section = loaded.spec.experts.connected(asked)
    with pytest.raises(ConnectionAbortedError):
        build_trainable(loaded.spec.model, sections={"experts": section}, facts=source_facts(source))
    return asked.asked


def worked(loaded: LoadedSpec, place: Place) -> dict[str, Any]:
    """A whole attempt of a worker: what lies in the run folder, who wrote it, and who was told."""
    from raytrain.checkpoint import writer as checkpoint
    from raytrain.execution.worker import Worker

    writers: set[str] = set()
    write = checkpoint.write_checkpoint

    def noted(*arguments: Any, **named: Any) -> int:
        writers.add("background" if "checkpoint" in threading.current_thread().name else "the loop's thread")
        return write(*arguments, **named)

    place.patch.setattr(checkpoint, "write_checkpoint", noted)
    (place.folder / "flag_observer.py").write_text("told = []\ndef see(row):\n    told.append(row['kind'])\n")
    place.patch.syspath_prepend(str(place.folder))
    told = importlib.import_module("flag_observer").told
    told.clear()
    run = RunFolder.create(str(place.folder / "runs"), "flags")
    run.next_attempt(this_process())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        Worker(session_of(loaded, run=run).job, workers=Workers(), local_rank=0, channel=Silent()).run(None)
    events = run.read_rows(run.events)
    return {
        "memory": re.findall(r"^step (\d+): memory ", printed.getvalue(), re.MULTILINE),
        "checkpoints": [row["step"] for row in events if row["kind"] == "checkpoint"],
        "kept": sorted(entry.name for entry in run.store.entries("checkpoints")),
        "writers": writers,
        "tensorboard": bool(run.store.entries("tensorboard")),
        "told": list(told),
        "rollbacks": sum(row.get("what") == "rollback" for row in events),
    }


def weighed(loaded: LoadedSpec, place: Place) -> dict[str, Any]:
    """Which checkpoint of a run that was not finished inference takes."""
    worked(loaded, place)
    run = RunFolder.open(str(next((place.folder / "runs").glob("flags-*"))))
    place.patch.setattr(
        RunFolder, "exists", lambda run, path: path != run.weights and run.store.exists(run._name(path))
    )
    return {"step": weights_of(run, loaded.spec.infer.weights)[1]}


def failing(loaded: LoadedSpec, place: Place) -> dict[str, Any]:
    """How a job ends that has one row without a prompt among twenty."""
    path = Path(str(loaded.spec.infer.input))
    path.write_text(path.read_text().replace('"why 3"', "null"))
    target = target_of(loaded, "flags", BOX)
    place.patch.chdir(place.folder)
    result = infer_target(target, BOX, resume=None, dry_run=False, verbose=False, console=Console(quiet=True))
    assert result is not None
    return {"status": result.status}


def stopped(loaded: LoadedSpec, place: Place) -> dict[str, Any]:
    """What would end an answer."""
    target = target_of(loaded, "flags", BOX)
    predictor = target.model.load(loaded.spec.infer, pa.schema([("prompt", pa.string())]))
    assert isinstance(predictor, TextPredictor)
    return {"stop": predictor.sampling.stop}


def commanded(loaded: LoadedSpec, place: Place) -> dict[str, Any]:
    """A whole command that is stopped while its workers train; Ray itself and the workers are played."""
    from experts.hosts.reserve import HostsOfRun
    from jobs import train
    from jobs.driver import attempts
    from raytrain.execution import driver_channel, trainer

    signals, stopped, seen = StopSignals(), threading.Event(), {}
    signals.training = True

    class Trains:
        def __init__(self, *_: Any, torch_config: Any, train_loop_config: Any, **__: Any) -> None:
            assert train_loop_config["data"] == ("data" in kept)
            job = cloudpickle.loads(kept["job"])
            seen["telemetry_every"] = job.telemetry_every
            seen["memory_warning"] = (
                Worker(job, workers=Workers(), local_rank=0, channel=None).soft_limit().look() is not None
            )
            seen["interface"] = torch_config.interface

        def fit(self) -> Any:
            signals.asked.set()
            assert stopped.wait(60)
            saved = AttemptResult("interrupted", "saved in time", workers_running=True)  # writes no report
            return SimpleNamespace(return_value=saved)

    @contextmanager
    def connected(address: str, **_: Any) -> Iterator[Cluster]:
        seen["address"] = address
        yield Cluster(local=address == "local", address=address, folder=str(place.folder))

    kept: dict[str, Any] = {}
    channel = SimpleNamespace(
        keep=SimpleNamespace(remote=kept.__setitem__),
        request_stop=SimpleNamespace(remote=stopped.set), progress=SimpleNamespace(remote=str),
        printed_lines=SimpleNamespace(remote=lambda *, last: ""),
        last_signs=SimpleNamespace(remote=dict), warnings=SimpleNamespace(remote=list),
        stacks=SimpleNamespace(remote=dict),
    )  # fmt: skip
    place.patch.chdir(place.folder)
    place.patch.setattr(sys, "path", list(sys.path))

    def start_hosts(*_: Any, retry: Any, **__: Any) -> HostsOfRun:
        seen.update({name: getattr(retry, name) for name in ("host_wait_s", "host_silence_s", "hang_s")})
        return HostsOfRun(None)

    place.patch.setattr(attempts, "connected", connected)
    place.patch.setattr(attempts, "inventory_from_ray", lambda: BOX)
    place.patch.setattr(driver_channel, "open_channel", lambda: channel)
    place.patch.setattr("jobs.driver.watch.start_hosts", start_hosts)
    place.patch.setattr("jobs.driver.watch.controller_pid", lambda: None)
    place.patch.setattr("jobs.driver.watch.check_room", lambda _: "")
    place.patch.setattr(trainer, "trainer_class", lambda *, local: Trains)
    place.patch.setattr("ray.get", lambda *_, **__: ({}, "", {}, [], {}))
    try:
        quiet = Console(quiet=True)
        result = train.train_loaded(loaded, resumed=None, signals=signals, verbose=False, console=quiet, began=0.0)
    finally:
        signals.restore()
    run = Path(result.run)
    return {
        **seen,
        "dir": run.parent.relative_to(place.folder).as_posix(),
        "name": re.sub(r"-\d{8}T\d{6}Z(-\d+)?$", "", run.name),
        "ending": result.reason,
    }


def decided(loaded: LoadedSpec, place: Place) -> dict[str, Any]:
    """What is decided after two restarts that came no further."""
    died = Fault(1, 0, None, "WorkerDied", "lost", "", "fp32", False, False, 0, 0.0)
    choice = decide([died, died], retry=loaded.spec.retry, fallback=True, resumed_from=[0, 0, 0])
    return {"action": choice.action}


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Flag:
    """Two values of a key (as the command line has them, or makers of objects) and what has to differ.

    Attributes:
        see: the observer, and `part`, what of it.
        job: what the key is given to; `run_interleaved`: other keys that it needs.
    """

    see: Callable[[LoadedSpec, Place], dict[str, Any]]
    part: str
    first: Any
    second: Any
    beside: tuple[str, ...] = ()
    job: Callable[[Path], dict[str, Any]] = rows_job


def experts(part: str, first: str, second: str, *beside: str) -> Flag:
    """A key of the mixture of experts, shown by a training session."""
    return Flag(trained, part, first, second, beside, experts_job)


def infers(part: str, first: str, second: str, *beside: str) -> Flag:
    """A key of inference, shown by a small job."""
    return Flag(inferred, part, first, second, beside, prompts_job)


def lives(first: str, second: str, *beside: str) -> Flag:
    """A key of the lifecycle of experts, shown by who comes and goes in a training session."""
    return experts("changes", first, second, "experts.lifecycle.max_experts=9", *beside)


def sleeps(first: str, second: str, *beside: str) -> Flag:
    """A key of the sleep cycles, shown by their records."""
    needed = ("max_experts=9", "birth.uncertainty=1.0", "replay.bytes=100000", "replay.every=4", "replay.rows=8")
    own = [f"experts.lifecycle.{key}" for key in needed]
    return experts("cycles", first, second, "experts.hosts=0", "loop.max_steps=12", *own, *beside)


EVERY, ALWAYS = "experts.lifecycle.every=1", "experts.lifecycle.birth.uncertainty=0.0"
AT_ONCE, SOON = "experts.lifecycle.birth.cooldown_steps=1", "experts.lifecycle.prune.idle_steps=1"
DEMANDING, NO_BIRTH = "experts.lifecycle.prune.least_share=0.9", "experts.lifecycle.birth.uncertainty=1.0"
SGD = ("optim.name=sgd",)
OFTEN = ("loop.eval_every=1", "data.eval_fraction=0.5", "optim.lr=0.001")
UNHELD = ("scale.mode=auto",)


def searched(loaded: LoadedSpec, place: Place) -> dict[str, Any]:
    """What a sweep would try, without Ray: its trials, and how many beside each other."""
    seen: dict[str, Any] = {"refused": ""}
    if loaded.spec.tune.space is None:
        try:
            seen["budget"] = find_search(loaded, check_on_driver(loaded.spec, run_batch=False), BOX).space.budget_bytes
        except InputError as error:
            seen["refused"] = error.key
    else:
        try:
            points = find_points(loaded, BOX)
        except InputError as error:  # the searcher is not installed
            seen["trials"] = error.key
        else:
            alone = loaded.spec.tune.metric == "samples_per_s"
            seen["trials"] = [one.overrides for one in points.trials]
            seen["at a time"] = points.at_a_time(gpus=0, cpus=BOX.cpus, alone=alone)
    return seen


RATES = ("tune.space.optim.lr=[0.1, 0.2, 0.3]",)

FLAGS = {
    "tune.space": Flag(searched, "trials", "{optim.lr: [0.1]}", "{optim.lr: [0.1, 0.2]}"),
    "tune.metric": Flag(searched, "at a time", "eval_loss", "samples_per_s", RATES),
    "tune.scheduler": Flag(searched, "trials", "none", "asha", RATES),
    "tune.searcher": Flag(searched, "trials", "random", "optuna", RATES),
    "tune.max_trials": Flag(searched, "trials", "1", "2", RATES),
    "cluster.memory_soft_limit": Flag(commanded, "memory_warning", "null", "1000"),
    "cluster.memory_limit": Flag(searched, "budget", "null", "2000000000"),
    "name": Flag(commanded, "name", "one", "two"),
    "seed": Flag(trained, "losses", "1", "2"),
    "model.builder": Flag(trained, "parameters", "raytrain.models.mlp:mlp", "experts.models:moe_mlp"),
    "model.init_from": Flag(trained, "losses", "null", weights_file),
    "model.module": Flag(trained, "parameters", lambda: Net(8), lambda: Net(16)),
    "data.source": Flag(planned, "steps_per_epoch", "text", "csv", job=file_job),
    "data.storage": Flag(trained, "storage", "resident", "stream"),
    "data.loader_workers": Flag(trained, "loaders", "0", "2", job=items_job),
    "data.collate": Flag(trained, "losses", "null", "flag_collate:negated", job=collate_job),
    "data.drop_last": Flag(trained, "batches", "false", "true", ("loop.global_batch_size=24", "loop.max_steps=4")),
    "data.prefetch": Flag(trained, "loaders", "1", "3", ("data.loader_workers=1",), items_job),
    "data.tokens_per_batch": experts("batches", "null", "24"),
    "data.eval_fraction": Flag(trained, "evals", "0.0", "0.5"),
    "data.train": Flag(trained, "losses", lambda: class_rows(64), lambda: class_rows(48)),
    "data.eval": Flag(trained, "evals", lambda: class_rows(8), lambda: class_rows(24)),
    "optim.name": Flag(trained, "losses", "adamw", "sgd"),
    "optim.lr": Flag(trained, "losses", "0.01", "0.1"),
    "optim.weight_decay": Flag(trained, "losses", "0.1", "5.0"),
    "optim.betas": Flag(trained, "losses", "[0.9, 0.99]", "[0.1, 0.2]"),
    "optim.momentum": Flag(trained, "losses", "0.9", "0.0", SGD),
    "optim.fused": Flag(planned, "optimizer_impl", "auto", "false"),
    "optim.eps": Flag(trained, "losses", "1e-8", "0.1"),
    "optim.schedule": Flag(trained, "losses", "cosine", "constant"),
    "optim.warmup_steps": Flag(trained, "losses", "0", "3"),
    "optim.final_lr_fraction": Flag(trained, "losses", "0.1", "0.9"),
    "optim.max_grad_norm": Flag(trained, "losses", "null", "0.01", SGD),
    "optim.scale_lr": Flag(trained, "losses", "none", "sqrt"),
    "precision.dtype": Flag(trained, "dtypes", "fp32", "bf16"),
    "precision.fallback": Flag(planned, "refused", "true", "false", ("precision.dtype=tf32",)),
    "precision.fp32_layers": Flag(trained, "dtypes", "[]", "[layers.0]", ("precision.dtype=bf16",)),
    "loop.max_steps": Flag(trained, "steps", "2", "3"),
    "loop.epochs": Flag(trained, "epochs", "1", "2", ("loop.max_steps=9",)),
    "loop.global_batch_size": Flag(trained, "batches", "16", "8"),
    "loop.micro_batch_size": Flag(trained, "batches", "auto", "4"),
    "loop.eval_every": Flag(trained, "eval_steps", "1", "3"),
    "loop.eval_batches": Flag(trained, "evals", "null", "1", ("data.eval_fraction=0.5", "loop.micro_batch_size=1")),
    "loop.eval_clear_every": Flag(evaluated, "evaluation", "1", "null", ("data.eval_fraction=0.5",)),
    "loop.clear_every": Flag(evaluated, "loop", "2", "null"),
    "loop.grow_after": Flag(trained, "batches", "1", "null", job=tight_job),
    "loop.log_every": Flag(trained, "steps", "1", "2"),
    "loop.deterministic": Flag(trained, "deterministic", "false", "true"),
    "loop.compile": Flag(planned, "compile", "default", "reduce-overhead"),
    "loop.compile_parts": Flag(planned, "compile", "blocks", "all", ("loop.compile=default",)),
    "loop.cudnn_benchmark": Flag(planned, "cudnn_benchmark", "true", "false"),
    "loop.mask_cache_mb": experts("masks", "8.0", "0.0", "model.window=4"),
    "loop.reference": Flag(planned, "optimizer_impl", "false", "true"),
    "loop.activation_checkpointing": experts("batches", "false", "true"),
    "loop.patience": Flag(trained, "steps", "1", "3", (*OFTEN, "loop.min_delta=100.0")),
    "loop.min_delta": Flag(trained, "steps", "0.0", "100.0", (*OFTEN, "loop.patience=1")),
    "save.every": Flag(worked, "checkpoints", "1", "2"),
    "save.keep": Flag(worked, "kept", "1", "all", ("save.every=1", "data.eval_fraction=0.0")),
    "save.dir": Flag(commanded, "dir", "runs", "deep/elsewhere"),
    "save.export": Flag(planned, "export", "best", "last"),
    "save.asynchronous": Flag(worked, "writers", "true", "false"),
    "scale.workers": Flag(planned, "workers", "1", "2"),
    "scale.mode": Flag(planned_on_gpus, "device", "auto", "cpu"),
    "scale.strategy": Flag(planned, "strategy", "auto", "data_parallel"),
    "scale.accelerator": Flag(planned_on_gpus, "device", "null", "cpu", UNHELD),
    "scale.gpus_per_worker": Flag(planned_on_gpus, "backend", "1.0", "0.5", UNHELD),
    "scale.threads": Flag(trained, "threads", "1", "2"),
    "scale.shares": Flag(planned, "micro_batch_size", "equal", "auto", ("scale.workers=2",)),
    "scale.sync_batchnorm": Flag(planned, "micro_batch_size", "true", "false", ("scale.workers=2",)),
    "scale.overlap": Flag(planned, "overlap", "true", "false", ("scale.workers=2",)),
    "retry.restarts_without_progress": Flag(decided, "action", "3", "2"),
    "retry.nonfinite_steps": Flag(trained, "steps", "1", "3", job=nan_job),
    "retry.rollbacks": Flag(worked, "rollbacks", "0", "2", ("retry.nonfinite_steps=1",), nan_job),
    "retry.stop_grace_s": Flag(commanded, "ending", "60.0", "0.0"),
    "retry.host_wait_s": Flag(commanded, "host_wait_s", "30.0", "5.0"),
    "retry.host_silence_s": Flag(commanded, "host_silence_s", "60.0", "20.0"),
    "retry.hang_s": Flag(commanded, "hang_s", "300.0", "20.0"),
    "experts.num_experts": experts("parameters", "4", "2"),
    "experts.top_k": experts("losses", "2", "1"),
    "experts.hosts": Flag(planned, "hosts", "auto", "0", job=experts_job),
    "experts.inflight": Flag(planned, "inflight", "1", "2", ("experts.hosts=1",), experts_job),
    "experts.capacity_factor": experts("losses", "null", "0.5"),
    "experts.score": experts("losses", "softmax", "sigmoid"),
    "experts.renormalize": experts("losses", "true", "false"),
    "experts.balance": experts("losses", "both", "none"),
    "experts.balance_weight": experts("losses", "0.01", "5.0"),
    "experts.z_loss_weight": experts("losses", "0.001", "0.5"),
    "experts.bias_rate": experts("losses", "0.001", "1.0"),
    "experts.noise": experts("losses", "0.0", "1.0"),
    "experts.temperature": experts("losses", "1.0", "0.01"),
    "experts.shared_expert": experts("parameters", "false", "true"),
    "experts.shared_hidden": experts("parameters", "null", "8", "experts.shared_expert=true"),
    "experts.shared_gate": experts("parameters", "false", "true", "experts.shared_expert=true"),
    "experts.hidden": experts("parameters", "null", "[8, 8, 16, 32]"),
    "experts.activation": experts("parameters", "gelu", "swiglu"),
    "experts.bias": experts("parameters", "false", "true"),
    "experts.replicas": Flag(placed, "placement", "0", "2", job=experts_job),
    "experts.placement": Flag(placed, "placement", "auto", "round_robin", job=experts_job),
    "experts.trace_every": experts("traced", "null", "2"),
    "experts.rebalance_every": Flag(placed, "every", "null", "10", job=experts_job),
    "experts.lifecycle.max_experts": experts("parameters", "6", "9"),
    "experts.graph_routing": sleeps("0", "9"),
    "experts.lifecycle.merge.similarity": sleeps("null", "0.01"),
    "experts.lifecycle.replay.bytes": sleeps("100000", "2000"),
    "experts.lifecycle.replay.every": sleeps("4", "6"),
    "experts.lifecycle.replay.rows": sleeps("8", "3"),
    "experts.lifecycle.replay.batch_size": sleeps("32", "2"),
    "experts.lifecycle.replay.lr": sleeps("0.0001", "0.1"),
    "experts.lifecycle.replay.priority": sleeps("uncertainty", "uniform", "loop.max_steps=24"),
    "experts.lifecycle.replay.targets": sleeps("labels", "teacher"),
    "experts.lifecycle.min_experts": lives("4", "2", EVERY, SOON, DEMANDING, NO_BIRTH),
    "experts.lifecycle.every": lives("1", "2", ALWAYS, AT_ONCE),
    "experts.lifecycle.birth.uncertainty": lives("1.0", "0.0", EVERY, AT_ONCE),
    "experts.lifecycle.birth.cooldown_steps": lives("1", "2", EVERY, ALWAYS),
    "experts.lifecycle.prune.idle_steps": lives("null", "1", EVERY, DEMANDING, NO_BIRTH),
    "experts.lifecycle.prune.least_share": lives("0.0", "0.9", EVERY, SOON, NO_BIRTH),
    "infer.input": infers("ids", "in.jsonl", "less.jsonl"),
    "infer.output": infers("folder", "null", "mine"),
    "infer.weights": Flag(weighed, "step", "last", "3", ("save.every=1", "save.keep=all"), job=rows_job),
    "infer.batch_size": infers("batches", "4", "5"),
    "infer.unit_rows": infers("units", "8", "10"),
    "infer.stages": Flag(inferred, "stages", "1", "2", job=stages_job),
    "infer.stage_policy": Flag(inferred, "held", "balanced", "balanced_low_0", ("infer.stages=2",), job=stages_job),
    "infer.stage_map": Flag(inferred, "held", "[]", "['tokens', '0-1, norm, head']", job=stages_job),
    "infer.inflight": Flag(inferred, "inflight", "1", "3", ("infer.stages=2",), job=stages_job),
    "infer.quantize": infers("int8", "null", "int8"),
    "infer.max_samples": infers("ids", "null", "7"),
    "infer.max_failures": Flag(failing, "status", "0.01", "1.0", job=prompts_job),
    "infer.id_column": infers("ids", "null", "key"),
    "infer.keep": infers("columns", "[]", "[other]"),
    "infer.label": infers("quality", "null", "kind"),
    "infer.format": infers("files", "parquet", "csv"),
    "infer.prompt_field": infers("answers", "null", "other"),
    "infer.template": infers("answers", "asked", "told"),
    "infer.templates": infers("answers", "{it: '{prompt}'}", "{it: '{other}'}", "infer.template=it"),
    "infer.chat": infers("answers", "false", "true"),
    "infer.max_new_tokens": infers("tokens", "6", "3"),
    "infer.temperature": infers("answers", "0.0", "1.0"),
    "infer.top_k": infers("answers", "null", "2", "infer.temperature=1.0"),
    "infer.top_p": infers("answers", "null", "0.05", "infer.temperature=1.0"),
    "infer.stop": Flag(stopped, "stop", "[]", "[x]", job=prompts_job),
    "telemetry.observers": Flag(worked, "told", "[]", "['flag_observer:see']"),
    "telemetry.log_memory": Flag(worked, "memory", "false", "true"),
    "telemetry.tensorboard": Flag(worked, "tensorboard", "true", "false"),
    "telemetry.every": Flag(commanded, "telemetry_every", "1.0", "0.0"),
    "cluster.address": Flag(commanded, "address", "null", "10.0.0.1:6379"),
    "cluster.interface": Flag(commanded, "interface", "null", "eth7", ("cluster.address=10.0.0.1:6379",)),
    "cluster.wanted_memory": Flag(planned_on_gpus, "warnings", "null", "90000000000000"),
    "cluster.wanted_capability": Flag(planned_on_gpus, "warnings", "8.0", "9.0"),
    "cluster.memory_fraction": Flag(planned, "storage", "0.9", "0.1"),
}  # fmt: skip
"""Every key that this version obeys."""

LATER: dict[str, tuple[str, str]] = {}
"""Keys that the design promises and nobody reads yet: a value, and what will read it."""


def given(key: str, value: Any, *, flag: Flag, folder: Path) -> LoadedSpec:
    """The flag's job with one value of its key, as a flag or as an object."""
    mapping = flag.job(folder)
    section, _, name = key.partition(".")
    taken = tuple(text for text in (*FIXED, *flag.beside) if not text.startswith(f"{key}="))
    if not callable(value):
        return load_spec(mapping=mapping, overrides=[*taken, f"{key}={value}"])
    mapping[section] = {**mapping[section], name: value()}
    if key == "model.module":
        del mapping["model"]["builder"]
    return load_spec(mapping=mapping, overrides=taken)


def text_of(key: str) -> str | None:
    """A value of a key as a file may hold it, never its default; None where only Python can give one."""
    if key in LATER:
        return LATER[key][0]
    flag = FLAGS[key]
    texts = [value for value in (flag.second, flag.first) if isinstance(value, str)]
    default = next(row.default for row in key_rows(JobSpec) if row.key == key)
    return next((text for text in texts if text.strip("'\"") != default.strip('"')), None)


@pytest.fixture
def fixed_process() -> Iterator[None]:
    """Threads, determinism and the generator are this process's again at the end."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    torch.set_rng_state(state)


def test_every_key_is_in_one_of_the_tables() -> None:
    """A new key belongs into FLAGS, with two values that make a difference."""
    known = [*FLAGS, *LATER]
    assert sorted(known) == sorted(row.key for row in key_rows(JobSpec))


@pytest.mark.usefixtures("fixed_process")
@pytest.mark.covers("CLI-39")
@pytest.mark.parametrize("key", list(FLAGS))
def test_two_values_of_a_key_make_a_difference(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = FLAGS[key]
    seen = []
    for number, value in enumerate((flag.first, flag.second, flag.first)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with monkeypatch.context() as patch:
            if not callable(value):
                torch.manual_seed(0)
            loaded = given(key, value, flag=flag, folder=tmp_path)
            seen.append(flag.see(loaded, Place(folder, patch))[flag.part])
    assert seen[0] != seen[1], f"{key} changes nothing: {flag.part} is {seen[0]} either way"
    assert key == "model.module" or seen[0] == seen[2], f"{flag.part} differs by itself"


@cache
def attributes_read() -> list[tuple[str, str]]:
    """(place, `section.key`) of every attribute of a section that the product's code reads."""
    found = []
    for package in ("cluster", "raytrain", "experts", "jobs"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute):
                    owner = ast.unparse(node.value).rpartition(".")[2]
                    found.append((f"{path.name}:{node.lineno}", f"{owner}.{node.attr}"))
    return found


@pytest.mark.parametrize("key", list(LATER))
def test_keys_of_later_versions_belong_to_a_refused_verb_or_are_unused(key: str) -> None:
    """An entry of LATER goes as soon as somebody reads its key."""
    readers = [where for where, attribute in attributes_read() if attribute == key]
    assert not readers, f"{readers} read {key}: it belongs into FLAGS"


# ---------------------------------------------------------------- the file stays what it is


@pytest.mark.covers("CLI-39")
@pytest.mark.parametrize("key", [key for key in (*FLAGS, *LATER) if text_of(key) is not None])
def test_a_flag_that_is_not_given_keeps_the_value_of_the_file(key: str, tmp_path: Path) -> None:
    text = text_of(key)
    section, _, name = key.partition(".")
    builder = "experts.models:moe_gpt" if key.startswith(("experts.lifecycle.", "experts.graph_routing")) else "a:b"
    job: dict[str, Any] = {"model": {"builder": builder}, "data": {"source": "stdlib"}}
    bare = load_spec(mapping=job).spec
    job, inner = apply_overrides(job, [f"{key}={text}"])[0], name.split(".") if name else []
    path = tmp_path / "job.yaml"
    path.write_text(dump_yaml(job))

    def held(loaded: LoadedSpec | None = None) -> Any:
        spec = encode(bare if loaded is None else loaded.spec)[section]
        for part in inner:
            spec = spec[part]
        return spec

    other = "loop.max_steps=77" if key != "loop.max_steps" else "loop.epochs=77"
    needed = FLAGS[key].beside if key.startswith("experts.") and key in FLAGS else ()
    needed = [one for one in needed if not one.startswith(f"{key}=")]
    filed, beside = load_spec(path, needed), load_spec(path, [*needed, other])
    flagged = load_spec(path, [*needed, f"{key}={text}"])
    assert held(filed) == held(beside) == held(flagged)
    assert held() != held(filed), f"{text} is the default of {key}: nothing is shown"
    leaves = [leaf for leaf in filed.sources if leaf == key or leaf.startswith(f"{key}.")]
    assert leaves and {filed.sources[leaf] for leaf in leaves} == {"file"}
    assert {beside.sources[leaf] for leaf in leaves} == {"file"}
    assert {flagged.sources[leaf] for leaf in leaves} == {"command line"}
    assert beside.sources[other.partition("=")[0]] == "command line"


def test_the_command_keeps_the_files_values_beside_a_flag(tmp_path: Path) -> None:
    """Through the real arguments: what a flag does not name is the file's, what neither names the default."""
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: {builder: 'raytrain.models.gpt:gpt', layers: 1, heads: 1, width: 8, context: 8}\n"
        "data: {source: stdlib}\nseed: 9\noptim: {lr: 0.5, schedule: linear}\nloop: {epochs: 3, max_steps: 5}\n"
    )
    done = CliRunner().invoke(main, ["plan", str(path), "optim.lr=0.25", "--json"])
    assert done.exit_code == 0, done.output
    plan = json.loads(done.output)
    config = plan["config"]
    assert (config["seed"], config["optim"]["lr"], config["optim"]["schedule"]) == (9, 0.25, "linear")
    assert (config["loop"]["epochs"], config["loop"]["max_steps"], config["loop"]["log_every"]) == (3, 5, 10)
    origin = {key: plan["sources"][key] for key in ("seed", "optim.lr", "optim.schedule", "loop.log_every")}
    assert origin == {"seed": "file", "optim.lr": "command line", "optim.schedule": "file", "loop.log_every": "default"}


# ---------------------------------------------------------------- one flag, one row


def job_of(*flags: str, **sections: Any) -> LoadedSpec:
    """The rows' job with flags, beside what `sections` say as the file."""
    base = {name: {} for name in SECTIONS}
    for text in FIXED:
        section, _, rest = text.partition(".")
        name, value = parse_override(f"{section}.{rest}")[0].partition(".")[2], parse_override(text)[1]
        base[section][name] = value
    mapping = rows_job(Path())
    merged = {name: {**section, **sections.get(name, {})} for name, section in base.items()}
    return load_spec(mapping={**mapping, **merged}, overrides=flags)


def plan_of(*flags: str, inventory: Inventory = BOX, **sections: Any) -> Plan:
    loaded = job_of(*flags, **sections)
    return plan_job(loaded, inventory=inventory, build=True)


def value_of(plan: Plan, name: str) -> Any:
    """A value of the run's record, plan.json."""
    return plan.to_json()["choices"][name]["value"]


@pytest.mark.covers("CLI-06")
def test_the_batch_of_a_flag_is_the_one_in_the_record_and_in_the_step() -> None:
    plan = plan_of("loop.global_batch_size=8")
    assert [value_of(plan, name) for name in ("global_batch_size", "effective_batch", "micro_batch_size")] == [8, 8, 8]
    shared = plan_of("loop.global_batch_size=8", "scale.workers=2")
    assert (value_of(shared, "micro_batch_size"), value_of(shared, "effective_batch")) == (4, 8)
    assert trained(job_of("loop.global_batch_size=8"))["batches"] == [8, 8, 8, 8]
    assert trained(job_of())["batches"] == [16, 16, 16, 10], "58 rows are left for training"


@pytest.mark.covers("CLI-08")
def test_the_epochs_of_a_flag_are_those_of_the_history() -> None:
    seen = trained(job_of("loop.epochs=3", loop={"max_steps": None, "epochs": 1, "global_batch_size": 29}))
    assert seen["epochs"] == [0, 0, 1, 1, 2, 2] and seen["outcome"] == "done"
    assert seen["batches"] == [29] * 6


@pytest.mark.covers("CLI-09")
@pytest.mark.parametrize(
    ("mode", "on_cpu", "on_one", "on_two"),
    [
        ("auto", ("cpu", 1), ("single_gpu", 1), ("multi_gpu", 2)),
        ("cpu", ("cpu", 1), ("cpu", 1), ("cpu", 1)),
        ("single_gpu", ("cpu", 1), ("single_gpu", 1), ("single_gpu", 1)),
        ("multi_gpu", ("cpu", 1), ("single_gpu", 1), ("multi_gpu", 2)),
    ],
)
def test_the_mode_of_a_flag_on_each_machine(
    mode: str, on_cpu: tuple[str, int], on_one: tuple[str, int], on_two: tuple[str, int]
) -> None:
    one = machine(("NVIDIA A100", (8, 0)))
    for inventory, expected in ((BOX, on_cpu), (one, on_one), (GPUS, on_two)):
        plan = plan_of(f"scale.mode={mode}", inventory=inventory)
        assert (value_of(plan, "mode"), value_of(plan, "workers")) == expected
        assert value_of(plan, "device") == ("cpu" if expected[0] == "cpu" else "cuda")
        fell_back = mode not in ("auto", expected[0])
        assert fell_back == any("fell back" in warning for warning in plan.warnings)
        assert fell_back == plan.mode.reason.startswith("fell back")


@pytest.mark.usefixtures("fixed_process")
@pytest.mark.covers("CLI-11")
def test_mixed_precision_is_set_by_a_key_and_does_not_change_the_weights() -> None:
    on, off = (trained(job_of(f"precision.dtype={name}")) for name in ("bf16", "fp32"))
    assert (on["dtypes"], off["dtypes"]) == ({torch.bfloat16}, {torch.float32})
    assert on["weights_are"] == off["weights_are"] == {torch.float32}
    default = load_spec(mapping=rows_job(Path())).spec.precision.dtype
    assert default == "auto" and isinstance(plan_of("precision.dtype=auto").precision, Resolved)
    assert value_of(plan_of("precision.dtype=auto"), "precision") == "fp32", "off where the machine has no use for it"


@pytest.mark.usefixtures("fixed_process")
@pytest.mark.covers("CLI-12")
def test_the_kind_of_mixed_precision_is_named_or_found_by_capability() -> None:
    old, new = machine(("Tesla T4", (7, 5))), machine(("NVIDIA A100", (8, 0)))
    for inventory, kinds in ((old, ("fp16", "fp32")), (new, ("bf16", "fp32")), (machine(amx=True), ("bf16", "fp32"))):
        mode = "cpu" if not inventory.devices() else "auto"
        choice = plan_of("precision.dtype=auto", f"scale.mode={mode}", inventory=inventory).precision
        assert isinstance(choice, Deferred) and tuple(choice.bounds) == kinds and choice.reason
    half, brain = (trained(job_of(f"precision.dtype={name}")) for name in ("fp16", "bf16"))
    assert (half["dtypes"], brain["dtypes"]) == ({torch.float16}, {torch.bfloat16})
    assert half["scales"] == [2.0**16] * 4 and brain["scales"] == [None] * 4


@pytest.mark.covers("CLI-14")
def test_accumulation_follows_from_the_micro_batch_of_a_flag() -> None:
    plan = plan_of("loop.micro_batch_size=4")
    assert (value_of(plan, "accumulation"), value_of(plan, "effective_batch")) == (4, 16)
    whole, parts = trained(job_of()), trained(job_of("loop.micro_batch_size=4"))
    assert parts["batches"] == [4] * 12 + [4, 4, 2] and len(parts["losses"]) == 4
    assert parts["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert value_of(plan_of(), "accumulation") == 1, "without the flag there is none"


@pytest.mark.usefixtures("fixed_process")
@pytest.mark.covers("CLI-31")
def test_single_gpu_and_fp16_without_a_gpu_is_a_recorded_fallback_that_runs() -> None:
    flags = ("scale.mode=single_gpu", "precision.dtype=fp16")
    plan = plan_of(*flags)
    assert (value_of(plan, "mode"), value_of(plan, "device"), value_of(plan, "precision")) == ("cpu", "cpu", "fp16")
    assert "single_gpu was asked for, but there is no GPU" in plan.mode.reason
    assert any("fell back to cpu" in warning for warning in plan.warnings)
    seen = trained(job_of(*flags))
    assert seen["dtypes"] == {torch.float16} and seen["outcome"] == "done"
    assert all(map(math.isfinite, seen["losses"])) and seen["losses"][-1] < seen["losses"][0]
    there = plan_of(*flags, inventory=GPUS)
    assert (value_of(there, "mode"), value_of(there, "workers"), there.warnings) == ("single_gpu", 1, [])


@pytest.mark.covers("MON-17")
@pytest.mark.parametrize(("every", "steps"), [(50, [1, 50, 100, 110]), (100, [1, 100, 110]), (0, [1, 110])])
def test_the_flag_sets_the_number_of_batches_per_progress_line(every: int, steps: list[int]) -> None:
    seen = trained(job_of(f"loop.log_every={every}", "loop.max_steps=110", "loop.global_batch_size=4"))
    assert seen["steps"] == steps


# ---------------------------------------------------------------- importable anywhere


@pytest.mark.covers("SRC-03")
def test_the_command_line_the_driver_and_the_loop_are_importable_without_gpu_and_network(tmp_path: Path) -> None:
    """In one process that may look up no name and open no socket, and has no GPU; the loop does not load Ray."""
    code = """
import sys
asked = []
def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        asked.append(event)
        raise PermissionError(event)
sys.addaudithook(watch)
def loaded():
    return [name for name in ("torch", "ray") if name in sys.modules]
import jobs.__main__, jobs.train
print(loaded())
import raytrain.train.loop, raytrain.train.session
print(loaded())
import jobs.driver.check_job, jobs.driver.watch, raytrain.execution.trainer, raytrain.execution.worker
import torch
print(loaded(), torch.cuda.is_initialized(), torch.cuda.is_available(), asked)
"""
    unseen = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=unseen, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "['torch']", "['torch', 'ray'] False False []"]
