"""`train_loop_per_worker`: what runs inside each Ray Train worker. The adapter between Ray and `session.py`.

Order: sums over the workers -> rank 0 takes an attempt number and applies the failure rules -> everybody builds,
restores the same checkpoint, trains -> rank 0 exports weights and a sample. A failure is written to the run folder
before it is raised; Ray then restarts the whole group and rank 0 decides anew.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from typing import Any

import ray
import ray.exceptions
import ray.train
from ray import cloudpickle

from raytrain.allocator import keep_freed_memory
from raytrain.callbacks import TensorBoard, load_observers
from raytrain.checkpoint import LoadedCheckpoint, discard_after, load, newest_good
from raytrain.data.sources import Source, handed_over
from raytrain.device import platform
from raytrain.errors import StateLost
from raytrain.export import export
from raytrain.faults import fault_of, read_faults, write_fault
from raytrain.gradients import Workers
from raytrain.loop_state import Clock, Outcome
from raytrain.models.registry import make_importable, resolve
from raytrain.plan import Deferred, Resolved
from raytrain.probe.found import confirm_found
from raytrain.probe.settled import settle_inflight, settle_precision
from raytrain.probe.settled_memory import settle_micro_batch
from raytrain.probe.settled_overlap import settle_overlap
from raytrain.probe.settled_shares import settle_shares
from raytrain.rank_log import rank_log
from raytrain.recovery import Decision, Fault, decide
from raytrain.reporter import RankZeroReporter, SilentReporter, Superseded
from raytrain.rollback import Rewinds, roll_back
from raytrain.run_folder import RunFolder
from raytrain.saver import CheckpointSaver
from raytrain.session import Session
from raytrain.train_job import TrainJob, place_of, with_micro_batch


def train_loop_per_worker(config: dict[str, Any]) -> dict[str, Any] | None:
    """Entry point of a Ray Train worker.

    Args:
        config: {"job": reference to a pickled TrainJob, "import_path", "run_path", "link": handle of the RunLink actor,
            "data": reference to handed-over data or None}.

    Returns:
        Rank 0's ending ({"status", "reason", ...}); None elsewhere.
    """
    keep_freed_memory()
    make_importable(config["import_path"])  # the job names the user's classes: importable before it is unpickled
    context = ray.train.get_context()
    workers = Workers()
    say = config["link"].say.remote if workers.rank == 0 else None
    with rank_log(RunFolder(config["run_path"]), workers.rank, say=say):
        job: TrainJob = cloudpickle.loads(ray.get(config["job"]))
        data = None if config["data"] is None else ray.get(config["data"])
        worker = Worker(job, workers=workers, local_rank=context.get_local_rank(), link=config["link"])
        return worker.run(data)


class Worker:
    """One attempt on one worker, with its connections to the run folder, the driver and Ray."""

    def __init__(self, job: TrainJob, *, workers: Workers, local_rank: int, link: Any) -> None:
        self.job = job
        self.workers = workers
        self.local_rank = local_rank
        self.link = link
        self.run_folder = RunFolder(job.run_path)
        self.session: Session | None = None
        self.attempt = 0
        self.from_step = 0
        self._new_faults: list[Fault] = []
        self._refused: list[str] = []
        self._rewinds = Rewinds(self.run_folder, limit=job.retry.restarts_without_progress)
        self._stop = threading.Event()

    def run(self, data: Any) -> dict[str, Any] | None:
        """Decide, train, end. Exceptions leave a fault record behind."""
        decision, loaded = self._begin()
        if decision.action == "stop":
            self._reporter(decision).close()  # the last fault and this decision belong to the record
            return self._ending("failed", decision.reason)
        try:
            return self._train(decision, loaded, data)
        except Superseded:
            raise
        except Exception as error:
            traceback.print_exc()  # to this rank's log; rank 0's also reaches the terminal
            self._record_fault(error)
            raise
        finally:
            if self.session is not None:
                self.session.close()

    # -- beginning --------------------------------------------------------------------------------

    def _begin(self) -> tuple[Decision, LoadedCheckpoint | None]:
        """Rank 0 takes the attempt number and decides; the others hear of it. Then all read the same checkpoint."""
        message = b""
        loaded: LoadedCheckpoint | None = None
        place = place_of(self.job, rank=self.workers.rank, world=self.workers.world)
        if self.workers.rank == 0:
            loaded, refused = newest_good(self.run_folder, place=place)
            faults = read_faults(self.run_folder, since=self.job.first_attempt)
            self._new_faults = faults[-1:]
            origins = [fault.from_step for fault in faults] + [loaded.step if loaded else 0]
            decision = decide(faults, retry=self.job.retry, fallback=self.job.precision.fallback, resumed_from=origins)
            attempt = self._attempt_number(faults)
            message = json.dumps(
                {
                    "attempt": attempt,
                    "step": loaded.step if loaded else 0,
                    "refused": refused,
                    "decision": vars(decision),
                }
            ).encode()
        told = json.loads(self.workers.gather_bytes(message)[0])
        self.attempt, self.from_step, self._refused = told["attempt"], told["step"], told["refused"]
        if self.workers.rank and self.from_step:  # rank 0 has verified every byte of it
            loaded = load(self.run_folder.checkpoint_dir(self.from_step), check_hashes=False, place=place)
        return Decision(**told["decision"]), loaded

    def _attempt_number(self, faults: list[Fault]) -> int:
        """The number the driver took, for its first attempt; a new one after each restart by Ray. Raises Superseded
        where another command has taken the run folder over."""
        first, newest = self.job.first_attempt, self.run_folder.current_attempt()
        if newest > first and self.run_folder.owner_of(newest) != self.job.owner:
            raise Superseded(f"attempt {newest} of another command has taken over {self.run_folder.path}")
        if newest == first and not faults:
            return first
        return self.run_folder.next_attempt(self.job.owner)

    def _train(self, decision: Decision, loaded: LoadedCheckpoint | None, data: Any) -> dict[str, Any] | None:
        if decision.micro_batch is not None:
            self.job = with_micro_batch(self.job, Resolved(decision.micro_batch, decision.reason))
        source: Source | None = handed_over(data, self.job.data, context=self.job.model.keys.get("context"))
        self.session = session = Session(
            self.job, workers=self.workers, local_rank=self.local_rank, source=source, initial=loaded is None
        )
        reporter = self._reporter(decision)
        session.say = reporter.event
        precision = settle_precision(
            session, self.run_folder, forced=decision.precision, loaded=loaded, reporter=reporter, push=self._push
        )
        settle_micro_batch(session, self.run_folder, reporter=reporter, push=self._push)
        confirm_found(session, self.run_folder, reporter=reporter, push=self._push)
        settle_inflight(session, self.run_folder, reporter=reporter, push=self._push)
        settle_shares(session, self.run_folder, reporter=reporter)
        settle_overlap(session, self.run_folder, reporter=reporter, push=self._push)
        if loaded is not None:
            session.restore(loaded)
        if self.workers.rank == 0:
            self.run_folder.truncate_metrics(session.state.step)
            discard_after(self.run_folder, session.state.step)
            threading.Thread(target=self._watch, daemon=True, name="stop-watch").start()
        reporter.event(
            "attempt",
            from_step=session.state.step,
            workers=self.workers.world,
            precision=precision,
            matmul=session.matmul,
            device=str(session.device),
            platform=platform().to_json(),
            reason=decision.reason,
            **session.layout.facts(),
        )
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
        reporter.close()
        return self._ending("interrupted" if outcome.kind == "interrupted" else "done", outcome.reason)

    def _reporter(self, decision: Decision) -> RankZeroReporter | SilentReporter:
        if self.workers.rank:
            return SilentReporter()
        observers: list[Any] = load_observers(self.job.observers, resolve)
        if self.job.tensorboard and self.run_folder.is_local:
            observers.append(TensorBoard(self.run_folder.tensorboard_dir))
        reporter = RankZeroReporter(self.run_folder, attempt=self.attempt, observers=observers, push=self._push)
        for fault in self._new_faults:
            row = fault.to_json()
            reporter.event("fault", failed_attempt=row.pop("attempt"), failed_at=row.pop("time"), **row)
        for reason in self._refused:
            reporter.event("checkpoint_refused", reason=reason)
        if self.attempt > self.job.first_attempt:
            reporter.event(
                "decision", what="recovery", value=decision.action, precision=decision.precision, reason=decision.reason
            )
            print(f"attempt {self.attempt}: {decision.reason}")
        return reporter

    # -- training ---------------------------------------------------------------------------------

    def _loop(self, reporter: Any) -> Outcome:
        """Run the loop; after non-finite steps in a row roll back, skip the window, raise the precision."""
        session = self.session
        assert session is not None
        rollbacks, clock = 0, Clock(session.state.step)
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
            rollbacks += 1
            if rollbacks > self.job.retry.rollbacks:
                return Outcome("failed", f"{outcome.reason}, after {rollbacks - 1} roll-backs (retry.rollbacks)")
            self.session, decision = roll_back(session, self.run_folder, outcome=outcome)
            session = self.session
            reporter.event("decision", **decision)

    def _checkpoint_every(self) -> int | str:
        planned = self.job.plan.checkpoint_every
        return "auto" if isinstance(planned, Deferred) else int(planned.value)

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
        session = self.session
        fault = fault_of(
            error,
            attempt=self.attempt,
            rank=self.workers.rank,
            step=session.state.step + 1 if session else 0,
            precision=(session.precision or "") if session else "",
            from_step=self.from_step,
            micro_batch=session.feed.micro_batch if session and session.precision else None,
        )
        write_fault(self.run_folder, fault)

    # -- the driver -------------------------------------------------------------------------------

    def _push(self, status: dict[str, Any]) -> None:
        if self.workers.rank == 0:
            self.link.push.remote(status)

    def _watch(self) -> None:
        """Thread of rank 0: one long poll; ends with the link's actor."""
        try:
            if ray.get(self.link.wait_stop.remote()):
                self._stop.set()
        except ray.exceptions.RayError:
            return  # the driver is gone, and the cluster with it
