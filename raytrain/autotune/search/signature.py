"""What the figures of a search depend on: a hash to compare, and the facts that it was made from. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from raytrain.config.decode import encode
from raytrain.config.sections import LoopConfig, ModelConfig, OptimConfig

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
        longest_row: its size (`raytrain.data.rows.longest`), or that of every row.
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
