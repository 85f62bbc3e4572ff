"""The last check: one `TorchTrainer` fit in which the same workers train two steps in each supported precision."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cluster.checks.preflight import CheckResult
from cluster.devices.inventory import Inventory
from cluster.wording import counted

if TYPE_CHECKING:
    from raytrain.train.job import TrainJob

COPIES = "batch_copies"
#: Operations of torch that are products of matrices; one may stay in another format.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
STEPS, ROWS, WIDTH, CONTEXT = 2, 8, 64, 32
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
        "loop": {"max_steps": STEPS, "global_batch_size": ROWS * workers, "micro_batch_size": ROWS, "log_every": 1},
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
    for payload in config["jobs"]:
        rows.append(_train(cloudpickle.loads(payload), workers, local_rank))
    gathered = workers.all_gather_object([{**row, "rank": workers.rank} for row in rows])
    return [row for rank_rows in gathered for row in rank_rows]


def _train(packed: tuple[Any, Any], workers: Any, local_rank: int) -> dict[str, Any]:
    """The steps of a job, at most `ENOUGH_S` long and without evaluations; the row of this worker."""
    from jobs.checks.job import figures_of
    from raytrain.data.sources.open import source_from_driver
    from raytrain.data.transfer import TRANSFERS
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
    row = {"what": "training", "precision": dtype, "losses": [one["loss"] for one in logged],
           "steps": session.state.step, "moved": moved, "rows": loop.sizing.now, "asked": loop.sizing.planned,
           "device": str(session.device), "devices": places, "copies": vars(copies), "products": dict(products),
           "wanted": str(session.policy.autocast_dtype or session.policy.master_dtype).removeprefix("torch."),
           "budget": budget, **figures_of(logged), "seconds": time.perf_counter() - began}  # fmt: skip
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
    """A small training in each format, and its data."""
    from jobs.driver.session import worker_job

    on_gpu = bool(inventory.devices())
    mode = "cpu" if not on_gpu else "multi_gpu" if workers > 1 else "single_gpu"
    packed = []
    for dtype in formats:
        job, source = worker_job(small_job(workers=workers, threads=1, mode=mode, dtype=dtype), inventory=inventory)
        packed.append((job, source.worker_data))
    return packed


def run_fit(
    packed: Sequence[tuple[TrainJob, Any]], *, workers: int, on_gpu: bool, local: bool, interface: str | None,
    storage: str,
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows of every worker, from one fit in which all train the jobs, one after the other.

    Raises:
        RunError: the fit failed.
    """
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
    results = [_check_collectives(rows)] if workers > 1 else []
    trained = [row for row in rows if row["what"] == "training"]
    for dtype in dict.fromkeys(row["precision"] for row in trained):
        mine = [row for row in trained if row["precision"] == dtype]
        wrong = [text for row in mine if (text := _wrong(row))]
        seconds = max(row["seconds"] for row in mine)
        losses = ", ".join(f"{loss:.4f}" for loss in mine[0]["losses"])
        products = f"products in {' and '.join(sorted(mine[0]['products'])) or 'no format'}"
        seen = f"{counted(len(mine), 'worker')}, {STEPS} steps, {products}, losses {losses}, "
        seen += f"{seconds:.1f} s on {mine[0]['device']}"
        expected = f"{STEPS} steps with products in {mine[0]['wanted']}, finite losses and other weights, on one device"
        status, remedy = ("fail", "see the rank's own message above") if wrong else ("ok", "")
        results.append(CheckResult(f"training in {dtype}", status, "; ".join(wrong) or seen, expected, remedy))
    return [*results, check_copies(trained)]


def check_copies(trained: Sequence[Mapping[str, Any]]) -> CheckResult:
    """Whether the copies of batches that the workers counted came from pinned memory and were non-blocking.

    Args:
        trained: the rows of the workers' trainings.
    """
    from raytrain.data.transfer import TransferCounts

    expected = "every batch is copied from pinned memory, non-blocking"
    device = trained[0]["device"].partition(":")[0] if trained else "cpu"
    if device == "cpu":
        seen = "not shown: the model is in the memory of the CPU, so that no batch is copied"
        return CheckResult(COPIES, "na", seen, expected)
    total = TransferCounts.total(TransferCounts(**row["copies"]) for row in trained)
    idle = [f"rank {row['rank']} in {row['precision']}" for row in trained if not row["copies"]["tensors"]]
    seen = total.describe(device) + (f"; none were counted on {', '.join(idle)}" if idle else "")
    if not idle and total.tensors == total.pinned == total.non_blocking:
        return CheckResult(COPIES, "ok", seen, expected)
    return CheckResult(COPIES, "fail", seen, expected, "copies wait for each other: report this with `check --bundle`")


def _wrong(row: dict[str, Any]) -> str:
    """What is wrong with a worker's training; "" if nothing is."""
    who = f"rank {row['rank']}"
    if row["steps"] != STEPS:
        return f"{who} took {counted(row['steps'], 'step')}"
    if not all(math.isfinite(loss) for loss in row["losses"]):
        return f"{who} has the losses {row['losses']}"
    if not row["moved"]:
        return f"{who} has weights that no step changed"
    if row["products"].get(row["wanted"], 0) <= sum(row["products"].values()) / 2:
        return f"{who} computes its products in {' and '.join(sorted(row['products'])) or 'no format'}"
    if row["devices"] != [row["device"]]:
        return f"{who} computes on {row['device']} and holds weights on {', '.join(row['devices'])}"
    return ""


def _check_collectives(rows: Sequence[dict[str, Any]]) -> CheckResult:
    measured = [row for row in rows if row["what"] == "collectives"]
    slowest = {name: min(row[name] for row in measured) / 1e9 for name in ("all_reduce", "all_to_all")}
    seen = (
        f"{measured[0]['world_size']} workers over {measured[0]['backend']}: all-reduce "
        f"{slowest['all_reduce']:.2g} GB/s, all-to-all {slowest['all_to_all']:.2g} GB/s"
    )
    return CheckResult("collectives", "ok", seen, "both complete between all workers")
