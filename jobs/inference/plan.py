"""The plan of an inference job: which rows in which units, in which batches, on how many workers, written where."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain, count
from typing import Any

from cluster.devices.inventory import Inventory
from jobs.inference.layout import HOSTS_KEY as HOSTS
from jobs.inference.layout import HostChoice, StageChoice, choose_hosts, choose_stages
from jobs.inference.target import Target
from jobs.job.facts import absolute_path
from raytrain.config.decode import encode
from raytrain.data.sources.ray_dataset import is_ray_dataset
from raytrain.errors import InputError, RunError
from raytrain.infer.convert import converted, write_joined
from raytrain.infer.input import (
    NAMED_BY_ROW,
    InputRows,
    Unit,
    check_cells,
    check_columns,
    duplicate_id,
    fingerprint,
    input_files,
    unit_size,
    units_of,
    usual_rows,
)
from raytrain.infer.model import template_columns
from raytrain.infer.output import CONVERTED, RESULT_COLUMNS, TIMING_COLUMNS, OutputFolder, digest_of
from raytrain.infer.stages.partition import KEY as STAGES
from raytrain.infer.summary import check_labels
from raytrain.infer.worker import Work, kept_columns
from raytrain.plan.room import TYPE_SHARE, Need, room_for
from raytrain.runs.storage import join, open_store, typed_path

#: Batches of a unit for each stage of a divided model: a pipeline needs several to be full.
BATCHES_OF_STAGE = 4
#: Keys of the section that the answers do not depend on, or that are in the identity of a job by their effect.
UNIMPORTANT = (
    "input", "output", "max_failures", "batch_size", "unit_rows", "weights", "stages", "stage_policy", "stage_map",
    "inflight",
)  # fmt: skip
DATASET = "input.parquet"
PROCESS = "process of a worker"


@dataclass(frozen=True)
class InferencePlan:
    target: Target
    rows: InputRows  # the input as Parquet
    units: list[Unit]  # all of them, also those that an earlier command has computed
    output: OutputFolder
    batch_size: int  # rows of a batch
    workers: int
    threads: int  # CPU threads of a worker, or of each of its stages
    stages: StageChoice  # whether and how the model is divided
    identity: dict[str, Any]  # what the answers depend on
    paths: tuple[str, ...]  # of the input as it was given; empty if it was no files
    batch_reason: str  # why a batch has its rows
    hosts: HostChoice  # where the experts are
    need: Need  # what one worker reserves in Ray
    room: int | None = None  # workers that the nodes of a cluster have room for; None for our own Ray
    waits: str = ""  # a line where an autoscaler must add nodes first

    @property
    def at_once(self) -> int:
        """Workers that can compute at the same time."""
        return self.workers if self.room is None else min(self.workers, max(self.room, 1))

    @property
    def processes(self) -> int:
        """Of each worker: itself with its hosts, or all stages of a replica."""
        return self.stages.stages + self.hosts.hosts

    @property
    def job(self) -> str:
        return digest_of(self.identity)

    def work(self) -> Work:
        cluster = self.target.spec.cluster
        return Work(
            self.target.model, self.target.spec.infer, self.rows, self.output.parts, self.batch_size, self.most_failed,
            self.threads, self.job, cluster.memory_fraction, cluster.memory_limit, self.stages.split,
            self.hosts.hosts, import_path=os.getcwd(),
        )  # fmt: skip

    @property
    def most_failed(self) -> int:
        return math.floor(self.target.spec.infer.max_failures * self.rows.rows)

    def check_unchanged(self) -> None:
        """Raise RunError if a file of the input is another one than when it was planned."""
        for path, known in zip(self.paths, self.identity["input"], strict=False):
            if fingerprint(path) != known:
                raise RunError(
                    f"{path} changed while its rows were computed, so that the predictions are of two versions of it; "
                    "use a new infer.output"
                )


def plan_inference(
    target: Target, inventory: Inventory, *, resume: str | None, data: Any = None, scratch: str | None = None
) -> InferencePlan:
    """Open the input, divide it into units, and choose batches and workers. Raises InputError: the input cannot be
    read, or does not fit the keys of the `infer` section. Nothing is left of what was written.

    Args:
        resume: the output folder of an interrupted command, None to begin.
        data: a Ray Dataset or an Arrow table, instead of `infer.input`.
        scratch: where input of other formats is converted, None for the output folder.
    """
    resume = resume and typed_path(resume, key="--resume")
    folder = resume or target.spec.infer.output
    if not folder:
        parent = join(target.run.path, "predictions") if target.run is not None else os.path.abspath("predictions")
        names = {entry.name for entry in open_store(parent).entries("")}
        stem = f"{target.name}-{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}"
        free = (name for name in chain([stem], (f"{stem}-{n}" for n in count(2))) if name not in names)
        folder = join(parent, next(free))
    output = OutputFolder(absolute_path(folder))
    output.check_free(resume=resume is not None)
    try:
        rows, paths, prints = _input(target, scratch or join(output.path, CONVERTED), data)
        return _planned(target, inventory, output, rows, paths, prints)
    except BaseException:
        if output.identity() is None:
            output.forget()
        raise


def _input(target: Target, folder: str, data: Any) -> tuple[InputRows, tuple[str, ...], list[str]]:
    """The rows, the files that they come from, and the fingerprints of these."""
    infer = target.spec.infer
    if data is not None:
        path, used = join(folder, DATASET), _used(target, infer.keep)
        tables: Callable[[], Iterable[Any]] = lambda: [data]  # noqa: E731
        if is_ray_dataset(data):
            from raytrain.infer.ray_data import dataset_tables  # imports Ray

            tables = partial(dataset_tables, data)
        write_joined(tables, path, origin="the input", used=used)
        return InputRows.at([path], limit=infer.max_samples), (), [fingerprint(path)]
    if not infer.input:
        expected = "the files or folders of rows to answer"
        raise InputError("infer.input", got="no value", expected=expected, remedy="type infer.input=FILE")
    given = [infer.input] if isinstance(infer.input, str) else list(infer.input)
    files = input_files([absolute_path(one) for one in given])
    carried, numbers, known = {*infer.keep, infer.id_column}, not _generates(target), target.model.classes()
    if known is not None and known.names is not None:
        carried.add(infer.label)  # a name may look like a number
    join_columns = files.kind in NAMED_BY_ROW
    as_texts = infer.keep if infer.format == "jsonl" and join_columns else ()  # whatever the types of their values
    exact, used = {*as_texts, *template_columns(infer)}, _used(target, () if as_texts else infer.keep)
    written = converted(files, folder, carried=carried, label=infer.label, numbers=numbers, exact=exact, used=used)
    rows = InputRows.at(written, origins=files.paths, limit=infer.max_samples, join=join_columns, used=used)
    return rows, files.paths, [fingerprint(path) for path in files.paths]


def _used(target: Target, kept: Sequence[str]) -> set[str] | None:
    """The columns whose types matter; None for all."""
    reads, infer = target.model.used(target.spec.infer), target.spec.infer
    return None if reads is None else reads | {name for name in (infer.id_column, infer.label, *kept) if name}


def _planned(
    target: Target, inventory: Inventory, output: OutputFolder, rows: InputRows, paths: tuple[str, ...],
    prints: Sequence[str],
) -> InferencePlan:  # fmt: skip
    infer = target.spec.infer
    if not rows.rows:
        raise InputError("infer.input", got="no rows", expected="at least one row")
    check_columns(rows.schema, {
        "infer.id_column": infer.id_column, "infer.label": infer.label,
        **{f"infer.keep[{number}]": name for number, name in enumerate(infer.keep)},
    })  # fmt: skip
    reserved = {"id", *RESULT_COLUMNS, *TIMING_COLUMNS}
    for name in kept_columns(infer):
        if name in reserved:
            raise InputError("infer.keep", got=f"{name}, a column that raytrain writes", expected="another name")
    written = {"infer.id_column": [infer.id_column], "infer.keep": infer.keep, "infer.label": [infer.label]}
    check_cells(rows.schema, written, infer.format)
    target.model.check_header(infer, rows.schema)
    known = target.model.classes()
    if infer.label is not None and known is not None:
        check_labels(rows, infer.label, known)
    found = None if infer.id_column is None else duplicate_id(rows, infer.id_column)
    if found is not None:
        value, places = found
        what = f"no value in row {places[0]}" if value is None else f"{value!r} in rows {places[0]} and {places[1]}"
        seen = f"the column {infer.id_column} with {what}"
        raise InputError("infer.id_column", got=seen, expected="a unique id in every row")
    wanted, generates = infer.batch_size, _generates(target)
    usual = wanted if isinstance(wanted, int) else usual_rows(generates=generates)
    hosts = choose_hosts(target, rows=usual)
    stages = StageChoice(None, None, None) if hosts.hosts else choose_stages(target, rows=usual)
    if isinstance(wanted, int):
        batch, reason = wanted, "infer.batch_size"
    elif stages.stages == 1:
        device = "GPU" if target.machines.on_gpu else "CPU"
        batch, reason = usual_rows(generates=generates, on_gpu=target.machines.on_gpu), f"usual on a {device}"
    else:  # not one large batch, but several in flight
        batch = usual if generates else max(1, usual // (BATCHES_OF_STAGE * stages.stages))
        reason = "several batches are in flight"
    size = infer.unit_rows if isinstance(infer.unit_rows, int) else unit_size(rows.rows, generates=generates)
    if not isinstance(infer.unit_rows, int) and stages.stages > 1:
        size = max(size, BATCHES_OF_STAGE * stages.stages * batch)
    units = units_of(rows.rows, size)
    each, key = stages.stages + hosts.hosts, HOSTS if hosts.hosts else STAGES
    workers = workers_of(target, len(units), inventory, stages=each, key=key)
    room = room_of(target, inventory, stages=each)
    threads = target.spec.scale.threads
    if not isinstance(threads, int):  # the processes are divided equally over the machines
        nodes = [node.cpus for node in inventory.nodes if node.cpus] or [1]
        processes = (workers if room is None else min(workers, max(room, 1))) * each
        threads = max(1, min(nodes) // math.ceil(processes / len(nodes)))
    room, waits = room_of(target, inventory, stages=each, threads=threads), ""
    need, asked = need_of(target, each, key=key, threads=threads), target.spec.scale.workers
    if room is not None:
        from jobs.driver.watch import check_room  # imports Ray

        least = 1 if each > 1 or asked == "auto" else workers if isinstance(asked, int) else min(asked[0], workers)
        waits = check_room([replace(need, number=least * each)])
    settings = {key: value for key, value in encode(infer).items() if key not in UNIMPORTANT}
    identity = {
        **target.identity, "input": list(prints), "rows": rows.rows,
        "unit_rows": size, "batch_size": batch,
        "dtype": target.model.dtype, "seed": target.model.seed,
        **{f"infer.{key}": value for key, value in settings.items()},
    }  # fmt: skip
    return InferencePlan(
        target, rows, units, output, batch, workers, threads, stages, identity, paths, reason, hosts, need, room, waits
    )  # fmt: skip


def workers_of(target: Target, units: int, inventory: Inventory, *, stages: int = 1, key: str = STAGES) -> int:
    """Workers of the job, at most one for each unit; each of them has as many devices as the model has stages.
    `stages`: processes of a replica, which may also be a worker and its expert hosts. `key`: that sets their number."""
    wanted, gpus = target.spec.scale.workers, len(target.machines.gpus)
    room = room_of(target, inventory, stages=stages)
    local = room is None
    if isinstance(wanted, tuple):  # the pool of a cluster grows from one worker to all that it finds room for
        wanted = max(wanted[0], min(wanted[1], gpus // stages)) if local and gpus else wanted[1]
    if room is not None and (stages > 1 or wanted == "auto"):  # a replica more would hold what another one waits for
        units = min(units, max(room, 1))
    if local and 0 < gpus < stages:  # a process more would wait for a GPU without end
        but = " but the worker's" if key == HOSTS else ""
        raise InputError(
            key, got=_number(stages, key), expected=f"at most {_number(gpus, key)}, one for each GPU{but}",
            remedy=f"use fewer, or scale.mode=cpu; available: {inventory.describe()}",
        )  # fmt: skip
    if not isinstance(wanted, int):
        gpus = min(gpus, 1) if target.machines.mode.value == "single_gpu" and stages == 1 else gpus
        return min(max(gpus // stages, 1), units)
    if local and gpus and min(wanted, units) * stages > gpus:
        each = "one for each GPU" if stages == 1 else f"one for every {stages} GPUs"
        raise InputError(
            "scale.workers", got=str(wanted), expected=f"at most {gpus // stages}, {each}",
            remedy=f"use fewer, or scale.mode=cpu; available: {inventory.describe()}",
        )  # fmt: skip
    return min(wanted, units)


def _number(processes: int, key: str) -> str:
    """The value of the key with which a replica has so many processes."""
    return str(processes - 1 if key == HOSTS else processes)


def need_of(target: Target, processes: int, *, key: str, threads: int | None = None) -> Need:
    """What a worker of so many processes reserves in Ray: as in training, a process on the CPUs of a cluster the
    cores that it computes on, and one in our own Ray a single one, so that they may be more than the cores. `key`:
    that sets the number of its processes. `threads`: of each; None where that is chosen from the number of workers."""
    machines, private = target.machines, target.address == "local"
    each: dict[str, float] = {"CPU": 1}
    if machines.on_gpu:
        kind = None if private else machines.required_type
        each |= {"GPU": 1} | ({} if kind is None else {f"accelerator_type:{kind}": TYPE_SHARE})
    elif not private:
        asked = target.spec.scale.threads
        each = {"CPU": threads or (asked if isinstance(asked, int) else 1)}
    return Need("scale.workers", "worker", 1, each) if processes == 1 else Need(key, PROCESS, processes, each)


def room_of(target: Target, inventory: Inventory, *, stages: int = 1, threads: int | None = None) -> int | None:
    """Workers of so many processes that the nodes of a cluster have room for, None for our own Ray."""
    if target.address == "local":
        return None
    each, kind = need_of(target, stages, key=STAGES, threads=threads).each, target.machines.required_type
    on_gpu = target.machines.on_gpu
    pool = target.machines.pool if on_gpu else [(node, ()) for node in inventory.nodes]
    nodes = [
        {"CPU": node.cpus, "GPU": len(devices)} | ({} if kind is None else {f"accelerator_type:{kind}": 1})
        for node, devices in pool
    ]
    return room_for(each, nodes) // stages


def _generates(target: Target) -> bool:
    """Whether the answers are texts of many tokens, as far as is known before the model is loaded."""
    return "vocab_size" in target.model.facts or target.model.tokenizer is not None
