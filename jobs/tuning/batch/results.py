"""Results of a search over batch size and precision: best.yaml, tune.json, tune.png, the table and the advice."""

from __future__ import annotations

from dataclasses import asdict
from statistics import linear_regression, median
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Column, Table

from jobs.job.paths import path_from_here
from jobs.tuning.batch.device_kinds import of_kind
from jobs.tuning.batch.known import KnownMeasurements, still_needed, with_noise_scale
from jobs.tuning.batch.loaders import KEY, chosen_loaders
from jobs.tuning.best import best_mapping, best_text
from jobs.tuning.space.results import close, draw, header_of, print_files
from jobs.tuning.table import bytes_text, number_text, print_table
from raytrain.autotune.search.batch_size import BatchDecision, TableRow, decide
from raytrain.autotune.search.device_kinds import KindsDecision, choose_for_all
from raytrain.autotune.search.measurement import STEADY, Candidate
from raytrain.autotune.search.memory_line import line_of
from raytrain.autotune.search.noise_scale import goodput_advice
from raytrain.autotune.search.precision import gate_refusal
from raytrain.config.decode import encode
from raytrain.config.sections import TuneFound
from raytrain.errors import RunError
from raytrain.plan.choice import Resolved
from raytrain.plan.text import size_text
from raytrain.report.tune_figures import batch_spec

if TYPE_CHECKING:
    from jobs.tuning.batch.cache import Caches
    from jobs.tuning.batch.search import BatchSearch
    from jobs.tuning.command import TuneCommand

WORTH_SAYING = 0.02
LARGER = 4
"""The advice about a larger global batch predicts one of this many times the given size."""


def print_search(command: TuneCommand, search: BatchSearch) -> None:
    """Print the search space before the search starts."""
    space = search.space
    sizes = ", ".join(map(str, space.sizes)) if len(space.sizes) <= 12 else f"{space.sizes[0]} to {space.sizes[-1]}"
    batch = "the global batch is searched too" if space.rows_per_step is None else (
        f"{space.rows_per_step} rows per worker and step are fixed"
    )  # fmt: skip
    rooms = [
        "no memory limit is known" if one.budget_bytes is None else f"{size_text(one.budget_bytes)} for each process"
        for one in search.kinds
    ]
    named = [f"{one.devices} {one.name}, {room}" for one, room in zip(search.kinds, rooms, strict=True)]
    room = rooms[0] if len(rooms) == 1 else f"a search for each kind of device ({'; '.join(named)})"
    command.print_line(f"search: {' and '.join(space.precisions)}, micro-batches of {sizes} rows; {batch}; {room}")
    folder = path_from_here(command.the_sweep.path)
    command.print_line(f"each trial in its own process, {search.devices} at a time; search folder {folder}")


def write_batch(command: TuneCommand, search: BatchSearch, caches: Caches) -> None:
    """Decide from all measurements, then write and print the result.

    Raises:
        RunError: nothing that was measured can run.
    """
    spec, sweep, workers = command.spec, command.the_sweep, search.workers
    for kind in search.kinds:
        caches[kind.name].store(of_kind(sweep.ended(), kind.name))
    answer = answer_of(search, caches)
    chosen, known, decision = answer.candidate, caches[answer.binding].known, answer.decisions[answer.binding]
    size = chosen.micro_batch_size
    values: dict[str, Any] = {"precision.dtype": chosen.precision, "loop.micro_batch_size": size}
    reasons = {"precision.dtype": answer.precision.reason, "loop.micro_batch_size": answer.micro_batch_size.reason}
    if spec.loop.micro_batch_size == "whole":
        del values["loop.micro_batch_size"], reasons["loop.micro_batch_size"]
    if search.space.rows_per_step is None:
        values["loop.global_batch_size"] = size * workers
        reasons["loop.global_batch_size"] = f"micro-batches of {size} rows x {workers} workers, no accumulation"
    loaders = chosen_loaders(search.loaders, [caches[kind.name].known.loaders for kind in search.kinds])
    if isinstance(loaders, Resolved):
        values[KEY], reasons[KEY] = loaders.value, loaders.reason
    found = measured(answer, caches, search)
    memory = memory_used(found["peak_bytes"], next(k.budget_bytes for k in search.kinds if k.name == answer.binding))
    job = best_mapping(command.job_mapping(), values, found=found)
    header = "\n".join(filter(None, [header_of(command), unsteady_warning(known), untold_warning(decision)]))
    sweep.write_text(sweep.best, best_text(job, reasons, header=header))
    advice = advice_lines(decision, chosen, known, search, spec.loop.global_batch_size)
    table = [
        {**asdict(row), "precision": f"{name} {row.precision}".strip()}
        for name, one in answer.decisions.items()
        for row in one.table
    ]
    line = f"{answer.binding} {chosen.precision}".strip()
    draw(command, batch_spec(table, sizes=search.space.sizes, chosen=(line, size), budget=search.space.budget_bytes,
                             name=spec.name, goodput=search.goodput))  # fmt: skip
    for name, one in answer.decisions.items():
        print_table(command.console, decision_table(one, kind=name))
    command.print_line(f"precision   {chosen.precision}: {answer.precision.reason}")
    command.print_line(f"micro-batch {size}: {answer.micro_batch_size.reason}")
    if memory["used"] is not None:
        peak, limit = size_text(memory["peak_bytes"]), size_text(memory["limit_bytes"])
        command.print_line(
            f"memory      {memory['used']:.1%} used: a peak of {peak} of the {limit} that a process may use"
        )
    command.print_line(
        f"{KEY} {f'{loaders.value}: {loaders.reason}' if isinstance(loaders, Resolved) else loaders.how}"
    )
    for line in advice:
        command.print_line(line)
    kinds = {name: one.to_json() for name, one in answer.decisions.items()}
    close(command, {"kind": "batch", "values": values, "decision": decision.to_json(), "kinds": kinds, "found": found,
                    "memory": memory, "loaders": loaders.to_json(), "advice": advice,
                    "from_cache": sum(len(cache.rows) for cache in caches.values())})  # fmt: skip
    print_files(command, died=trials_to_repeat(command, search, caches))


def trials_to_repeat(command: TuneCommand, search: BatchSearch, caches: Caches) -> list[int]:
    """Numbers of the trials whose process died and that a resumed search would still run; measurements made since then
    may have made some of them unnecessary."""
    sweep = command.the_sweep
    found: list[int] = []
    for kind in search.kinds:
        known = caches[kind.name].known_with(of_kind(sweep.standing(), kind.name))
        known.noise, known.loaders = caches[kind.name].known.noise, caches[kind.name].known.loaders
        space = with_noise_scale(search.space_of(kind), known, goodput=search.goodput)
        found += still_needed(of_kind(sweep.again(), kind.name), space, known)
    return sorted(found)


def answer_of(search: BatchSearch, caches: Caches) -> KindsDecision:
    """The decision of each kind of device, and the one for all of them.

    Raises:
        RunError: on one kind, nothing that was measured can run.
    """
    decisions: dict[str, BatchDecision] = {}
    for kind in search.kinds:
        known = caches[kind.name].known
        space = with_noise_scale(search.space_of(kind), known, goodput=search.goodput)
        try:
            decisions[kind.name] = decide(space, known.measurements, known.gates, known.contests)
        except RunError as error:
            if not kind.name:
                raise
            raise RunError(f"on {kind.name}: {error}") from error
    gates = [gate for cache in caches.values() for gate in cache.known.gates]
    return choose_for_all(
        decisions,
        workers={kind.name: kind.workers for kind in search.kinds},
        reference=search.space.lead,
        refused={gate.precision for gate in gates if gate_refusal(gate)},
    )


def memory_used(peak: int | None, limit: int | None) -> dict[str, Any]:
    """Peak and limit of a process with the chosen micro-batch, and their ratio (None if either is unknown)."""
    return {"peak_bytes": peak, "limit_bytes": limit, "used": peak / limit if peak and limit else None}


def measured(answer: KindsDecision, caches: Caches, search: BatchSearch) -> dict[str, Any]:
    """`tune.found`: what was measured for the chosen point; `train` compares its own measurement with it."""
    chosen, known = answer.candidate, caches[answer.binding].known
    signatures = [cache.known.signature for name, cache in caches.items() if name != answer.binding]
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
        peak_bytes=next(
            row.measured_peak
            for row in answer.decisions[answer.binding].table
            if (row.precision, row.micro_batch_size) == (chosen.precision, chosen.micro_batch_size)
        ),
        device=own[-1].device,
        also=[one["hash"] for one in signatures if one is not None],
    )
    return encode(found)


def decision_table(decision: BatchDecision, *, kind: str) -> Table:
    """Every candidate that was measured on one `kind` of device, the best one marked."""
    word = f"best on {kind}" if kind else "best"
    rows = []
    for row in decision.table:
        taken = (row.precision, row.micro_batch_size) == (
            decision.candidate.precision, decision.candidate.micro_batch_size
        )  # fmt: skip
        noise = "too noisy" if is_noisy(row) else ""
        note = row.note or ", ".join(part for part in (word if taken else "", noise) if part)
        rows.append((taken, (
            row.precision, str(row.micro_batch_size), str(row.passes or ""), rate_text(row),
            bytes_text(row.measured_peak), bytes_text(row.predicted_peak), note,
        )))  # fmt: skip
    names = ("precision", "rows", "passes", "rows/s [95 %]", "peak", "predicted", "")
    filled = [at for at in range(len(names)) if any(cells[at] for _, cells in rows)]
    columns = [Column(names[at], no_wrap=bool(names[at])) for at in filled]  # only the notes are broken, between words
    table = Table(*columns, box=None, pad_edge=False, header_style="bold", title=f"on {kind}" if kind else None,
                  title_justify="left")  # fmt: skip
    for taken, cells in rows:
        table.add_row(*(escape(cells[at]) for at in filled), style="bold green" if taken else "")
    return table


def is_noisy(row: TableRow) -> bool:
    """Whether the interval of a rate is so wide that the rate says little."""
    return row.low is not None and row.high is not None and row.high > (1 + STEADY) * row.low


def rate_text(row: TableRow) -> str:
    """Rows per second with their interval, in fewer digits where that is wide."""
    if row.rows_per_s is None or row.low is None or row.high is None:
        return ""
    digits = 2 if is_noisy(row) else 4
    rate, low, high = (number_text(float(f"{one:.{digits}g}")) for one in (row.rows_per_s, row.low, row.high))
    return f"{rate} [{low}, {high}]"


def untold_warning(decision: BatchDecision) -> str:
    """A warning that precisions could not be told apart, or ""."""
    if not decision.untold:
        return ""
    chosen, others = decision.candidate.precision, " and ".join(decision.untold)
    return (
        f"the times vary too much to tell {others} from {chosen} at the same number of rows: {chosen} stays, as train "
        "chooses where it cannot tell; search again on an idle machine (--fresh)"
    )


def unsteady_warning(known: KnownMeasurements) -> str:
    """A warning that some times are unreliable, or ""."""
    unsteady = sum(not one.is_steady for one in known.measurements)
    if not unsteady:
        return ""
    message = f"times of {unsteady} of {len(known.measurements)} measurements vary by more than {STEADY:.0%}"
    return f"{message}, since the machine was busy; they are not cached: search again when it is idle"


def advice_lines(
    decision: BatchDecision, chosen: Candidate, known: KnownMeasurements, search: BatchSearch, asked: Any
) -> list[str]:
    """Further conclusions: peak memory at half and twice the size, and the benefit of another global batch."""
    lines = [warning for warning in (unsteady_warning(known), untold_warning(decision)) if warning]
    space, size = search.space, chosen.micro_batch_size
    own = [one for one in known.measurements if one.candidate.precision == chosen.precision]
    if any(one.peak_bytes for one in own):
        line = line_of(own)
        peaks = [f"{size_text(line.predict(round(part * size)))} at {part:g}x" for part in (0.5, 1, 2)]
        room = "" if space.budget_bytes is None else f"; a process may use {size_text(space.budget_bytes)}"
        lines.append(f"predicted peak: {', '.join(peaks)} this micro-batch{room}")
    if known.noise is not None:
        now = size * search.workers if asked == "auto" else int(asked)
        lines.append(goodput_advice(known.noise, global_batch=now))
    can_grow = asked != "auto" and decision.candidate == chosen
    worth = larger_batch(decision, known, search) if can_grow else None
    if worth is not None:
        gain = f"a change of {worth:+.0%} in rows/s" if worth > WORTH_SAYING else "no gain in rows/s"
        lines.append(f"loop.global_batch_size: auto also searches the batch: {LARGER} times this one predicts {gain}")
    return lines


def larger_batch(decision: BatchDecision, known: KnownMeasurements, search: BatchSearch) -> float | None:
    """Predicted gain in rows/s of a step that is one micro-batch of `LARGER` times a worker's rows; None if it cannot
    be predicted."""
    chosen, rows = decision.candidate, search.space.rows_per_step
    own = [one for one in known.measurements if one.candidate.precision == chosen.precision and one.pass_s]
    if rows is None or len({one.candidate.micro_batch_size for one in own}) < 2:
        return None
    line = linear_regression([one.candidate.micro_batch_size for one in own], [median(one.pass_s) for one in own])
    update = median(second for one in own for second in one.update_s) if any(one.update_s for one in own) else 0.0
    larger = LARGER * rows
    return larger / (line.intercept + line.slope * larger + update) / decision.rows_per_s - 1
