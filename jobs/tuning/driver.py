"""What both kinds of search share on the driver: their job, folder, machines and output, and best.yaml.

`jobs.tune` opens a search here; `batch.py` and `space.py` run it.
"""

from __future__ import annotations

import contextlib
import os
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

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

PIPED_COLUMNS = 10_000
"""Console width for piped output; wider than any row of a table."""
COMMENT_COLUMNS = 108

T = TypeVar("T")


class TuneCommand:
    """One `tune` command."""

    def __init__(
        self, loaded: LoadedSpec, *, sweep: SweepFolder | None, signals: StopSignals, verbose: bool, console: Console,
        activity: Activity | None = None,
    ) -> None:  # fmt: skip
        """`activity` says what happens; it is entered by the caller."""
        self.activity = activity or Activity(console)
        self.loaded = loaded
        self.spec = resolved(loaded.spec)
        self.sweep = sweep
        self.signals = signals
        self.verbose = verbose
        self.console = console
        self.began = time.time()

    @property
    def the_sweep(self) -> SweepFolder:
        """The search folder; available after `open_sweep`."""
        assert self.sweep is not None, "open_sweep comes first"
        return self.sweep

    def open_sweep(self, inventory: Inventory) -> None:
        """Create the search folder, or reopen the resumed one, and record the start.

        Raises:
            InputError: it cannot be written.
        """
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

    @contextlib.contextmanager
    def machines(
        self, address: str, inventory: Inventory, *, find: Callable[[Inventory], T],
        resources: Callable[[T], tuple[int, int]], needs: Callable[[T, Cluster], Iterable[Sequence[Need]]],
    ) -> Iterator[tuple[T, Cluster]]:  # fmt: skip
        """What `find` says is to be tried on the machines, and the connected Ray; the search folder is open.

        A cluster says what machines it has; our own Ray starts with the `resources` (cores, GPUs) of what was found,
        and only after all checks. Each of the `needs` must fit a cluster, before the first trial.

        Args:
            inventory: of this machine.
        Raises:
            InputError: the cluster never has room for one of the needs.
        """
        local, wanted, cpus, gpus = address == "local", None, 0, 0
        if local:
            wanted = find(inventory)
            cpus, gpus = resources(wanted)
            self.open_sweep(inventory)
            show_only_picked(choose_devices(self.spec.scale, inventory, []).accelerator.value, inventory)
        self.activity.begin("starting Ray" if local else "connecting to Ray")
        with connected(address, num_cpus=cpus, num_gpus=gpus, verbose=self.verbose) as cluster:
            self.signals.install()
            if wanted is None:
                inventory = inventory_from_ray()
                wanted = find(inventory)
                from jobs.driver.watch import check_room  # imports Ray

                for waits in filter(None, dict.fromkeys(check_room(one) for one in needs(wanted, cluster))):
                    self.print_line(waits.rstrip())
                self.open_sweep(inventory)
            yield wanted, cluster

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

    def print_line(self, text: str) -> None:
        """Print one line, which a terminal breaks between two words."""
        self.console.print(text, markup=False, soft_wrap=not self.console.is_terminal)

    def print_path(self, text: str) -> None:
        """Print one line with a path or a command, which stays in one piece so that it can be copied."""
        self.console.print(text, markup=False, soft_wrap=True)

    def print_table(self, table: Table) -> None:
        """Print a table; piped output is not wrapped."""
        width = self.console.width
        if not self.console.is_terminal:
            self.console.width = PIPED_COLUMNS
        try:
            self.console.print(table)
        finally:
            self.console.width = width

    def write_best(
        self, values: Mapping[str, Any], reasons: Mapping[str, str], *, found: Mapping[str, Any] | None = None,
        note: str = "",
    ) -> None:  # fmt: skip
        """Write best.yaml: the job with the dotted `values` set, the reasons as comments, and `note` at the top; its
        section `tune` holds only what was measured (`found`)."""
        job, _ = apply_overrides(self.job_mapping(), [f"{key}={render(value)}" for key, value in values.items()])
        job.pop("tune", None)
        job |= {"tune": {"found": dict(found)}} if found else {}
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
        self.print_path(f"trials  {path_from_here(sweep.trials)}")
        self.print_path(f"picture {path_from_here(sweep.picture)}")
        self.print_path(f"report  {path_from_here(build_sweep_report(sweep))}")
        print_command(self.console, "train   ", shell_command("train", path_from_here(sweep.best)))
        if died := [str(row["trial"]) for row in sweep.again()]:
            again = resume_command("tune", path_from_here(sweep.path))
            self.print_path(f"died    trial {', '.join(died)}; to repeat: {again}")


def best_text(job: Mapping[str, Any], reasons: Mapping[str, str], *, header: str) -> str:
    """The job as YAML, with `header` as a comment at the top and a comment above each dotted key of `reasons`.

    Relies on the layout of `dump_yaml`: sections are not indented, their keys by two spaces.
    """
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
