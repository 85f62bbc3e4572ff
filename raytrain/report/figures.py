"""Key figures of a run, computed from its records: outcome, history, account of time, performance, compilation.

The page, its tables, the findings, comparisons and the terminal show these figures and compute none of their own.
"""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.wording import counted, seconds
from raytrain.report.charts import line, panel
from raytrain.report.experts import loads_of, names_of
from raytrain.report.records import Row, RunRecords, first_text, listed, mapping, number, percentile, series, values
from raytrain.runs.faults import CLUSTER_LOST, RAY_FAILED
from raytrain.runs.records import PURPOSES

SAME = 0.03
"""A difference up to this fraction of a step is noise."""


@dataclass(frozen=True)
class CompileGain:
    eager_s: float  # seconds of a step as it was written, measured at the start
    compiled_s: float  # median seconds of the run's steps after the first, without reading data
    compiler_s: float  # seconds spent in the compiler
    steps: int  # that the run has done

    @property
    def ratio(self) -> float:
        """Compiled over eager: below 1 the compiled step is faster."""
        return self.compiled_s / self.eager_s

    @property
    def verdict(self) -> str:
        """ "faster", "slower", or "the same" within noise."""
        return "slower" if self.ratio > 1 + SAME else "faster" if self.ratio < 1 - SAME else "the same"

    @property
    def break_even(self) -> int | None:
        """The first step by which faster steps have made up for the compilation; None if they never do."""
        if self.verdict != "faster":
            return None
        return max(1, math.ceil(self.compiler_s / (self.eager_s - self.compiled_s)))


def compile_gain(records: RunRecords) -> CompileGain | None:
    """The comparison; None where the run did not compile, did not measure an eager step, or has done too few steps."""
    eager, compiled = records.of_kind("eager_step"), records.of_kind("compile")
    eager_s = number(eager[-1].get("seconds")) if eager else None
    compiler_s = number(compiled[-1].get("seconds")) if compiled else None
    if not eager_s or not compiler_s or str(compiled[-1].get("achieved")).startswith(("0 of", "off")):
        return None
    later = [row for row in records.train if (number(row.get("step")) or 0) > 1]
    spent = []  # seconds of a step: of the row's own, or the median of those since the row before, without reading data
    for row in later:
        median_ms, own = number(row.get("step_ms_p50")), number(row.get("step_time_s"))
        if (step_s := own if median_ms is None else median_ms / 1000) is not None:
            spent.append(step_s - (number(row.get("data_time_s")) or 0.0))
    compiled_s = percentile(spent, 0.5)
    if not compiled_s or compiled_s <= 0:
        return None
    return CompileGain(eager_s, compiled_s, compiler_s, int(number(records.train[-1].get("step")) or 0))


# ---------------------------------------------------------------- figures

MOST_LOSS = 50.0
"""A perplexity of a larger loss says nothing."""
HISTORY_COLUMNS = (
    "epoch", "first_step", "last_step", "train_loss", "last_train_loss", "eval_loss", "accuracy", "grad_norm",
    "lr", "samples_per_s", "tokens_per_s", "step_time_s", "epoch_time_s", "peak_memory_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended: `status` (done, failed, interrupted, running, lost) and one sentence saying why."""

    status: str
    sentence: str


def rounded(value: float | None, digits: int = 6) -> float | int | None:
    """Six significant digits, integers without a fraction: the same value in the text and in the JSON file."""
    if value is None or isinstance(value, int):
        return value
    return int(value) if value.is_integer() else float(f"{value:.{digits}g}")


def outcome(records: RunRecords) -> RunOutcome:
    """The outcome of the run in one sentence; without a result.json it is running or lost."""
    result = records.result
    step = last_step(records)
    if records.alive:
        who = f"host {records.alive.get('host', '?')}, pid {records.alive.get('pid', '?')}"
        return RunOutcome("running", f"Still running ({who}), at step {step:,}.")
    if result is None:
        missing = f"there is no result.json, and the last recorded step is {step:,}"
        return RunOutcome("lost", f"Still running or lost: {missing}.")
    status = str(result.get("status", "unknown"))
    wall = seconds(number(result.get("wall_s")))
    reason = failure_reason(records)
    if status == "failed":
        lost = ", as Ray itself was lost" if cluster_lost(reason) else ""
        return RunOutcome(status, f"Failed after step {step:,}{lost}: {reason or 'no cause was recorded'}")
    if status == "interrupted":
        why = f" ({reason})" if reason else ""
        return RunOutcome(status, f"Interrupted after step {step:,}{why}; it can be resumed.")
    if status == "done":
        why = "" if reason in ("", f"{step} steps", counted(step, "step")) else f" ({reason})"
        return RunOutcome(status, f"Done: {counted(step, 'step')} in {wall}{why}.")
    return RunOutcome(status, f"Ended as {status} after step {step:,}.")


def cluster_lost(reason: str) -> bool:
    """Whether this is the reason of a run that failed because the Ray cluster was lost."""
    return CLUSTER_LOST in reason or reason.startswith(RAY_FAILED)


def failure_reason(records: RunRecords) -> str:
    """The first line of the cause in result.json, or otherwise of the last recorded failure."""
    result = records.result or {}
    text = first_text(result, "reason", "failure", "error", "message", "cause").strip()
    failures = records.of_kind("failure", "fault", "stop")
    if not text and failures and result.get("status") != "done":
        text = cause_of(failures[-1])
    return text.splitlines()[0] if text else ""


def cause_of(row: Row) -> str:
    """A fault in one line, such as `ValueError: bad batch`; the message of any other event."""
    error, message = first_text(row, "error", "type"), first_text(row, "message", "reason", "cause", "detail")
    text = f"{error}: {message}" if error and message and error not in message else message or error
    place = first_text(row, "place")
    return text.strip().splitlines()[0] + (f" at {place}" if place else "") if text.strip() else ""


def step_ms(records: RunRecords) -> tuple[float | None, float | None]:
    """(p50, p95) of a step in milliseconds; of rows that describe all steps since the previous row, the medians."""
    times, tails = values(records.train, "step_time_s"), values(records.train, "step_ms_p95")
    steps = [step for step, _ in series(records.train, "step_time_s")]
    sparse = len(steps) > 1 and steps[-1] - steps[0] >= 2 * (len(steps) - 1)
    if sparse and tails:
        return percentile(values(records.train, "step_ms_p50"), 0.5), percentile(tails, 0.5)
    milliseconds = [1000 * time for time in times]
    return percentile(milliseconds, 0.5), percentile(milliseconds, 0.95)


def last_step(records: RunRecords) -> int:
    """The last recorded step; 0 if there is none."""
    seen = number((records.result or {}).get("steps"))
    if seen is None and records.train:
        seen = number(records.train[-1].get("step"))
    return int(seen or 0)


def best_eval(records: RunRecords) -> tuple[int, float] | None:
    """(step, loss) of the lowest eval loss, from result.json or otherwise from the rows."""
    named = [number((records.result or {}).get(key)) for key in ("best_step", "best_eval_loss")]
    if named[0] is not None and named[1] is not None:
        return int(named[0]), named[1]
    points = series(records.evals, "loss")
    if not points:
        return None
    step, loss = min(points, key=lambda point: point[1])
    return int(step), loss


def time_account(records: RunRecords) -> list[tuple[str, float]]:
    """(part, seconds) in a fixed order, with `unaccounted` if the parts fall short of wall_s by more than 1 %."""
    account = (records.result or {}).get("time")
    if not isinstance(account, dict):
        return []
    known = [(part, number(account.get(part)) or 0.0) for part in PURPOSES if part in account]
    known += [(part, number(spent) or 0.0) for part, spent in account.items() if part not in PURPOSES]
    wall = number((records.result or {}).get("wall_s"))
    missing = (wall or 0.0) - sum(spent for _, spent in known)
    if wall and missing > 0.01 * wall:
        known.append(("unaccounted", missing))
    return known


def ranks_of(records: RunRecords) -> list[dict[str, Any]]:
    """Of each worker of the last attempt: node, device, pid, `visible` (CUDA_VISIBLE_DEVICES) and `busy`, the fraction
    of its time that it computed (None if the attempt did not end); [] where nothing was recorded."""
    attempts = records.of_kind("attempt")
    rows = [mapping(row) for row in listed(attempts[-1].get("ranks"))] if attempts else []
    ended = [row for row in records.of_kind("account") if row.get("attempt") == (attempts or [{}])[-1].get("attempt")]
    busy = [number(share) for share in listed(ended[-1].get("busy"))] if ended else []
    return [{**row, "busy": busy[rank] if rank < len(busy) else None} for rank, row in enumerate(rows)]


def batch_copies(records: RunRecords) -> dict[str, Any]:
    """Tensors of batches that the last attempt copied to the devices, and how (`batch_tensors_...`), from the counters
    of its workers; empty if it has not ended."""
    rows = records.of_kind("transfers")
    names = ("tensors", "bytes", "pinned", "non_blocking", "pageable", "other_device")
    found = {} if not rows else {name: rows[-1].get(name) for name in names}
    return {f"batch_{name}_copied" if name in names[:2] else f"batch_tensors_{name}": n for name, n in found.items()}


def history(records: RunRecords) -> list[dict[str, Any]]:
    """One row per epoch (`HISTORY_COLUMNS`), from the first to the last recorded one.

    Losses, gradient norm and peak memory are those of the logged steps; an epoch shorter than the log interval has
    a row with empty cells. `epoch_time_s` counts each logged step time once per step since the previous row.
    """
    train = [row for row in records.train if "epoch" in row]
    if not train:
        return []
    ends: list[float] = [row["step"] for row in train]
    evals: dict[int, Row] = {}
    for row in records.evals:
        before = train[max(0, bisect_right(ends, row["step"]) - 1)]
        evals[before["epoch"]] = row
    members: dict[int, list[tuple[Row, float]]] = {}
    previous = 0
    for row in train:
        members.setdefault(row["epoch"], []).append((row, row["step"] - previous))
        previous = row["step"]
    epochs = range(min(members), max(members) + 1)
    return [_epoch_row(epoch, members.get(epoch, []), evals.get(epoch, {})) for epoch in epochs]


def _epoch_row(epoch: int, members: list[tuple[Row, float]], evaluated: Row) -> dict[str, Any]:
    """`members` are the rows of the epoch, each with the number of steps since the previous row."""
    rows = [row for row, _ in members]
    losses, norms = values(rows, "loss"), values(rows, "grad_norm")
    timed = [time * span for row, span in members if (time := number(row.get("step_time_s"))) is not None]
    return {
        "epoch": epoch,
        "first_step": rows[0]["step"] - members[0][1] + 1 if rows else None,
        "last_step": rows[-1]["step"] if rows else None,
        "train_loss": statistics.fmean(losses) if losses else None,
        "last_train_loss": losses[-1] if losses else None,
        "eval_loss": number(evaluated.get("loss")),
        "accuracy": number(evaluated.get("accuracy")),
        "grad_norm": statistics.fmean(norms) if norms else None,
        "lr": next(iter(reversed(values(rows, "lr"))), None),
        "samples_per_s": percentile(values(rows, "samples_per_s"), 0.5),
        "tokens_per_s": percentile(values(rows, "tokens_per_s"), 0.5),
        "step_time_s": percentile(values(rows, "step_time_s"), 0.5),
        "epoch_time_s": math.fsum(timed) if timed else None,
        "peak_memory_bytes": max(values(rows, "peak_memory_bytes"), default=None),
    }


def device_line(records: RunRecords) -> str:
    """The devices of the run as text: `2 x cpu (Intel Xeon)`."""
    device, workers = records.planned("device"), records.planned("workers")
    names = listed(records.environment.get("gpus")) if device not in (None, "cpu") else []
    model = ", ".join(sorted({str(name) for name in names}))
    model = model or first_text(records.environment, "cpu_model")
    count = f"{workers} x {device or '?'}" if workers else str(device or "unknown")
    return f"{count} ({model})" if model else count


def expert_counts(records: RunRecords) -> tuple[Any, Any]:
    """Experts at the first and the last step; (None, None) for a dense model."""
    counts = values(records.train, "experts")
    planned = number(records.configured("experts.num_experts"))
    if counts:
        return int(counts[0]), int(counts[-1])
    return (int(planned), int(planned)) if planned else (None, None)


def training_spec(records: RunRecords) -> dict[str, Any]:
    """Three panels: loss; accuracy, or otherwise gradient norm; time per epoch, or per step with a single epoch.

    Each series holds the `x` and `y` that are drawn, in full precision.
    """
    accuracy = _lines(train=series(records.train, "accuracy"), eval=series(records.evals, "accuracy"))
    norms = _lines(**{"gradient norm": series(records.train, "grad_norm")})
    second = panel("Accuracy", "accuracy", accuracy) if accuracy else panel("Gradient norm", "global norm", norms)
    epochs = [(row["epoch"], row["epoch_time_s"]) for row in history(records) if row["epoch_time_s"] is not None]
    if len(epochs) > 1:
        third = panel("Epoch time", "seconds", _lines(epoch=epochs), x_label="epoch", kind="bar")
    else:
        third = panel("Step time", "seconds", _lines(step=series(records.train, "step_time_s")))
    losses = _lines(train=series(records.train, "loss"), eval=series(records.evals, "loss"))
    return {"title": records.name, "panels": [panel("Loss", "loss", losses), second, third]}


def _lines(**named: Sequence[tuple[float, float]]) -> list[dict[str, Any]]:
    return [line(label, points) for label, points in named.items() if points]


def throughput(records: RunRecords) -> dict[str, float | None]:
    """Samples and tokens per second: `_median` of the log intervals, which leave out evaluation and saving, and `_run`:
    what all steps of the run trained on, over its whole wall time."""
    samples, tokens = values(records.train, "samples_per_s"), values(records.train, "tokens_per_s")
    medians = percentile(samples, 0.5), percentile(tokens, 0.5)
    wall, trained = number((records.result or {}).get("wall_s")), samples_trained(records)
    whole = trained / wall if wall and trained is not None else None
    each = percentile([of / per for per, of in zip(samples, tokens, strict=False) if per], 0.5)  # tokens of a sample
    return {
        "samples_per_s_median": medians[0],
        "samples_per_s_run": whole,
        "tokens_per_s_median": medians[1],
        "tokens_per_s_run": whole * each if whole is not None and each is not None else None,
    }


def samples_trained(records: RunRecords) -> int | None:
    """Samples in the steps of the run, the shorter last batch of each epoch included; None if the plan is missing."""
    batch = number(records.planned("effective_batch") or records.planned("global_batch_size"))
    if batch is None:
        return None
    steps, per_epoch = last_step(records), number(records.planned("steps_per_epoch"))
    if records.train_rows is None or not per_epoch:
        return int(steps * batch)
    epochs, rest = divmod(steps, int(per_epoch))
    return epochs * min(records.train_rows, int(per_epoch * batch)) + int(rest * batch)  # fewer by data.drop_last


COMPILE_FIELDS = ("achieved", "seconds", "graphs", "graph_breaks", "recompiles", "reasons")
"""Fields of a `compile` event that become figures."""


def compile_figures(records: RunRecords) -> dict[str, Any]:
    """`compile_achieved`, `compile_seconds` (time.compile excludes probes before the first step), graphs, graph breaks,
    recompiles, why something runs eager, and the status of each part; empty if the run does not compile."""
    rows = records.of_kind("compile")
    if not rows:
        return {}
    last = rows[-1]
    figures = {f"compile_{name}": last.get(name) for name in COMPILE_FIELDS}
    figures["compile_reasons"] = "; ".join(map(str, last.get("reasons") or [])) or None
    parts = last.get("parts")
    listed = parts if isinstance(parts, list) else []
    if (gain := compile_gain(records)) is not None:
        wall = sum(spent for _, spent in time_account(records))
        pays = f"step {gain.break_even:,}" if gain.break_even is not None else f"no step: compiled is {gain.verdict}"
        figures |= {
            "compile_took": f"{seconds(gain.compiler_s)} of {seconds(wall)}",
            "eager_step": seconds(gain.eager_s),
            "compiled_step": seconds(gain.compiled_s),
            "compiled_over_eager": f"{gain.ratio:.3g} times",
            "compile_pays_after": pays,
        }
    return {**figures, "compile_parts": {str(part.get("name")): part.get("achieved") for part in listed}}


def summarise(records: RunRecords) -> dict[str, Any]:
    """The figures by name, in the order of the page; None for a figure that the run does not have.

    Times in seconds (`_s`) or milliseconds (`_ms`), memory in bytes; floats have six significant digits.
    """
    result = records.result or {}
    losses, (p50, p95) = values(records.train, "loss"), step_ms(records)
    accuracies = values(records.evals, "accuracy") or values(records.train, "accuracy")
    best_step, best_loss = best_eval(records) or (None, None)
    is_text = records.vocab_size is not None and bool(values(records.train, "tokens_per_s"))
    perplexity = math.exp(best_loss) if is_text and best_loss is not None and best_loss < MOST_LOSS else None
    first = records.train[0] if records.train else {}
    (first_experts, last_experts), loads = expert_counts(records), loads_of(records)
    found: dict[str, Any] = {
        "run": records.name,
        "status": outcome(records).status,
        "reason": failure_reason(records) or None,
        "mode": records.planned("mode"),
        "devices": device_line(records),
        "workers": records.planned("workers"),
        "strategy": records.planned("strategy"),
        "precision": records.planned("precision"),
        "micro_batch": records.planned("micro_batch_size"),
        "accumulation": records.planned("accumulation"),
        "effective_batch": records.planned("effective_batch") or records.planned("global_batch_size"),
        "compile": records.planned("compile") or records.configured("loop.compile"),
        **compile_figures(records),
        "parameters": records.planned("parameters"),
        "experts_first": first_experts,
        "experts_last": last_experts,
        "experts_without_tokens": names_of(dead) if (dead := loads.dead() if loads else []) else None,
        "expert_imbalance": max(loads.imbalance()) if loads else None,
        "attempts": len(records.of_kind("attempt")) or None,
        "steps": last_step(records),
        "epochs": len(history(records)) or None,
        "wall_s": number(result.get("wall_s")),
        **{f"{part}_s": spent for part, spent in time_account(records)},
        "step_ms_p50": p50,
        "step_ms_p95": p95,
        **throughput(records),
        "mfu": percentile(values(records.train, "mfu"), 0.5),
        "peak_memory_bytes": max(values(records.train, "peak_memory_bytes"), default=None),
        **batch_copies(records),
        "first_loss": number(first.get("loss")) if first.get("step") == 1 else None,
        "final_loss": losses[-1] if losses else number(result.get("final_loss")),
        "best_eval_loss": number(result.get("best_eval_loss")) if best_loss is None else best_loss,
        "perplexity": perplexity,
        "best_eval_step": best_step,
        "accuracy": accuracies[-1] if accuracies else None,
        "skipped_steps": number(records.train[-1].get("skipped_steps")) if records.train else None,
    }
    return {name: rounded(value) if isinstance(value, float) else value for name, value in found.items()}


def summary_text(summary: Mapping[str, Any]) -> str:
    """One `name  value` line per figure; strings on one line, everything else as JSON."""
    width = max(len(name) for name in summary) + 2
    lines = []
    for name, value in summary.items():
        cell = " ".join(value.split()) if isinstance(value, str) else "-" if value is None else json.dumps(value)
        lines.append(f"{name:<{width}}{cell}")
    return "\n".join(["raytrain performance summary", "", *lines, ""])
