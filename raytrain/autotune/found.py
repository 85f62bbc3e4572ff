"""What the figures of a search hold for (`tune.found`): the model, the data and the device, as a hash and readable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.environment import package_version
from raytrain.accelerator import device_bytes, device_name
from raytrain.config.decode import encode
from raytrain.config.sections import TuneFound
from raytrain.data.rows.map_style import longest_row
from raytrain.train.session import Session

LOOP_KEYS = ("compile", "activation_checkpointing", "deterministic")
OPTIM_KEYS = ("name", "momentum", "max_grad_norm")
#: Of the `experts` section; not the hosts, since a search builds the experts in its own process.
EXPERT_KEYS = (
    "num_experts", "top_k", "hidden", "activation", "bias", "capacity_factor", "shared_expert", "shared_hidden",
)  # fmt: skip


@dataclass(frozen=True)
class Signature:
    """If the hashes are equal, figures measured for one run hold for the other.

    Attributes:
        hash: of the facts, hexadecimal.
        facts: dotted name -> what JSON can hold.
    """

    hash: str
    facts: dict[str, Any]


def signature_of(session: Session, *, workers: int | None = None) -> Signature:
    """What figures measured in this session depend on; needs no `prepare`.

    Args:
        workers: of the run that the figures are for, if this session is one process of a search.
    """
    job, split, experts = session.job, session.source.train, session.job.builder_sections.get("experts")
    model, longest = job.plan.model_facts, longest_row(split)
    facts = {f"model.{key}": value for key, value in encode(job.model).items()}
    facts |= {f"optim.{key}": getattr(job.optim, key) for key in OPTIM_KEYS}
    facts |= {f"loop.{key}": getattr(job.loop, key) for key in LOOP_KEYS}
    facts |= {f"experts.{key}": getattr(experts, key) for key in EXPERT_KEYS if experts is not None}
    facts |= {
        "parameters": None if model is None else model.parameters,
        "longest_row": split.tokens_per_row or session.source.facts.row_bytes if longest is None else longest.size,
        "device": device_name(session.device),
        "device_bytes": device_bytes(session.device),
        "threads": int(job.planned("threads") or 0),
        "workers": session.workers.world_size if workers is None else workers,
        "version.torch": str(package_version("torch")),
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return Signature(hashlib.sha256(text.encode()).hexdigest()[:16], json.loads(text))


def refusal(found: TuneFound, session: Session) -> str:
    """Why what a search found does not hold for this run, "" where it does. Collective: rank 0's device counts."""

    def compared() -> str:
        now = signature_of(session)
        if now.hash in (found.signature, *found.also):
            return ""
        return f"the search was for something else ({_changed(found.facts, now.facts)})"

    micro, precision = session.job.planned("micro_batch_size"), session.precision
    if (found.precision, found.micro_batch_size) != (precision, micro):
        was = f"{found.precision} and {found.micro_batch_size} rows"
        return f"the search found {was}, this run has {precision} and {micro} rows"
    return session.workers.broadcast_object(compared() if session.workers.rank == 0 else "")


def _changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = [name for name in sorted({*now, *then}) if then.get(name) != now.get(name)]
    return "; ".join(f"{name}: {then.get(name)} -> {now.get(name)}" for name in names) or "an earlier version wrote it"
