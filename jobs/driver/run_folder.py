"""Creates or resumes the folder of a run: `--resume` finds it and checks which keys changed; first records.

`jobs.driver.attempts` opens it once for a command.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cluster.devices.inventory import Inventory, local_inventory
from cluster.environment import environment_record
from cluster.preflight import CheckResult, check_ray_job, check_seen_by_all, run_preflight, submission_id
from jobs.driver.plan_table import ResumedFrom, print_plan, print_start
from jobs.driver.planning import plan_job, show_only_picked
from jobs.driver.printing import print_line
from jobs.driver.progress import Phases
from jobs.driver.result import last_sign_of_life
from jobs.job.facts import absolute_path, local_paths, path_from_here
from jobs.job.spec import (
    JobSpec,
    LoadedSpec,
    changed_keys,
    check_objects,
    load_spec,
    may_change_on_resume,
    read_job,
    values_of,
)
from raytrain.config.decode import apply_overrides, encode, load_yaml
from raytrain.config.messages import describe
from raytrain.errors import CheckpointError, InputError
from raytrain.plan.choice import Deferred, Resolved
from raytrain.plan.plan import Plan
from raytrain.runs.faults import fallen_precision
from raytrain.runs.folder import RunFolder, find_unfinished, run_to_name, shell_command, start_anew, this_process
from raytrain.runs.records import event
from raytrain.runs.storage import typed_path

if TYPE_CHECKING:  # imports torch
    from jobs.driver.check_job import Checked

# ---------------------------------------------------------------- resume
# `--resume`: finds the run, loads its job and checks which keys changed.


#: The driver also reads the content of checkpoints up to this size. That of larger ones, and of those in an object
#: store, is checked by the workers only, who read it anyway: reading it twice would delay the start by minutes.
HASHED_BYTES = 4 << 30


@dataclass(frozen=True)
class Resumed:
    run: RunFolder
    loaded: LoadedSpec
    changed: list[str]  # the dotted keys that differ from the run's own job
    finished: bool = False
    step: int | None = None  # of the newest checkpoint found to be valid, once `check_checkpoints` has looked

    def hosts(self) -> Any:
        """The expert hosts in the plan of the run; None if the run has no plan yet."""
        if not self.run.exists(self.run.plan):
            return None
        return Plan.from_json(self.run.read_json(self.run.plan)).hosts.value_or(None)

    def taken_over(self, plan: Plan, *, attempt: int) -> ResumedFrom:
        """Where the run continues, and what earlier attempts have measured of the choices that the plan leaves open."""
        run, measured = self.run, dict[str, Any]()
        step = max(run.saved_steps(), default=None) if self.step is None else self.step
        known = run.read_json(run.memory_probe) if run.exists(run.memory_probe) else {}
        rows = [row for row in run.read_rows(run.events) if row["kind"] == "attempt" and row.get("precision")]
        if isinstance(plan.precision, Deferred):
            saved = rows[-1]["precision"] if rows and step is not None else None  # that of the checkpoint
            value = fallen_precision(run) or saved or known.get("precision", {}).get("value")
            measured |= {} if value is None else {"precision": value}
        now = {"global_batch_size": plan.global_batch_size, "workers": plan.workers}
        micro = known.get("micro_batch", {})
        same = all(micro.get("settings", {}).get(name) == choice.value_or(None) for name, choice in now.items())
        if isinstance(plan.micro_batch_size, Deferred) and micro and same:
            measured["micro_batch"] = micro["value"]
        return ResumedFrom(step, attempt, measured)

    def checked_against(self, plan: Plan) -> RunFolder:
        """Check that this plan can load the newest checkpoint, which stores experts as the plan places them, and return
        the run."""
        from raytrain.checkpoint.reader import read_manifest  # imports torch, as the command has by now

        saved = self.run.saved_steps()
        if not saved or not isinstance(plan.hosts, Resolved):
            return self.run
        inside = read_manifest(self.run.checkpoint_dir(saved[-1])).get("experts") is None
        if (plan.hosts.value in ("none", 0)) is not inside:
            where = "inside the model" if inside else "separately, by name"
            raise InputError(
                "experts.hosts", got=f"{plan.hosts.value} ({plan.hosts.reason})",
                expected="0" if inside else "any number of hosts above 0, or colocated",
                remedy=f"the checkpoint of step {saved[-1]} stores the experts {where}",
            )  # fmt: skip
        return self.run


def newest_unfinished(loaded: LoadedSpec) -> Resumed | None:
    found = find_unfinished(loaded.spec.save.dir, loaded.spec.name, load_yaml(loaded.merged_text, origin="job"))
    return None if found is None else Resumed(found, loaded, [])


def open_resumed(
    resume: str, path: Path | None, overrides: Sequence[str], *, mapping: Mapping[str, Any] | None = None
) -> Resumed:
    """Open the run folder to resume.

    Args:
        path: a JOB.yaml, which may change only some keys, as may the overrides.
        mapping: the job as given from Python, instead of `path`: with the objects that no run folder can hold.
    """
    try:
        run = RunFolder.open(resume)
    except InputError as error:
        raise InputError("--resume", got=error.got, expected=error.expected, remedy=error.remedy) from error
    if not run.exists(run.job_mapping):
        seen, remedy = f"{resume}, which has no job.json", run_to_name(resume)
        raise InputError("--resume", got=seen, expected="the folder of a run", remedy=remedy)
    alive = run.alive()
    if alive:
        raise InputError(
            "--resume",
            got=f"{path_from_here(run.path)}, which is still running with pid {alive['pid']} on {alive['host']}",
            expected="a run that has ended",
            remedy="stop it first, or wait",
        )
    events = run.read_rows(run.events) if run.exists(run.events) else []
    rows = [row["changes"] for row in events if row["kind"] == "driver_start" and row.get("changes")]
    earlier = [f"{key}={json.dumps(value)}" for changes in rows for key, value in changes.items()]
    original = apply_overrides(run.recorded_job(), earlier)[0]  # an extension outlives an interruption
    path = path and Path(typed_path(str(path), key=str(path)))
    given = load_yaml(read_job(path), origin=str(path)) if path else original if mapping is None else mapping
    merged, _ = apply_overrides(given, overrides)
    changed = changed_keys(original, merged)
    refused = [key for key in changed if not may_change_on_resume(key)]
    if refused:
        before, after = values_of(original).get(refused[0]), values_of(merged).get(refused[0])
        raise InputError(
            refused[0],
            got=f"the changed value {describe(after)}",
            expected=f"{describe(before)}, with which the run started",
            remedy="this key cannot change on resume; start a new run without --resume to change it",
        )
    loaded = load_spec(mapping=merged)
    sources = {
        key: "resume" if ".".join(key.split(".")[:2]) in changed else "run" if source == "python" else source
        for key, source in loaded.sources.items()
    }
    loaded = replace(loaded, sources=sources)
    check_objects(loaded.spec)
    most, reached = loaded.spec.loop.max_steps, max(run.saved_steps(), default=0)
    if "loop.max_steps" in changed and most is not None and most <= reached:
        raise InputError(
            "loop.max_steps", got=str(most), expected=f"more than {reached}, the step of the newest checkpoint",
            remedy=f"`{shell_command('export', path_from_here(run.path))}` writes its weights without training",
        )  # fmt: skip
    longer = bool({"loop.max_steps", "loop.epochs"} & set(changed))  # so that a finished run continues
    return Resumed(run, loaded, changed, finished=run.finished() and not longer)


def check_checkpoints(resumed: Resumed) -> Resumed:
    """Check that one of the checkpoints of a run can be loaded, and return the run with the step of that one.

    A run that was interrupted before its first checkpoint was complete begins at step 0, and is no error. Without this
    check, a run with damaged checkpoints would begin there too, and its metrics and weights would be replaced.
    """
    from raytrain.checkpoint.reader import check  # imports torch

    problems = []
    for step in reversed(resumed.run.saved_steps()):
        try:
            check(resumed.run.checkpoint_dir(step), hash_up_to=HASHED_BYTES)
            return replace(resumed, step=step)
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise InputError(
            "--resume",
            got=f"{path_from_here(resumed.run.path)}, whose checkpoints are all damaged ({'; '.join(problems)})",
            expected="a run with a valid checkpoint", remedy=start_anew(resumed.run),
        )  # fmt: skip
    return resumed


def changed_values(resumed: Resumed | None) -> dict[str, Any]:
    """{dotted key: value} of what a resume changes, for the record of its command: the next resume starts from it."""
    if resumed is None:
        return {}
    config, found = encode(resumed.loaded.spec), dict[str, Any]()
    for key in resumed.changed:
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if not (isinstance(value, str) and value.startswith("<object ")):  # only its program has an object
            found[key] = value
    return found


# ---------------------------------------------------------------- run folder
# Opens the folder of a run: checks the machine, creates or resumes the folder, writes the records of the start.


@dataclass(frozen=True)
class OpenRun:
    run: RunFolder
    plan: Plan  # as written to plan.json
    attempt: int  # number of the command's first attempt
    claimed: int  # number of the next attempt, which the driver has taken for its workers


@dataclass(frozen=True)
class RunPlanner:
    """Plans a job for the machines that are there, and opens its run folder."""

    loaded: LoadedSpec
    spec: JobSpec  # that of `loaded` with absolute paths
    checked: Checked
    _: KW_ONLY
    resumed: Resumed | None  # the run to resume; None makes a new one
    began: float  # when the command started, in unix seconds
    phases: Phases
    console: Console
    verbose: bool = False  # print the whole plan

    def open(self, inventory: Inventory, *, shared: bool = False) -> OpenRun:
        """Make the run folder, or open the resumed one, write the records of this command and print what it will do.
        The machines are those of the connected cluster if it is `shared`."""
        resumed, console = self.resumed, self.console
        plan = self._plan(inventory, hosts_of_run=None if resumed is None else resumed.hosts())
        if shared:
            from jobs.driver.watch import check_room, run_needs  # imports Ray

            if waits := check_room(run_needs(self.spec, plan)):
                print_line(console, waits)
        checks = _checked(self.spec, plan, inventory, run=None if resumed is None else resumed.run)
        if resumed is not None:
            run = resumed.checked_against(plan)
        else:
            job = load_yaml(self.loaded.merged_text, origin="job")
            run = RunFolder.create(self.spec.save.dir, self.spec.name, job=job)
            run.write_text(run.job, self.loaded.text)
        last_sign = last_sign_of_life(run)
        attempt = run.next_attempt(this_process())  # from here on, workers of older attempts stop before they write
        changes: Any = {"changed": resumed.changed if resumed else [], "changes": changed_values(resumed)}
        began: Any = {"process_start": self.began, "pid": os.getpid(), "ray_job": submission_id()}
        run.append_event(event("driver_start", last_sign_of_life=last_sign, **began, **changes))
        run.reserve_space()
        plan = _recorded(run, plan, checks)
        run.write_json(run.environment, environment_record())
        if self.verbose:
            print_plan(replace(plan, warnings=[]), console)
        warnings = [*plan.warnings, *(check.text for check in checks if check.status == "warn")]
        before = None if resumed is None else resumed.taken_over(plan, attempt=attempt)
        print_start(plan, console, warnings=warnings, every=self.verbose, resumed=before)
        if resumed is not None and run.exists(run.result):
            run.store.delete("result.json")
        return OpenRun(run, plan, attempt, claimed=attempt)

    def open_here(self) -> OpenRun:
        """The same on this machine, of whose GPUs this process and a private Ray see only those of the plan."""
        inventory = local_inventory()
        opened = self.open(inventory)
        show_only_picked(str(opened.plan.choices()["accelerator"].value_or("cpu")), inventory)
        return opened

    def change_workers(self, opened: OpenRun, inventory: Inventory, workers: Resolved) -> OpenRun:
        """The same run, with the plan for another number of workers, and its records written again."""
        plan = self._plan(inventory, hosts_of_run=opened.plan.hosts.value_or(None), workers=workers)
        checks = _checked(self.spec, plan, inventory, run=opened.run)
        before, why = opened.plan.workers.value_or(None), workers.reason
        opened.run.append_event(event("decision", what="workers", value=workers.value, before=before, reason=why))
        return replace(opened, plan=_recorded(opened.run, plan, checks))

    def _plan(self, inventory: Inventory, *, hosts_of_run: Any, workers: Resolved | None = None) -> Plan:
        checked = self.checked
        return plan_job(
            self.loaded, inventory=inventory, model_facts=checked.model_facts, data_facts=checked.data_facts,
            split=checked.first.split, hosts_of_run=hosts_of_run, workers=workers,
        )  # fmt: skip


def _recorded(run: RunFolder, plan: Plan, checks: Sequence[CheckResult]) -> Plan:
    """The plan with the path of the run, written to it beside the results of the checks."""
    plan = replace(plan, files=replace(plan.files, value=run.path))
    run.write_json(run.plan, plan.to_json())
    run.write_json(run.preflight, [check.to_json() for check in checks])
    return plan


def _checked(spec: JobSpec, plan: Plan, inventory: Inventory, *, run: RunFolder | None) -> list[CheckResult]:
    """The results of the checks before the start. Errors: InputError for the first that failed."""
    size, workers = plan.checkpoint_bytes.value_or(None), int(plan.workers.value_or(1))
    checks = run_preflight(
        save_dir=spec.save.dir, inventory=inventory, checkpoint_bytes=size, worker_bytes=plan.memory.value_or(None),
        local_workers=-(-workers // max(1, len(inventory.nodes))), on_gpu=plan.device.value_or(None) == "cuda",
        saved=0 if run is None else len(run.saved_steps()),
    )  # fmt: skip
    if len(inventory.nodes) > 1:
        checks += check_seen_by_all({"save.dir": absolute_path(spec.save.dir), **local_paths(spec)})
    checks += check_ray_job(spec.save.dir)
    failed = [check for check in checks if check.status == "fail"]
    if failed:
        first = failed[0]
        raise InputError(first.key or first.name, got=first.seen, expected=first.expected, remedy=first.remedy)
    return checks
