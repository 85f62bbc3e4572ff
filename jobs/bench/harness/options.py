"""Options that every bench takes, and the registry of benches, which are found by their modules. Torch-free."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from cluster.config import Count, NonNegativeInt, Section

FOLDER = Path(__file__).parents[1]
ORDER = (
    "loop", "precision", "checkpoint", "memory", "attention", "compile", "placement", "moves", "unequal", "overlap",
    "recovery", "oom", "experts", "data", "clone", "pinned", "tune", "peers", "lr", "all",
)  # fmt: skip
"""Order of `bench --list` and of bench `all`; a bench that is not named here comes after the others of its kind."""


class BenchOptions(Section):
    """Options of one bench; a bench derives its own class from it, next to its `run`.

    Attributes:
        MEASURES: one line for `bench --list`.
        QUICK: values under `--quick`, sized for a test; their figures mean nothing.
        IN_ALL: whether bench `all` runs it.
        OUT: default path of its JSON document; None is a new file in runs/bench.
    """

    MEASURES: ClassVar[str] = ""
    QUICK: ClassVar[dict[str, Any]] = {}
    IN_ALL: ClassVar[bool] = True
    OUT: ClassVar[str | None] = None

    seed: NonNegativeInt = Field(42, description="of weights, order and generated data")
    blocks: Count = Field(20, description="repetitions that are kept; each runs one block of every arm")
    threads: Count | Literal["auto"] = Field("auto", description="threads of one process, the same for every arm")


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
    """All benches by name: the modules of one word in the folders of jobs/bench, but for the harness. A module that
    belongs to a bench has its name and an underscore, such as `experts_member`."""
    paths = [*FOLDER.glob("*.py"), *(path for path in FOLDER.glob("*/*.py") if path.parent.name != "harness")]
    found = [_load_bench(path) for path in paths if "_" not in path.stem]
    found.sort(key=lambda bench: (not bench.options.IN_ALL, _rank(bench.name), bench.name))
    return {bench.name: bench for bench in found}


def _load_bench(path: Path) -> Bench:
    module = importlib.import_module(".".join(("jobs", "bench", *path.relative_to(FOLDER).with_suffix("").parts)))
    (options,) = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, BenchOptions) and kind.__module__ == module.__name__
    ]
    return Bench(path.stem, options, module.run)


def _rank(name: str) -> int:
    return ORDER.index(name) if name in ORDER else len(ORDER)
