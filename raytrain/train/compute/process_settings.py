"""The settings of torch that a worker applies to its process, for processes that compute a part of its passes."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

import torch

from raytrain.train.device import seed_everything

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""cuBLAS reads it when it is first used; deterministic products need it."""


@dataclass(frozen=True)
class ProcessSettings:
    """What changes the results or the speed of a process and is global to it; threads and memory limits are not here,
    since each process has its own.

    Attributes:
        deterministic, cublas_workspace: of `loop.deterministic`.
        matmul: "highest", "high" or "medium"; with cudnn_tf32 of `precision.dtype`.
        cudnn_deterministic, cudnn_benchmark: of `loop.deterministic` and `loop.cudnn_benchmark`.
        seed: the one that this process was seeded with last.
    """

    deterministic: bool
    cublas_workspace: str | None
    matmul: str
    cudnn_tf32: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool
    seed: int

    @classmethod
    def current(cls) -> ProcessSettings:
        """Those of this process."""
        return cls(
            deterministic=torch.are_deterministic_algorithms_enabled(),
            cublas_workspace=os.environ.get(CUBLAS_WORKSPACE),
            matmul=torch.get_float32_matmul_precision(),
            cudnn_tf32=bool(torch.backends.cudnn.allow_tf32),
            cudnn_deterministic=bool(torch.backends.cudnn.deterministic),
            cudnn_benchmark=bool(torch.backends.cudnn.benchmark),
            seed=torch.initial_seed(),
        )

    def apply(self) -> None:
        """Set them in this process."""
        if torch.are_deterministic_algorithms_enabled() != self.deterministic:  # the call imports torch's compiler
            torch.use_deterministic_algorithms(self.deterministic)
        if self.cublas_workspace is not None:
            os.environ[CUBLAS_WORKSPACE] = self.cublas_workspace
        torch.set_float32_matmul_precision(self.matmul)
        torch.backends.cudnn.allow_tf32 = self.cudnn_tf32
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        seed_everything(self.seed)

    def to_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return asdict(self)
