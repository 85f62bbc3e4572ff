"""The search over the keys of `tune.space` on the driver: complete runs as trials, and their result."""

from __future__ import annotations

import os

from cluster.devices.amd import VISIBLE
from cluster.devices.inventory import Inventory, inventory_from_ray
from jobs.driver.checks.job import Checked
from jobs.driver.plan import show_only_picked
from jobs.driver.runtime import Cluster, connected
from jobs.job.paths import path_from_here
from jobs.tuning.command import TuneCommand
from jobs.tuning.space.points import Points, find_points
from jobs.tuning.table import WHOLE_COLUMNS, SweepTable, counted, values_text
from raytrain.plan.rules.devices import choose_devices
from raytrain.runs.sweep import SweepFolder


def run_space(command: TuneCommand, checked: Checked, *, address: str, inventory: Inventory) -> SweepFolder:
    """Run the complete runs of `tune.space` and write the result.

    Raises:
        InputError, RunError, Interrupted.
    """
    points = find_points(command.loaded, inventory, shapes=checked.shapes) if address == "local" else None
    cpus = gpus = 0
    if points is not None:
        at_a_time = _at_a_time(command, points, inventory)
        show_only_picked(choose_devices(command.spec.scale, inventory, []).accelerator.value, inventory)
        each = max(one.gpus or one.cores for one in points.trials)
        cpus, gpus = at_a_time * (each + 1), at_a_time * max(one.gpus for one in points.trials)
        command.open_sweep(inventory)
    command.activity.begin("starting Ray" if address == "local" else "connecting to Ray")
    with connected(address, num_cpus=cpus, num_gpus=gpus, verbose=command.verbose) as cluster:
        command.signals.install()
        if points is None:
            inventory = inventory_from_ray()
            points = find_points(command.loaded, inventory, shapes=checked.shapes)
            from jobs.driver.watch.cluster import check_room  # imports Ray

            for waits in filter(None, dict.fromkeys(check_room([one.need]) for one in points.trials if one.need)):
                command.print_line(waits)
            command.open_sweep(inventory)
        _try(command, points, inventory, cluster, private=address == "local")
    return command.the_sweep


def _at_a_time(command: TuneCommand, points: Points, inventory: Inventory) -> int:
    gpus = len(choose_devices(command.spec.scale, inventory, []).gpus)
    return points.at_a_time(gpus=gpus, cpus=inventory.cpus, alone=command.spec.tune.metric == "samples_per_s")


def _try(command: TuneCommand, points: Points, inventory: Inventory, cluster: Cluster, *, private: bool) -> None:
    from ray import tune

    from jobs.tuning.space.results import curves_of, write_whole
    from jobs.tuning.space.schedulers import scheduler_of
    from jobs.tuning.space.trial import WholeTrial, WholeTrialSettings
    from jobs.tuning.space.trials import TRIAL_RESOURCES, WholeTrials
    from jobs.tuning.sweep import close_channel, make_tuner, run_trials
    from raytrain.execution.driver_channel import open_channel

    command.activity.begin("preparing the trials")
    sweep, keys = command.the_sweep, list(points.trials[0].values)
    at_a_time = _at_a_time(command, points, inventory)
    _print_search(command, points, at_a_time)
    command.activity.begin("")  # the table says what happens from here on
    with SweepTable(command.console, [*keys, *WHOLE_COLUMNS], title=counted(len(points.trials), "trial")) as table:
        trials = WholeTrials(points.trials, sweep=sweep, table=table, metric=command.spec.tune.metric, private=private)
        channel = open_channel()
        visible = {name: os.environ[name] for name in VISIBLE if name in os.environ}
        settings = WholeTrialSettings(command.job_mapping(), sweep.path, os.getcwd(), visible, channel)

        def stop() -> None:
            trials.stopping = True
            table.print_line("stopping: the trials save and exit (a second signal exits at once)")
            close_channel(channel)

        tuner = make_tuner(
            tune.with_parameters(WholeTrial, settings=settings),
            trials,
            storage=command.storage(cluster),
            resources={name.lower(): share for name, share in TRIAL_RESOURCES.items()},
            at_a_time=at_a_time,
            scheduler=scheduler_of(command.spec.tune.scheduler, points, curves=curves_of(sweep.standing())),
        )
        grace_s = command.spec.retry.stop_grace_s
        run_trials(tuner, sweep=sweep, signals=command.signals, show=table.show, stop=stop, grace_s=grace_s)
    command.activity.begin("writing the result")
    write_whole(command, trials, points, table)


def _print_search(command: TuneCommand, points: Points, at_a_time: int) -> None:
    at_a_time = min(at_a_time, len(points.trials))
    pace = f", {at_a_time} at a time" if at_a_time > 1 else ", one at a time"
    early = {"none": "", "asha": "; ASHA stops trials early", "median": "; trials below the median stop early"}
    text = f"{counted(len(points.trials), 'complete run')}{pace}{early[command.spec.tune.scheduler]}"
    command.print_line(f"{text}; search folder {path_from_here(command.the_sweep.path)}")
    for values, reason in points.left_out:
        command.print_line(f"left out: {values_text(values)}: {reason}")
