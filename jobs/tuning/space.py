"""The search over the keys of `tune.space` on the driver: complete runs as trials, and their result."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from cluster.devices.gpus import VISIBLE
from cluster.devices.inventory import Inventory
from cluster.wording import counted
from jobs.driver.runtime import Cluster
from jobs.job.facts import path_from_here
from jobs.tuning.driver import TuneCommand
from jobs.tuning.space_points import Points, find_points, run_cells, values_text
from raytrain.errors import RunError
from raytrain.plan.machines import choose_devices
from raytrain.plan.room import Need
from raytrain.report.sweep import whole_spec
from raytrain.runs.folder import RunFolder

if TYPE_CHECKING:
    from jobs.driver.check_job import Checked

WIDE = 120
"""On a terminal narrower than this, the dotted keys in the header are broken over several lines, not truncated."""
STOPPING = "stopping: the trials save and exit (a second signal exits at once)"
EARLY = {"none": "", "asha": "; ASHA stops trials early", "median": "; trials below the median stop early"}


class SpaceCommand(TuneCommand):
    points: Points
    at_a_time: int

    def find(self, checked: Checked, inventory: Inventory) -> None:
        self.points = find_points(self.loaded, inventory, shapes=checked.shapes)
        gpus = len(choose_devices(self.spec.scale, inventory, []).gpus)
        alone = self.spec.tune.metric == "samples_per_s"
        self.at_a_time = self.points.at_a_time(gpus=gpus, cpus=inventory.cpus, alone=alone)

    def resources(self) -> tuple[int, int]:
        trials = self.points.trials
        each = max(one.gpus or one.cores for one in trials)
        return self.at_a_time * (each + 1), self.at_a_time * max(one.gpus for one in trials)

    def needs(self, cluster: Cluster) -> Iterable[Sequence[Need]]:
        return [[one.need] for one in self.points.trials if one.need]

    def measure(self, cluster: Cluster) -> None:
        """See `TuneCommand`: a trial for each point that trials.jsonl lacks."""
        from ray import tune

        from jobs.tuning.space_trials import TRIAL_CPU, PointSearcher, SpaceTrial, SpaceTrials, config_of, scheduler_of
        from jobs.tuning.trials import fit
        from raytrain.execution.driver_channel import open_channel

        sweep, wanted, trials = self.the_sweep, self.spec.tune, self.points.trials
        pace = f"{self.at_a_time} at a time" if min(self.at_a_time, len(trials)) > 1 else "one at a time"
        text = f"{counted(len(trials), 'complete run')}, {pace}{EARLY[wanted.scheduler]}"
        self.print_line(f"{text}; search folder {path_from_here(sweep.path)}")
        for values, reason in self.points.left_out:
            self.print_line(f"left out: {values_text(values)}: {reason}")
        standing = sweep.standing()
        left = [one for one in trials if one.number not in {row["trial"] for row in standing}]
        if not left:
            return
        channel = open_channel()
        trainable = tune.with_parameters(
            SpaceTrial, mapping=self.job_mapping(), sweep=sweep.path, folder=os.getcwd(), channel=channel,
            visible={name: os.environ[name] for name in VISIBLE if name in os.environ},
        )  # fmt: skip
        searcher = None if wanted.searcher == "random" else PointSearcher(self, self.points)
        fit(
            trainable, SpaceTrials(self, trials, private=cluster.local), cluster=cluster, at_a_time=self.at_a_time,
            resources={"cpu": TRIAL_CPU}, channel=channel, stopping=STOPPING, grace_s=self.spec.retry.stop_grace_s,
            param_space=None if searcher else {"trial": tune.grid_search([config_of(one) for one in left])},
            searcher=searcher, scheduler=scheduler_of(wanted.scheduler, self.points, curves=curves_of(standing)),
        )  # fmt: skip

    def write(self) -> None:
        sweep, metric = self.the_sweep, self.spec.tune.metric
        rows = list({row["trial"]: row for row in sweep.ended()}.values())  # the last one of each trial
        found = best_of(rows, metric=metric)
        marked = found[0]["trial"] if found else None
        keys = list(self.points.trials[0].values)
        narrow = self.console.is_terminal and self.console.width < WIDE
        names = [name.replace(".", ".\n").replace("_", "_\n") if narrow else name for name in keys]
        columns = [Column(name, overflow="fold") for name in ("trial", *names, "steps", "eval loss", "samples/s", "")]
        table = Table(*columns, box=None, pad_edge=False, header_style="bold", title=counted(len(rows), "trial"),
                      title_justify="left")  # fmt: skip
        for row in sorted(rows, key=lambda row: row["trial"]):
            style = "bold green" if row["trial"] == marked else ""
            table.add_row(str(row["trial"]), *run_cells(row, keys), style=style)
        self.print_table(table)
        if found is None:
            reasons = "; ".join(f"trial {row['trial']}: {row['reason']}" for row in rows[:3])
            raise RunError(f"none of {counted(len(rows), 'trial')} completed ({reasons}); see {sweep.trials}")
        best, reason = found
        note = f"Trial {best['trial']}: {values_text(best['values'])}; its run is {best['run']}"
        self.write_best(best["values"], {next(iter(best["values"])): reason}, note=note)
        self.print_line(f"best: trial {best['trial']}, {values_text(best['values'])}; {reason}")
        plot = whole_spec(rows, curves_of(rows), best=best["trial"], metric=metric, name=self.spec.name)
        left_out = [{"values": values, "reason": why} for values, why in self.points.left_out]
        record = {"kind": "space", "metric": metric, "best": best, "reason": reason, "left_out": left_out}
        self.finish(record, plot)


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


def curves_of(rows: Sequence[Mapping[str, Any]]) -> dict[int, list[tuple[int, float]]]:
    """(step, loss) of the evaluations of each trial, up to the step at which a scheduler stopped it."""
    curves = {}
    for row in filter(lambda row: row.get("run"), rows):
        end = row["steps"] if row["outcome"] == "stopped" else float("inf")
        metrics = RunFolder(row["run"]).read_rows("metrics.jsonl")
        evaluated = [one for one in metrics if one["kind"] == "eval" and one["step"] <= end]
        curves[row["trial"]] = [(one["step"], one["loss"]) for one in evaluated]
    return curves
