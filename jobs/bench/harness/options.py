"""Options of all benches, and the registry of benches, which are found by their modules. Torch-free."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_type_hints

from pydantic import Field

from cluster.config import Count, NonNegativeInt, Section
from cluster.devices.inventory import local_inventory

FOLDER = Path(__file__).parents[1]
ORDER = (
    "loop", "precision", "checkpoint", "memory", "attention", "compile", "placement", "moves", "recovery", "restart",
    "experts", "data", "clone", "pinned", "tune", "infer", "scaling", "peers", "lr", "all",
)  # fmt: skip
"""Order of `bench --list` and of bench `all`; benches that are not listed come last."""


class BenchOptions(Section):
    """Options of one bench; each bench derives its own class, the type of the `options` of its `run`.

    Attributes:
        MEASURES: one line for `bench --list`.
        QUICK: values for `--quick`: sizes for a test, too small for meaningful figures.
        IN_ALL: whether bench `all` runs it.
        OUT: default path of its JSON document; None means a new file in runs/bench.
    """

    MEASURES: ClassVar[str] = ""
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
        return self.options.MEASURES


@functools.cache
def find_benches() -> dict[str, Bench]:
    """All benches by name: the modules in the folders of jobs/bench, except the harness and modules with an underscore
    in their name. Such a module belongs to a bench, as `experts_member` to `experts`."""
    paths = [*FOLDER.glob("*.py"), *(path for path in FOLDER.glob("*/*.py") if path.parent.name != "harness")]
    found = [_load_bench(path) for path in paths if "_" not in path.stem]
    found.sort(key=lambda bench: (not bench.options.IN_ALL, _rank(bench.name), bench.name))
    return {bench.name: bench for bench in found}


def _load_bench(path: Path) -> Bench:
    module = importlib.import_module(".".join(("jobs", "bench", *path.relative_to(FOLDER).with_suffix("").parts)))
    return Bench(path.stem, get_type_hints(module.run)["options"], module.run)


def _rank(name: str) -> int:
    return ORDER.index(name) if name in ORDER else len(ORDER)
