"""What a search found for a job (`tune.found`): its signature, and whether it still holds at the start of a run.

It can be out of date in two ways. Its signature differs: then the memory of its micro-batch is measured again. Or the
signature is the same, but a step of the real group needs another time or memory than the trial did: if they differ by
more than a tenth, the measured figures replace the found ones. Either is an event.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from cluster.environment import package_version
from raytrain.accelerator import device_bytes, device_name
from raytrain.autotune.measurement import Candidate, Measurement
from raytrain.autotune.micro_batch import measure_micro_batch, memory_budget, micro_batch_sizes, spare_memory
from raytrain.autotune.step_probe import StepProbe
from raytrain.config.decode import encode
from raytrain.config.sections import LoopConfig, ModelConfig, OptimConfig, TuneFound
from raytrain.data.rows.map_style import longest_row
from raytrain.plan.choice import digits_text, size_text
from raytrain.train.session import Session

LOOP_KEYS = ("compile", "activation_checkpointing", "deterministic")
OPTIM_KEYS = ("name", "momentum", "max_grad_norm")
#: Of the `experts` section; not the hosts, since a search builds the experts in its own process.
EXPERT_KEYS = (
    "num_experts", "top_k", "hidden", "activation", "bias", "capacity_factor", "shared_expert", "shared_hidden",
)  # fmt: skip
VERSIONS = ("raytrain", "torch")
#: A difference up to this fraction of a found figure is noise.
TOLERATED = 0.1
#: Timed passes of the confirmation.
PASSES = 5


@dataclass(frozen=True)
class Signature:
    """If the hashes are equal, figures measured for one run hold for the other.

    Attributes:
        hash: of the facts, hexadecimal.
        facts: dotted name -> what JSON can hold.
    """

    hash: str
    facts: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """A plain mapping; `Signature(**row)` is its inverse."""
        return asdict(self)

    def differences(self, earlier: Mapping[str, Any]) -> list[str]:
        """Each fact that differs, as `name: then -> now`."""
        now = json.loads(json.dumps(self.facts))
        names = sorted({*now, *earlier})
        return [f"{n}: {earlier.get(n)} -> {now.get(n)}" for n in names if earlier.get(n) != now.get(n)]


def make_signature(
    *, model: ModelConfig, optim: OptimConfig, loop: LoopConfig, experts: Any, parameters: int | None,
    longest_row: int | None, device: str, device_bytes: int, threads: int, workers: int,
    versions: Mapping[str, str],
) -> Signature:  # fmt: skip
    """The signature of a run.

    Args:
        experts: the section, None for a model without.
        longest_row: its size (`raytrain.data.rows.map_style`), or that of every row.
        device, device_bytes: name and memory of one worker's device.
        threads: of one worker; 0 on a GPU.
    """
    facts = {f"model.{key}": value for key, value in encode(model).items()}
    facts |= {f"optim.{key}": getattr(optim, key) for key in OPTIM_KEYS}
    facts |= {f"loop.{key}": getattr(loop, key) for key in LOOP_KEYS}
    facts |= {f"experts.{key}": getattr(experts, key) for key in EXPERT_KEYS if experts is not None}
    facts |= {"parameters": parameters, "longest_row": longest_row}
    facts |= {"device": device, "device_bytes": device_bytes, "threads": threads, "workers": workers}
    facts |= {f"version.{name}": version for name, version in versions.items()}
    text = json.dumps(facts, sort_keys=True, default=str)
    return Signature(hashlib.sha256(text.encode()).hexdigest()[:16], json.loads(text))


def signature_of(session: Session, *, workers: int | None = None) -> Signature:
    """What figures measured in this session depend on; needs no `prepare`.

    Args:
        workers: of the run that the figures are for, if this session is one process of a search.
    """
    job, split = session.job, session.source.train
    longest = longest_row(split)
    facts = job.plan.model_facts
    return make_signature(
        model=job.model, optim=job.optim, loop=job.loop,
        experts=job.builder_sections.get("experts"),
        parameters=None if facts is None else facts.parameters,
        longest_row=split.tokens_per_row or session.source.facts.row_bytes if longest is None else longest.size,
        device=device_name(session.device), device_bytes=device_bytes(session.device),
        threads=int(job.planned("threads") or 0),
        workers=session.workers.world_size if workers is None else workers,
        versions={name: str(package_version(name)) for name in VERSIONS},
    )  # fmt: skip


def confirm(probe: StepProbe, found: TuneFound) -> dict[str, Any]:
    """The record of what a search found, compared with this run; its value is the micro-batch to use. Collective.

    Raises:
        RunError: the signature differs, and not even one row fits now.
    """
    session = probe.session
    own = signature_of(session).to_json() if session.workers.rank == 0 else None
    now = Signature(**session.workers.broadcast_object(own))
    micro, precision = int(session.job.planned("micro_batch_size")), session.precision or ""
    if (found.precision, found.micro_batch_size) != (precision, micro):
        was = f"{found.precision} and {found.micro_batch_size} rows"
        return _measured_again(probe, micro, f"the search found {was}, this run has {precision} and {micro} rows")
    if now.hash not in (found.signature, *found.also):
        changed = "; ".join(now.differences(found.facts)) or "another version of its signature"
        return _measured_again(probe, micro, f"the search was for something else ({changed})")
    budget = memory_budget(session)
    measured = probe.measure(Candidate(precision, micro), budget=budget, passes=PASSES, with_memory=True)
    figures = {"peak_bytes": measured.peak_bytes, "budget_bytes": budget, "was": found.model_dump()}
    if measured.outcome == "out_of_memory":
        spare_memory(session, peak=measured.peak_bytes, budget=budget)
        reason = f"it does not fit the real group ({measured.reason})"
        return figures | _measured_again(probe, micro, reason, known=(measured,))
    rows = -(-int(session.job.planned("global_batch_size")) // session.workers.world_size)
    step_s = measured.step_s(rows) if measured.pass_s else None
    off = differences(found, step_s=step_s, peak_bytes=measured.peak_bytes)
    off += [measured.reason] if measured.outcome in ("error", "nonfinite") else []
    reason = "; ".join(off) or "step time and peak memory are within a tenth of what the search found"
    return figures | {"value": micro, "reason": reason, "confirmed": not off, "step_s": step_s}


def _measured_again(
    probe: StepProbe, micro: int, reason: str, *, known: tuple[Measurement, ...] = ()
) -> dict[str, Any]:
    """The largest micro-batch up to this one that fits; the session uses it."""
    session = probe.session
    sizes = micro_batch_sizes(int(session.job.planned("global_batch_size")), session.workers.world_size)
    whole = session.job.loop.micro_batch_size == "whole"
    within = [micro] if whole else sorted({size for size in sizes if size <= micro} | {micro})
    chosen, record = measure_micro_batch(probe, {}, sizes=within, known=known)
    session.use(replace(session.settings, micro_batch=chosen.value))
    text = f"{reason}; its micro-batch was measured again: {chosen.reason}"
    return {"value": chosen.value, "reason": text, "confirmed": False, "micro_batch": record}


def differences(found: TuneFound, *, step_s: float | None, peak_bytes: int | None) -> list[str]:
    """What differs from the found figures by more than a tenth, each with both numbers."""
    off = []
    if step_s is not None and abs(step_s / found.step_s - 1) > TOLERATED:
        now, then = (digits_text(1e3 * spent, 4) for spent in (step_s, found.step_s))
        off.append(f"a step takes {now} ms, the search found {then} ms")
    if peak_bytes and found.peak_bytes and abs(peak_bytes / found.peak_bytes - 1) > TOLERATED:
        off.append(f"its peak is {size_text(peak_bytes)}, the search found {size_text(found.peak_bytes)}")
    return off
