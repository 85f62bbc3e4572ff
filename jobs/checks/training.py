"""The checks that compute: a named job's model on its data on one device, and one `TorchTrainer` fit on all workers.

`raytrain check` runs it last, since it loads torch and starts workers.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.devices.inventory import Inventory
from cluster.preflight import CheckResult, judged
from cluster.telemetry.warnings import HIGH
from cluster.wording import counted, plain_number, seconds, size
from jobs.job.spec import JobSpec, LoadedSpec, load_spec

if TYPE_CHECKING:
    from raytrain.train.job import TrainJob


# ---------------------------------------------------------------- job
# The checks of a job that was named: its own model trains some steps on its own data, on one device.


JOB_STEPS = 12
"""Steps of each training; fewer where a step is slow."""
ALONE = (
    "scale.workers=1", "scale.strategy=auto", "experts.hosts=0", "experts.replicas=0", "precision.fp32_layers=[]",
    "loop.compile=off", "loop.epochs=null", f"loop.max_steps={JOB_STEPS}", "loop.log_every=1", "tune.space=null",
    "telemetry.tensorboard=false",
)  # fmt: skip
"""One worker trains, with nothing left to measure at the start."""
NEAR, ALIKE = 0.05, 0.05
"""A difference of times up to this is noise; the losses of a format that is right differ from those of fp32 by less."""


@dataclass(frozen=True)
class Arm:
    """One training of the job: its format, its rows of a step, and processes that read."""

    precision: str
    rows: int
    loaders: int


class NamedJob:
    """A job that was named, opened and built on the driver before Ray starts."""

    def __init__(self, path: Path, overrides: Sequence[str]) -> None:
        from jobs.driver.check_job import check_on_driver  # imports torch
        from jobs.job.facts import resolved

        self._path, self._overrides = path, tuple(overrides)
        self.spec: JobSpec = load_spec(path, self._overrides).spec
        self.checked = check_on_driver(resolved(self.spec))

    def arms(self, formats: Sequence[str]) -> list[Arm]:
        """What to train; half the rows come first, since the peak of a process on a CPU only rises."""
        loop, loaders = self.spec.loop, self.spec.data.loader_workers
        rows = next((one for one in (loop.micro_batch_size, loop.global_batch_size) if isinstance(one, int)), 16)
        rows = max(1, min(rows, self.checked.data_facts.train_rows or rows))
        given = loaders if isinstance(loaders, int) else 0
        found = [Arm("fp32", rows // 2, given)] if rows > 1 else []
        found += [Arm(name, rows, given) for name in dict.fromkeys(("fp32", *formats, "bf16"))]
        if self.checked.data_facts.kind == "items":  # rows that are read one by one, which further processes can do
            found += [Arm("fp32", rows, count) for count in (0, 1, 2, 4) if count != given]
        return found

    def job(self, arm: Arm, inventory: Inventory) -> tuple[TrainJob, Any]:
        """The workers' job of an arm, and the data to send to them."""
        from jobs.driver.check_job import train_job
        from jobs.driver.planning import plan_job
        from jobs.job.facts import resolved
        from raytrain.runs.folder import RunFolder

        keys = (f"precision.dtype={arm.precision}", f"loop.global_batch_size={arm.rows}",
                f"loop.micro_batch_size={arm.rows}", f"data.loader_workers={arm.loaders}")  # fmt: skip
        mode = () if self.spec.scale.mode != "multi_gpu" else ("scale.mode=single_gpu",)
        loaded: LoadedSpec = load_spec(self._path, [*self._overrides, *ALONE, *mode, *keys])
        facts: dict[str, Any] = {"model_facts": self.checked.model_facts, "data_facts": self.checked.data_facts}
        plan = plan_job(loaded, inventory=inventory, **facts)
        run = RunFolder(f"{loaded.spec.save.dir}/{loaded.spec.name}")  # only named, never written
        return train_job(resolved(loaded.spec), plan, run, attempt=1), self.checked.handed


def check_job(
    arms: Sequence[Arm], found: Sequence[Mapping[str, Any]], spec: JobSpec, *, source: str, rows: int
) -> list[CheckResult]:
    """A result for each of the four questions, from the worker's row of each training; the data is `source`, with so
    many training rows."""
    most = max(arm.rows for arm in arms)
    whole = [(arm, row) for arm, row in zip(arms, found, strict=True) if arm.rows == most]
    first, row = whole[0]  # in fp32, with the loaders of the job
    fewer = next((other for arm, other in zip(arms, found, strict=True) if arm.rows < most), None)
    formats = {arm.precision: one for arm, one in whole if arm.loaders == first.loaders}
    loaders = {arm.loaders: one for arm, one in whole if arm.precision == "fp32"}
    room, asked = f"at most {HIGH:.0%} of what a worker may use", spec.precision.dtype
    questions: tuple[Any, ...] = (
        ("data", "fail", "", "finite losses and other weights", _data(row, source, rows)),
        ("precision", "warn", "precision.dtype", "the fastest format that is right", _precision(formats, asked)),
        ("memory", "warn", "loop.micro_batch_size", room, _memory(row, fewer)),
        ("loaders", "warn", "data.loader_workers", "reading holds no step up", _loaders(loaders, first.loaders)),
    )
    return [
        judged(f"job {name}", seen, expected, remedy, status=status, key=key)
        for name, status, key, expected, (seen, remedy) in questions
    ]


def _data(row: Mapping[str, Any], source: str, rows: int) -> tuple[str, str]:
    """(what was seen, what to change or ""), as of each question."""
    losses = row["losses"]
    seen = f"{rows:,} rows of {source}; {len(losses)} steps of {row['rows']} rows in fp32: losses "
    seen += f"{losses[0]:.4g} to {losses[-1]:.4g}" if losses else "none"
    right = losses and all(map(math.isfinite, losses)) and row["moved"]
    return seen, "" if right else "look at the rows, and at optim.lr"


def _precision(found: Mapping[str, Mapping[str, Any]], asked: str) -> tuple[str, str]:
    """Which format is fastest, of those that train about the same losses."""
    base, parts, right = found["fp32"], [], {}
    for name, row in found.items():
        same = len(row["losses"]) == len(base["losses"]) and all(
            abs(loss - other) <= ALIKE * abs(other) for loss, other in zip(row["losses"], base["losses"], strict=True)
        )
        parts.append(f"{name} {seconds(row['step_s'])}")
        if name != "fp32":
            alike = "with the losses of fp32" if same else "but with other losses than fp32"
            parts[-1] += f", {base['step_s'] / row['step_s']:.2f} times as fast, {alike}"
        right |= {name: row["step_s"]} if same else {}
    fastest = min(right, key=lambda name: right[name], default="fp32")
    best = fastest if fastest in right and right[fastest] < (1 - NEAR) * base["step_s"] else "fp32"
    seen = f"a step of {base['rows']} rows: {'; '.join(parts)}; best {best}"
    if asked in found and asked != best and (asked not in right or right[asked] > (1 + NEAR) * right[best]):
        return seen, f"{'faster' if asked in right else 'trains like fp32'} here: precision.dtype={best}"
    return seen, ""


def _memory(row: Mapping[str, Any], fewer: Mapping[str, Any] | None) -> tuple[str, str]:
    """The peak of a step, what a worker may use, and how many rows fit by the line through two sizes."""
    peak, budget, asked = row["peak_bytes"], row["budget"], row["asked"]
    seen = f"a peak of {size(peak)} of {size(budget)} that a worker may use, with {row['rows']} rows in fp32"
    if row["rows"] < asked:
        remedy = f"set loop.micro_batch_size={row['rows']}, or leave it auto"
        return f"{asked} rows need more than fits; {seen}", remedy
    rows = 0.0 if fewer is None else row["rows"] - fewer["rows"]
    each = (peak - fewer["peak_bytes"]) / rows if fewer is not None and rows else 0.0
    if each > 0 and budget and budget > peak:
        more = int((HIGH * budget - peak) / each)
        seen += f"; {size(each)} a row: about {plain_number(row['rows'] + max(0, more))} rows would fit"
    full = bool(budget) and peak > HIGH * budget
    return seen, "set loop.micro_batch_size lower, or loop.activation_checkpointing" if full else ""


def _loaders(found: Mapping[int, Mapping[str, Any]], given: int) -> tuple[str, str]:
    """How much of a step its data takes, with each number of processes that was tried."""
    steps = {count: row["step_s"] for count, row in sorted(found.items())}
    share = found[given]["data_s"] / found[given]["step_s"] if found[given]["step_s"] else 0.0
    seen = f"data.loader_workers={given} waits {share:.1%} of a step for its rows"
    if len(found) == 1:
        return seen, ""
    best = min(steps, key=lambda count: (steps[count] > (1 + NEAR) * min(steps.values()), count))
    parts = ", ".join(f"{count}: {seconds(step)} a step" for count, step in steps.items())
    better = steps[given] > (1 + NEAR) * steps[best] and best != given
    remedy = f"set data.loader_workers={best}, or auto" if better else ""
    return f"{seen}; best data.loader_workers={best} ({parts})", remedy


# ---------------------------------------------------------------- training
# The last check: one `TorchTrainer` fit in which the same workers train two steps in each supported precision.


COPIES = "batch_copies"
#: Operations of torch that are products of matrices; one may stay in another format.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
FIT_STEPS, ROWS, WIDTH, CONTEXT = 2, 8, 64, 32
#: Seconds after which a training of a slow job stops.
ENOUGH_S = 20.0
#: Bytes that the collectives move.
MOVED = 8 << 20


def small_job(*, workers: int, threads: int, mode: str, dtype: str) -> dict[str, Any]:
    """A language model of some ten thousand parameters on generated text; on a GPU its batches are copied there."""
    import torch

    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(97, 123, (64, CONTEXT), generator=draw)
    return {
        "name": "check",
        "model": {"builder": "raytrain.models.gpt:gpt", "layers": 1, "heads": 4, "width": WIDTH, "context": CONTEXT,
                  "vocab_size": 256},
        "data": {"train": {"input_ids": ids, "labels": ids.roll(-1, 1)}, "eval_fraction": 0.0,
                 "storage": "auto" if mode == "cpu" else "pinned"},
        "precision": {"dtype": dtype},
        "loop": {"max_steps": FIT_STEPS, "global_batch_size": ROWS * workers, "micro_batch_size": ROWS, "log_every": 1},
        "scale": {"workers": workers, "threads": threads, "mode": mode},
        "telemetry": {"tensorboard": False},
    }  # fmt: skip


def train_steps(config: dict[str, Any]) -> list[dict[str, Any]]:
    """A worker of the fit: measure the collectives, then train in each precision; every worker's rows."""
    import ray.train
    from ray import cloudpickle

    from raytrain.config.user_code import import_from
    from raytrain.train.parallel.collectives import Workers

    workers = Workers()
    rows = [_collectives(workers)] if workers.world_size > 1 else []
    local_rank = ray.train.get_context().get_local_rank()
    import_from(config["folder"])  # a job may name classes of the user's: importable before it is unpickled
    rows += [_train(cloudpickle.loads(payload), workers, local_rank) for payload in config["jobs"]]
    gathered = workers.all_gather_object([{**row, "rank": workers.rank} for row in rows])
    return [row for rank_rows in gathered for row in rank_rows]


def _train(packed: tuple[Any, Any], workers: Any, local_rank: int) -> dict[str, Any]:
    """The steps of a job, at most `ENOUGH_S` long and without evaluations; the row of this worker."""
    from raytrain.data.rows.residency import TRANSFERS
    from raytrain.data.sources.open import source_from_driver
    from raytrain.execution.reporter import SilentReporter
    from raytrain.train.memory.device import process_budget
    from raytrain.train.session import Session

    logged = list[dict[str, Any]]()

    class Rows(SilentReporter):
        def metrics(self, row: dict[str, Any]) -> None:
            if row["kind"] == "train":
                logged.append(row)

    job, data = packed
    began = time.perf_counter()
    source = source_from_driver(data, job.data, context=job.model.keys.get("context"))
    session = Session(job, workers=workers, local_rank=local_rank, source=source)
    dtype = str(job.planned("precision"))
    session.prepare(dtype)
    before = [parameter.detach().clone() for parameter in session.trainable.module.parameters()]
    copied = replace(TRANSFERS)
    loop = session.loop(reporter=Rows(), should_stop=lambda: time.perf_counter() - began > ENOUGH_S)
    loop.evaluate = None
    with _products() as products:
        loop.run(session.state)
    copies = TRANSFERS.since(copied)
    moved = all(
        not (one == other).all() for one, other in zip(before, session.trainable.module.parameters(), strict=True)
    )  # fmt: skip
    places = sorted({str(parameter.device) for parameter in session.trainable.module.parameters()})
    budget = process_budget(session.device, fraction=job.cluster.memory_fraction, limit=job.cluster.memory_limit,
                            processes=session.sharing)  # fmt: skip
    later = logged[2:] or logged  # without the first two steps
    times = ([one[name] for one in later] for name in ("step_time_s", "data_time_s"))
    step_s, data_s = (statistics.median(taken) if taken else math.nan for taken in times)
    row = {"what": "training", "precision": dtype, "losses": [one["loss"] for one in logged],
           "steps": session.state.step, "moved": moved, "rows": loop.sizing.now, "asked": loop.sizing.planned,
           "device": str(session.device), "devices": places, "copies": vars(copies), "products": dict(products),
           "wanted": str(session.policy.autocast_dtype or session.policy.master_dtype).removeprefix("torch."),
           "budget": budget, "step_s": step_s, "data_s": data_s,
           "peak_bytes": max((one["peak_memory_bytes"] for one in logged), default=0),
           "seconds": time.perf_counter() - began}  # fmt: skip
    session.close()
    return row


@contextlib.contextmanager
def _products() -> Iterator[Counter[str]]:
    """How many matrix products of this thread's passes read which format, as they reach their kernels."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found = Counter[str]()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ in PRODUCTS:
                found[str(args[1].dtype).removeprefix("torch.")] += 1
            return func(*args, **(kwargs or {}))

    with Products():
        yield found


def _collectives(workers: Any) -> dict[str, Any]:
    """Bytes per second of an all-reduce and an all-to-all between all workers, each the best of three."""
    import ray.train.torch
    import torch
    import torch.distributed as dist

    device = ray.train.torch.get_device()
    rows = MOVED // 4 // workers.world_size * workers.world_size
    source, target = (torch.ones(rows, device=device) for _ in range(2))
    found = dict[str, float]()
    for name, run in (
        ("all_reduce", lambda: dist.all_reduce(target)),
        ("all_to_all", lambda: dist.all_to_all_single(target, source)),
    ):
        best = 0.0
        for _ in range(4):
            dist.barrier()
            began = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = max(best, 4 * rows / (time.perf_counter() - began))
        found[name] = best
    return {"what": "collectives", "backend": dist.get_backend(), "world_size": workers.world_size, **found}


def small_jobs(inventory: Inventory, *, workers: int, formats: Sequence[str]) -> list[tuple[TrainJob, Any]]:
    from jobs.driver.local_session import worker_job

    on_gpu = bool(inventory.devices())
    mode = "cpu" if not on_gpu else "multi_gpu" if workers > 1 else "single_gpu"
    jobs = (small_job(workers=workers, threads=1, mode=mode, dtype=dtype) for dtype in formats)
    made = (worker_job(job, inventory=inventory) for job in jobs)
    return [(job, source.worker_data) for job, source in made]


def run_fit(
    packed: Sequence[tuple[TrainJob, Any]], *, workers: int, on_gpu: bool, local: bool, interface: str | None,
    storage: str,
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows of every worker, from one fit in which all train the jobs, one after the other."""
    from ray import cloudpickle
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from raytrain.errors import RunError, first_line
    from raytrain.execution import driver_channel
    from raytrain.execution.controller import Collectives
    from raytrain.execution.ray_private import trainer_class
    from raytrain.execution.trainer import worker_resources

    first = packed[0][0]
    trainer = trainer_class(local=local)(
        train_steps,
        train_loop_config={
            "jobs": [cloudpickle.dumps(one) for one in packed],  # pyright: ignore[reportPrivateImportUsage]
            "folder": os.getcwd(),
        },
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=on_gpu, resources_per_worker=worker_resources(first.plan, local=local),
            placement_strategy=first.planned("placement"),
        ),
        torch_config=Collectives(  # pyright: ignore[reportArgumentType]  (as in raytrain.execution.trainer)
            backend=first.planned("backend"), loopback=local, interface="lo" if local else interface,
            channel=driver_channel.open_channel(),
        ),
        run_config=RunConfig(name="check", storage_path=storage, failure_config=FailureConfig(max_failures=0)),
    )  # fmt: skip
    try:
        result: Any = trainer.fit().return_value
        return result
    except Exception as error:  # of any worker, or of Ray
        failures = getattr(error, "worker_failures", {})
        ranks = [f"rank {rank}: {type(one).__name__}: {first_line(one)}" for rank, one in failures.items()]
        raise RunError("; ".join(ranks) or f"{type(error).__name__}: {first_line(error)}") from error


def check_training(rows: Sequence[dict[str, Any]], *, workers: int) -> list[CheckResult]:
    """A result for each precision, one for the collectives, and one for the copies of batches."""
    results = []
    if workers > 1:
        measured = [row for row in rows if row["what"] == "collectives"]
        reduce, exchange = (min(row[name] for row in measured) / 1e9 for name in ("all_reduce", "all_to_all"))
        seen = f"{measured[0]['world_size']} workers over {measured[0]['backend']}: all-reduce {reduce:.2g} GB/s, "
        seen += f"all-to-all {exchange:.2g} GB/s"
        results.append(judged("collectives", seen, "both complete between all workers"))
    trained = [row for row in rows if row["what"] == "training"]
    for dtype in dict.fromkeys(row["precision"] for row in trained):
        mine = [row for row in trained if row["precision"] == dtype]
        wrong = [text for row in mine if (text := _wrong(row))]
        seconds = max(row["seconds"] for row in mine)
        losses = ", ".join(f"{loss:.4f}" for loss in mine[0]["losses"])
        products = f"products in {' and '.join(sorted(mine[0]['products'])) or 'no format'}"
        seen = f"{counted(len(mine), 'worker')}, {FIT_STEPS} steps, {products}, losses {losses}, "
        seen += f"{seconds:.1f} s on {mine[0]['device']}"
        expected = (
            f"{FIT_STEPS} steps with products in {mine[0]['wanted']}, finite losses and other weights, on one device"
        )
        remedy = "see the rank's own message above" if wrong else ""
        results.append(judged(f"training in {dtype}", "; ".join(wrong) or seen, expected, remedy))
    return [*results, check_copies(trained)]


def check_copies(trained: Sequence[Mapping[str, Any]]) -> CheckResult:
    """Whether the copies of batches that the workers counted came from pinned memory and were non-blocking."""
    from raytrain.data.rows.residency import TransferCounts

    expected = "every batch is copied from pinned memory, non-blocking"
    device = trained[0]["device"].partition(":")[0] if trained else "cpu"
    if device == "cpu":
        seen = "not shown: the model is in the memory of the CPU, so that no batch is copied"
        return CheckResult(COPIES, "na", seen, expected)
    total = TransferCounts.total(TransferCounts(**row["copies"]) for row in trained)
    idle = [f"rank {row['rank']} in {row['precision']}" for row in trained if not row["copies"]["tensors"]]
    seen = total.describe(device) + (f"; none were counted on {', '.join(idle)}" if idle else "")
    right = not idle and total.tensors == total.pinned == total.non_blocking
    return judged(
        COPIES, seen, expected, "" if right else "copies wait for each other: report this with `check --bundle`"
    )


def _wrong(row: dict[str, Any]) -> str | None:
    who = f"rank {row['rank']}"
    if row["steps"] != FIT_STEPS:
        return f"{who} took {counted(row['steps'], 'step')}"
    if not all(math.isfinite(loss) for loss in row["losses"]):
        return f"{who} has the losses {row['losses']}"
    if not row["moved"]:
        return f"{who} has weights that no step changed"
    if row["products"].get(row["wanted"], 0) <= sum(row["products"].values()) / 2:
        return f"{who} computes its products in {' and '.join(sorted(row['products'])) or 'no format'}"
    if row["devices"] != [row["device"]]:
        return f"{who} computes on {row['device']} and holds weights on {', '.join(row['devices'])}"
    return None
