"""Plan rules about data: where its rows are kept, and how many processes read them.

Pure: sections and facts in, choices out. Choices that need facts not known yet are `Deferred`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.wording import counted
from raytrain.config.sections import DataConfig
from raytrain.errors import InputError
from raytrain.plan.choice import Choice, Deferred, Resolved
from raytrain.plan.facts import DataFacts
from raytrain.plan.text import size_text

AFTER_DATA = "read from the data at start"

OVERHEAD = 1.1
"""Factor by which rows on a device take more than their bytes: alignment, and the gathered batch."""

SPARE = 0.9
"""Fraction of a device's remaining memory that rows may take, since the rest is only estimated."""

LEAST_PART = 0.05
"""A smaller fraction of the rows is not worth keeping on the device."""

VARIES = "items differ from one reading to the next, as with random transforms"
KEEPS_RANDOM = "data.storage=stream reads them in every epoch"

SLOW_S = 2.0
"""Reading all items before the first step is avoided where it takes longer than this, and the run needs only some."""

MOST_LOADERS = 4
"""The most loader processes per worker that `auto` chooses."""


@dataclass(frozen=True)
class DataRoom:
    """The memory of a worker that is left for data.

    Attributes:
        allowed: bytes that a worker may use of its device, or of its node's memory; None where unknown.
        model_bytes: planned bytes of weights, gradients, optimizer state and activations; None if the model is
            unknown.
        whole: whether `model_bytes` includes the activations.
        on_gpu: whether it is a GPU's memory.
    """

    allowed: int | None
    model_bytes: int | None
    whole: bool
    on_gpu: bool

    @property
    def certain(self) -> int | None:
        """The most bytes that data can take."""
        return None if self.allowed is None else self.allowed - (self.model_bytes or 0)

    @property
    def left(self) -> int:
        """Bytes that `auto` gives to data; half of the remaining memory where the activations are unknown."""
        return max(0, int((self.certain or 0) * (SPARE if self.whole else 0.5)))

    def text(self) -> str:
        """`left` and how it is computed."""
        if self.model_bytes is None:
            return (
                f"{size_text(self.left)}, half of the memory of a worker, since the size of the model is not known yet"
            )
        part = f"{size_text(self.left)}: {'90' if self.whole else '50'} % of what is left"
        return f"{part} of {size_text(self.allowed or 0)} after {size_text(self.model_bytes)} for the model"


def choose_storage(
    data: DataConfig, *, facts: DataFacts | None, room: DataRoom, loaders: Choice, warnings: list[str],
    reads: int | None = None,
) -> dict[str, Choice]:  # fmt: skip
    """`storage`: resident (the full split on the device), partial (its first `resident_rows`), pinned (batches copied
    ahead of time through pinned memory) or stream (each batch moved on demand).

    Args:
        loaders: processes that would read streamed rows.
        reads: rows that the run trains on, each counted as often as it is used; None: at least all of them once.
    Raises:
        InputError: `resident` is configured, and the rows cannot fit.
    """
    requested = data.storage
    if requested == "pinned" and not room.on_gpu:
        chosen = _by_bytes(facts, room, loaders=loaders, reads=reads)
        why = "data.storage pinned needs a GPU, and there is none"
        value = chosen["storage"].value_or("the result of auto")
        warnings.append(f"{why}: {value} instead")
        return {**chosen, "storage": _because(chosen["storage"], why)}
    if requested == "resident" and facts is not None:
        _check_fits(facts, room)
        if facts.varies:
            warnings.append(f"data.storage resident keeps the first reading of each item, and {VARIES}: {KEEPS_RANDOM}")
    if requested != "auto":
        return {"storage": Resolved(requested, "data.storage")}
    return _by_bytes(facts, room, loaders=loaders, reads=reads)


def _because(choice: Choice, why: str) -> Choice:
    if isinstance(choice, Resolved):
        return Resolved(choice.value, f"{why}; {choice.reason}")
    return Deferred(choice.how, choice.bounds, why)


def _by_bytes(facts: DataFacts | None, room: DataRoom, *, loaders: Choice, reads: int | None) -> dict[str, Choice]:
    streamed = "pinned" if room.on_gpu else "stream"
    if facts is None:
        return {"storage": Deferred(AFTER_DATA, ("resident", streamed))}
    if why := _reason_to_stream(facts, reads):
        return {"storage": Resolved(streamed, why)}
    need = int(facts.total_bytes * OVERHEAD)
    if room.allowed is None:
        reason = f"{size_text(need)} of data; the device's free memory is unknown"
        return {"storage": Resolved(streamed, reason)}
    numbers = f"{size_text(need)} of data, room for {room.text()}"
    if need < room.left:
        return {"storage": Resolved("resident", numbers)}
    rows = min(facts.train_rows, int(room.left / (facts.row_bytes * OVERHEAD))) if facts.row_bytes else 0
    read_beside = facts.kind == "items" and loaders.value_or(0)
    can_part = (facts.kind == "items" and not read_beside) or (facts.kind == "memory" and room.on_gpu)
    if not can_part or rows < LEAST_PART * facts.train_rows:
        return {"storage": Resolved(streamed, numbers)}
    share = rows / facts.train_rows
    return {
        "storage": Resolved("partial", numbers),
        "resident_rows": Resolved(rows, f"{share:.0%} of {facts.train_rows:,} rows fit; the others are streamed"),
    }


def _reason_to_stream(facts: DataFacts, reads: int | None) -> str:
    """Why items are read when a step needs them although all would fit; "" if they may be kept."""
    if facts.varies:
        return VARIES
    whole_s = (facts.item_s or 0.0) * (facts.train_rows + facts.eval_rows)
    if reads is not None and reads < facts.train_rows and whole_s > SLOW_S:
        return f"the run trains on {reads:,} of {facts.train_rows:,} rows, and to read all takes about {whole_s:.0f} s"
    return ""


def _check_fits(facts: DataFacts, room: DataRoom) -> None:
    need, most = int(facts.total_bytes * OVERHEAD), room.certain
    if most is None or need <= most:
        return
    model_part = (
        ""
        if room.model_bytes is None
        else f", {size_text(room.model_bytes)} of it for weights, optimizer and activations"
    )
    raise InputError(
        "data.storage", got=f"resident for {size_text(need)} of data",
        expected=f"at most {size_text(max(0, most))}: a worker may use {size_text(room.allowed or 0)}{model_part}",
        remedy="auto keeps what fits and streams the rest; stream keeps nothing",
    )  # fmt: skip


def resident_bytes(facts: DataFacts | None, choices: Mapping[str, Choice]) -> int:
    """Bytes that the chosen storage keeps on the device of each worker."""
    storage, rows = choices["storage"], choices.get("resident_rows")
    if facts is None or not isinstance(storage, Resolved):
        return 0
    if storage.value == "partial" and isinstance(rows, Resolved):
        return rows.value * facts.row_bytes
    return facts.total_bytes if storage.value == "resident" else 0


def choose_loaders(
    data: DataConfig, *, facts: DataFacts | None, counts: Mapping[str, int], cores: Mapping[str, int],
    warnings: list[str],
) -> Choice:  # fmt: skip
    """Processes of each worker that read a dataset item by item.

    `auto` leaves one core of each node to training: no process on one core, one on two cores.

    Args:
        counts: workers of each node.
        cores: of each node.
    """
    requested = data.loader_workers
    if requested == 0:
        return Resolved(0, "data.loader_workers")
    if facts is None:
        return Deferred(AFTER_DATA) if requested == "auto" else Resolved(requested, "data.loader_workers")
    if facts.kind != "items" or data.storage == "resident":
        why = "rows are in memory" if facts.kind == "memory" else "row groups are read by a thread"
        why = "every item is read once, before the first step" if facts.kind == "items" else why
        if requested != "auto":
            warnings.append(f"data.loader_workers {requested} is not needed: {why}")
        return Resolved(0, why)
    if requested != "auto":
        host = min(counts, key=lambda name: cores[name] - requested * counts[name])
        if requested * counts[host] > cores[host] - 1:
            warnings.append(f"{requested * counts[host]} loader processes on the {cores[host]} cores of {host}")
        return Resolved(requested, "data.loader_workers")
    host = min(counts, key=lambda name: (cores[name] - 1) / counts[name])
    spare = max(0, (cores[host] - 1) // counts[host])
    reason = f"{cores[host]} cores less one / {counted(counts[host], 'worker')} on {host}, at most {MOST_LOADERS}"
    return Resolved(min(MOST_LOADERS, spare), reason)
