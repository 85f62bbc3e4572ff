"""Bench `compile`: optimizer steps of a small GPT, compiled against eager, and what the compiler takes first.

A compiled step pays from the step on at which its gains have made up for the compiler's seconds: that step is printed.
The last pair is everything at its default against `loop.reference`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from cluster.config import Count, Text
from cluster.devices.inventory import local_inventory
from jobs.bench.harness.measuring import BenchMeasurement, Check, Say, alternate, compare, equal_series, median_interval
from jobs.bench.harness.options import BenchOptions
from raytrain.train.compute.toolchain import missing_for_compile

if TYPE_CHECKING:
    from jobs.bench.harness.sessions import SessionArm

TOLERANCE = 1e-4
MAX_STEPS = 100_000
#: What is commonly promised of all optimisations together.
PROMISED_TOGETHER = 2.0


class CompileOptions(BenchOptions):
    """Whole optimizer steps compiled against eager, what compiling costs first, and all switches against none."""

    MEASURES: ClassVar[str] = (
        "compiled against eager steps by mode: speed, compile time, graph breaks, the step at which it pays off; all "
        "optimizations against loop.reference"
    )
    QUICK: ClassVar[dict[str, Any]] = {
        "layers": 1, "heads": 1, "width": 8, "context": 8, "batch": 4, "blocks": 3, "block_steps": 1,
        "modes": ["default"],
    }  # fmt: skip

    layers: Count = Field(4, description="of the GPT")
    heads: Count = Field(4, description="of the GPT")
    width: Count = Field(128, description="of the GPT")
    context: Count = Field(64, description="tokens of a window")
    batch: Count = Field(12, description="rows of a step")
    parts: Text = Field("blocks", description="loop.compile_parts")
    modes: list[Literal["default", "reduce-overhead", "max-autotune"]] = Field(
        ["default", "max-autotune"], description="of torch.compile; reduce-overhead is default on a CPU"
    )
    block_steps: Count = Field(20, description="steps of one block")
    reference: bool = Field(True, description="also a job with every default against loop.reference")


def run(options: CompileOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure every mode; see `CompileOptions`."""
    from jobs.bench.harness.sessions import restored_threads

    found = BenchMeasurement("compile", quick, options.model_dump(), "seconds per step, the mean of one block")
    missing = missing_for_compile("cpu")
    if not found.gate(Check("this machine can compile", missing is None, missing or "a C++ compiler is there")):
        return found
    with restored_threads():
        arms = {"eager": _arm(options)}
        for mode in options.modes:
            arms[mode] = _arm(options, compile=mode, compile_parts=options.parts)
        _compare(found, options, arms, say)
        if options.reference:
            _together(found, options, say)
    return found


def _arm(options: CompileOptions, *, fused: bool | str = "auto", **loop: Any) -> SessionArm:
    import torch

    from jobs.bench.harness.sessions import SessionArm

    draw = torch.Generator().manual_seed(options.seed)
    tokens = torch.randint(97, 123, (60_000,), generator=draw, dtype=torch.uint8)
    sizes = {name: getattr(options, name) for name in ("layers", "heads", "width", "context")}
    threads = local_inventory().cpus if options.threads == "auto" else options.threads
    return SessionArm(
        {
            "name": "bench-compile",
            "seed": options.seed,
            "model": {"builder": "raytrain.models.gpt:gpt", **sizes},
            "data": {"train": bytes(tokens.tolist()), "eval_fraction": 0.0},
            "optim": {"fused": fused},
            "loop": {
                "max_steps": MAX_STEPS, "global_batch_size": options.batch, "log_every": options.block_steps, **loop,
            },
            "scale": {"workers": 1, "mode": "cpu", "threads": threads},
        },
        precision="fp32",
    )  # fmt: skip


def _compare(found: BenchMeasurement, options: CompileOptions, arms: dict[str, SessionArm], say: Say) -> None:
    first: dict[str, float] = {}
    for name, arm in arms.items():
        say(f"{name}: the first steps")
        first[name] = arm.run(2 * options.block_steps)
        parts = arm.session.switches.compiled
        if parts is not None:
            status = parts.status()
            whole = status["achieved"] == f"{len(status['parts'])} of {len(status['parts'])} parts"
            found.gate(Check(f"{name}: every part is compiled", whole, "; ".join(status["reasons"]) or "all of them"))
            found.values[name] = status
        label = f"{name}: the losses are those of eager code"
        found.gate(equal_series(label, arm.losses, arms["eager"].losses, relative=TOLERANCE))
    steps = options.block_steps
    found.arms = alternate(
        {name: (lambda arm=arm: arm.run(steps) / steps) for name, arm in arms.items()}, blocks=options.blocks
    )
    eager = median_interval(found.arms["eager"]).median
    for mode in options.modes:
        ratio = compare(found.arms, of="eager", to=mode, name=f"eager / {mode}")
        found.ratios.append(ratio)
        seconds, gain = found.values[mode]["seconds"], eager - median_interval(found.arms[mode]).median
        found.values[mode]["pays_from_step"] = pays = math.ceil(seconds / gain) if gain > 0 else None
        found.claim(
            f"torch.compile ({mode}) makes steps faster", ratio.low > 1,
            f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]; {seconds:.1f} s in the compiler, "
            f"{found.values[mode]['graph_breaks']} graph breaks, {found.values[mode]['recompiles']} recompiles; "
            + ("it never pays" if pays is None else f"pays from step {pays}"),
        )  # fmt: skip
    found.values["first_blocks_s"] = first


def _together(found: BenchMeasurement, options: CompileOptions, say: Say) -> None:
    """Every default against the plain path, and against itself without fused kernels, in blocks of their own."""
    say("every default against loop.reference")
    arms = {
        "defaults": _arm(options), "optim.fused false": _arm(options, fused=False),
        "reference": _arm(options, reference=True),
    }  # fmt: skip
    for name, arm in arms.items():
        arm.run(2 * options.block_steps)
        losses, plain = arm.losses, arms["defaults"].losses
        found.gate(equal_series(f"{name}: the losses of the defaults", losses, plain, relative=TOLERANCE))
    steps = options.block_steps
    times = alternate({name: (lambda arm=arm: arm.run(steps) / steps) for name, arm in arms.items()},
                      blocks=options.blocks)  # fmt: skip
    found.arms |= times
    ratio = compare(times, of="reference", to="defaults", name="reference / every default")
    fused = compare(times, of="optim.fused false", to="defaults", name="optimizer without / with fused kernels")
    found.ratios += [ratio, fused]
    found.claim(
        f"all optimisations together train {PROMISED_TOGETHER:g} times as fast",
        ratio.low >= PROMISED_TOGETHER,
        f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] of this small GPT on this CPU",
    )
    found.claim(
        "fused optimizer kernels make steps faster on a CPU", fused.low > 1,
        f"{fused.median:.3f} [{fused.low:.3f}, {fused.high:.3f}] of whole steps",
    )  # fmt: skip
