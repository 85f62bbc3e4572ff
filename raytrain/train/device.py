"""A worker's device as the plan selects it, determinism, random generators, and torch's settings in its process.

Applied once, when a session is built; expert hosts apply the same settings.
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch
from torch import nn

from raytrain.accelerator import gpu_module, on_gpu
from raytrain.config.messages import abbreviated
from raytrain.errors import DevicePlacementError

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""cuBLAS reads it when it is first used; deterministic products need it."""


def need_data(module: nn.Module) -> None:
    """Check that every parameter and buffer has values, before a module moves to its device. Raises
    DevicePlacementError: tensors were left on the meta device; the message names the first five."""
    named = [*module.named_parameters(), *module.named_buffers()]
    empty = [name for name, tensor in named if tensor.is_meta]
    if empty:
        raise DevicePlacementError(
            f"{abbreviated(empty, 5)}: on the meta device, without values; model.builder has to initialise them"
        )


def set_determinism(*, deterministic: bool) -> None:
    """Apply `loop.deterministic`: bitwise reproducible kernels, which may be slower; CPU kernels always are."""
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # the call imports torch's compiler
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    if deterministic:
        torch.backends.cudnn.benchmark = False
        os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
        # torch excludes NVLink SHARP where it constructs a group, which Ray does earlier; NCCL reads it later
        os.environ.setdefault("NCCL_ALGO", "^NVLS")


def seed_everything(seed: int) -> None:
    """Seed the generators that a model or a dataset may use: Python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of every generator as tensors and plain numbers (no pickle), for the checkpoint."""
    numpy_state: Any = np.random.get_state(legacy=False)
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": {
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "python": {"version": version, "state": torch.tensor(internal, dtype=torch.int64), "gauss": gauss},
    }
    if on_gpu(device):
        state[device.type] = gpu_module(device).get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"].to(torch.uint8))
    kept = state["numpy"]
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": kept["key"].numpy().astype(np.uint32), "pos": kept["pos"]},
            "has_gauss": kept["has_gauss"],
            "gauss": kept["gauss"],
        }
    )
    python = state["python"]
    random.setstate((python["version"], tuple(python["state"].tolist()), python["gauss"]))
    if on_gpu(device) and device.type in state:
        gpu_module(device).set_rng_state(state[device.type].to(torch.uint8), device)


# ---------------------------------------------------------------- process settings


def process_settings() -> dict[str, Any]:
    """What changes the results or the speed of a process and is global to it; threads and memory limits are not here,
    since each process has its own."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cublas_workspace": os.environ.get(CUBLAS_WORKSPACE),
        "matmul": torch.get_float32_matmul_precision(),
        "cudnn_tf32": bool(torch.backends.cudnn.allow_tf32),
        "cudnn_deterministic": bool(torch.backends.cudnn.deterministic),
        "cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
        "seed": torch.initial_seed(),
    }


def apply_process_settings(settings: dict[str, Any]) -> None:
    if torch.are_deterministic_algorithms_enabled() != settings["deterministic"]:  # the call imports torch's compiler
        torch.use_deterministic_algorithms(settings["deterministic"])
    if settings["cublas_workspace"] is not None:
        os.environ[CUBLAS_WORKSPACE] = settings["cublas_workspace"]
    torch.set_float32_matmul_precision(settings["matmul"])
    torch.backends.cudnn.allow_tf32 = settings["cudnn_tf32"]
    torch.backends.cudnn.deterministic = settings["cudnn_deterministic"]
    torch.backends.cudnn.benchmark = settings["cudnn_benchmark"]
    seed_everything(settings["seed"])


# ---------------------------------------------------------------- cudnn


#: Each new shape costs a search of a few hundred milliseconds; with more shapes than this they are not constant.
SHAPES_AT_MOST = 8


class CudnnBenchmark:
    """Controls `torch.backends.cudnn.benchmark` and counts the shapes of the batches. `asked`: `loop.cudnn_benchmark`:
    true, false, or auto (on for a GPU, until there are too many shapes; not with `loop.deterministic`, which requires
    the same kernels every time)."""

    def __init__(self, asked: bool | str, *, device: torch.device, deterministic: bool) -> None:
        on = on_gpu(device) and not deterministic if asked == "auto" else bool(asked)
        torch.backends.cudnn.benchmark = on
        self._counting = on and asked == "auto"
        self._shapes: set[tuple[Any, ...]] = set()

    def observe(self, batch: dict[str, Any]) -> dict[str, Any] | None:
        """Count the shapes of a batch; return the fields of an event if this batch turns the search off."""
        if not self._counting:
            return None
        self._shapes.add(tuple((name, tuple(v.shape)) for name, v in batch.items() if isinstance(v, torch.Tensor)))
        if len(self._shapes) <= SHAPES_AT_MOST:
            return None
        torch.backends.cudnn.benchmark = self._counting = False
        return {"value": False, "shapes": len(self._shapes), "reason": f"more than {SHAPES_AT_MOST} shapes of batches"}
