"""The parts of bench `claims` about whole training steps: their memory, their precision, and compiled code."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from cluster.devices.inventory import local_inventory, missing_for_compile
from jobs.bench.harness.measuring import (
    BenchMeasurement,
    Goal,
    Ratio,
    alternate,
    equal_series,
    matrix_units,
    median_interval,
)
from jobs.bench.harness.processes import ArmProcesses, Arms, serve_blocks
from jobs.bench.harness.sessions import (
    DEVICE,
    SessionArm,
    alternate_steps,
    draw_bytes,
    draw_rows,
    gpt_model,
    job_of,
    perceptron_model,
    saved_for_backward,
)
from raytrain.train.memory.device import memory_in_use

MAX_STEPS = 100_000
CLASSES = 10
#: fp32 sums in a different order; rounding of a lower precision, over a few steps.
TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2
#: The first steps of an arm: optimizer state, allocator, kernels; the losses for the gate.
WARM_STEPS = 5


def _job(options: Any, model: dict[str, Any], data: Any, *, batch: int, optim: Any = None, **loop: Any) -> Any:
    loop = {"max_steps": MAX_STEPS, "global_batch_size": batch, "micro_batch_size": batch, "log_every": 0, **loop}
    return job_of(
        options, model, data, name="claims", loop=loop, threads=options.thread_count, optim=optim or {},
        scale={"mode": "cpu" if DEVICE.type == "cpu" else "auto"},
    )  # fmt: skip


# ---------------------------------------------------------------- memory

#: Without these malloc keeps freed memory, and the resident set does not show what is in use.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
FLOOR_STEPS, PEAK_STEPS = 2, 4


def measure_memory(options: Any, found: BenchMeasurement) -> None:
    """The bytes that a step adds to those of a step with one row, each in a process of its own: in one large batch, in
    several micro-batches, with activation checkpointing, and in bf16."""
    micro = options.rows // options.accumulation
    small, large = f"{options.accumulation} x {micro} rows", f"1 x {options.rows} rows"
    ways: dict[str, dict[str, Any]] = {
        small: {"micro_batch_size": micro}, large: {}, "checkpointing": {"activation_checkpointing": True}, "bf16": {},
    }  # fmt: skip
    losses: dict[str, list[float]] = {}

    def block(name: str) -> float:
        with Arms() as arms:
            path = arms.folder / "text.txt"
            length = (8 + PEAK_STEPS * options.rows) * options.long
            path.write_bytes(bytes(97 + (31 * i * i + 7 * i) % 26 for i in range(length)))
            model = gpt_model(options, width=options.wide, context=options.long)
            job = _job(options, model, path, batch=options.rows, log_every=1, **ways[name])
            settings = {"job": job, "precision": "bf16" if name == "bf16" else "fp32", "threads": options.thread_count}
            arm = ArmProcesses(arms, "memory", "jobs.bench.claims_steps:serve_peak", settings, environment=MALLOC)
            arm.await_ready()
            answer = arm.ask()
        losses[name] = answer["losses"]
        return float(answer["peak"] - answer["floor"])

    bytes_of = alternate({name: partial(block, name) for name in ways}, blocks=options.repeats, dropped=0)
    found.values["bytes_above_the_floor"] = bytes_of
    for name in (small, "checkpointing", "bf16"):
        tolerance = HALF_TOLERANCE if name == "bf16" else TOLERANCE
        found.gate(equal_series(f"{name}: the same steps", losses[name], losses[large], relative=tolerance))
        found.compare(
            bytes_of, of=name, to=large, name=f"peak above the floor, {name} / {large}",
            goal=Goal(at_most=1.0), words=("smaller", "larger"),
        )  # fmt: skip


def serve_peak(settings: dict[str, Any], rank: int) -> None:
    """A process of `measure_memory`: its memory after steps of one row, and in the last steps."""
    torch.set_num_threads(settings["threads"])
    arm = SessionArm(settings["job"], precision=settings["precision"])
    batches = arm.session.loader.batches
    rows, micro = batches.global_batch_size, batches.micro_batch

    def peak(_request: Any) -> dict[str, Any]:
        batches.global_batch_size = batches.micro_batch = 1
        arm.run(FLOOR_STEPS)
        in_use = memory_in_use(DEVICE)
        batches.global_batch_size, batches.micro_batch = rows, micro
        return {
            "seconds": arm.run(PEAK_STEPS),
            "floor": in_use["memory_reserved_bytes" if DEVICE.type == "cpu" else "memory_allocated_bytes"],
            "peak": max(arm.log.peaks[FLOOR_STEPS + 2 :]),  # of each row: the loop resets the peak
            "losses": arm.losses[FLOOR_STEPS:],
        }

    serve_blocks(peak)


# ---------------------------------------------------------------- precision

PRECISIONS = ("fp32", "bf16", "fp16")
#: Commonly claimed gains of half-precision training: speed, and saved memory.
PROMISED_SPEED, PROMISED_MEMORY = 1.5, 0.25
GPT = "gpt"


def measure_precision(options: Any, found: BenchMeasurement) -> None:
    """Full steps in each precision, of perceptrons by width and of the small GPT, and the bytes kept for backward."""
    units = matrix_units(local_inventory().cpu_flags) if DEVICE.type == "cpu" else torch.cuda.get_device_name()
    jobs = {
        f"mlp {width}": _job(
            options, perceptron_model(width, classes=CLASSES), batch=options.mlp_batch,
            data=draw_rows(4 * options.mlp_batch, width, classes=CLASSES, seed=options.seed),
        )
        for width in options.widths
    }  # fmt: skip
    jobs[GPT] = _job(options, gpt_model(options), draw_bytes(options.seed), batch=options.batch)
    gains: dict[str, Ratio] = {}
    kept: dict[str, dict[str, float]] = {}
    for name, job in jobs.items():
        gains[name], kept[name] = _compare_precisions(options, found, name, job)
    found.values["saved_for_backward, bf16 / fp32"] = kept
    perceptrons = [name for name in gains if name != GPT]
    best = max(perceptrons, key=lambda name: gains[name].median)
    faster = [name for name, ratio in gains.items() if ratio.low > 1]
    found.claim(
        f"bf16 trains at least {PROMISED_SPEED} times as fast as fp32 at some width", gains[best].low >= PROMISED_SPEED,
        f"{best} {gains[best]:.2f}; faster: {', '.join(faster) or 'none'}; matrix units: {units}",
    )  # fmt: skip
    for family, names in (("a perceptron", perceptrons), ("a small GPT", [GPT])):
        shown = ", ".join(f"{name} {kept[name]['per_row']:.2f} ({kept[name]['total']:.2f})" for name in names)
        found.claim(
            f"bf16 keeps at least {PROMISED_MEMORY:.0%} fewer bytes of activations for backward, in {family}",
            max(kept[name]["per_row"] for name in names) <= 1 - PROMISED_MEMORY,
            f"bytes of each further row (of a whole batch, copies of weights included), against fp32's: {shown}",
        )


def _compare_precisions(
    options: Any, found: BenchMeasurement, name: str, job: dict[str, Any]
) -> tuple[Ratio, dict[str, float]]:
    """The gain from bf16, and its bytes kept for backward over those of fp32."""
    found.say(f"precision: {name}")
    arms = {precision: SessionArm(job, precision=precision) for precision in PRECISIONS}
    for arm in arms.values():
        arm.run(WARM_STEPS)
    for precision in ("bf16", "fp16"):
        label = f"{name}: the loss in {precision} is that of fp32"
        found.gate(equal_series(label, arms[precision].losses, arms["fp32"].losses, relative=HALF_TOLERANCE))
    steps = max(1, min(200, round(options.block_s * WARM_STEPS / arms["fp32"].run(WARM_STEPS))))
    times = alternate_steps(found, arms, steps=steps, blocks=options.blocks, named=f"{name}, {{}}")
    gain, _ = (found.compare(times, of="fp32", to=to, name=f"{name}: fp32 / {to}") for to in ("bf16", "fp16"))
    full, half = _saved_bytes(arms, whole=True), _saved_bytes(arms, whole=False)
    per_row = {precision: full[precision] - half[precision] for precision in full}
    return gain, {"total": full["bf16"] / full["fp32"], "per_row": per_row["bf16"] / per_row["fp32"]}


def _saved_bytes(arms: dict[str, SessionArm], *, whole: bool) -> dict[str, int]:
    """Bytes that a pass of each precision saves for backward, of a whole or of half a batch. Those of a lower precision
    include copies of the weights, which the difference of both does not."""
    found = {}
    for precision in ("fp32", "bf16"):
        session = arms[precision].session
        indices, _ = session.loader.global_batch(session.state.cursor)
        micro = session.loader.one(indices if whole else indices[: len(indices) // 2])
        forward = partial(session.step.forward, micro.batch, global_weight=micro.weight)
        found[precision] = saved_for_backward(session.trainable.module, forward)
    return found


# ---------------------------------------------------------------- compiled code

#: Commonly claimed speed-up of all optimisations together.
PROMISED_TOGETHER = 2.0
ON_CPU = {
    "reduce-overhead": "on a CPU the same code as default, as its CUDA graphs need a GPU",
    "max-autotune": "on a CPU without its CUDA graphs",
}


def measure_compiled(options: Any, found: BenchMeasurement) -> None:
    """Steps of the GPT in each mode of torch.compile against eager ones, then all defaults against `loop.reference`."""
    missing = missing_for_compile(DEVICE.type)
    if missing is not None:
        found.cannot("torch.compile makes steps faster", missing)
    else:
        _compare_modes(options, found)
    found.say("compile: all defaults against loop.reference")
    arms = {
        "defaults": gpt_arm(options), "optim.fused false": gpt_arm(options, optim={"fused": False}),
        "reference": gpt_arm(options, reference=True),
    }  # fmt: skip
    for name, arm in arms.items():
        arm.run(2 * options.block_steps)
        label = f"{name}: the losses of the defaults"
        found.gate(equal_series(label, arm.losses, arms["defaults"].losses, relative=TOLERANCE))
    times = alternate_steps(found, arms, steps=options.block_steps, blocks=options.blocks)
    ratio = found.compare(times, of="reference", to="defaults", name="reference / every default")
    fused = found.compare(times, of="optim.fused false", to="defaults", name="optimizer without / with fused kernels")
    found.claim(
        f"all optimisations together train {PROMISED_TOGETHER:g} times as fast", ratio.low >= PROMISED_TOGETHER,
        f"{ratio} of this small GPT",
    )  # fmt: skip
    found.claim("fused optimizer kernels make steps faster", fused.low > 1, f"{fused} of whole steps")


def gpt_arm(options: Any, *, optim: dict[str, Any] | None = None, **loop: Any) -> SessionArm:
    """The small GPT in fp32, with these keys of the loop."""
    data, loop = draw_bytes(options.seed), {"log_every": options.block_steps, **loop}
    return SessionArm(_job(options, gpt_model(options), data, batch=options.batch, optim=optim, **loop))


def _compare_modes(options: Any, found: BenchMeasurement) -> None:
    """Modes that do not compile every part are skipped, with their reason."""
    arms = {"eager": gpt_arm(options)}
    arms["eager"].run(2 * options.block_steps)
    found.values["skipped"] = skipped = dict[str, str]()
    for mode in options.modes:
        found.say(f"compile: {mode}, the first steps")
        arm = gpt_arm(options, compile=mode, compile_parts="blocks")
        arm.run(2 * options.block_steps)
        compiled = arm.session.switches.compiled
        assert compiled is not None  # asked for
        status = found.values[mode] = compiled.status()
        if status["achieved"] != f"{len(status['parts'])} of {len(status['parts'])} parts":
            skipped[mode] = why = "; ".join(status["reasons"]) or status["achieved"]
            found.cannot(f"torch.compile ({mode}) makes steps faster", f"skipped, not every part is compiled: {why}")
            continue
        label = f"{mode}: the losses are those of eager code"
        found.gate(equal_series(label, arm.losses, arms["eager"].losses, relative=TOLERANCE))
        arms[mode] = arm
    times = alternate_steps(found, arms, steps=options.block_steps, blocks=options.blocks)
    for mode in (mode for mode in arms if mode != "eager"):
        ratio, status = found.compare(times, of="eager", to=mode), found.values[mode]
        gain = median_interval(times["eager"]).median - median_interval(times[mode]).median
        pays = status["pays_from_step"] = math.ceil(status["seconds"] / gain) if gain > 0 else None
        found.claim(
            f"torch.compile ({mode}) makes steps faster", ratio.low > 1,
            f"{ratio}; {status['seconds']:.1f} s in the compiler, {status['graph_breaks']} graph breaks, "
            f"{status['recompiles']} recompiles; "
            + ("no break-even" if pays is None else f"break-even at step {pays}")
            + (f"; {ON_CPU[mode]}" if mode in ON_CPU and DEVICE.type == "cpu" else ""),
        )  # fmt: skip
