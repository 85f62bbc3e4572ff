"""Plan rules about what makes a step faster: compilation, cuDNN's search, fused optimizers. Pure."""

from __future__ import annotations

from typing import Any

from raytrain.config.sections import LoopConfig, OptimConfig
from raytrain.errors import InputError
from raytrain.plan.choice import Choice, Resolved
from raytrain.plan.rules.batch import fused_part
from raytrain.plan.rules.devices import DevicePool


def choose_speed(
    loop: LoopConfig, optim: OptimConfig, machines: DevicePool, strategy: Choice, *, missing: str | None,
    warnings: list[str],
) -> dict[str, Any]:  # fmt: skip
    """The choices of this module by name; arguments and errors as `choose_compile`."""
    return {
        "optimizer_impl": choose_optimizer_impl(optim, machines, strategy),
        "compile": choose_compile(loop, strategy, missing=missing, warnings=warnings),
        "cudnn_benchmark": choose_cudnn_benchmark(loop, machines),
    }


def choose_compile(loop: LoopConfig, strategy: Choice, *, missing: str | None, warnings: list[str]) -> Resolved | None:
    """The mode of torch.compile; "off" with a warning where these machines cannot; None where it is not asked for.

    Args:
        missing: why the driver's machine cannot compile; None where it can, or where others are planned for.

    Raises:
        InputError: together with what it cannot be had with.
    """
    if loop.compile == "off":
        return None
    if loop.compile == "max-autotune" and loop.deterministic:
        raise InputError(
            "loop.compile", seen="max-autotune with loop.deterministic true", expected="default or reduce-overhead",
            remedy="max-autotune takes the kernels that were fastest when it looked, which is not the same each time",
        )  # fmt: skip
    if loop.compile_parts == "all":
        sharded = strategy.value_or(None) == "fsdp"
        other = "scale.strategy fsdp" if sharded else "loop.activation_checkpointing"
        if sharded or loop.activation_checkpointing:
            raise InputError(
                "loop.compile_parts", seen=f"all with {other}", expected="blocks, or names of parts, with it",
                remedy="both work block by block",
            )  # fmt: skip
    if missing is not None:
        warnings.append(f"loop.compile is {loop.compile}, but {missing}: the model runs eager")
        return Resolved("off", missing)
    if loop.compile == "max-autotune":
        warnings.append(
            "loop.compile max-autotune chooses kernels by their time: a resumed run equals the unbroken one within"
            " rounding only"
        )
    parts = loop.compile_parts if isinstance(loop.compile_parts, str) else ", ".join(loop.compile_parts)
    which = "blocks where the model repeats some, else all of it" if parts == "auto" else parts
    return Resolved(loop.compile, f"loop.compile; parts: {which}")


def choose_cudnn_benchmark(loop: LoopConfig, machines: DevicePool) -> Resolved | None:
    """Whether cuDNN looks for the fastest kernel of each shape; None on a CPU that was not asked to."""
    if loop.cudnn_benchmark == "auto":
        if not machines.on_gpu:
            return None
        if loop.deterministic:
            return Resolved(False, "loop.deterministic wants the same kernels each time")
        return Resolved(True, "until batches of too many shapes have come")
    if loop.cudnn_benchmark and loop.deterministic:
        raise InputError(
            "loop.cudnn_benchmark", seen="true with loop.deterministic true", expected="auto or false with it",
            remedy="its search picks kernels by their time",
        )  # fmt: skip
    return Resolved(loop.cudnn_benchmark, "loop.cudnn_benchmark")


def choose_optimizer_impl(optim: OptimConfig, machines: DevicePool, strategy: Choice) -> Resolved:
    """How the optimizer goes over its tensors: "fused" or "plain"."""
    if optim.fused is False:
        return Resolved("plain", "optim.fused false: each step costs a device read")
    if optim.name == "sgd" and strategy.value_or(None) == "fsdp":
        return Resolved("plain", "torch has no fused SGD for the shards of scale.strategy fsdp")
    return Resolved("fused", f"torch has it for {fused_part(optim)} on {machines.device.value}")
