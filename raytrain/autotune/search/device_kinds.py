"""Combines the decisions for several kinds of devices, each of which was searched by itself. Pure, without torch.

All workers of a run compute in one precision, and rows are assigned in micro-batches: one has to fit the smallest
device, and `scale.shares: auto` assigns more of them to the faster ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from raytrain.autotune.search.batch_size import BatchDecision
from raytrain.autotune.search.measurement import Candidate
from raytrain.errors import RunError
from raytrain.plan.choice import Resolved
from raytrain.plan.text import figure_text


@dataclass(frozen=True)
class KindsDecision:
    """The candidate for all kinds.

    Attributes:
        decisions: kind -> what its own search decided.
        candidate: precision and micro-batch size.
        binding: the kind with the smallest best size in that precision, which is the candidate's.
        rows_per_s: of all workers together, each at its own kind's best size.
    """

    decisions: Mapping[str, BatchDecision]
    candidate: Candidate
    binding: str
    precision: Resolved
    micro_batch_size: Resolved
    rows_per_s: float


def choose_for_all(
    decisions: Mapping[str, BatchDecision], *, workers: Mapping[str, int], reference: str, refused: Collection[str] = ()
) -> KindsDecision:
    """The precision in which all workers together are fastest, and the least of the kinds' best sizes in it.

    A precision other than the reference is considered if some kind chose it and no kind's gate refused it.

    Args:
        decisions: kind -> what its own search decided.
        workers: kind -> how many of the run's workers use it; devices that the run does not use do not count.
        refused: precisions that a gate has refused on some kind.

    Raises:
        RunError: there is no precision that runs on every kind.
    """
    if len(decisions) == 1:
        ((kind, only),) = decisions.items()
        speed = workers[kind] * only.rows_per_s
        return KindsDecision(decisions, only.candidate, kind, only.precision, only.micro_batch_size, speed)
    chosen_anywhere = {one.candidate.precision for one in decisions.values()}
    everywhere = set.intersection(*(set(one.knees) for one in decisions.values()))
    allowed = [
        name for name in sorted(everywhere) if name == reference or (name in chosen_anywhere and name not in refused)
    ]
    if not allowed:
        kinds_text = "; ".join(f"{kind}: {', '.join(one.knees)}" for kind, one in decisions.items())
        raise RunError(f"no precision runs on every kind of device ({kinds_text}): scale.accelerator picks one kind")
    totals = {name: sum(workers[kind] * _speed(one, name) for kind, one in decisions.items()) for name in allowed}
    precision = max(allowed, key=lambda name: (totals[name], name == reference))
    sizes = {kind: one.knees[precision] for kind, one in decisions.items()}
    binding = min(sizes, key=lambda kind: sizes[kind])
    speeds = ", ".join(
        f"{name} {figure_text(total)} rows/s" for name, total in sorted(totals.items(), key=lambda one: -one[1])
    )
    best = ", ".join(f"{kind} {size}" for kind, size in sizes.items())
    return KindsDecision(
        decisions=decisions,
        candidate=Candidate(precision, sizes[binding]),
        binding=binding,
        precision=Resolved(precision, f"of all {sum(workers.values())} workers together: {speeds}"),
        micro_batch_size=Resolved(sizes[binding], f"fits every kind (best of each: {best}); scale.shares gives the"
                                  " faster ones more"),
        rows_per_s=totals[precision],
    )  # fmt: skip


def _speed(decision: BatchDecision, precision: str) -> float:
    """Rows per second of one worker of this kind in a precision, at its best size there."""
    size = decision.knees[precision]
    return next(
        row.rows_per_s or 0.0 for row in decision.table if (row.precision, row.micro_batch_size) == (precision, size)
    )
