"""The AMP rules in one place: which dtype computes, which dtype owns the weights, who scales the loss.

Names follow the YAML key `precision.dtype`. `fp32` and `tf32` differ only in how matrix products of float32
operands are computed; `bf16` and `fp16` keep float32 weights and run the forward pass under autocast; `fp64`
is there for verification. Only fp16 has a loss scale, and it has exactly one owner: `LossScale` below.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: What a run falls back to when a precision fails (DESIGN section 7): more mantissa and range each time.
HIGHER_PRECISION = {"fp16": "bf16", "bf16": "fp32", "tf32": "fp32"}


@dataclass(frozen=True)
class PrecisionPolicy:
    """How one run computes.

    Attributes:
        name: value of `precision.dtype`.
        master_dtype: dtype of weights, gradients and optimizer state.
        autocast_dtype: dtype of autocast's matrix products, None where autocast is off.
        matmul: torch's float32 matrix product setting, "highest" (exact float32) or "high" (TF32).
    """

    name: str
    master_dtype: torch.dtype
    autocast_dtype: torch.dtype | None
    matmul: str

    @property
    def scales_loss(self) -> bool:
        """Only float16's narrow exponent needs a loss scale."""
        return self.autocast_dtype is torch.float16

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """The context of a forward pass; nothing at all where autocast is off."""
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.autocast_dtype)


_POLICIES = {
    "fp64": PrecisionPolicy("fp64", torch.float64, None, "highest"),
    "fp32": PrecisionPolicy("fp32", torch.float32, None, "highest"),
    "tf32": PrecisionPolicy("tf32", torch.float32, None, "high"),
    "bf16": PrecisionPolicy("bf16", torch.float32, torch.bfloat16, "highest"),
    "fp16": PrecisionPolicy("fp16", torch.float32, torch.float16, "highest"),
}


def policy_for(name: str) -> PrecisionPolicy:
    """The policy of a resolved `precision.dtype` (never "auto")."""
    return _POLICIES[name]


def apply_matmul(policy: PrecisionPolicy) -> dict[str, Any]:
    """Set torch's process-wide float32 matrix product precision and return what it now is, for the run record."""
    torch.set_float32_matmul_precision(policy.matmul)
    allow = policy.matmul != "highest"
    torch.backends.cudnn.allow_tf32 = allow
    return {
        "float32_matmul": torch.get_float32_matmul_precision(),
        "cuda_matmul_tf32": bool(torch.backends.cuda.matmul.allow_tf32),
        "cudnn_tf32": bool(torch.backends.cudnn.allow_tf32),
        "autocast": None if policy.autocast_dtype is None else str(policy.autocast_dtype).removeprefix("torch."),
        "loss_scale": policy.scales_loss,
    }


class LossScale:
    """The dynamic loss scale of fp16, kept on the device so that a step never waits for it.

    Rule (torch.amp.GradScaler's): start at 2**16, halve after a step with a non-finite gradient, double after
    `growth_interval` good ones. Powers of two, so that scaling and unscaling round nothing.
    """

    def __init__(
        self, device: torch.device, *, enabled: bool, initial: float = 2.0**16, growth_interval: int = 2000
    ) -> None:
        self.enabled = enabled
        self.growth_interval = growth_interval
        self.value = torch.tensor(initial if enabled else 1.0, dtype=torch.float32, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)

    @property
    def inverse(self) -> Tensor:
        """What gradients that are not unscaled yet must be multiplied by."""
        return self.value.reciprocal()

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss * self.value.to(loss.dtype) if self.enabled else loss

    def unscale_(self, gradients: list[Tensor]) -> None:
        """Divide flat gradient buffers by the scale, before their norm is taken."""
        if self.enabled:
            inverse = self.inverse
            for flat in gradients:
                flat.mul_(inverse)

    def update(self, skip: Tensor) -> None:
        """Once a step: halve where it was skipped, double after a long run of good ones. No device read."""
        if not self.enabled:
            return
        good = torch.where(skip, torch.zeros_like(self._good_steps), self._good_steps + 1)
        grow = good >= self.growth_interval
        factor = torch.where(skip, 0.5, torch.where(grow, 2.0, 1.0))
        self.value = self.value * factor
        self._good_steps = torch.where(grow, torch.zeros_like(good), good)

    def state_dict(self) -> dict[str, Any]:
        """Empty unless the run scales its loss: checkpoints of other precisions hold no scaler."""
        return {"scale": self.value, "good_steps": self._good_steps} if self.enabled else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the scale up again; a run that no longer scales its loss ignores it."""
        if self.enabled and state:
            self.value.copy_(state["scale"])
            self._good_steps.copy_(state["good_steps"])
