"""The verb `report`, and the function `report` for Python: pages about run folders and bench measurements.

`--follow` watches a run from another process, through its run folder only.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster.wording import counted, size
from jobs.driver.printing import print_line
from jobs.driver.progress import TrainingDisplay, clock_text
from jobs.job.facts import path_from_here, run_named, text_from_here
from raytrain.errors import InputError, RunError
from raytrain.execution.driver_channel import RESTARTING, STARTING
from raytrain.report.compare import compare
from raytrain.report.figures import cause_of, outcome
from raytrain.report.findings import diagnose, finding_lines
from raytrain.report.inference import build_inference_report, is_inference
from raytrain.report.page import build_report
from raytrain.report.records import read_records
from raytrain.report.sweep import build_sweep_report, is_sweep
from raytrain.runs.folder import RunFolder, resume_command
from raytrain.runs.records import rows_of
from raytrain.runs.storage import LocalStore, typed_path

__all__ = ["Report", "report"]

LOOK_EVERY_S = 0.5
#: Between two lines about the devices.
DEVICES_EVERY_S = 30.0
CODES = {"done": 0, "failed": 1, "interrupted": 130}
#: A run that is not alive and has no result is given up after this long: its end may be being written.
GIVE_UP_S = 10.0
SHOWN = {"warning": "warning: ", "node_lost": "", "out_of_memory": "out of memory: ", "death": "", "hang": "hang: "}
"""Kinds of events whose reason is shown -> what stands before it."""


@dataclass(frozen=True)
class Report:
    """What was written, and what the records of a run show to be wrong.

    Attributes:
        path: of the page.
        findings: of a run: what asks for a change, a line each, with the key to change; [] for other pages.

    Example:
        >>> from jobs.report import report
        >>> one, = report("runs/latest")
        >>> one.path.endswith("report/report.html"), one.findings
        (True, [])
    """

    path: str
    findings: list[str]


def report(*paths: str | Path) -> list[Report]:
    """Write a report of each run folder, a comparison of several, and a summary of each bench's JSON.

    Args:
        paths: run folders (local paths or URIs), output folders of `infer`, folders of `tune`, and JSON files of
            `raytrain bench`; none, or `latest`, means the newest run in `runs`.

    Raises:
        InputError: a path is neither; no report of a run is written.

    Example:
        >>> from pathlib import Path
        >>> from jobs.report import report
        >>> first, second = sorted(Path("runs").glob("run-*"))[:2]
        >>> pages = report(first, second)
        >>> [Path(page.path).name for page in pages]
        ['report.html', 'report.html', '...html']
    """
    return list(_reports([str(path) for path in paths]))


def report_verb(paths: list[str]) -> int:
    """Print the path of each page as soon as it is written, and below it what the records show to be wrong."""
    for one in _reports(paths):
        folder = one.path.partition("/report/")[0]  # of a run, which its findings name
        findings = [text_from_here(line, folder) for line in one.findings]
        print("\n".join([path_from_here(one.path), *findings]))
    return 0


def _reports(paths: list[str]) -> Iterator[Report]:
    runs = []
    for path in [path if path == "latest" else typed_path(path, key="report") for path in paths] or ["latest"]:
        if path.endswith(".json"):
            from jobs.bench.harness.options import write_summary

            yield Report(str(write_summary(Path(path))), [])
        elif is_inference(path):
            yield Report(build_inference_report(path), [])
        elif is_sweep(path):
            yield Report(build_sweep_report(RunFolder.open(path)), [])
        else:
            runs.append(_open(path))
    for run in runs:
        yield Report(build_report(run), finding_lines(diagnose(read_records(run))))
    if len(runs) > 1:
        yield Report(compare(runs), [])


def follow_run(paths: list[str]) -> int:
    """Watch the run of one path (none: `latest`) until it ends; returns its exit code. Ctrl-C ends the view, and the
    run continues. Raises RunError if the run ended without a result."""
    if len(paths) > 1:
        raise InputError("--follow", got=f"{len(paths)} runs", expected="one run")
    run, console = _open(*paths or ["latest"]), Console(highlight=False)
    view = RunView(run, console=console, clock=time.monotonic)
    try:
        with view.display:
            while not view.update():
                time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        print_line(console, f"no longer watching; the run continues in {path_from_here(run.path)}")
        return 130
    return view.close()


def _open(path: str) -> RunFolder:
    run = run_named(path)
    if not any(run.exists(name) for name in (run.job, run.plan, run.events, run.job_mapping)):
        seen, expected = f"{path}, which has no job.yaml, plan.json or events.jsonl", "the folder of a run"
        raise InputError("run folder", got=seen, expected=f"{expected}, as printed when `raytrain train` starts")
    return run


class NewRows:
    """The rows of a JSONL file that were added since the last call.

    On a local path only the new part is read; a file that was replaced (rows after a checkpoint are removed at a
    restart) is read again.
    """

    def __init__(self, run: RunFolder, name: str) -> None:
        self._run, self._name = run, name
        self._offset, self._inode, self._seen = 0, 0, 0

    def read(self) -> list[dict[str, Any]]:
        """The new complete rows; [] where the file does not exist."""
        store = self._run.store
        if not isinstance(store, LocalStore):
            rows = self._run.read_rows(self._name)
            new, self._seen = rows[self._seen :] if len(rows) >= self._seen else rows, len(rows)
            return new
        try:
            with open(store.at(self._name), "rb") as file:
                about = os.fstat(file.fileno())
                if about.st_ino != self._inode or about.st_size < self._offset:
                    self._offset, self._inode = 0, about.st_ino
                file.seek(self._offset)
                data = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        self._offset += len(data) + 1 if data else 0
        return rows_of(data, origin=self._name)


class RunView:
    """What the view has shown of a run; `update` shows what is new."""

    def __init__(self, run: RunFolder, *, console: Console, clock: Callable[[], float]) -> None:
        self.display = TrainingDisplay(console, clock=clock)
        self._run, self._console, self._clock = run, console, clock
        self._metrics, self._events = NewRows(run, "metrics.jsonl"), NewRows(run, "events.jsonl")
        self._telemetry: dict[str, NewRows] = {}
        self._devices: dict[str, str] = {}
        self._devices_shown = clock() - DEVICES_EVERY_S + 2 * LOOK_EVERY_S
        self._progress: dict[str, Any] = {"phase": STARTING}
        self._max_steps: int | None = None
        self._step_s: list[float] = []
        self._dead_since: float | None = None

    def update(self) -> bool:
        """Show what is new; returns whether the run has ended."""
        alive = self._run.alive() is not None  # asked first: what the run writes last is read below
        if self._max_steps is None and self._run.exists(self._run.plan):
            choices = self._run.read_json(self._run.plan)["choices"]
            self._max_steps = choices.get("max_steps", {}).get("value") or 1
        for row in self._events.read():
            self._show_event(row)
        for row in self._metrics.read():
            if row["kind"] == "train":
                self._step_s = [*self._step_s[-19:], float(row.get("step_time_s") or 0.0)]
            steps = (self._max_steps or 0) - int(row["step"])
            # for the steps that are left, evaluations and checkpoints not counted
            left_s = steps * statistics.median(self._step_s) if self._step_s and steps > 0 else None
            self._progress.update(phase="training", step=row["step"], row=row, max_steps=self._max_steps, left_s=left_s)
        missing = lambda: "" if (left_s := self.display.left_s) is None else f"{clock_text(left_s)} left"  # noqa: E731
        self.display.show(self._progress, missing=missing)
        self._show_devices()
        if alive:
            self._dead_since = None
            return False
        if self._run.exists(self._run.result):
            return True
        self._dead_since = self._dead_since or self._clock()
        return self._clock() - self._dead_since > GIVE_UP_S

    def close(self) -> int:
        """Say how the run ended; returns its exit code."""
        records = read_records(self._run)
        state = outcome(records)
        if records.result is None:
            resume = resume_command("train", path_from_here(self._run.path))
            raise RunError(f"{state.sentence} Resume it with: {resume}")
        for line in finding_lines(diagnose(records)):
            self.display.print_lines(text_from_here(line, self._run.path))
        print_line(self._console, state.sentence)
        return CODES.get(state.status, 1)

    def _show_event(self, row: Mapping[str, Any]) -> None:
        kind = row["kind"]
        if kind == "driver_start":  # the run's own time, as in the terminal of the command
            self.display.began = self._clock() - max(0.0, time.time() - float(row.get("process_start") or row["time"]))
            self._begin(STARTING)
        elif kind in SHOWN:
            self.display.print_lines(f"{SHOWN[kind]}{row.get('reason', '')}")
        elif kind == "attempt":
            again = f", from step {row['from_step']}" if row["attempt"] > 1 else ""
            workers = f"{counted(row['workers'], 'worker')} on {row['device']}"
            self.display.print_lines(f"attempt {row['attempt']}: {workers}{again}")
            self._begin("training", step=row["from_step"], max_steps=self._max_steps)
        elif kind == "fault":
            rank = "" if row.get("rank") is None else f" on rank {row['rank']}"
            self.display.print_lines(f"attempt {row.get('failed_attempt')} failed{rank}: {cause_of(row)}")
            self._begin(RESTARTING)
        elif kind == "attempt_end":
            self._progress["phase"] = "ending"

    def _begin(self, phase: str, **fields: Any) -> None:
        """A phase in which nothing of the attempt before it holds: no step, loss or remaining time."""
        self._progress = {"phase": phase, **fields}
        self._step_s = []

    def _show_devices(self) -> None:
        """A line with the newest sample of every node, every `DEVICES_EVERY_S` seconds."""
        for entry in self._run.store.entries("telemetry"):
            rows = self._telemetry.setdefault(entry.name, NewRows(self._run, f"telemetry/{entry.name}")).read()
            if rows:
                self._devices[entry.name] = device_line(rows[-1])
        if self._devices and self._clock() - self._devices_shown >= DEVICES_EVERY_S:
            self._devices_shown = self._clock()
            for line in self._devices.values():
                self.display.print_lines(line)


def device_line(row: Mapping[str, Any]) -> str:
    """The devices of one node in one line: `n: cpu 97 %, 3.1 GiB of 23.5 GiB; cuda:0 99 %, 61 GiB of 80 GiB, 64 C`."""
    parts = []
    for device in row["devices"]:
        busy = "" if device["utilisation"] is None else f" {device['utilisation']:.0f} %"
        used, total = device["memory_used"], device["memory_total"]
        memory = f", {size(used)} of {size(total)}" if used is not None and total else ""
        heat = "" if device["temperature_c"] is None else f", {device['temperature_c']:.0f} C"
        power = "" if device["power_w"] is None else f", {device['power_w']:.0f} W"
        slowed = f", slowed down: {', '.join(device['throttle'])}" if device["throttle"] else ""
        parts.append(f"{device['device']}{busy}{memory}{heat}{power}{slowed}")
    return f"{row['node']}: {'; '.join(parts)}"
