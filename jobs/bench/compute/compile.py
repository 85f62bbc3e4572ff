"""Bench `compile`: optimizer steps of a small GPT in each mode of torch.compile against eager, and what that costs.

The bench prints which mode is worth setting, and the break-even step of each: the first step at which the total gain
exceeds the time of the compilation. The last comparison is all defaults against `loop.reference`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from cluster.config import Count, Text
from jobs.bench.harness.inputs import draw_bytes, gpt_model, job_of
from jobs.bench.harness.measuring import BenchMeasurement, Check, Say, equal_series, median_interval
from jobs.bench.harness.options import BenchOptions
from raytrain.train.compute.toolchain import missing_for_compile

if TYPE_CHECKING:
    from jobs.bench.harness.sessions import SessionArm

ON_CPU = {
    "reduce-overhead": "on a CPU the same code as default, as its CUDA graphs need a GPU",
    "max-autotune": "on a CPU without its CUDA graphs",
}
TOLERANCE = 1e-4
MAX_STEPS = 100_000
#: Commonly claimed speed-up of all optimisations together.
PROMISED_TOGETHER = 2.0


class CompileOptions(BenchOptions):
    """Optimizer steps compiled against eager, the cost of compiling, and all defaults against the reference."""

    MEASURES: ClassVar[str] = (
        "compiled against eager steps by mode: speed, compile time, graph breaks, the step at which it pays off; all "
        "optimizations against loop.reference"
    )
    QUICK: ClassVar[dict[str, Any]] = {
        "layers": 1, "heads": 1, "width": 8, "context": 8, "batch": 4, "blocks": 3, "block_steps": 1,
    }  # fmt: skip

    layers: Count = Field(4, description="of the GPT")
    heads: Count = Field(4, description="of the GPT")
    width: Count = Field(128, description="of the GPT")
    context: Count = Field(64, description="tokens of a window")
    batch: Count = Field(12, description="rows of a step")
    parts: Text = Field("blocks", description="loop.compile_parts")
    modes: list[Literal["default", "reduce-overhead", "max-autotune"]] = Field(
        ["default", "reduce-overhead", "max-autotune"],
        description="of torch.compile; on a CPU reduce-overhead compiles the same code as default",
    )
    block_steps: Count = Field(20, description="steps of one block")
    reference: bool = Field(True, description="also compare all defaults with loop.reference")


def run(options: CompileOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure every mode; see `CompileOptions`."""
    from jobs.bench.harness.sessions import restored_threads

    found = BenchMeasurement("compile", quick, options.model_dump(), "seconds per step, the mean of one block")
    missing = missing_for_compile("cpu")
    if not found.gate(Check("this machine can compile", missing is None, missing or "there is a C++ compiler")):
        return found
    with restored_threads():
        arms = {"eager": _arm(options)}
        for mode in options.modes:
            arms[mode] = _arm(options, compile=mode, compile_parts=options.parts)
        _compare_modes(found, options, arms, say)
        if options.reference:
            _compare_defaults(found, options, say)
    return found


def _arm(options: CompileOptions, *, fused: bool | str = "auto", **loop: Any) -> SessionArm:
    from jobs.bench.harness.sessions import SessionArm

    loop |= {"max_steps": MAX_STEPS, "global_batch_size": options.batch, "log_every": options.block_steps}
    job = job_of(
        options, gpt_model(options), draw_bytes(options.seed), name="compile", loop=loop, threads=options.thread_count,
        optim={"fused": fused},
    )  # fmt: skip
    return SessionArm(job, precision="fp32")


def _compare_modes(found: BenchMeasurement, options: CompileOptions, arms: dict[str, SessionArm], say: Say) -> None:
    from jobs.bench.harness.sessions import alternate_steps

    first, skipped = dict[str, float](), dict[str, str]()
    for name, arm in list(arms.items()):
        say(f"{name}: the first steps")
        first[name] = arm.run(2 * options.block_steps)
        parts = arm.session.switches.compiled
        if parts is not None:
            status = parts.status()
            found.values[name] = status
            if status["achieved"] != f"{len(status['parts'])} of {len(status['parts'])} parts":
                skipped[name] = "; ".join(status["reasons"]) or status["achieved"]
                del arms[name]
                continue
        label = f"{name}: the losses are those of eager code"
        found.gate(equal_series(label, arm.losses, arms["eager"].losses, relative=TOLERANCE))
    found.values |= {"first_blocks_s": first, "skipped": skipped}
    for mode, why in skipped.items():
        found.cannot(f"torch.compile ({mode}) makes steps faster", f"skipped, not every part is compiled: {why}")
    whole = [mode for mode in options.modes if mode in arms]
    if found.gate(Check("modes that compile every part", bool(whole), ", ".join(whole) or "none")):
        found.arms = alternate_steps(arms, steps=options.block_steps, blocks=options.blocks)
        _judge_modes(found, whole)


def _judge_modes(found: BenchMeasurement, modes: list[str]) -> None:
    """The ratio of each mode, the step from which it pays, and the mode that is worth setting."""
    eager = median_interval(found.arms["eager"]).median
    paying: dict[str, float] = {}
    for mode in modes:
        ratio = found.compare(found.arms, of="eager", to=mode)
        seconds, gain = found.values[mode]["seconds"], eager - median_interval(found.arms[mode]).median
        found.values[mode]["pays_from_step"] = pays = math.ceil(seconds / gain) if gain > 0 else None
        if ratio.low > 1 and pays is not None:
            paying[mode] = ratio.median
        found.claim(
            f"torch.compile ({mode}) makes steps faster", ratio.low > 1,
            f"{ratio}; {seconds:.1f} s in the compiler, "
            f"{found.values[mode]['graph_breaks']} graph breaks, {found.values[mode]['recompiles']} recompiles; "
            + ("no break-even" if pays is None else f"break-even at step {pays}")
            + (f"; {ON_CPU[mode]}" if mode in ON_CPU else ""),
        )  # fmt: skip
    found.values["worth_setting"] = best = max(paying, key=lambda mode: paying[mode], default=None)
    if best is None:
        found.advice.append(f"of {', '.join(modes)} none is faster than loop.compile=off here")
    else:
        pays = found.values[best]["pays_from_step"]
        found.advice.append(f"loop.compile={best} is the fastest, {paying[best]:.2f} times off, from step {pays} on")


def _compare_defaults(found: BenchMeasurement, options: CompileOptions, say: Say) -> None:
    """All defaults against `loop.reference`, and with against without fused optimizer kernels."""
    from jobs.bench.harness.sessions import alternate_steps

    say("all defaults against loop.reference")
    arms = {
        "defaults": _arm(options), "optim.fused false": _arm(options, fused=False),
        "reference": _arm(options, reference=True),
    }  # fmt: skip
    for name, arm in arms.items():
        arm.run(2 * options.block_steps)
        losses, plain = arm.losses, arms["defaults"].losses
        found.gate(equal_series(f"{name}: the losses of the defaults", losses, plain, relative=TOLERANCE))
    times = alternate_steps(arms, steps=options.block_steps, blocks=options.blocks)
    found.arms |= times
    ratio = found.compare(times, of="reference", to="defaults", name="reference / every default")
    fused = found.compare(times, of="optim.fused false", to="defaults", name="optimizer without / with fused kernels")
    found.claim(
        f"all optimisations together train {PROMISED_TOGETHER:g} times as fast",
        ratio.low >= PROMISED_TOGETHER,
        f"{ratio} of this small GPT on this CPU",
    )
    found.claim(
        "fused optimizer kernels make steps faster on a CPU", fused.low > 1,
        f"{fused} of whole steps",
    )  # fmt: skip
