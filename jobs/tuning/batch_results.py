"""What a search over batch size and precision leaves: best.yaml, tune.json, tune.png, the table and the advice."""

from __future__ import annotations

from statistics import linear_regression, median
from typing import TYPE_CHECKING, Any

from rich.table import Table

from jobs.tuning.batch_known import Known, weighed
from jobs.tuning.best import best_mapping, best_text
from jobs.tuning.points import whole_mapping
from jobs.tuning.results import close, draw, header_of, say_files
from jobs.tuning.table import bytes_text, number_text, print_table
from raytrain.config import TuneFound
from raytrain.decode import encode
from raytrain.planning.values import size_text
from raytrain.readers.tune_figures import batch_spec
from raytrain.search.batch import decide
from raytrain.search.decision import BatchDecision
from raytrain.search.measurement import STEADY
from raytrain.search.memory_line import line_of
from raytrain.search.noise_scale import goodput_advice

if TYPE_CHECKING:
    from jobs.tuning.batch_command import BatchSearch
    from jobs.tuning.cache import Cache
    from jobs.tuning.command import TuneCommand

WORTH_SAYING = 0.02
LARGER = 4
"""The advice about a free global batch looks so many times further than the given one."""


def write_batch(command: TuneCommand, search: BatchSearch, cache: Cache) -> None:
    """Decide from all that is known, write it, say it.

    Raises:
        RunError: nothing that was measured can run.
    """
    cache.keep(command.the_sweep.ended())
    known, spec = cache.known, command.spec
    goodput = spec.tune.objective == "goodput"
    space = weighed(search.space, known, goodput=goodput)
    decision = decide(space, known.measurements, known.gates, known.contests)
    chosen, workers = decision.candidate, search.workers
    size = chosen.micro_batch_size
    free = search.space.rows_per_step is None
    values: dict[str, Any] = {"precision.dtype": chosen.precision, "loop.micro_batch_size": size}
    reasons = {"precision.dtype": decision.precision.reason, "loop.micro_batch_size": decision.micro_batch_size.reason}
    if free:
        values["loop.global_batch_size"] = size * workers
        reasons["loop.global_batch_size"] = f"micro-batches of {size} rows x {workers} workers, no accumulation"
    found = measured(decision, known, search)
    job = best_mapping(whole_mapping(command.loaded, spec), values, found=found)
    sweep = command.the_sweep
    sweep.write_text(sweep.best, best_text(job, reasons, header=header_of(command)))
    advice = advice_lines(decision, known, search, spec.loop.global_batch_size)
    record = decision.to_json()
    draw(command, batch_spec(record["table"], chosen=(chosen.precision, size), budget=search.space.budget_bytes,
                             name=spec.name, goodput=goodput))  # fmt: skip
    print_table(command.console, decision_table(decision))
    command.say(f"precision   {chosen.precision}: {decision.precision.reason}")
    command.say(f"micro-batch {size}: {decision.micro_batch_size.reason}")
    for line in advice:
        command.say(line)
    close(command, {"kind": "batch", "values": values, "decision": record, "found": found, "advice": advice,
                    "from_cache": len(cache.rows)})  # fmt: skip
    say_files(command)


def measured(decision: BatchDecision, known: Known, search: BatchSearch) -> dict[str, Any]:
    """`tune.found`: what was measured of the chosen point, for `train` to hold its own measurement against."""
    chosen = decision.candidate
    own = [one for one in known.measurements if one.candidate == chosen and one.pass_s]
    in_turn = [one for contest in known.contests[-1:] for one in [contest.of(chosen)] if one is not None and one.pass_s]
    own = in_turn or own
    rows = search.space.rows_per_step or chosen.micro_batch_size
    assert known.signature is not None, "a decision rests on a measurement"
    found = TuneFound(
        signature=known.signature["hash"],
        facts=known.signature["facts"],
        precision=chosen.precision,
        micro_batch_size=chosen.micro_batch_size,
        step_s=median(one.step_s(rows) for one in own),
        peak_bytes=decision.measured_peak,
        device=own[-1].device,
    )
    return encode(found)


def decision_table(decision: BatchDecision) -> Table:
    """Every candidate on which anything was spent, the chosen one marked."""
    table = Table("precision", "rows", "passes", "rows/s (95 %)", "peak", "predicted", "", box=None, pad_edge=False,
                  header_style="bold")  # fmt: skip
    for row in decision.table:
        taken = (row.precision, row.micro_batch_size) == (
            decision.candidate.precision, decision.candidate.micro_batch_size
        )  # fmt: skip
        off = "" if row.low is None or row.rows_per_s is None else f" ± {number_text(row.rows_per_s - row.low)}"
        table.add_row(
            row.precision, str(row.micro_batch_size), str(row.passes or ""), number_text(row.rows_per_s) + off,
            bytes_text(row.measured_peak), bytes_text(row.predicted_peak), row.note or ("taken" if taken else ""),
            style="bold green" if taken else "",
        )  # fmt: skip
    return table


def advice_lines(decision: BatchDecision, known: Known, search: BatchSearch, asked: Any) -> list[str]:
    """What else the measurements tell: memory at half and twice the size, and what another global batch is worth."""
    lines = []
    unsteady = sum(not one.is_steady for one in known.measurements)
    if unsteady:
        told = f"times of {unsteady} of {len(known.measurements)} measurements vary by more than {STEADY:.0%}"
        lines.append(f"{told}: the machine did other work. They are not kept; search again when it is quiet")
    chosen, space = decision.candidate, search.space
    size = chosen.micro_batch_size
    own = [one for one in known.measurements if one.candidate.precision == chosen.precision]
    if any(one.peak_bytes for one in own):
        line = line_of(own)
        told = [f"{size_text(line.predict(round(part * size)))} at {part:g}x" for part in (0.5, 1, 2)]
        room = "" if space.budget_bytes is None else f"; a process may take {size_text(space.budget_bytes)}"
        lines.append(f"predicted peak: {', '.join(told)} of this micro-batch{room}")
    if known.noise is not None:
        now = size * search.workers if asked == "auto" else int(asked)
        lines.append(goodput_advice(known.noise, global_batch=now))
    worth = None if asked == "auto" else larger_batch(decision, known, search)
    if worth is not None:
        gain = f"{worth:+.0%} rows/s" if worth > WORTH_SAYING else "no more rows/s"
        lines.append(f"loop.global_batch_size: auto lets the batch grow: {LARGER} times this one predicts {gain}")
    return lines


def larger_batch(decision: BatchDecision, known: Known, search: BatchSearch) -> float | None:
    """Gain in rows/s of a step of one micro-batch of `LARGER` times a worker's rows, predicted; None where nothing
    tells."""
    chosen, rows = decision.candidate, search.space.rows_per_step
    own = [one for one in known.measurements if one.candidate.precision == chosen.precision and one.pass_s]
    if rows is None or len({one.candidate.micro_batch_size for one in own}) < 2:
        return None
    line = linear_regression([one.candidate.micro_batch_size for one in own], [median(one.pass_s) for one in own])
    update = median(second for one in own for second in one.update_s) if any(one.update_s for one in own) else 0.0
    larger = LARGER * rows
    return larger / (line.intercept + line.slope * larger + update) / decision.rows_per_s - 1
