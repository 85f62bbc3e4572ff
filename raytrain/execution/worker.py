"""`train_loop_per_worker`: what runs inside each Ray Train worker. The adapter between Ray and `session.py`.

Order: sums over the workers -> rank 0 takes an attempt number and applies the failure rules -> everybody builds,
restores the same checkpoint, trains -> rank 0 exports weights and a sample. A failure is written to the run folder
before it is raised; Ray then restarts the whole group and rank 0 decides anew.
"""

from __future__ import annotations

import threading
import time
import traceback
from typing import Any

import ray
import ray.exceptions
import ray.train
from ray import cloudpickle

from raytrain.autotune.startup.choice import Calibration
from raytrain.autotune.startup.resolve import resolve_choices
from raytrain.checkpoint.retention import discard_after
from raytrain.config.user_code import make_importable, resolve
from raytrain.data.rows.contract import Source
from raytrain.data.sources.open import source_from_driver
from raytrain.errors import CollectiveFailed, OutOfMemory, RaytrainError, StateLost
from raytrain.execution.attempt import AttemptStart, attempt_number, begin
from raytrain.execution.checkpointer import CheckpointSaver
from raytrain.execution.export import export
from raytrain.execution.observers import TensorBoard, load_observers
from raytrain.execution.rank_log import rank_log
from raytrain.execution.reporter import RankZeroReporter, SilentReporter, Superseded
from raytrain.execution.rollback import Rewinds, RollBacks
from raytrain.plan.choice import Resolved
from raytrain.runs.faults import Fault, read_faults, write_fault
from raytrain.runs.folder import RunFolder
from raytrain.train.clock import Clock
from raytrain.train.device import platform
from raytrain.train.job import TrainJob, with_micro_batch
from raytrain.train.memory.allocator import keep_freed_memory
from raytrain.train.memory.device import is_out_of_memory
from raytrain.train.parallel.collectives import Workers
from raytrain.train.session import Session
from raytrain.train.state import LoopOutcome


def train_loop_per_worker(config: dict[str, Any]) -> dict[str, Any] | None:
    """Entry point of a Ray Train worker.

    Args:
        config: {"job": reference to a pickled TrainJob, "import_path", "run_path", "link": handle of the DriverChannel
            actor, "data": reference to handed-over data or None}.

    Returns:
        Rank 0's ending ({"status", "reason", ...}); None elsewhere.
    """
    keep_freed_memory()
    make_importable(config["import_path"])  # the job names the user's classes: importable before it is unpickled
    context = ray.train.get_context()
    workers = Workers()
    say = config["link"].say.remote if workers.rank == 0 else None
    with rank_log(RunFolder(config["run_path"]), workers.rank, say=say, wait=ray.wait):
        job: TrainJob = cloudpickle.loads(ray.get(config["job"]))
        data = None if config["data"] is None else ray.get(config["data"])
        worker = Worker(job, workers=workers, local_rank=context.get_local_rank(), channel=config["link"])
        return worker.run(data)


class Worker:
    """One attempt on one worker, with its connections to the run folder, the driver and Ray."""

    def __init__(self, job: TrainJob, *, workers: Workers, local_rank: int, channel: Any) -> None:
        self.job = job
        self.workers = workers
        self.local_rank = local_rank
        self.channel = channel
        self.run_folder = RunFolder(job.run_path)
        self.session: Session | None = None
        self.attempt = 0
        self.from_step = 0
        self._new_faults: list[Fault] = []
        self._rewinds = Rewinds(self.run_folder, limit=job.retry.restarts_without_progress)
        self._stop = threading.Event()

    def run(self, data: Any) -> dict[str, Any] | None:
        """Decide, train, end. Exceptions leave a fault record behind."""
        try:
            begun = self._begin()
            reporter = self._reporter(begun)  # the last fault and this decision belong to the record
            try:
                if begun.decision.action == "stop":
                    return self._ending("failed", begun.decision.reason)
                return self._train(begun, data, reporter)
            finally:
                reporter.close()
        except Superseded:
            raise
        except Exception as error:
            traceback.print_exc()  # to this rank's log; rank 0's also reaches the terminal
            self._record_fault(error)
            raise
        finally:
            if self.session is not None:
                self.session.close()

    def _begin(self) -> AttemptStart:
        """Rank 0 takes the attempt number first: where no checkpoint can be read, that is this attempt's failure."""
        faults: list[Fault] = []
        if self.workers.rank == 0:
            faults = read_faults(self.run_folder, since=self.job.first_attempt)
            self.attempt = attempt_number(self.job, self.run_folder, faults=faults)
            events = self.run_folder.read_rows(self.run_folder.events)
            told = {row["failed_attempt"] for row in events if row["kind"] == "fault"}
            self._new_faults = [fault for fault in faults if fault.attempt not in told]
        begun = begin(self.job, self.run_folder, workers=self.workers, attempt=self.attempt, faults=faults)
        self.attempt, self.from_step = begun.attempt, begun.step
        return begun

    def _train(self, begun: AttemptStart, data: Any, reporter: Any) -> dict[str, Any] | None:
        decision, loaded = begun.decision, begun.loaded
        if decision.micro_batch is not None:
            self.job = with_micro_batch(self.job, Resolved(decision.micro_batch, decision.reason))
        source: Source | None = source_from_driver(data, self.job.data, context=self.job.model.keys.get("context"))
        self.session = session = Session(
            self.job, workers=self.workers, local_rank=self.local_rank, source=source, initial=loaded is None
        )
        session.say = reporter.event
        resolve_choices(
            Calibration(session, self.run_folder, reporter, self._push), forced=decision.precision, loaded=loaded
        )
        if loaded is not None:
            session.restore(loaded)
        session.state.cursor = begun.cursor or session.state.cursor
        if self.workers.rank == 0:
            self.run_folder.truncate_metrics(session.state.step)
            discard_after(self.run_folder, session.state.step)
            threading.Thread(target=self._watch, daemon=True, name="stop-watch").start()
        reporter.event(
            "attempt",
            from_step=session.state.step,
            workers=self.workers.world_size,
            precision=session.precision,
            matmul=session.matmul,
            device=str(session.device),
            platform=platform().to_json(),
            reason=decision.reason,
            **session.strategy.facts(),
        )
        self.run_folder.flush()  # an object store is told now where this attempt began
        outcome = self._loop(reporter)
        session = self.session  # after a rollback another one
        reporter.event("attempt_end", step=session.state.step, outcome=outcome.kind, reason=outcome.reason)
        if outcome.kind == "failed":
            return self._ending("failed", outcome.reason)
        if outcome.kind != "interrupted":
            self._push({"phase": "exporting", "row": getattr(reporter, "last_row", {})})
            module = session.whole_module()
            if self.workers.rank == 0 and module is not None:
                export(session, module, self.run_folder)
        return self._ending("interrupted" if outcome.kind == "interrupted" else "done", outcome.reason)

    def _reporter(self, begun: AttemptStart) -> RankZeroReporter | SilentReporter:
        if self.workers.rank:
            return SilentReporter()
        observers: list[Any] = load_observers(self.job.observers, resolve)
        if self.job.tensorboard and self.run_folder.is_local:
            observers.append(TensorBoard(self.run_folder.tensorboard_dir))
        reporter = RankZeroReporter(self.run_folder, attempt=self.attempt, observers=observers, push=self._push)
        for fault in self._new_faults:
            row = fault.to_json()
            reporter.event("fault", failed_attempt=row.pop("attempt"), failed_at=row.pop("time"), **row)
        for reason in begun.refused:
            reporter.event("checkpoint_refused", reason=reason)
        if self.attempt > self.job.first_attempt:
            made = begun.decision
            reporter.event("decision", what="recovery", value=made.action, precision=made.precision, reason=made.reason)
            print(f"attempt {self.attempt}: {made.reason}")
        return reporter

    # -- training ---------------------------------------------------------------------------------

    def _loop(self, reporter: Any) -> LoopOutcome:
        """Run the loop; after non-finite steps in a row roll back, skip the window, raise the precision."""
        session = self.session
        assert session is not None
        clock, roll_backs = Clock(session.state.step), RollBacks(self.run_folder, limit=self.job.retry.rollbacks)
        while True:
            loop = session.loop(reporter=reporter, should_stop=self._stop.is_set, clock=clock)
            saver = CheckpointSaver(
                session,
                self.run_folder,
                every=self._checkpoint_every(),
                keep=self.job.save.keep,
                asynchronous=self.job.save.asynchronous,
                reporter=reporter,
                clock=loop.clock,
                fence=getattr(reporter, "fence", None),
            )
            loop.saver = saver
            self._push({"phase": "training", "max_steps": loop.limits.max_steps, "step": session.state.step})
            try:
                outcome = loop.run(session.state)
            except StateLost as error:
                saver.abandon()
                self._push({"phase": "recovering"})
                self.session, decision = self._rewinds.back(session, error)
                session = self.session
                clock.rewind(session.state.step, restart_s=decision["seconds"])
                reporter.event("decision", **decision)
                continue
            except BaseException:
                saver.close()
                raise
            saver.close()
            reporter.event("account", seconds=loop.clock.seconds, step=session.state.step)
            if outcome.kind != "rollback":
                return outcome
            after = roll_backs.back(session, outcome)
            if isinstance(after, LoopOutcome):
                return after
            self.session = session = after

    def _checkpoint_every(self) -> int | str:
        return self.job.plan.checkpoint_every.value_or("auto")

    # -- ending -----------------------------------------------------------------------------------

    def _ending(self, status: str, reason: str) -> dict[str, Any] | None:
        if self.workers.rank:
            return None
        state = self.session.state if self.session else None
        return {
            "status": status,
            "reason": reason,
            "steps": state.step if state else self.from_step,
            "final_loss": state.final_loss if state else None,
            "best_eval_loss": state.best_eval_loss if state else None,
            "best_step": state.best_step if state else None,
            "ended": time.time(),
        }

    def _record_fault(self, error: Exception) -> None:
        if not self.attempt:
            return  # rank 0 has not said which it is, or could not take one: the controller writes it
        session = self.session
        fault = fault_of(
            error,
            attempt=self.attempt,
            rank=self.workers.rank,
            step=session.state.step + 1 if session else 0,
            precision=(session.precision or "") if session else "",
            from_step=self.from_step,
            micro_batch=session.loader.micro_batch if session and session.precision else None,
        )
        write_fault(self.run_folder, fault)

    # -- the driver -------------------------------------------------------------------------------

    def _push(self, status: dict[str, Any]) -> None:
        if self.workers.rank == 0:
            self.channel.push.remote(status)

    def _watch(self) -> None:
        """Thread of rank 0: one long poll; ends with the link's actor."""
        try:
            if ray.get(self.channel.wait_for_stop.remote()):
                self._stop.set()
        except ray.exceptions.RayError:
            return  # the driver is gone, and the cluster with it


def fault_of(
    error: Exception,
    *,
    attempt: int,
    rank: int,
    step: int,
    precision: str,
    from_step: int,
    micro_batch: int | None = None,
) -> Fault:
    """The record of an exception that is being handled now; what raytrain explains itself will not go away."""
    return Fault(
        attempt=attempt,
        rank=rank,
        step=step,
        error=type(error).__name__,
        message=str(error).splitlines()[0] if str(error) else "",
        traceback=traceback.format_exc(),
        precision=precision,
        reduced=precision in ("bf16", "fp16", "tf32"),
        final=isinstance(error, RaytrainError) and not isinstance(error, OutOfMemory | CollectiveFailed | StateLost),
        from_step=from_step,
        time=time.time(),
        out_of_memory=is_out_of_memory(error, device=None),
        micro_batch=micro_batch,
    )
