"""Options of all benches, and the registry of benches. Torch-free."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_type_hints

from pydantic import Field

from cluster.config import Count, NonNegativeInt, Section
from cluster.devices.inventory import local_inventory

BENCHES = (
    "claims", "loop", "checkpoint", "moves", "recovery", "experts", "tune", "infer", "startup", "scaling", "peers",
    "lr", "all",
)  # fmt: skip
"""The modules of jobs/bench that are benches, in the order of `bench --list` and of bench `all`."""


class BenchOptions(Section):
    """Options of one bench; each bench derives its own class, the type of the `options` of its `run`.

    The first paragraph of its docstring is what `bench --list` says.

    Attributes:
        QUICK: values for `--quick`: sizes for a test, too small for meaningful figures.
        IN_ALL: whether bench `all` runs it.
        OUT: default path of its JSON document; None means a new file in runs/bench.
    """

    QUICK: ClassVar[dict[str, Any]] = {}
    IN_ALL: ClassVar[bool] = True
    OUT: ClassVar[str | None] = None

    seed: NonNegativeInt = Field(42, description="of weights, order and generated data")
    blocks: Count = Field(20, description="repetitions that are kept; each runs one block of every arm")
    threads: Count | Literal["auto"] = Field("auto", description="threads of one process, the same for every arm")

    @property
    def thread_count(self) -> int:
        """`threads`; the number of CPUs for "auto"."""
        return self.threads if isinstance(self.threads, int) else local_inventory().cpus


@dataclass(frozen=True)
class Bench:
    """A bench: its options, and `run(options, *, quick, say)`, which returns a `BenchMeasurement`."""

    name: str
    options: type[BenchOptions]
    run: Callable[..., Any]

    @property
    def measures(self) -> str:
        """What it measures, in one line."""
        return " ".join((self.options.__doc__ or "").partition("\n\n")[0].split())


@functools.cache
def find_benches() -> dict[str, Bench]:
    """All benches by name."""
    return {name: _load_bench(name) for name in BENCHES}


def _load_bench(name: str) -> Bench:
    module = importlib.import_module(f"jobs.bench.{name}")
    return Bench(name, get_type_hints(module.run)["options"], module.run)
