"""The sections about machines, and `Section`, the base class of every section of a job.

The annotations define ranges, allowed values and whether null is valid. `raytrain.config.decode` and `--help` derive
the expected values of a key from them, so that there is no second table to keep in sync.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """One section of a job: strict types, no unknown keys, frozen once read."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True
    )


Count = Annotated[int, Field(ge=1)]
"""An integer of at least one."""

NonNegativeInt = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
"""A fraction from 0 up to, but excluding, 1."""

Text = Annotated[str, Field(min_length=1)]


class TelemetryConfig(Section):
    """What is monitored while a job runs; none of these keys affects the training itself."""

    every: NonNegative = Field(default=5.0, description="seconds between two samples of a node; 0: none")
    observers: list[Text] = Field(
        default=[],
        examples=[["my_mod:Observer"]],
        description="module:Class of user-defined observers, called on rank 0",
    )
    tensorboard: bool = Field(default=True, description="write TensorBoard files in addition to metrics.jsonl")
    log_memory: bool = Field(
        default=False, description="print the memory in use on rank 0's device with each train row (loop.log_every)"
    )


class ClusterConfig(Section):
    """The machines that the job runs on, and how much of their memory it may use."""

    address: Text | None = Field(
        default=None,
        examples=["10.0.0.4:6379"],
        description="a running Ray cluster (of several addresses the first that answers); null starts a private one",
    )
    interface: Text | None = Field(
        default=None, examples=["eth0"], description="network interface for the collectives; null: the one Ray uses"
    )
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.9, description="fraction of a device's memory that the job may use"
    )
    memory_limit: Count | None = Field(
        default=None,
        examples=[2147483648],
        description="bytes of device memory, or of RAM on a CPU, that one worker may use, where allocations beyond it "
        "fail; null: the fraction",
    )
    memory_soft_limit: Count | None = Field(
        default=None,
        examples=[1073741824],
        description="bytes as for memory_limit above which a warning names the largest tensors; null: 90 % of its room",
    )
    wanted_memory: Count | None = Field(
        default=None,
        examples=[17179869184],
        description="bytes of each GPU, or of a CPU node, that the job is meant for; less is a warning",
    )
    wanted_capability: Positive | None = Field(
        default=None,
        examples=[8.0],
        description="compute capability that the job is meant for, such as 9.0; less is a warning",
    )
