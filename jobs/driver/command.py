"""One `train` command on the driver: from a checked spec to the result. `train.py` tells the story, this does it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cluster.checks.preflight import CheckResult, check_seen_by_all, run_preflight
from cluster.devices.inventory import Inventory, inventory_from_ray, local_inventory
from cluster.environment import environment_record
from jobs.driver.result import last_sign_of_life, process_start, say_ending, write_result
from jobs.driver.resume import Resumed
from jobs.driver.runtime import Cluster, Interrupted, StopSignals, cluster_address, connected
from jobs.job.paths import local_paths, resolved
from jobs.job.spec import LoadedSpec
from jobs.plan import plan_job, print_plan, visible_devices
from raytrain.config.decode import load_yaml
from raytrain.errors import InputError, RaytrainError, RunError
from raytrain.plan.plan import Plan
from raytrain.plan.rules.hosts import separate_hosts
from raytrain.runs.folder import RunFolder
from raytrain.runs.lease import this_process
from raytrain.runs.records import event

if TYPE_CHECKING:
    from jobs.driver.checks import Checked

STATUS_EVERY_S = 0.25


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        run: path of the run folder.
        status: "done", "failed" or "interrupted".
        steps: optimizer steps taken, over all attempts.
        final_loss: of the last train row; None without one.
        best_eval_loss: the smallest; None without an evaluation.
        history: every row of metrics.jsonl.
        weights: path of the exported safetensors file; None unless done.
        reason: in words.
    """

    run: str
    status: str
    steps: int
    final_loss: float | None
    best_eval_loss: float | None
    history: list[dict[str, Any]]
    weights: str | None
    reason: str


def result_of(run: RunFolder, record: Mapping[str, Any]) -> Result:
    """A `Result` from the run folder and its result.json."""
    return Result(
        run=run.path,
        status=record["status"],
        steps=record["steps"],
        final_loss=record["final_loss"],
        best_eval_loss=record["best_eval_loss"],
        history=run.read_rows(run.metrics),
        weights=run.weights if run.exists(run.weights) else None,
        reason=record.get("reason", ""),
    )


class TrainCommand:
    """One `train` command, from checked spec to result."""

    def __init__(
        self,
        loaded: LoadedSpec,
        *,
        resumed: Resumed | None,
        signals: StopSignals,
        verbose: bool,
        console: Console,
        began: float,
    ) -> None:
        self.loaded = loaded
        self.spec = resolved(loaded.spec)
        self.resumed = resumed
        self.signals = signals
        self.verbose = verbose
        self.console = console
        self.began = process_start(began)
        self.status: dict[str, Any] = {}

    def run(self) -> Result:
        """Check, plan, make the run folder, train, write the result and the report."""
        from jobs.driver.checks import check_on_driver

        address = cluster_address(self.spec.cluster.address)
        begun = self.resumed is not None and self.resumed.has_checkpoint()
        checked = check_on_driver(self.spec, initial=not begun)
        inventory = local_inventory()
        plan = self._plan(checked, inventory) if address == "local" else None
        run: RunFolder | None = None
        ending: dict[str, Any] = {"status": "interrupted", "reason": "interrupted before the first step"}
        try:
            if plan is not None:
                run = self._open_run(plan, inventory)
                visible = visible_devices(plan, inventory)
                if visible is not None:  # scale.accelerator picked some: Ray and torch shall see no others
                    os.environ["CUDA_VISIBLE_DEVICES"] = visible
            cpus, gpus = _resources(plan)
            with connected(address, num_cpus=cpus, num_gpus=gpus, verbose=self.verbose) as cluster:
                self.signals.install()
                if plan is None:
                    inventory = inventory_from_ray()
                    plan = self._plan(checked, inventory)
                    run = self._open_run(plan, inventory)
                assert run is not None
                ending = self._train(plan, run, cluster, checked.handed)
                if ending.get("leave"):
                    return self._close(run, ending)  # on disk before Ray is asked to end, which may take its time
        except KeyboardInterrupt:  # `Interrupted` is one
            pass
        except SystemExit as stop:  # ray.init turns a SIGTERM inside it into one
            if stop.code not in (15, 130, 143):
                raise
        except RaytrainError as error:
            if run is None:
                raise
            ending = {"status": "failed", "reason": str(error)}
        if run is None:
            raise Interrupted("before the run folder was made")
        return self._close(run, ending)

    def _plan(self, checked: Checked, inventory: Inventory) -> Plan:
        facts = {"model_facts": checked.model_facts, "data_facts": checked.data_facts}
        return plan_job(self.loaded, inventory=inventory, **facts)  # type: ignore[arg-type]

    # -- the run folder ---------------------------------------------------------------------------

    def _open_run(self, plan: Plan, inventory: Inventory) -> RunFolder:
        """A new run folder, or the resumed one, with what is known before the start. Checks that it can be written."""
        checks = preflight_of(plan, self.spec.save.dir, inventory)
        if len(inventory.nodes) > 1:
            checks += check_seen_by_all({"save.dir": os.path.abspath(self.spec.save.dir), **local_paths(self.spec)})
        failed = [check for check in checks if check.status == "fail"]
        if failed:
            first = failed[0]
            raise InputError(first.key or first.name, seen=first.seen, expected=first.expected, remedy=first.remedy)
        if self.resumed is not None:
            run = self.resumed.under(plan)
        else:
            given = load_yaml(self.loaded.merged_text, origin="job")
            run = RunFolder.create(self.spec.save.dir, self.spec.name, job=given)
            run.write_text(run.job, self.loaded.text)
        last_sign = last_sign_of_life(run)
        self.attempt = run.next_attempt(this_process())  # from here on every older worker ends before it writes
        run.append_event(
            event(
                "driver_start",
                process_start=self.began,
                pid=os.getpid(),
                last_sign_of_life=last_sign,
                changed=self.resumed.changed if self.resumed else [],
            )
        )
        plan = replace(plan, files=replace(plan.files, value=run.path))
        run.write_json(run.plan, plan.to_json())
        run.write_json(run.environment, environment_record())
        run.write_json(run.preflight, [check.to_json() for check in checks])
        print_plan(plan, self.console)
        if plan.data_facts is not None:
            self.console.print(f"data: {plan.data_facts.reason}", markup=False)
        if self.resumed is not None and run.exists(run.result):
            run.store.delete("result.json")
        return run

    # -- training ---------------------------------------------------------------------------------

    def _train(self, plan: Plan, run: RunFolder, cluster: Cluster, handed: Any) -> dict[str, Any]:
        import ray

        from experts.hosts.reserve import connect
        from jobs.driver.checks import train_job
        from jobs.driver.progress import TrainingDisplay
        from raytrain.execution.trainer import fit, open_channel

        interface = "lo" if cluster.local else self.spec.cluster.interface
        say, wait_s = self.console.print, self.spec.retry.host_wait_s
        connection = connect(plan, run, local=cluster.local, interface=interface, host_wait_s=wait_s, say=say)
        job = train_job(self.spec, plan, run, attempt=self.attempt, connection=connection)
        channel = open_channel()
        outcome: dict[str, Any] = {}

        def work() -> None:
            try:
                storage = os.path.join(cluster.folder, "t") if cluster.local else f"{run.path}/logs/ray"
                outcome["ending"] = fit(
                    job,
                    data=handed,
                    channel=channel,
                    local=cluster.local,
                    interface=self.spec.cluster.interface,
                    storage=storage,
                )
            except BaseException as error:  # handed to the main thread, which owns the command's fate
                outcome["error"] = error
            if connection is not None and not cluster.ended.is_set():
                connection.close()

        thread = threading.Thread(target=work, daemon=True, name="fit")
        thread.start()
        stop_at, unanswered = None, 0
        with TrainingDisplay(self.console) as display:
            while thread.is_alive():
                thread.join(STATUS_EVERY_S)
                run.heartbeat()
                unanswered = 0 if self._look(ray, channel, display) else unanswered + 1
                if self.signals.asked.is_set() and not self.signals.training:
                    raise Interrupted("before the first step")  # where something of Ray's swallowed the first one
                if self.signals.asked.is_set() and stop_at is None:
                    stop_at = time.monotonic() + self.spec.retry.stop_grace_s
                    channel.stop.remote()
                    display.say("stopping: the workers save and return (a second signal leaves at once)")
                late = stop_at is not None and time.monotonic() > stop_at
                gone = stop_at is not None and unanswered > 1  # the same signal may have ended the cluster
                if self.signals.times > 1 or late or gone:
                    return {"status": "interrupted", "reason": "left without waiting for the workers", "leave": True}
            self._look(ray, channel, display, last=True)
        if "error" in outcome:
            if self.signals.asked.is_set():
                return {"status": "interrupted", "reason": "a stop was asked for"}
            raise outcome["error"]
        return outcome["ending"]

    def _look(self, ray: Any, channel: Any, display: Any, *, last: bool = False) -> bool:  # False where nobody answers
        try:
            self.status, said = ray.get([channel.status.remote(), channel.printed.remote(last=last)], timeout=5)
        except ray.exceptions.RayError:  # too slow, or gone: the thread of `fit` tells how that ends
            return False
        if said:
            display.say(said)
        display.show(self.status)
        if not self.signals.training and self.status.get("phase") == "training":
            self.signals.training = True
        return True

    # -- the end ----------------------------------------------------------------------------------

    def _close(self, run: RunFolder, ending: dict[str, Any]) -> Result:
        newest = run.current_attempt()
        if run.owner_of(newest) != this_process():
            raise RunError(f"attempt {newest} of another command has taken over {run.path}; this one writes no result")
        run.append_event(event("driver_end", status=ending["status"], reason=ending.get("reason", "")))
        record = write_result(run, ending)
        run.flush()
        leave = bool(ending.get("leave"))
        if not leave:
            from raytrain.report.build import build_report

            page = build_report(run)
            say_ending(self.console, run, record, page)
        if record["status"] == "interrupted":
            where = "" if record["steps"] else " before the first step"
            self.console.print(f"interrupted{where}; go on with: raytrain train --resume {run.path}", soft_wrap=True)
        return result_of(run, record)


def _resources(plan: Plan | None) -> tuple[int, int]:
    """Logical CPUs and GPUs that a local cluster declares: what the plan needs, not what the box has."""
    processes = 0 if plan is None else int(_known(plan.workers)) + separate_hosts(plan.hosts)
    return processes + 1, processes if plan is not None and _known(plan.device) == "cuda" else 0


def preflight_of(plan: Plan, save_dir: str, inventory: Inventory) -> list[CheckResult]:
    """The machine's checks for what this plan needs."""
    return run_preflight(
        save_dir=save_dir,
        inventory=inventory,
        checkpoint_bytes=_known(plan.checkpoint_bytes),
        worker_bytes=_known(plan.memory),
        local_workers=-(-int(_known(plan.workers) or 1) // max(1, len(inventory.nodes))),
        on_gpu=_known(plan.device) == "cuda",
    )


def _known(choice: Any) -> Any:
    return getattr(choice, "value", None)  # None of a choice that is deferred
