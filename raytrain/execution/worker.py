"""`train_loop_per_worker` runs inside each Ray Train worker and connects Ray to `raytrain/train/session.py`.

An attempt, in order: rank 0 takes an attempt number and applies the failure rules; all workers build the model,
resolve the deferred choices, restore the same checkpoint and train; rank 0 exports the weights and a
sample. A failure is written to the run folder before it is raised. Ray then restarts all workers, and rank 0 of the
next attempt decides how to continue.
"""

from __future__ import annotations

import bdb
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import ray
import ray.train
import torch
from ray import cloudpickle
from ray.train.torch import get_device

from cluster.ray_runtime import keep_parents_objects
from cluster.telemetry.warnings import HIGH
from raytrain.accelerator import on_gpu, platform
from raytrain.autotune.startup import Calibration, resolve_choices
from raytrain.checkpoint.writer import discard_after
from raytrain.config.user_code import import_from, pass_over_breakpoints, raised_at, resolve, users_place
from raytrain.data.rows.contract import Source
from raytrain.data.rows.residency import TRANSFERS, TransferCounts
from raytrain.data.sources.open import source_from_driver
from raytrain.errors import (
    CollectiveFailed,
    InputError,
    OutOfMemory,
    RaytrainError,
    RunError,
    StateLost,
    first_line,
    printable,
)
from raytrain.execution.checkpointer import CheckpointSaver
from raytrain.execution.driver_channel import (
    AttemptResult,
    OwnProcess,
    kept,
    on_stop_request,
    signs_of_life,
    write_stacks,
)
from raytrain.execution.export import export
from raytrain.execution.recovery import AttemptStart, RewindPolicy, RollbackPolicy, agree_on_start, take_attempt_number
from raytrain.execution.reporter import (
    RankReporter,
    RankZeroReporter,
    SilentReporter,
    StepReports,
    Superseded,
    TensorBoard,
    load_observers,
    rank_log,
)
from raytrain.execution.telemetry import node_telemetry
from raytrain.runs.faults import NOT_EXPORTED, Fault, read_faults, record_of, write_fault
from raytrain.runs.folder import MirroredFolder, RunFolder, shell_command
from raytrain.train.job import StepSettings, TrainJob
from raytrain.train.memory.device import is_out_of_memory, keep_freed_memory, memory_in_use, process_budget
from raytrain.train.memory.retry import NOT_SPLIT
from raytrain.train.memory.soft_limit import SoftLimit, SoftLimitWarning, largest_tensors, table, watched_memory
from raytrain.train.parallel.collectives import Workers
from raytrain.train.session import Session
from raytrain.train.state import Clock, LoopOutcome


def train_loop_per_worker(config: dict[str, Any]) -> AttemptResult | None:
    """Entry point of a Ray Train worker; returns rank 0's result, None on the other ranks. `config`: {"import_path",
    "run_path", "channel": handle of the DriverChannel actor, which keeps the pickled TrainJob, "data": whether it also
    keeps data that the driver read}."""
    keep_freed_memory()
    keep_parents_objects()  # the user's own datasets may fork
    pass_over_breakpoints()
    import_from(config["import_path"])  # the job names the user's classes: importable before it is unpickled
    workers = Workers()
    channel = config["channel"]
    print_lines = channel.print_lines.remote if workers.rank == 0 else None
    log = rank_log(RunFolder(config["run_path"]), workers.rank, print_lines=print_lines, wait=ray.wait)
    stacks = partial(write_stacks, RunFolder(config["run_path"]), workers.rank, threading.get_ident())
    with signs_of_life(channel, workers.rank, write_stacks=stacks), log:
        job: TrainJob = cloudpickle.loads(kept(channel, "job"))
        data = kept(channel, "data") if config["data"] else None
        local_rank = ray.train.get_context().get_local_rank()
        node = ray.get_runtime_context().get_node_id()
        # of GPUs that workers share, their ranks do not tell which one Ray has given this worker a part of
        own = get_device().index if job.plan.per_gpu > 1 else local_rank
        worker = Worker(job, workers=workers, local_rank=own, channel=channel, node=node)
        every, limit = job.telemetry_every if local_rank == 0 else 0.0, job.cluster.memory_limit
        sampled = node_telemetry(job.run_path, every=every, limit=limit, channel=channel, tags=worker.position)
        with sampled, watched_memory(worker.soft_limit(), every=job.telemetry_every, warn=worker.warn_of_memory):
            return worker.run(data)


def place_of(device: torch.device) -> dict[str, Any]:
    """Where this worker runs, for the record of its attempt: the node by the address that Ray knows it by, the device,
    and what hides the others from it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"node": ray.util.get_node_ip_address(), "device": str(device), "pid": os.getpid(), "visible": visible}


class Worker:
    """One attempt on one worker. `local_rank`: rank among the workers of this machine, or the index of its GPU where
    they share them; `node`: Ray's id of this node, for the faults recorded here."""

    def __init__(
        self, job: TrainJob, *, workers: Workers, local_rank: int, channel: Any, node: str | None = None
    ) -> None:
        self.job = job
        self.workers = workers
        self.local_rank = local_rank
        self.channel = channel
        self._node = node
        self.run_folder = RunFolder(job.run_path)
        self.session: Session | None = None
        self.attempt = 0
        self.from_step = 0
        self._new_faults: list[Fault] = []
        self._known_places: set[str] = set()
        self._rewind_policy = RewindPolicy(self.run_folder, limit=job.retry.restarts_without_progress)
        self._stop_requested = threading.Event()
        self._now: Callable[[], dict[str, Any]] = dict
        self._step_reports = StepReports(lambda: self._now(), self._report_progress)

    def run(self, data: Any) -> AttemptResult | None:
        """Decide how to start, train, and return the result; an exception is recorded as a fault. `data` is what the
        driver read for all workers; None if each worker opens the source itself."""
        try:
            start = self._start()
            reporter = self._open_reporter(start)  # records the last fault and this decision first
            try:
                if start.decision.action == "stop":
                    return self._result("failed", start.decision.reason)
                return self._train(start, data, reporter)
            finally:
                reporter.close()
        except Superseded:
            raise
        except CollectiveFailed as error:  # the consequence of a death, which the next attempt explains
            print(f"rank {self.workers.rank} lost the other workers at step {self._step()}", file=sys.stderr)
            self._record_fault(error)
            raise
        except BaseException as error:  # what the user's code calls may exit, or raise what nobody expects
            if isinstance(self.channel, OwnProcess):
                if isinstance(error, bdb.BdbQuit):
                    return self._result("interrupted", "the debugger was left")
                if isinstance(error, KeyboardInterrupt):  # of this terminal
                    raise
            self._record_fault(error)
            self._print_error(error)
            try:
                str(error).encode()
            except Exception:  # Ray could not pass it on, and would take the worker for one that returned nothing
                raise RunError(f"{type(error).__name__}: {first_line(error)}") from None
            raise
        finally:
            self._step_reports.close()
            if self.session is not None:
                self.session.close()

    def _start(self) -> AttemptStart:
        """Rank 0 takes the attempt number before it reads checkpoints, so a failure to read is this attempt's fault."""
        faults: list[Fault] = []
        if self.workers.rank == 0:
            faults = read_faults(self.run_folder, since=self.job.first_attempt)
            self.attempt = take_attempt_number(self.job, self.run_folder, faults=faults)
            events = self.run_folder.read_rows(self.run_folder.events)
            recorded = {row["failed_attempt"] for row in events if row["kind"] == "fault"}
            self._new_faults = [fault for fault in faults if fault.attempt not in recorded]
        self._known_places = {fault.place for fault in faults}
        start = agree_on_start(self.job, self.run_folder, workers=self.workers, attempt=self.attempt, faults=faults)
        self.attempt, self.from_step = start.attempt, start.from_step
        return start

    def _open_reporter(self, start: AttemptStart) -> RankReporter:
        if self.workers.rank:
            return SilentReporter()
        observers: list[Any] = load_observers(self.job.observers, resolve)
        if self.job.tensorboard:
            observers.append(TensorBoard(MirroredFolder(self.run_folder, "tensorboard")))
        reporter = RankZeroReporter(
            self.run_folder, attempt=self.attempt, observers=observers, report_progress=self._report_progress,
            print_epochs=self.job.loop.log_every == "epoch", print_memory=self.job.log_memory,
            from_step=start.from_step,
        )  # fmt: skip
        for fault in self._new_faults:
            row = fault.to_json()
            reporter.event("fault", failed_attempt=row.pop("attempt"), failed_at=row.pop("time"), **row)
        for reason in start.refused_checkpoints:
            reporter.event("checkpoint_refused", reason=reason)
        if start.damage and start.decision.action != "stop":
            print(start.damage)
        if self.attempt > self.job.first_attempt:
            made = start.decision
            reporter.event("decision", what="recovery", value=made.action, precision=made.precision, reason=made.reason)
            stops = made.action == "stop"
            print(f"stopping: {made.reason}" if stops else f"{made.reason} (now attempt {self.attempt})")
        return reporter

    # -- training ---------------------------------------------------------------------------------

    def _train(self, start: AttemptStart, data: Any, reporter: RankReporter) -> AttemptResult | None:
        session = self._prepare(start, data, reporter)
        if self.workers.rank == 0:
            self.run_folder.truncate_metrics(session.state.step)
            discard_after(self.run_folder, session.state.step)
            on_stop_request(self.channel, self._stop_requested.set)
        ranks = self.workers.all_gather_object(place_of(session.device))
        reporter.event(
            "attempt", from_step=session.state.step, workers=self.workers.world_size, precision=session.precision,
            matmul=session.matmul, workers_on_node=int(os.environ.get("LOCAL_WORLD_SIZE", self.workers.world_size)),
            node=os.uname().nodename, device=str(session.device), platform=platform().to_json(),
            reason=start.decision.reason, ranks=ranks, **session.strategy.facts(),
        )  # fmt: skip
        self.run_folder.flush()  # upload the start of this attempt to an object store before the first step
        self._step_reports.start()
        outcome = self._loop(reporter)
        self._step_reports.close()
        session = self.session  # a rollback replaces it
        assert session is not None
        reporter.event("attempt_end", step=session.state.step, outcome=outcome.kind, reason=outcome.reason)
        if outcome.kind in ("failed", "interrupted"):
            return self._result(outcome.kind, outcome.reason)
        self._report_progress({"phase": "exporting", "row": reporter.last_row})
        began = time.perf_counter()
        try:
            module = session.full_module()
        except CollectiveFailed:
            raise
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error, device=session.device):
                raise
            # final, as the next attempt would gather the same weights; an error, not a result, so that Ray ends the
            # workers that wait for this one
            raise RunError(self._not_exported(error)) from error
        if self.workers.rank == 0 and module is not None:
            try:
                export(session, module, self.run_folder)
            except Exception as error:  # of the disk, the object store or the user's own export
                return self._result("failed", self._not_exported(error))
            reporter.event("exported", step=session.state.step, seconds=time.perf_counter() - began)
        return self._result("done", outcome.reason)

    def _not_exported(self, error: Exception) -> str:
        """Why a run whose training is complete failed. Nothing of the training is repeated: its state is saved."""
        if not isinstance(error, RaytrainError | OSError):
            print(printable(traceback.format_exc()), file=sys.stderr)  # the frames of the user's own code
        why = str(error) if isinstance(error, RaytrainError) else f"{type(error).__name__}: {first_line(error)}"
        return (
            f"the training is complete and its checkpoint of step {self.committed()} is kept, but its "
            f"{NOT_EXPORTED}: {why}. When that is fixed, `{shell_command('export', self.run_folder.path)}` writes "
            "them; --to DIR writes them elsewhere"
        )

    def _prepare(self, start: AttemptStart, data: Any, reporter: RankReporter) -> Session:
        """Build the session, resolve the deferred choices, restore the checkpoint."""
        decision, loaded = start.decision, start.checkpoint
        settings = StepSettings.planned(self.job)
        if decision.micro_batch is not None:
            settings = settings.reduced_to(decision.micro_batch)
        source: Source | None = source_from_driver(data, self.job.data, context=self.job.model.keys.get("context"))
        self.session = session = Session(
            self.job, workers=self.workers, local_rank=self.local_rank, source=source, initial=loaded is None,
            settings=settings,
        )  # fmt: skip
        session.say = partial(self._say_event, reporter)
        calibration = Calibration(session, self.run_folder, reporter, self._report_progress)
        resolve_choices(calibration, forced=decision.precision, loaded=loaded)
        if loaded is not None:
            session.restore(loaded)
        session.state.cursor = start.cursor or session.state.cursor
        return session

    def _loop(self, reporter: RankReporter) -> LoopOutcome:
        """Run the loop until it ends.

        After a loss of remote state it continues from the latest valid checkpoint with the same data; after non-finite
        steps in a row, with later data and the next higher precision.
        """
        session = self.session
        assert session is not None
        clock, copied = Clock(session.state.step), replace(TRANSFERS)
        rollback_policy = RollbackPolicy(self.run_folder, limit=self.job.retry.rollbacks)
        while True:
            loop = session.loop(reporter=reporter, should_stop=self._stop_requested.is_set, clock=clock)
            loop.saver = saver = CheckpointSaver(
                session, self.run_folder, every=self.job.plan.checkpoint_every.value_or("auto"),
                keep=self.job.save.keep, asynchronous=self.job.save.asynchronous, reporter=reporter, clock=clock,
                fence=reporter.fence,
            )  # fmt: skip
            self._now = lambda state=session.state, loop=loop: {"step": state.step, "activity": loop.activity}
            first = {"max_steps": loop.limits.max_steps, "step": session.state.step, "row": {}}  # none of later steps
            first["compiles"] = session.settings.compiled
            self._report_progress({"phase": "training", **first})
            try:
                outcome = loop.run(session.state)
            except StateLost as error:
                saver.abandon()
                self._report_progress({"phase": "recovering"})
                self.session, decision = self._rewind_policy.recover(session, error)
                session = self.session
                clock.rewind(session.state.step, restart_s=decision["seconds"])
                reporter.event("decision", **decision)
                continue
            except BaseException:
                saver.close()
                raise
            saver.close()
            # of each rank; of a run that is stopped, whose workers may have little time left, what this rank copied
            busy, copies = list[float](), [TRANSFERS.since(copied)]
            if outcome.kind in ("done", "plateau"):
                figures = [clock.share("compute"), *map(float, copies[0].values())]
                rows = self.workers.all_gather_floats(figures)
                busy, copies = [row[0] for row in rows], [TransferCounts(*map(int, row[1:])) for row in rows]
            reporter.event("account", seconds=clock.seconds, step=session.state.step, busy=busy)
            reporter.event("transfers", step=session.state.step, **transfers_row(copies, device=session.device.type))
            if outcome.kind != "rollback":
                return outcome
            after = rollback_policy.recover(session, outcome)
            if isinstance(after, LoopOutcome):
                return after
            self.session = session = after

    def position(self) -> dict[str, Any]:
        """The attempt and the step, for the rows of telemetry; called from other threads."""
        session = self.session
        return {"attempt": self.attempt, "step": session.state.step if session else self.from_step}

    def soft_limit(self) -> SoftLimit:
        """Compares what this process uses with `cluster.memory_soft_limit`; called from another thread."""
        settings = self.job.cluster

        def limit() -> int | None:
            session = self.session
            if settings.memory_soft_limit is not None or session is None:
                return settings.memory_soft_limit
            budget = process_budget(
                session.device, fraction=settings.memory_fraction, limit=settings.memory_limit,
                processes=session.sharing,
            )  # fmt: skip
            return None if budget is None else int(HIGH * budget)

        def used() -> int:
            device = torch.device("cpu") if self.session is None else self.session.device
            return memory_in_use(device)["memory_reserved_bytes"]

        who = f"rank {self.workers.rank} (pid {os.getpid()}) on {os.uname().nodename}"
        return SoftLimit(limit=limit, used=used, tensors=lambda: largest_tensors(self.session), who=who)

    def warn_of_memory(self, warning: SoftLimitWarning) -> None:
        """Send the warning to the driver, which shows that of the first rank, and write all tensors beside the log."""
        self.run_folder.write_text(f"logs/rank_{self.workers.rank:05d}.tensors", table(warning.tensors))
        self.channel.warn.remote("soft limit", "soft_limit", warning.text, warning.figures)

    # -- the end of an attempt --------------------------------------------------------------------

    def _result(self, status: Literal["done", "failed", "interrupted"], reason: str) -> AttemptResult | None:
        if self.workers.rank:
            return None
        return AttemptResult(status, reason, steps=self.committed())

    def committed(self) -> int:
        return self.session.state.step if self.session else self.from_step

    def _step(self) -> int:
        return self.session.state.step + 1 if self.session else 0

    def _print_error(self, error: BaseException) -> None:
        """An error, to this rank's log; rank 0's also reaches the terminal. Of the user's code only its own frames, and
        those once, and of our own errors none: the records of the fault have the others."""
        place, what = users_place(error), f"rank {self.workers.rank} failed at step {self._step()}"
        if isinstance(error, InputError):
            print(f"{what}: {error}", file=sys.stderr)
            return
        if not place or not self.attempt:
            print(printable(traceback.format_exc()), file=sys.stderr)
            return
        what += f": {type(error).__name__}: {first_line(error)}"
        if place in self._known_places:
            print(f"{what}\nagain at {place}", file=sys.stderr)
            return
        record = f"{self.run_folder.path}/{record_of(self.attempt, self.workers.rank)}"
        print(f"{what}\n{raised_at(error)}\nall frames: {record}", file=sys.stderr)

    def _record_fault(self, error: BaseException) -> None:
        if not self.attempt:
            return  # no attempt number reached this worker: the controller records the fault
        session = self.session
        fault = fault_of(
            error, attempt=self.attempt, rank=self.workers.rank, step=self._step(), from_step=self.from_step,
            precision=(session.precision or "") if session else "", node=self._node,
            micro_batch=session.loader.batches.micro_batch if session and session.precision else None,
            device=session.device if session and on_gpu(session.device) else None,
        )  # fmt: skip
        if fault.out_of_memory and self.job.loop.micro_batch_size == "whole":  # no restart with half of it
            fault = replace(fault, final=True, micro_batch=None, message=f"{fault.message}; {NOT_SPLIT}")
        write_fault(self.run_folder, fault)

    def _say_event(self, reporter: RankReporter, kind: str, **fields: Any) -> None:
        """Record an event of the session; the driver also shows how much of the data has been read."""
        reporter.event(kind, **fields)
        if kind == "preparation":
            reading = fields["phase"] == "progress" and fields["done"] < fields["of"]
            self._report_progress({"detail": f"reading {fields['reason']}" if reading else ""})

    def _report_progress(self, progress: dict[str, Any]) -> None:
        if self.workers.rank == 0:
            self.channel.report_progress.remote(progress)


def transfers_row(copies: list[TransferCounts], *, device: str) -> dict[str, Any]:
    """The event about the copies of batches since the first step of an attempt, evaluations included: of each worker,
    by rank; of rank 0 alone if the run was stopped."""
    total = TransferCounts.total(copies)
    ranks = [vars(one) for one in copies]
    return {"device": device, "workers": len(copies), **vars(total), "ranks": ranks, "reason": total.describe(device)}


def fault_of(
    error: BaseException, *, attempt: int, rank: int, step: int, precision: str, from_step: int,
    micro_batch: int | None = None, device: torch.device | None = None, node: str | None = None,
) -> Fault:  # fmt: skip
    """The record of the exception being handled. raytrain's own errors are `final`: a restart would repeat them.
    `device`: the GPU whose free memory says whether a library's error means that memory ran out; None elsewhere, as a
    CPU's error that ends an attempt was judged where it was caught."""
    passing = isinstance(error, OutOfMemory | CollectiveFailed | StateLost)
    return Fault(
        attempt, rank, step, type(error).__name__, first_line(error), traceback=printable(traceback.format_exc()),
        precision=precision, reduced=precision in ("bf16", "fp16", "tf32"),
        final=isinstance(error, RaytrainError | bdb.BdbQuit) and not passing,
        from_step=from_step, out_of_memory=is_out_of_memory(error, device=device), micro_batch=micro_batch,
        node=node, place=users_place(error),
    )  # fmt: skip
