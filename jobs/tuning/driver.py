"""What both kinds of search share on the driver: their job, folder, machines and output, and best.yaml.

`jobs.tune` runs a `BatchCommand` (`batch.py`) or a `SpaceCommand` (`space.py`).
"""

from __future__ import annotations

import contextlib
import os
import textwrap
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from cluster.devices.inventory import Inventory, inventory_from_ray
from cluster.environment import environment_record
from cluster.preflight import run_preflight
from jobs.driver.planning import show_only_picked
from jobs.driver.printing import print_command
from jobs.driver.progress import Activity
from jobs.driver.runtime import Cluster, connected
from jobs.driver.signals import StopSignals
from jobs.job.facts import absolute_path, path_from_here, resolved
from jobs.job.spec import LoadedSpec
from raytrain.config.decode import apply_overrides, dump_yaml, encode
from raytrain.config.messages import render
from raytrain.errors import InputError, RunError
from raytrain.plan.machines import choose_devices
from raytrain.plan.room import Need
from raytrain.report.sweep import build_sweep_report
from raytrain.runs.folder import SweepFolder, resume_command, shell_command, this_process
from raytrain.runs.records import event

if TYPE_CHECKING:
    from jobs.driver.check_job import Checked

PIPED_COLUMNS = 10_000
"""Console width for piped output; wider than any row of a table."""
COMMENT_COLUMNS = 108


class TuneCommand:
    """One `tune` command. What is searched is up to the subclass. `sweep`: the search folder to resume; None: a new
    search. `activity`: says what happens; entered by the caller."""

    def __init__(
        self, loaded: LoadedSpec, *, sweep: SweepFolder | None, signals: StopSignals, verbose: bool, console: Console,
        activity: Activity | None = None,
    ) -> None:  # fmt: skip
        self.activity = activity or Activity(console)
        self.loaded, self.spec = loaded, resolved(loaded.spec)
        self.sweep, self.signals = sweep, signals
        self.verbose, self.console = verbose, console
        self.began = time.time()

    # -- what a kind of search does ---------------------------------------------------------------

    @abstractmethod
    def find(self, checked: Checked, inventory: Inventory) -> None:
        """Find what is to be tried on these machines. Raises InputError where nothing can be."""

    @abstractmethod
    def resources(self) -> tuple[int, int]:
        """(CPU cores, GPUs) of our own Ray."""

    @abstractmethod
    def needs(self, cluster: Cluster) -> Iterable[Sequence[Need]]:
        """What must each fit a cluster."""

    @abstractmethod
    def measure(self, cluster: Cluster) -> None:
        """Run the trials. Raises RunError, Interrupted."""

    @abstractmethod
    def write(self) -> None:
        """Decide, write and print the result. Raises RunError where no trial succeeded."""

    # -- the search -------------------------------------------------------------------------------

    def run(self, checked: Checked, *, address: str, inventory: Inventory) -> SweepFolder:
        """Run the search; returns its folder. Raises InputError, RunError, Interrupted.

        A cluster says what machines it has; our own Ray starts with the resources of what was found on this machine
        (`inventory`), and only after all checks. What is needed must fit a cluster before the first trial.
        """
        local, cpus, gpus = address == "local", 0, 0
        if local:
            self.find(checked, inventory)
            cpus, gpus = self.resources()
            self.open_sweep(inventory)
            show_only_picked(choose_devices(self.spec.scale, inventory, []).accelerator.value, inventory)
        self.activity.begin("starting Ray" if local else "connecting to Ray")
        with connected(address, num_cpus=cpus, num_gpus=gpus, verbose=self.verbose) as cluster:
            self.signals.install()
            if not local:
                from jobs.driver.watch import check_room  # imports Ray

                inventory = inventory_from_ray()
                self.find(checked, inventory)
                for waits in filter(None, dict.fromkeys(map(check_room, self.needs(cluster)))):
                    self.print_line(waits.rstrip())
                self.open_sweep(inventory)
            self.activity.begin("preparing the trials")
            self.measure(cluster)
        self.activity.begin("writing the result")
        self.write()
        return self.the_sweep

    @property
    def the_sweep(self) -> SweepFolder:
        """The search folder; available after `open_sweep`."""
        assert self.sweep is not None, "open_sweep comes first"
        return self.sweep

    def open_sweep(self, inventory: Inventory) -> None:
        """Create the search folder, or reopen the resumed one, and record the start. Raises InputError: it cannot be
        written."""
        checks = run_preflight(save_dir=self.spec.save.dir, inventory=inventory, checkpoint_bytes=None,
                               worker_bytes=None, local_workers=1, on_gpu=False)  # fmt: skip
        failed = next((check for check in checks if check.status == "fail"), None)
        if failed is not None:
            key = failed.key or failed.name
            raise InputError(key, got=failed.seen, expected=failed.expected, remedy=failed.remedy)
        if self.sweep is None:
            save_dir = absolute_path(self.spec.save.dir)
            job = self.job_mapping()
            self.sweep = SweepFolder.create(save_dir, f"{self.spec.name}-tune", job=job, latest=False)
            self.sweep.write_text(self.sweep.job, self.loaded.text)
        self.sweep.next_attempt(this_process())
        self.sweep.append_event(event("driver_start", pid=os.getpid(), trials=len(self.sweep.ended())))
        self.sweep.write_json(self.sweep.environment, environment_record())

    def close(self) -> None:
        """Record that the command has ended, if it did not end as planned: its process (a notebook) may live on."""
        if self.sweep is not None and self.sweep.alive():
            with contextlib.suppress(RunError):  # the folder cannot be written, as the command has said
                self.sweep.append_event(event("driver_end"))

    def job_mapping(self) -> dict[str, Any]:
        """The job as given, with absolute model and data paths, so that it runs from any directory."""
        given, sections = self.loaded.mapping, encode(self.spec)
        paths = {key: sections["model"][key] for key in ("init_from", "path") if key in given["model"]}
        data = {key: sections["data"][key] for key in given.get("data") or {}}
        return {**given, "model": {**given["model"], **paths}, "data": data}

    # -- output -----------------------------------------------------------------------------------

    def print_line(self, text: str, *, whole: bool = False) -> None:
        """Print one line, which a terminal breaks between two words; `whole`: with a path or a command, which stays in
        one piece so that it can be copied."""
        self.console.print(text, markup=False, soft_wrap=whole or not self.console.is_terminal)

    def print_table(self, table: Table) -> None:
        """Print a table; piped output is not wrapped."""
        width = self.console.width
        if not self.console.is_terminal:
            self.console.width = PIPED_COLUMNS
        try:
            self.console.print(table)
        finally:
            self.console.width = width

    def write_best(self, values: Mapping[str, Any], reasons: Mapping[str, str], *, note: str = "") -> None:
        """Write best.yaml: the job with the dotted `values` set, the reasons as comments, and `note` at the top."""
        job, _ = apply_overrides(self.job_mapping(), [f"{key}={render(value)}" for key, value in values.items()])
        job.pop("tune", None)
        header = f"Found by raytrain tune on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {self.the_sweep.path}\n{note}"
        self.the_sweep.write_text(self.the_sweep.best, best_text(job, reasons, header=header))

    def finish(self, record: dict[str, Any], plot: dict[str, Any]) -> None:
        """Write the picture and tune.json, which marks the search as done, and print the last lines: the files, and the
        commands that use them."""
        from raytrain.report.plots import figure, png

        sweep, wall = self.the_sweep, time.time() - self.began
        sweep.write_json("tune_plot.json", plot)
        sweep.write_bytes(sweep.picture, png(figure(plot)))
        sweep.append_event(event("driver_end", status="done"))
        sweep.write_json(sweep.outcome, {"status": "done", "trials": len(sweep.ended()), "wall_s": wall, **record})
        sweep.flush()
        self.print_files()

    def print_files(self) -> None:
        """The last lines: the files, and the commands that use them."""
        sweep = self.the_sweep
        files = {"trials": sweep.trials, "picture": sweep.picture, "report": build_sweep_report(sweep)}
        for name, path in files.items():
            self.print_line(f"{name:<8}{path_from_here(path)}", whole=True)
        print_command(self.console, "train   ", shell_command("train", path_from_here(sweep.best)))
        if died := [str(row["trial"]) for row in sweep.again()]:
            again = resume_command("tune", path_from_here(sweep.path))
            self.print_line(f"died    trial {', '.join(died)}; to repeat: {again}", whole=True)


def best_text(job: Mapping[str, Any], reasons: Mapping[str, str], *, header: str) -> str:
    """The job as YAML, with `header` as a comment at the top and a comment above each dotted key of `reasons`. Relies
    on the layout of `dump_yaml`: sections are not indented, their keys by two spaces."""
    lines, section = _comment(header, ""), ""
    for line in dump_yaml(job).splitlines():
        if line[:1].isalpha():
            section = line.partition(":")[0]
        elif line[:2] == "  " and line[2:3].isalpha():
            lines += _comment(reasons.get(f"{section}.{line[2:].partition(':')[0]}", ""), "  ")
        lines.append(line)
    return "\n".join(lines) + "\n"


def _comment(text: str, indent: str) -> list[str]:
    mark = f"{indent}# "
    wrap = textwrap.TextWrapper(COMMENT_COLUMNS, initial_indent=mark, subsequent_indent=mark, break_on_hyphens=False)
    return [line for paragraph in text.splitlines() for line in wrap.wrap(paragraph)]
