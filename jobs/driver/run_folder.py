"""Opens the folder of a run: checks the machine, creates or resumes the folder, writes the records of the start."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from cluster.checks.preflight import CheckResult, check_seen_by_all, run_preflight
from cluster.checks.ray_job import check_ray_job, submission_id
from cluster.devices.inventory import Inventory
from cluster.environment import environment_record
from jobs.driver.result import answers_rows, last_sign_of_life
from jobs.driver.resume import Resumed, changed_values
from jobs.driver.screen.plan_table import print_plan, print_start
from jobs.job.paths import absolute_path, local_paths
from jobs.job.spec import JobSpec, LoadedSpec
from raytrain.config.decode import load_yaml
from raytrain.errors import InputError
from raytrain.plan.plan import Plan
from raytrain.runs.folder import RunFolder
from raytrain.runs.lease import this_process
from raytrain.runs.records import event


@dataclass(frozen=True)
class OpenRun:
    """A run folder that is ready for training.

    Attributes:
        plan: the plan, as written to plan.json.
        attempt: number of the command's first attempt.
        claimed: number of the next attempt, which the driver has taken for its workers.
    """

    run: RunFolder
    plan: Plan
    attempt: int
    claimed: int


def open_run(
    loaded: LoadedSpec,
    spec: JobSpec,
    plan: Plan,
    inventory: Inventory,
    *,
    resumed: Resumed | None,
    began: float,
    console: Console,
    verbose: bool = False,
) -> OpenRun:
    """Make the run folder, or open the resumed one, write the records of this command and print what it will do.

    Args:
        spec: the job of `loaded` with absolute paths.
        began: when the command started, in unix seconds.
        verbose: print the whole plan.

    Raises:
        InputError: a check of the machine failed, or the plan does not fit the checkpoint.
    """
    checks = _checked(spec, plan, inventory, run=None if resumed is None else resumed.run)
    if resumed is not None:
        run = resumed.checked_against(plan)
    else:
        run = RunFolder.create(spec.save.dir, spec.name, job=load_yaml(loaded.merged_text, origin="job"))
        run.write_text(run.job, loaded.text)
    last_sign = last_sign_of_life(run)
    attempt = run.next_attempt(this_process())  # from here on, workers of older attempts stop before they write
    run.append_event(
        event(
            "driver_start",
            process_start=began,
            pid=os.getpid(),
            last_sign_of_life=last_sign,
            changed=resumed.changed if resumed else [],
            changes=changed_values(resumed),
            ray_job=submission_id(),
        )
    )
    run.reserve_space()
    plan = replace(plan, files=replace(plan.files, value=run.path))
    run.write_json(run.plan, plan.to_json())
    run.write_json(run.environment, environment_record())
    run.write_json(run.preflight, [check.to_json() for check in checks])
    warned = [check.text for check in checks if check.status == "warn"]
    if verbose:
        print_plan(replace(plan, warnings=[]), console)
    before = None if resumed is None else resumed.taken_over(plan, attempt=attempt)
    print_start(plan, console, warnings=[*plan.warnings, *warned], every=verbose, resumed=before)
    if resumed is not None and run.exists(run.result):
        run.store.delete("result.json")
    return OpenRun(run, plan, attempt, claimed=attempt)


def record_inference(run: RunFolder, unanswered: str | None) -> None:
    """Record that `infer` cannot use the model of a run, or can again with its present code; it is not offered then
    (`jobs.driver.result`).

    Args:
        unanswered: why it cannot; "" if it can, None if that is unknown.
    """
    if unanswered is None or (not unanswered and answers_rows(run)):
        return
    reason = f"without labels, {unanswered}" if unanswered else "the model answers rows without labels"
    run.append_event(event("inference", value=not unanswered, reason=reason))


def replan(opened: OpenRun, spec: JobSpec, plan: Plan, inventory: Inventory) -> OpenRun:
    """The run with another plan, for another number of workers; the records of the plan are written again.

    Raises:
        InputError: a check of the machines failed.
    """
    run = opened.run
    checks = _checked(spec, plan, inventory, run=run)
    plan = replace(plan, files=replace(plan.files, value=run.path))
    workers, before = _value(plan.workers), _value(opened.plan.workers)
    reason = getattr(plan.workers, "reason", "")
    run.append_event(event("decision", what="workers", value=workers, before=before, reason=reason))
    run.write_json(run.plan, plan.to_json())
    run.write_json(run.preflight, [check.to_json() for check in checks])
    return replace(opened, plan=plan)


def _checked(spec: JobSpec, plan: Plan, inventory: Inventory, *, run: RunFolder | None) -> list[CheckResult]:
    """The results of the checks before the start. Errors: InputError for the first that failed.

    Args:
        run: the run that continues.
    """
    checks = preflight_of(plan, spec.save.dir, inventory, saved=0 if run is None else len(run.saved_steps()))
    if len(inventory.nodes) > 1:
        checks += check_seen_by_all({"save.dir": absolute_path(spec.save.dir), **local_paths(spec)})
    checks += check_ray_job(
        spec.save.dir,
        checkpoint_bytes=_value(plan.checkpoint_bytes),
        grace_s=spec.retry.stop_grace_s,
    )
    failed = [check for check in checks if check.status == "fail"]
    if failed:
        first = failed[0]
        raise InputError(first.key or first.name, got=first.seen, expected=first.expected, remedy=first.remedy)
    return checks


def preflight_of(plan: Plan, save_dir: str, inventory: Inventory, *, saved: int = 0) -> list[CheckResult]:
    """Check the machine for what this plan needs, besides `saved` checkpoints that are there already."""
    workers = int(_value(plan.workers) or 1)
    return run_preflight(
        save_dir=save_dir,
        inventory=inventory,
        checkpoint_bytes=_value(plan.checkpoint_bytes),
        worker_bytes=_value(plan.memory),
        local_workers=-(-workers // max(1, len(inventory.nodes))),
        on_gpu=_value(plan.device) == "cuda",
        saved=saved,
    )


def _value(choice: Any) -> Any:
    return getattr(choice, "value", None)  # None of a deferred choice
