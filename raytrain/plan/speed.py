"""Plan rules about speed: compilation, cuDNN's search, fused optimizers, and the predicted time of a step.

The prediction multiplies what a step computes, updates and sends by the rates of this machine, measured or assumed.
"""

from __future__ import annotations

from cluster.wording import counted
from raytrain.config.sections import LoopConfig, OptimConfig
from raytrain.errors import InputError
from raytrain.plan.choice import Choice, Deferred, Resolved
from raytrain.plan.machines import DevicePool

FEW_STEPS = 100
"""A run of fewer steps compiles nothing with `loop.compile: auto`, and does not even time an eager pass."""


def choose_compile(
    loop: LoopConfig, strategy: Choice, *, missing: str | None, warnings: list[str], steps: int | None = None,
    on_gpu: bool = False,
) -> Choice | None:  # fmt: skip
    """The mode of torch.compile; "off" if these machines cannot compile, with a warning where a mode is configured.
    None if it is configured off; `auto` is left to a measurement where one can be made. `missing` says why the driver's
    machine cannot compile, `steps` are those of the full run, where known. Raises InputError if the mode contradicts
    another key."""
    if loop.compile == "off":
        return None
    sharded = strategy.value_or(None) == "fsdp"
    if loop.compile == "auto":
        off = missing or ("nothing is measured under scale.strategy fsdp; set loop.compile" if sharded else None)
        if loop.deterministic:
            off = off or "measured times decide, and may differ between starts (loop.deterministic); set loop.compile"
        if steps is not None and steps < FEW_STEPS:
            off = off or too_few(steps)
        how, reason = "a compiled step against an eager one", "if the run is long enough to pay for the compilation"
        return Deferred(how, ("off", "default"), reason) if off is None else Resolved("off", off)
    if loop.compile == "max-autotune" and loop.deterministic:
        raise InputError(
            "loop.compile", got="max-autotune with loop.deterministic true", expected="default or reduce-overhead",
            remedy="max-autotune picks the fastest kernels by timing them, so the choice can differ between starts",
        )  # fmt: skip
    if loop.compile == "reduce-overhead" and on_gpu:
        _refuse_graphs_of_parts(loop, strategy)
    if loop.compile_parts == "all":
        other = "scale.strategy fsdp" if sharded else "loop.activation_checkpointing"
        if sharded or loop.activation_checkpointing:
            raise InputError(
                "loop.compile_parts", got=f"all with {other}", expected="blocks, or names of parts, with it",
                remedy="both work block by block",
            )  # fmt: skip
    if missing is not None:
        warnings.append(f"loop.compile is {loop.compile}, but {missing}: the model runs eager")
        return Resolved("off", missing)
    if loop.compile == "max-autotune":
        warnings.append(
            "loop.compile max-autotune picks kernels by timing them: a resumed run equals an uninterrupted one only"
            " within rounding"
        )
    parts = loop.compile_parts if isinstance(loop.compile_parts, str) else ", ".join(loop.compile_parts)
    which = "the blocks if the model repeats some, otherwise the full model" if parts == "auto" else parts
    if parts == "auto" and on_gpu and not (sharded or loop.activation_checkpointing):
        which = "the full model, or the blocks if they route rows to experts"
    if loop.compile == "reduce-overhead" and on_gpu:
        which = "the full model, as CUDA graphs need"
    return Resolved(loop.compile, f"loop.compile; parts: {which}")


def too_few(steps: int) -> str:
    """Why a run of fewer than FEW_STEPS does not compile."""
    return f"{counted(steps, 'step')} {'is' if steps == 1 else 'are'} too few to pay for a compilation"


def _refuse_graphs_of_parts(loop: LoopConfig, strategy: Choice) -> None:
    """Refuses CUDA graphs of parts of a model.

    Each part is a graph of its own, and the inputs of the second are the outputs of the first, which torch regards as
    those of an earlier run and refuses ("accessing tensor output of CUDAGraphs that has been overwritten",
    pytorch #152887), at the latest in the first evaluation.
    """
    planned = strategy.value_or(None)
    divided = [f"scale.strategy {planned}"] if planned in ("fsdp", "expert_parallel") else []
    divided += ["loop.activation_checkpointing true"] if loop.activation_checkpointing else []
    divided += [f"loop.compile_parts {loop.compile_parts}"] if loop.compile_parts not in ("auto", "all") else []
    if divided:
        raise InputError(
            "loop.compile", got=f"reduce-overhead on a GPU with {divided[-1]}",
            expected="default or max-autotune with it",
            remedy="its CUDA graphs work for the full model only (loop.compile_parts all): torch refuses to pass the"
            " output of one graph to another (pytorch #152887)",
        )  # fmt: skip


def choose_cudnn_benchmark(loop: LoopConfig, machines: DevicePool) -> Resolved | None:
    """Whether cuDNN searches for the fastest kernel of each shape; None on a CPU where the key is `auto`."""
    if loop.cudnn_benchmark == "auto":
        if not machines.on_gpu:
            return None
        if loop.deterministic:
            return Resolved(False, "loop.deterministic needs the same kernels each time")
        return Resolved(True, "until there are batches of too many shapes")
    if loop.cudnn_benchmark and loop.deterministic:
        raise InputError(
            "loop.cudnn_benchmark", got="true with loop.deterministic true", expected="auto or false with it",
            remedy="the search picks kernels by timing them",
        )  # fmt: skip
    return Resolved(loop.cudnn_benchmark, "loop.cudnn_benchmark")


def choose_optimizer_kernels(optim: OptimConfig, machines: DevicePool, strategy: Choice) -> Resolved:
    """The implementation of the optimizer: "fused" or "plain"."""
    if optim.fused is False:
        return Resolved("plain", "optim.fused false: each step reads a value from the device")
    if optim.name == "sgd" and strategy.value_or(None) == "fsdp":
        return Resolved("plain", "torch has no fused SGD for the shards of scale.strategy fsdp")
    part = "the AdamW part of Muon" if optim.name == "muon" else optim.name
    return Resolved("fused", f"torch has fused kernels for {part} on {machines.device.value}")
