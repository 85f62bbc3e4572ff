"""The search over the keys of `tune.space` on the driver: complete runs as trials, and their result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Column, Table

from cluster.devices.inventory import Inventory, inventory_from_ray
from cluster.wording import counted
from jobs.driver.check_job import Checked
from jobs.driver.planning import show_only_picked
from jobs.driver.runtime import connected
from jobs.tuning.driver import TuneCommand
from jobs.tuning.space_points import Points, curves_of, find_points, run_cells, values_text
from raytrain.errors import RunError
from raytrain.plan.machines import choose_devices
from raytrain.report.sweep import whole_spec
from raytrain.runs.folder import SweepFolder

WIDE = 120
"""On a terminal narrower than this, the dotted keys in the header are broken over several lines, not truncated."""


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
        from jobs.driver.watch import check_room  # imports Ray, as does the next
        from jobs.tuning.space_trials import run_points

        if points is None:
            inventory = inventory_from_ray()
            points = find_points(command.loaded, inventory, shapes=checked.shapes)
            for waits in filter(None, dict.fromkeys(check_room([one.need]) for one in points.trials if one.need)):
                command.print_line(waits)
            command.open_sweep(inventory)
        at_a_time = _at_a_time(command, points, inventory)
        run_points(command, points, at_a_time=at_a_time, cluster=cluster, private=address == "local")
        command.activity.begin("writing the result")
        write_space(command, points)
    return command.the_sweep


def _at_a_time(command: TuneCommand, points: Points, inventory: Inventory) -> int:
    gpus = len(choose_devices(command.spec.scale, inventory, []).gpus)
    return points.at_a_time(gpus=gpus, cpus=inventory.cpus, alone=command.spec.tune.metric == "samples_per_s")


def write_space(command: TuneCommand, points: Points) -> None:
    """Write and print the result.

    Raises:
        RunError: no trial completed.
    """
    sweep, metric = command.the_sweep, command.spec.tune.metric
    rows = list({row["trial"]: row for row in sweep.ended()}.values())  # the last one of each trial
    found = best_of(rows, metric=metric)
    marked = found[0]["trial"] if found else None
    keys = list(points.trials[0].values)
    narrow = command.console.is_terminal and command.console.width < WIDE
    names = [name.replace(".", ".\n").replace("_", "_\n") if narrow else name for name in keys]
    columns = [Column(name, overflow="fold") for name in ("trial", *names, "steps", "eval loss", "samples/s", "")]
    table = Table(*columns, box=None, pad_edge=False, header_style="bold", title=counted(len(rows), "trial"),
                  title_justify="left")  # fmt: skip
    for row in sorted(rows, key=lambda row: row["trial"]):
        style = "bold green" if row["trial"] == marked else ""
        table.add_row(str(row["trial"]), *run_cells(row, keys), style=style)
    command.print_table(table)
    if found is None:
        reasons = "; ".join(f"trial {row['trial']}: {row['reason']}" for row in rows[:3])
        raise RunError(f"none of {counted(len(rows), 'trial')} completed ({reasons}); see {sweep.trials}")
    best, reason = found
    note = f"Trial {best['trial']}: {values_text(best['values'])}; its run is {best['run']}"
    command.write_best(best["values"], {next(iter(best["values"])): reason}, found=None, notes=note)
    command.print_line(f"best: trial {best['trial']}, {values_text(best['values'])}; {reason}")
    plot = whole_spec(rows, curves_of(rows), best=best["trial"], metric=metric, name=command.spec.name)
    left_out = [{"values": values, "reason": why} for values, why in points.left_out]
    record = {"kind": "space", "metric": metric, "best": best, "reason": reason, "left_out": left_out}
    command.finish(record, plot)


def best_of(rows: Sequence[Mapping[str, Any]], *, metric: str) -> tuple[dict[str, Any], str] | None:
    """(the row with the lowest eval loss, or the most samples/s; why), of the trials that completed."""
    fastest = metric == "samples_per_s"
    done = [dict(row) for row in rows if row["outcome"] == "ok"]
    ranked = sorted(done, key=lambda row: row[metric], reverse=fastest)
    if not ranked:
        return None
    words = "most samples/s" if fastest else "lowest eval loss"
    reason = f"{words} of {counted(len(rows), 'trial')}: {ranked[0][metric]:.6g}"
    if len(ranked) > 1:
        reason += f"; next {ranked[1][metric]:.6g} with {values_text(ranked[1]['values'])}"
    return ranked[0], reason
