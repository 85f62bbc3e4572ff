"""One `tune` command on the driver: from a checked spec to best.yaml. `jobs.tune` calls it."""

from __future__ import annotations

import os
import time

from rich.console import Console

from cluster.checks.preflight import run_preflight
from cluster.devices.inventory import Inventory, inventory_from_ray, local_inventory
from cluster.environment import environment_record
from jobs.driver.checks import Checked, check_on_driver
from jobs.driver.plan import show_only_picked
from jobs.driver.runtime import Cluster, cluster_address, connected
from jobs.driver.signals import Interrupted, StopSignals
from jobs.job.paths import absolute_path, resolved
from jobs.job.spec import LoadedSpec
from jobs.tuning.space.points import Points, find_points, whole_mapping
from jobs.tuning.table import WHOLE_COLUMNS, SweepTable, counted, values_text
from raytrain.errors import InputError
from raytrain.plan.rules.devices import choose_devices
from raytrain.runs.lease import this_process
from raytrain.runs.records import event
from raytrain.runs.sweep import SweepFolder


class TuneCommand:
    """One `tune` command."""

    def __init__(
        self, loaded: LoadedSpec, *, sweep: SweepFolder | None, signals: StopSignals, verbose: bool, console: Console
    ) -> None:
        self.loaded = loaded
        self.spec = resolved(loaded.spec)
        self.sweep = sweep
        self.signals = signals
        self.verbose = verbose
        self.console = console
        self.began = time.time()

    def run(self) -> SweepFolder:
        """Check the job, plan and run the trials, decide, and write the result. Returns the search folder.

        Raises:
            InputError, RunError, Interrupted.
        """
        address = cluster_address(self.spec.cluster.address)
        checked = check_on_driver(self.spec)
        if checked.note is not None:
            self.console.print(checked.note, markup=False, soft_wrap=True)
        inventory = local_inventory()
        if self.spec.tune.space is None:
            from jobs.tuning.batch.command import run_batch

            return run_batch(self, checked, address=address, inventory=inventory)
        return self._whole(address, checked, inventory)

    # -- tune.space: complete runs ----------------------------------------------------------------

    def _whole(self, address: str, checked: Checked, inventory: Inventory) -> SweepFolder:
        points = find_points(self.loaded, inventory, shapes=checked.shapes) if address == "local" else None
        cpus = gpus = 0
        if points is not None:
            at_a_time = self._at_a_time(points, inventory)
            show_only_picked(choose_devices(self.spec.scale, inventory, []).accelerator.value, inventory)
            each = max(one.gpus or one.cores for one in points.trials)
            cpus, gpus = at_a_time * (each + 1), at_a_time * max(one.gpus for one in points.trials)
            self.open_sweep(inventory)
        with connected(address, num_cpus=cpus, num_gpus=gpus, verbose=self.verbose) as cluster:
            self.signals.install()
            if points is None:
                inventory = inventory_from_ray()
                points = find_points(self.loaded, inventory, shapes=checked.shapes)
                check_resources(points)
                self.open_sweep(inventory)
            self._try(points, inventory, cluster, private=address == "local")
        return self.the_sweep

    def _at_a_time(self, points: Points, inventory: Inventory) -> int:
        gpus = len(choose_devices(self.spec.scale, inventory, []).gpus)
        return points.at_a_time(gpus=gpus, cpus=inventory.cpus, alone=self.spec.tune.metric == "samples_per_s")

    def _try(self, points: Points, inventory: Inventory, cluster: Cluster, *, private: bool) -> None:
        from ray import tune

        from jobs.tuning.space.results import curves_of, write_whole
        from jobs.tuning.space.schedulers import scheduler_of
        from jobs.tuning.space.trial import WholeTrial, WholeTrialSettings
        from jobs.tuning.space.trials import TRIAL_RESOURCES, WholeTrials
        from jobs.tuning.sweep import close_channel, make_tuner, run_trials
        from raytrain.execution.driver_channel import open_channel

        sweep, keys = self.the_sweep, list(points.trials[0].values)
        at_a_time = self._at_a_time(points, inventory)
        self._print_search(points, at_a_time)
        with SweepTable(self.console, [*keys, *WHOLE_COLUMNS], title=counted(len(points.trials), "trial")) as table:
            trials = WholeTrials(points.trials, sweep=sweep, table=table, metric=self.spec.tune.metric, private=private)
            channel = open_channel()
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            settings = WholeTrialSettings(
                whole_mapping(self.loaded, self.spec), sweep.path, os.getcwd(), visible, channel
            )

            def stop() -> None:
                trials.stopping = True
                table.print_line("stopping: the trials save and exit (a second signal exits at once)")
                close_channel(channel)

            tuner = make_tuner(
                tune.with_parameters(WholeTrial, settings=settings),
                trials,
                storage=self.storage(cluster),
                resources={name.lower(): share for name, share in TRIAL_RESOURCES.items()},
                at_a_time=at_a_time,
                scheduler=scheduler_of(self.spec.tune.scheduler, points, curves=curves_of(sweep.standing())),
            )
            grace_s = self.spec.retry.stop_grace_s
            run_trials(tuner, sweep=sweep, signals=self.signals, show=table.show, stop=stop, grace_s=grace_s)
        write_whole(self, trials, points, table)

    def _print_search(self, points: Points, at_a_time: int) -> None:
        at_a_time = min(at_a_time, len(points.trials))
        pace = f", {at_a_time} at a time" if at_a_time > 1 else ", one at a time"
        early = {"none": "", "asha": "; ASHA stops trials early", "median": "; trials below the median stop early"}
        text = f"{counted(len(points.trials), 'complete run')}{pace}{early[self.spec.tune.scheduler]}"
        self.print_line(f"{text}; search folder {self.the_sweep.path}")
        for values, reason in points.left_out:
            self.print_line(f"left out: {values_text(values)}: {reason}")

    # -- the folder -------------------------------------------------------------------------------

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
            raise InputError(key, seen=failed.seen, expected=failed.expected, remedy=failed.remedy)
        if self.sweep is None:
            save_dir = absolute_path(self.spec.save.dir)
            job = whole_mapping(self.loaded, self.spec)
            self.sweep = SweepFolder.create(save_dir, f"{self.spec.name}-tune", job=job, latest=False)
            self.sweep.write_text(self.sweep.job, self.loaded.text)
        self.sweep.next_attempt(this_process())
        self.sweep.append_event(event("driver_start", pid=os.getpid(), trials=len(self.sweep.ended())))
        self.sweep.write_json(self.sweep.environment, environment_record())

    def storage(self, cluster: Cluster) -> str:
        """The directory for Ray's own experiment state."""
        return os.path.join(cluster.folder, "t")

    def print_line(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, markup=False, soft_wrap=True)

    def check_stopped(self) -> None:
        """Raise Interrupted if a signal arrived while no trial ran."""
        if self.signals.asked.is_set():
            raise Interrupted("between two trials")


def check_resources(points: Points) -> None:
    """Check that the connected cluster has the resources of one trial; otherwise a trial would wait forever.

    Raises:
        InputError: naming what is missing.
    """
    import ray

    there = ray.cluster_resources()
    gpus, cores = max(one.gpus for one in points.trials), max(one.cores for one in points.trials)
    for name, wanted, key in (("GPU", gpus, "scale.workers"), ("CPU", cores, "scale.threads")):
        if wanted > there.get(name, 0):
            raise InputError(
                key, seen=f"a trial that needs {wanted} {name}s",
                expected=f"at most {there.get(name, 0):g}, all that the cluster has",
                remedy="lower scale.workers or scale.threads",
            )  # fmt: skip
