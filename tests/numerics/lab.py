"""Small real jobs in a plain process: data, a session as the worker builds it, and instruments to look at one.

Everything goes the product's own way (as `jobs.driver.local_session` without its checks); only the machine is
invented, so that the plan is the same on every box.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import raytrain.train.session
from cluster.devices.inventory import Inventory, Node
from jobs.driver.build import opened
from jobs.driver.check_job import train_job
from jobs.driver.planning import plan_job
from jobs.job.spec import load_spec
from raytrain.data.rows.contract import Source
from raytrain.execution.checkpointer import CheckpointSaver
from raytrain.plan.choice import Resolved
from raytrain.runs.folder import RunFolder
from raytrain.train.job import TrainJob
from raytrain.train.parallel.collectives import Workers
from raytrain.train.session import Session
from raytrain.train.state import Clock, LoopOutcome, Saver

ROOT = Path(raytrain.train.session.__file__).parents[2]
PRODUCT = tuple(str(ROOT / package) for package in ("raytrain", "experts"))
BOX = Inventory(
    nodes=(Node("box", 8, 16 << 30),),
    source="a test",
    cpu_model="Test CPU",
    cpu_flags={"amx_bf16": False, "avx512_bf16": False},
)
FIXED: dict[str, dict[str, Any]] = {
    "precision": {"dtype": "fp32"},
    "scale": {"workers": 1, "mode": "cpu", "threads": 1},
    "loop": {"log_every": 1, "global_batch_size": 16, "max_steps": 20},
    "optim": {"lr": 0.003},
    "telemetry": {"tensorboard": False},
}
GPT = {"builder": "raytrain.models.gpt:gpt", "layers": 2, "heads": 2, "width": 32, "context": 12, "vocab_size": 31}
MOE = {**GPT, "builder": "experts.models:moe_gpt"}
MLP = {"builder": "raytrain.models.mlp:mlp", "hidden": [32, 32]}


# ---------------------------------------------------------------- data


def token_rows(
    rows: int, *, length: int = 12, vocabulary: int = 31, seed: int = 0, ragged: bool = False, empty: Iterable[int] = ()
) -> dict[str, Tensor]:
    """Token windows of a repeating pattern with noise. `ragged`: some labels are -100; rows of `empty`: all are."""
    draw = np.random.default_rng(seed)
    starts, strides = draw.integers(vocabulary, size=(rows, 1)), draw.integers(1, 4, size=(rows, 1))
    noise = (draw.random((rows, length + 1)) < 0.1) * draw.integers(vocabulary, size=(rows, length + 1))
    tokens = torch.from_numpy((starts + strides * np.arange(length + 1) + noise) % vocabulary)
    labels = tokens[:, 1:].clone()
    if ragged:
        labels[torch.from_numpy(np.arange(length) >= draw.integers(1, length + 1, size=(rows, 1)))] = -100
    labels[list(empty)] = -100
    return {"input_ids": tokens[:, :-1].clone(), "labels": labels}


def class_rows(rows: int, *, features: int = 12, classes: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """DET: drawn features, and the class whose fixed nonlinear score is largest."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((rows, features)).astype(np.float32)
    mix = np.random.default_rng(99).standard_normal((2, features, classes))
    labels = (np.tanh(x @ mix[0]) + 0.5 * (x @ mix[1])).argmax(axis=1)
    return {"x": torch.from_numpy(x), "labels": torch.from_numpy(labels)}


# ---------------------------------------------------------------- a session, as a worker builds it


def make_job(
    model: Mapping[str, Any],
    data: Mapping[str, Any],
    *,
    world_size: int = 1,
    run: RunFolder | None = None,
    **sections: Mapping[str, Any] | int,
) -> tuple[TrainJob, Source]:
    """The job of a worker, and its opened data. `sections` override `FIXED`; `seed` may be among them."""
    mapping: dict[str, Any] = {"model": dict(model), "data": dict(data), **{k: dict(v) for k, v in FIXED.items()}}
    mapping["scale"]["workers"] = world_size
    for name, section in sections.items():
        mapping[name] = {**mapping.get(name, {}), **section} if isinstance(section, Mapping) else section
    loaded = load_spec(mapping=mapping)
    source = opened(loaded.spec)
    plan = plan_job(loaded, inventory=BOX, data_facts=source.facts)
    job = train_job(loaded.spec, plan, run or RunFolder("unused"), attempt=1)
    for name in ("max_steps", "eval_every"):  # what a plan of objects in memory leaves to the opened data
        assert isinstance(getattr(job.plan, name), Resolved), name
    return replace(job, import_path=""), source


def make_session(
    model: Mapping[str, Any],
    data: Mapping[str, Any],
    *,
    workers: Workers | None = None,
    precision: str | Mapping[str, Any] = "fp32",
    prepare: bool = True,
    **sections: Any,
) -> Session:
    """A session on this process's workers (one, unless a group is up), prepared for `precision`."""
    workers = workers or Workers()
    sections["precision"] = {"dtype": precision} if isinstance(precision, str) else precision
    job, source = make_job(model, data, world_size=workers.world_size, **sections)
    session = Session(job, workers=workers, source=source)
    if prepare:
        session.prepare(job.planned("precision"))
    return session


class Rows:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.intervals: list[dict[str, Any]] = []
        self.traces: dict[int, bytes] = {}

    def metrics(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def interval(self, row: dict[str, Any], traces: dict[int, bytes]) -> None:
        self.intervals.append(row)
        self.traces |= traces

    def of(self, kind: str, name: str) -> list[Any]:
        """One column of the rows of a kind."""
        return [row[name] for row in self.rows if row["kind"] == kind]

    @property
    def losses(self) -> list[float]:
        return self.of("train", "loss")


def train(
    session: Session, *, saver: Saver | None = None, should_stop: Callable[[], bool] = lambda: False
) -> tuple[Rows, LoopOutcome]:
    """Run the session's loop from its current state."""
    reporter = Rows()
    outcome = session.loop(reporter=reporter, saver=saver, should_stop=should_stop).run(session.state)
    return reporter, outcome


def saver_of(session: Session, run: RunFolder, *, every: int | str, **options: Any) -> CheckpointSaver:
    """A saver that keeps all checkpoints, of a session without Ray."""
    options = {"keep": "all", "asynchronous": True, "reporter": Rows(), "clock": Clock(), "fence": None, **options}
    return CheckpointSaver(session, run, every=every, **options)


def train_and_save(
    session: Session, run: RunFolder, *, every: int, should_stop: Callable[[], bool] = lambda: False, **options: Any
) -> tuple[Rows, LoopOutcome]:
    """As `train`, with a checkpoint every so many steps; `options` of the saver."""
    reporter = Rows()
    saver = saver_of(session, run, every=every, reporter=reporter, **options)
    loop = session.loop(reporter=reporter, saver=saver, should_stop=should_stop, clock=saver.clock)
    outcome = loop.run(session.state)
    saver.close()
    return reporter, outcome


def by_step(reporter: Rows, name: str = "loss", *, kind: str = "train") -> dict[int, Any]:
    """Step -> a column of the rows of a kind."""
    return dict(zip(reporter.of(kind, "step"), reporter.of(kind, name), strict=True))


def full_weights(session: Session) -> dict[str, np.ndarray]:
    """Of the complete model, on rank 0; empty on other ranks. Collective."""
    module = session.full_module()
    return {} if module is None else {name: value.numpy().copy() for name, value in module.state_dict().items()}


# ---------------------------------------------------------------- instruments


def tensors_in(value: Any) -> Iterator[Tensor | str]:
    """Tensors of a nested state, and everything else as text, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield str(key)
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    else:
        yield repr(value)


def digest(*values: Any) -> str:
    """A hash of every bit of nested states."""
    total = hashlib.sha256()
    for part in tensors_in(values):
        if isinstance(part, Tensor):
            total.update(str((part.dtype, tuple(part.shape))).encode())
            total.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            total.update(part.encode())
    return total.hexdigest()


def weights_of(session: Session) -> dict[str, np.ndarray]:
    """Copies of the parameters and buffers, for another process."""
    return {name: value.detach().numpy().copy() for name, value in session.trainable.module.state_dict().items()}


def optimizer_state(session: Session) -> list[dict[str, Any]]:
    """The optimizers' states."""
    return [optimizer.state_dict() for optimizer in session.optimizers]


class DeviceReads(TorchDispatchMode):
    """Counts what makes a host wait for the device: on a GPU each of these would be a synchronisation.

    Both roads are watched: the operators (values read, shapes that depend on values) and the Python methods that
    reach a tensor's memory without an operator. One call of a method counts once. `spots` says where.
    """

    METHODS = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__", "cpu")
    OPERATORS = frozenset(
        {
            "aten::_local_scalar_dense",
            "aten::nonzero",
            "aten::masked_select",
            "aten::unique_dim",
            "aten::_unique2",
            "aten::unique_consecutive",
            "aten::repeat_interleave.Tensor",
            "aten::equal",
            "aten::is_nonzero",
            "aten::bincount",
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.spots: list[str] = []
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func.name().startswith("aten::index") and any(
            isinstance(index, Tensor) and index.dtype is torch.bool
            for index in (args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ())
        )
        if (by_mask or func.name() in self.OPERATORS) and not self._inside:
            self._note(func.name())
        return func(*args, **(kwargs or {}))

    def _note(self, what: str) -> None:
        ours = [row for row in traceback.extract_stack() if row.filename.startswith(PRODUCT)]
        where = f"{Path(ours[-1].filename).relative_to(ROOT)}:{ours[-1].name}" if ours else "a test"
        self.spots.append(f"{what} in {where}")

    def __enter__(self) -> DeviceReads:
        self._kept = {name: getattr(Tensor, name) for name in self.METHODS}
        for name, method in self._kept.items():
            setattr(Tensor, name, self._counted(name, method))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for name, method in self._kept.items():
            setattr(Tensor, name, method)

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(*args, **kwargs)
            self._note(name)
            self._inside = True
            try:
                return method(*args, **kwargs)
            finally:
                self._inside = False

        return call
