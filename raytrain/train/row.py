"""Builds the logged row of a log interval: one device read, one collective, one `StepRecord`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from raytrain.runs.records import StepRecord, spreads
from raytrain.train.clock import Fetching
from raytrain.train.state import NonFinite
from raytrain.train.step import StepOutput, TrainingStep
from raytrain.trainable import IntervalRow

#: Step times that a row's quantiles are taken from; without rows for long, the times before are only summed.
RECENT_STEPS = 1000


@dataclass
class LogInterval:
    """Sums over the steps since the last logged row.

    Attributes:
        steps: their number. recent_s: seconds of each of the last `RECENT_STEPS`.
        step_s: seconds of all steps. data_s, data_cpu_s: of these, fetching batches (`Fetching`).
        waited_s: of these, waiting for other processes.
        samples, tokens: trained on, by all workers.
        since: when the interval began; moved on by what is not training.
    """

    steps: int = 0
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    step_s: float = 0.0
    data_s: float = 0.0
    data_cpu_s: float = 0.0
    waited_s: float = 0.0
    samples: float = 0.0
    tokens: float = 0.0
    since: float = field(default_factory=lambda: time.perf_counter())

    def add(self, step_s: float, fetching: Fetching, *, waited_s: float, samples: int, tokens: int) -> None:
        """Add one step."""
        self.steps += 1
        self.recent_s.append(step_s)
        self.step_s += step_s
        self.data_s += fetching.seconds
        self.data_cpu_s += fetching.cpu_s
        self.waited_s += waited_s
        self.samples += samples
        self.tokens += tokens


@dataclass(frozen=True)
class LoggedRow:
    """What a log interval leaves behind.

    Attributes:
        record: the row of metrics.jsonl.
        longest_failed: the longest run of failed steps since the last row.
        failed: whether the last step was skipped for a value that is not finite.
        model: what the model reports with it (`Trainable.interval_log`).
    """

    record: StepRecord
    longest_failed: int
    failed: bool
    model: IntervalRow | None


def read_row(
    step: TrainingStep, output: StepOutput, interval: LogInterval, nonfinite: NonFinite, *, number: int, epoch: int,
    skipped_before: int, peak_memory: Callable[[], int], full_rate: Callable[[], float], extra: dict[str, Any],
) -> LoggedRow:  # fmt: skip
    """Read the device once, gather the workers' values once, and build the row. Collective.

    Args:
        number, epoch: of the step.
        skipped_before: steps that were skipped before this loop began.
        full_rate: samples per second of this worker's device at its peak; 0 where unknown.
        extra: further values for the record.
    """
    trainable, scaler = step.trainable, step.scale
    metrics = trainable.log_metrics() if trainable.log_metrics else {}
    log = trainable.interval_log
    named = [output.loss, output.aux_loss, output.norm, output.skip, nonfinite.total, nonfinite.longest, scaler.value]
    named += [*metrics.values(), *(total for total, _ in output.metrics.values())]
    read = torch.stack([v.detach().double().to(output.loss.device) for v in named])
    of_model = read[:0] if log is None else log.device_values().double().to(read.device)
    values = torch.cat([read, of_model]).tolist()
    values, of_model = values[: len(read)], values[len(read) :]
    values, told = values[: 7 + len(metrics)], values[7 + len(metrics) :]
    loss_share, aux_share, norm, skip, skipped, longest, scale = values[:7]
    elapsed = max(time.perf_counter() - interval.since, 1e-9)
    times = sorted(interval.recent_s)
    means = [seconds / interval.steps for seconds in (interval.step_s, interval.data_s, interval.waited_s)]
    own = [*means, float(peak_memory()), full_rate(), loss_share, aux_share]
    own += [] if log is None else log.host_values()
    of_losses, known = dict(zip(output.metrics, told, strict=True)), step.metric_names
    pairs = {name: (value, output.metrics[name][1]) for name, value in of_losses.items()}
    shares = [float(not pairs.keys() <= {*known}), *(part for name in known for part in pairs.get(name, (0.0, 0.0)))]
    workers = step.workers.all_gather_floats([*own, *shares])
    means = _means(step, pairs, [row[len(own) :] for row in workers])
    workers = [row[: len(own)] for row in workers]
    step_s, data_s, waited_s, peak, full, losses, auxes = zip(*(row[:7] for row in workers), strict=True)
    model = None if log is None else log.close(number, of_model, [row[7:] for row in workers])
    record = StepRecord(
        step=number,
        epoch=epoch,
        loss=sum(losses),  # shares of the global mean loss, added in the order of the ranks
        aux_loss=sum(auxes),
        grad_norm=norm,
        lr=output.lr,
        samples_per_s=interval.samples / elapsed,
        tokens_per_s=interval.tokens / elapsed if interval.tokens else None,
        step_time_s=sum(step_s) / len(step_s),
        data_time_s=sum(data_s) / len(data_s),
        peak_memory_bytes=int(max(peak)),
        loss_scale=scale if scaler.enabled else None,
        mfu=interval.samples / elapsed / sum(full) if all(full) else None,
        extra={
            **({**means, "metrics": list(means)} if means else {}),
            **spreads(times, step_s=step_s, data_s=data_s, waited_s=waited_s, peak=peak),
            "data_cpu_share": interval.data_cpu_s / elapsed,
            "skipped_steps": skipped_before + int(skipped),
            **extra,
            **dict(zip(metrics, values[7:], strict=True)),
            **(model.metrics if model else {}),
        },
    )
    failed = bool(skip) and (not scaler.enabled or scale <= 1.0)
    return LoggedRow(record, int(longest), failed, model)


def _means(step: TrainingStep, own: dict[str, tuple[float, float]], workers: list[list[float]]) -> dict[str, float]:
    """The means of what losses have told, over the micro-batches of all workers. Collective where a worker has a name
    that the others may not know yet, as in the first row of a run.

    Args:
        own: name -> (weighted sum, weight) of this worker.
        workers: of each, whether it has such a name, then the same two numbers for each name that was known.
    """
    known = step.metric_names
    shares = [dict(zip(known, zip(row[1::2], row[2::2], strict=True), strict=True)) for row in workers]
    if any(row[0] for row in workers):
        shares = step.workers.all_gather_object(own)
        step.metric_names = tuple(dict.fromkeys([*known, *(name for share in shares for name in share)]))
    sums = {
        name: [sum(parts) for parts in zip(*(share.get(name, (0.0, 0.0)) for share in shares), strict=True)]
        for name in step.metric_names
    }
    return {name: total / of for name, (total, of) in sums.items() if of}
