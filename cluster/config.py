"""Sections that belong to machines, and `Section`, what every section of a job is.

Ranges, words and null stand in the annotations, so that `raytrain.config.decode` can say what a key expects, and
`--help` can list it, without a second table that would drift away from this one.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """One section of a job: strict types, no unknown keys, frozen once read."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
    )


Count = Annotated[int, Field(ge=1)]
"""How many of something there are: at least one."""

NonNegativeInt = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
"""A part of a whole, never all of it."""

Text = Annotated[str, Field(min_length=1)]


class TelemetryConfig(Section):
    """What is watched while a job runs; nothing here can change the run."""

    every: Positive = Field(default=5.0, description="seconds between two samples of a node")
    observers: list[Text] = Field(default=[], description="module:Class of your own observers, called on rank 0")
    tensorboard: bool = Field(default=True, description="write TensorBoard files beside metrics.jsonl")


class ClusterConfig(Section):
    """Which machines the job runs on, and how much of them it may take."""

    address: Text | None = Field(default=None, description="a running Ray cluster; null starts a private local one")
    interface: Text | None = Field(default=None, description="network interface for the collectives; null finds it")
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.9, description="part of a device's memory the job may take"
    )
    memory_limit: Count | None = Field(
        default=None, description="bytes of its device, or of memory on a CPU, one worker may take; null: the fraction"
    )
