"""Mixed-precision policies: the dtypes of computation and of weights, and the loss scale.

Names follow the YAML key `precision.dtype`. `fp32` and `tf32` differ only in how matrix products of float32
operands are computed; `bf16` and `fp16` keep float32 weights and run the forward pass under autocast; `fp64`
is for verification. Only fp16 has a loss scale, owned by `LossScale`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: The fallback of each precision when it fails (DESIGN section 7), with more mantissa or range.
HIGHER_PRECISION = {"fp16": "bf16", "bf16": "fp32", "tf32": "fp32"}


@dataclass(frozen=True)
class PrecisionPolicy:
    """The dtypes of a run's computation.

    Attributes:
        name: value of `precision.dtype`.
        master_dtype: dtype of weights, gradients and optimizer state.
        autocast_dtype: dtype of autocast's matrix products; None if autocast is off.
        matmul: torch's float32 matrix product setting, "highest" (exact float32) or "high" (TF32).
    """

    name: str
    master_dtype: torch.dtype
    autocast_dtype: torch.dtype | None
    matmul: str

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled: only the narrow exponent of float16 needs it."""
        return self.autocast_dtype is torch.float16

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """The autocast context of a forward pass; a null context if autocast is off."""
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
    """Set torch's process-wide float32 matrix product precision; return the resulting settings for the run record."""
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
    """Dynamic loss scale of fp16, kept on the device so that a step never waits for it.

    The rule is that of torch.amp.GradScaler: start at 2**16, halve after a step with a non-finite gradient, double
    after `growth_interval` finite steps. Powers of two make scaling and unscaling exact.
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
        """The factor that unscales gradients."""
        return self.value.reciprocal()

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, on which to call backward."""
        return loss * self.value.to(loss.dtype) if self.enabled else loss

    def update(self, skip: Tensor) -> None:
        """Update the scale after a step: halve after a skip, double after `growth_interval` steps. No device read."""
        if not self.enabled:
            return
        good = torch.where(skip, torch.zeros_like(self._good_steps), self._good_steps + 1)
        grow = good >= self.growth_interval
        factor = torch.where(skip, 0.5, torch.where(grow, 2.0, 1.0))
        self.value = self.value * factor
        self._good_steps = torch.where(grow, torch.zeros_like(good), good)

    def state_dict(self) -> dict[str, Any]:
        """The state of the scale; empty unless enabled, since checkpoints of other precisions contain no scaler."""
        return {"scale": self.value, "good_steps": self._good_steps} if self.enabled else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale; ignored if the run no longer scales its loss."""
        if self.enabled and state:
            self.value.copy_(state["scale"])
            self._good_steps.copy_(state["good_steps"])
