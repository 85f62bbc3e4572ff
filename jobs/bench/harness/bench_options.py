"""What every bench can be asked. Torch-free."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from cluster.config import Count, NonNegativeInt, Section


class BenchOptions(Section):
    """Keys of one bench.

    `QUICK` are its values under `--quick`, sized for a test and not for a figure; `IN_ALL`: it is part of bench `all`;
    `OUT`: where its document goes by default, None for a new file in runs/bench.
    """

    QUICK: ClassVar[dict[str, Any]] = {}
    IN_ALL: ClassVar[bool] = True
    OUT: ClassVar[str | None] = None

    seed: NonNegativeInt = Field(42, description="of weights, order and generated data")
    blocks: Count = Field(20, description="repetitions that are kept; each runs one block of every arm")
    threads: Count | Literal["auto"] = Field("auto", description="threads of one process, the same for every arm")
