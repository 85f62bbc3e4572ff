"""One `tune` command on the driver: its job, its search folder and its output, for both kinds of search."""

from __future__ import annotations

import contextlib
import os
import textwrap
import time
from typing import Any

from rich.console import Console

from cluster.checks.preflight import run_preflight
from cluster.devices.inventory import Inventory
from cluster.environment import environment_record
from jobs.driver.runtime import Cluster
from jobs.driver.screen.progress import Activity
from jobs.driver.signals import Interrupted, StopSignals
from jobs.job.paths import absolute_path, resolved
from jobs.job.spec import LoadedSpec
from raytrain.config.decode import encode
from raytrain.errors import InputError, RunError
from raytrain.runs.lease import this_process
from raytrain.runs.records import event
from raytrain.runs.sweep import SweepFolder


class TuneCommand:
    """One `tune` command."""

    def __init__(
        self, loaded: LoadedSpec, *, sweep: SweepFolder | None, signals: StopSignals, verbose: bool, console: Console,
        activity: Activity | None = None,
    ) -> None:  # fmt: skip
        """`activity` shows what happens while no trial runs; it is entered by the caller."""
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

    def storage(self, cluster: Cluster) -> str:
        """The directory for Ray's own experiment state."""
        return os.path.join(cluster.folder, "t")

    def print_line(self, text: str) -> None:
        """Print one line; on a terminal a longer one goes on below itself, between two words."""
        if not self.console.is_terminal:
            self.console.print(text, markup=False, soft_wrap=True)
            return
        indent = " " * (len(text) - len(text.lstrip()) + 2)
        parts = textwrap.wrap(
            text, self.console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False,
            replace_whitespace=False, drop_whitespace=True,
        )  # fmt: skip
        for part in parts or [""]:
            self.console.print(part, markup=False, soft_wrap=True)

    def print_path(self, text: str) -> None:
        """Print one line with a path or a command, which stays in one piece so that it can be copied."""
        self.console.print(text, markup=False, soft_wrap=True)

    def check_stopped(self) -> None:
        """Raise Interrupted if a signal arrived while no trial ran."""
        if self.signals.asked.is_set():
            raise Interrupted("between two trials")
