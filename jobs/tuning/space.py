"""The search over the keys of `tune.space` on the driver: complete runs as trials, and their result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Column, Table

from cluster.devices.inventory import Inventory
from cluster.wording import counted
from jobs.driver.check_job import Checked
from jobs.driver.runtime import Cluster
from jobs.tuning.driver import TuneCommand
from jobs.tuning.space_points import Points, curves_of, find_points, run_cells, values_text
from raytrain.errors import RunError
from raytrain.plan.machines import choose_devices
from raytrain.plan.room import Need
from raytrain.report.sweep import whole_spec
from raytrain.runs.folder import SweepFolder

WIDE = 120
"""On a terminal narrower than this, the dotted keys in the header are broken over several lines, not truncated."""


def run_space(command: TuneCommand, checked: Checked, *, address: str, inventory: Inventory) -> SweepFolder:
    """Run the complete runs of `tune.space` and write the result.

    Raises:
        InputError, RunError, Interrupted.
    """

    def find(machines: Inventory) -> tuple[Points, int]:
        points = find_points(command.loaded, machines, shapes=checked.shapes)
        gpus = len(choose_devices(command.spec.scale, machines, []).gpus)
        alone = command.spec.tune.metric == "samples_per_s"
        return points, points.at_a_time(gpus=gpus, cpus=machines.cpus, alone=alone)

    def resources(wanted: tuple[Points, int]) -> tuple[int, int]:
        points, at_a_time = wanted
        each = max(one.gpus or one.cores for one in points.trials)
        return at_a_time * (each + 1), at_a_time * max(one.gpus for one in points.trials)

    def needs(wanted: tuple[Points, int], _: Cluster) -> list[list[Need]]:
        return [[one.need] for one in wanted[0].trials if one.need]

    how: Any = {"find": find, "resources": resources, "needs": needs}
    with command.machines(address, inventory, **how) as ((points, at_a_time), cluster):
        from jobs.tuning.space_trials import run_points  # imports Ray

        run_points(command, points, at_a_time=at_a_time, cluster=cluster, private=address == "local")
    command.activity.begin("writing the result")
    write_space(command, points)
    return command.the_sweep


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
    command.write_best(best["values"], {next(iter(best["values"])): reason}, note=note)
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
