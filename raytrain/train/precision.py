"""Mixed precision: dtypes of computation and weights, the loss scale, and layers that compute in another format.

A session prepares its model with a policy; `auto` may change the policy once, at the start, or after a failure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raytrain.config.messages import near_names
from raytrain.data.rows.residency import rebuild
from raytrain.errors import InputError
from raytrain.models.blocks import called_modules

#: The fallback of each precision when it fails, with more mantissa or range.
HIGHER_PRECISION = {"fp16": "bf16", "bf16": "fp32", "tf32": "fp32"}


@dataclass(frozen=True)
class PrecisionPolicy:
    """The dtypes of a run's computation."""

    name: str  # value of `precision.dtype`
    master_dtype: torch.dtype  # of weights, gradients and optimizer state
    autocast_dtype: torch.dtype | None  # of autocast's matrix products; None if autocast is off
    matmul: str  # torch's float32 matrix products: "highest" (exact float32) or "high" (TF32)

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
        """Empty unless enabled: checkpoints of other precisions contain no scaler."""
        return {"scale": self.value, "good_steps": self._good_steps} if self.enabled else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale; ignored if the run no longer scales its loss."""
        if self.enabled and state:
            self.value.copy_(state["scale"])
            self._good_steps.copy_(state["good_steps"])


# ---------------------------------------------------------------- layers


KEY = "precision.fp32_layers"
HALF = (torch.bfloat16, torch.float16)


class LayerPrecision:
    """Sets the format in which individual layers of a module, named as in `named_modules`, compute."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._kind = module, device.type
        self._kept: dict[nn.Module, Any] = {}

    def keep(self, names: Sequence[str]) -> None:
        """Make exactly these layers compute in fp32 when autocast is on. Raises InputError: the model has no layer of
        that name."""
        put_back(self._kept)
        self._kept = {}
        for part in parts_named(self._module, names):
            self._kept[part] = part.__dict__.get("forward")
            part.forward = _InFp32(part.forward, self._kind)

    @contextlib.contextmanager
    def alone_in(self, name: str, dtype: torch.dtype) -> Iterator[None]:
        """Context in which only this layer computes under autocast in `dtype`; autocast must otherwise be off."""
        before = {part: part.__dict__.get("forward") for part in parts_named(self._module, [name])}
        for part in before:
            part.forward = _InHalf(part.forward, self._kind, dtype)
        try:
            yield
        finally:
            put_back(before)


def parts_named(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The submodules with these names; a list of modules, which is never called itself, stands for its elements. Raises
    InputError: the model has no module of that name; the message suggests the nearest names."""
    known = {name: part for name, part in module.named_modules(remove_duplicate=False) if name}
    found: dict[nn.Module, None] = {}
    for name in names:
        if name not in known:
            remedy = near_names(name, list(known), otherwise=list(known))
            raise InputError(KEY, got=name, expected="names of the model's modules", remedy=remedy)
        found |= dict.fromkeys(part for _, part in called_modules(name, known[name]))
    return list(found)


def layers_of(module: nn.Module, *, blocks: str | None, most: int) -> list[str]:
    """Names of the layers that own parameters, in model order, without layers nested in another of them. `blocks`: name
    of the list of repeated blocks. `most`: with more layers than this, each block counts as one layer."""
    named = [(name, next(part.parameters(recurse=False), None)) for name, part in module.named_modules() if name]
    own = [name for name, parameter in named if parameter is not None]
    if len(own) > most and blocks is not None:
        within = [f"{blocks}.{name}" for name, _ in module.get_submodule(blocks).named_children()]
        own = [name for name in own if not name.startswith(f"{blocks}.")] + within
    return [name for name in own if not any(name.startswith(f"{other}.") for other in own)]


def put_back(before: dict[Any, Any]) -> None:
    """Put back the attribute `forward` that each part had; None: it had the method of its class."""
    for part, forward in before.items():
        if forward is None:
            part.__dict__.pop("forward", None)
        else:
            part.forward = forward


class _InFp32:
    """A layer's forward without autocast and with half-precision inputs cast to fp32; unchanged if autocast is off."""

    def __init__(self, forward: Any, kind: str) -> None:
        self._forward, self._kind = forward, kind

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_autocast_enabled(self._kind):
            return self._forward(*inputs, **named)
        with torch.autocast(self._kind, enabled=False):
            return self._forward(*_in_fp32(inputs), **_in_fp32(named))


class _InHalf:
    """A layer's forward under autocast, with outputs cast to fp32 for the rest of the model."""

    def __init__(self, forward: Any, kind: str, dtype: torch.dtype) -> None:
        self._forward, self._kind, self._dtype = forward, kind, dtype

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        with torch.autocast(self._kind, dtype=self._dtype):
            outputs = self._forward(*inputs, **named)
        return _in_fp32(outputs)


def _in_fp32(value: Any) -> Any:
    """Cast the half-precision tensors of a nested value to fp32."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALF else value
    return rebuild(value, _in_fp32)
