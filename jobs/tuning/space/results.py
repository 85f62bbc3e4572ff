"""Results of a search: best.yaml, tune.json, tune.png, the final table and the lines below it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from jobs.driver.screen.commands import print_command
from jobs.job.paths import path_from_here
from jobs.tuning.best import best_mapping, best_text
from jobs.tuning.space.points import Points
from jobs.tuning.table import SweepTable, counted, print_table, values_text
from raytrain.errors import RunError
from raytrain.report.sweep import build_sweep_report
from raytrain.report.tune_figures import whole_spec
from raytrain.runs.commands import resume_command, shell_command
from raytrain.runs.folder import RunFolder
from raytrain.runs.records import event

if TYPE_CHECKING:
    from jobs.tuning.command import TuneCommand
    from jobs.tuning.space.trials import WholeTrials


def write_whole(command: TuneCommand, trials: WholeTrials, points: Points, table: SweepTable) -> None:
    """Write and print the result of a search over `tune.space`.

    Raises:
        RunError: no trial completed.
    """
    sweep, rows = command.the_sweep, list(trials.rows.values())
    found = trials.best()
    print_table(command.console, table.drawn(marked=found[0]["trial"] if found else None))
    if found is None:
        reasons = "; ".join(f"trial {row['trial']}: {row['reason']}" for row in rows[:3])
        raise RunError(f"none of {counted(len(rows), 'trial')} completed ({reasons}); see {sweep.trials}")
    best, reason = found
    reasons = dict.fromkeys(best["values"], "")
    reasons[next(iter(reasons))] = reason
    job = best_mapping(command.job_mapping(), best["values"], found=None)
    header = f"{header_of(command)}\nTrial {best['trial']}: {values_text(best['values'])}; its run is {best['run']}"
    sweep.write_text(sweep.best, best_text(job, {key: why for key, why in reasons.items() if why}, header=header))
    draw(command, whole_spec(rows, curves_of(rows), best=best["trial"], metric=trials.metric, name=command.spec.name))
    close(command, {"kind": "space", "metric": trials.metric, "best": best, "reason": reason,
                    "left_out": [{"values": values, "reason": why} for values, why in points.left_out]})  # fmt: skip
    command.print_line(f"best: trial {best['trial']}, {values_text(best['values'])}; {reason}")
    print_files(command, died=[row["trial"] for row in sweep.again()])


def header_of(command: TuneCommand) -> str:
    """The first comment of best.yaml."""
    return f"Found by raytrain tune on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {command.the_sweep.path}"


def close(command: TuneCommand, record: dict[str, Any]) -> None:
    """Write tune.json, which marks the search as done."""
    sweep = command.the_sweep
    wall = time.time() - command.began
    sweep.append_event(event("driver_end", status="done"))
    sweep.write_json(sweep.outcome, {"status": "done", "trials": len(sweep.ended()), "wall_s": wall, **record})
    sweep.flush()


def draw(command: TuneCommand, spec: dict[str, Any]) -> None:
    """Draw tune.png from a plot spec, which is saved as tune_plot.json."""
    from raytrain.report.plots import figure, png

    command.the_sweep.write_json("tune_plot.json", spec)
    command.the_sweep.write_bytes(command.the_sweep.picture, png(figure(spec)))


def print_files(command: TuneCommand, *, died: Sequence[int]) -> None:
    """Print the last lines: the files, and the commands that use them.

    Args:
        died: trials that a resumed search would repeat.
    """
    sweep = command.the_sweep
    command.print_path(f"trials  {path_from_here(sweep.trials)}")
    command.print_path(f"picture {path_from_here(sweep.picture)}")
    command.print_path(f"report  {path_from_here(build_sweep_report(sweep))}")
    print_command(command.console, "train   ", shell_command("train", path_from_here(sweep.best)))
    if died:
        again = resume_command("tune", path_from_here(sweep.path))
        command.print_path(f"died    trial {', '.join(map(str, died))}; to repeat: {again}")


def curves_of(rows: list[dict[str, Any]]) -> dict[int, list[tuple[int, float]]]:
    """(step, loss) of the evaluations of each trial, up to the step at which a scheduler stopped it."""
    runs = {row["trial"]: RunFolder(row["run"]).read_rows("metrics.jsonl") for row in rows if row.get("run")}
    ends = {row["trial"]: row["steps"] for row in rows if row["outcome"] == "stopped"}
    return {
        trial: [
            (row["step"], row["loss"])
            for row in metrics
            if row["kind"] == "eval" and row["step"] <= ends.get(trial, row["step"])
        ]
        for trial, metrics in runs.items()
    }
