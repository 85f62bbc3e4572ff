"""Bench `precision`: full optimizer steps in fp32, bf16 and fp16, by layer width, and the choice of `auto`.

A lower precision is faster only where the matrix products outweigh the casts. The bench prints the break-even width;
below it fp32 is the right choice. At one width our gain from bf16 is compared with that of the plain loop.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from cluster.config import Count, NonNegativeInt
from cluster.devices.inventory import local_inventory
from jobs.bench.harness.inputs import draw_bytes, draw_rows, gpt_model, job_of, perceptron_model
from jobs.bench.harness.measuring import (
    BenchMeasurement,
    Goal,
    Ratio,
    Say,
    equal_series,
    matrix_units,
    median_interval,
    median_ms,
)
from jobs.bench.harness.options import BenchOptions
from raytrain.autotune.precision import LOSS_TOLERANCE, WORTHWHILE_GAIN

if TYPE_CHECKING:
    from jobs.bench.compute.precision_arms import PlainArm
    from jobs.bench.harness.sessions import SessionArm

PRECISIONS = ("fp32", "bf16", "fp16")
#: Commonly claimed gains of half-precision training: speed, and saved memory.
PROMISED_SPEED, PROMISED_MEMORY = 1.5, 0.25
WARM_STEPS = 5
MAX_STEPS = 100_000
CLASSES = 10


class PrecisionOptions(BenchOptions):
    """fp32 against bf16 and fp16, by layer width."""

    MEASURES: ClassVar[str] = (
        "bf16 and fp16 against fp32 by layer width: time, memory kept for backward, the choice of `auto`"
    )
    QUICK: ClassVar[dict[str, Any]] = {
        "widths": [16, 32], "batch": 8, "blocks": 3, "block_s": 0.0, "compare_width": 32, "gpt_width": 16,
        "gpt_layers": 1,
    }  # fmt: skip

    widths: list[Count] = Field([256, 512, 1024, 2048], description="widths of the three hidden layers of a perceptron")
    batch: Count = Field(256, description="rows of a step of the perceptron")
    compare_width: Count = Field(512, description="width at which our gain is compared with that of the plain loop")
    gpt_width: NonNegativeInt = Field(128, description="of a small GPT (context 64, batch 12); 0 leaves it out")
    gpt_layers: Count = Field(4, description="of the small GPT")
    block_s: float = Field(0.25, ge=0, description="seconds that one block of the fp32 arm should take")


def run(options: PrecisionOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure every width, then the small GPT; see `PrecisionOptions`."""
    from jobs.bench.harness.sessions import restored_threads

    found = BenchMeasurement("precision", quick, options.model_dump(), "seconds per step, the mean of one block")
    units = matrix_units(local_inventory().cpu_flags)
    found.values |= {"matrix_units": units, "models": {}}
    say(f"matrix units of this CPU for bf16: {units}")
    with restored_threads():
        for width in options.widths:
            say(f"perceptron of width {width}")
            job = _perceptron_job(options, width)
            _measure_model(found, options, f"mlp {width}", job, plain=width == options.compare_width)
        if options.gpt_width:
            say("small GPT")
            _measure_model(found, options, "gpt", _gpt_job(options), plain=False)
    _claims(found, options, units)
    return found


# -- one model ------------------------------------------------------------------------------------


def _job(options: PrecisionOptions, model: dict[str, Any], data: Any, *, batch: int) -> dict[str, Any]:
    loop = {"max_steps": MAX_STEPS, "global_batch_size": batch, "micro_batch_size": batch, "log_every": 0}
    return job_of(options, model, data, name="precision", loop=loop, threads=options.thread_count)


def _perceptron_job(options: PrecisionOptions, width: int) -> dict[str, Any]:
    data = draw_rows(4 * options.batch, width, classes=CLASSES, seed=options.seed)
    return _job(options, perceptron_model(width, classes=CLASSES), data, batch=options.batch)


def _gpt_job(options: PrecisionOptions) -> dict[str, Any]:
    model = gpt_model(options, layers=options.gpt_layers, width=options.gpt_width, context=64)
    return _job(options, model, draw_bytes(options.seed), batch=12)


def _measure_model(
    found: BenchMeasurement, options: PrecisionOptions, name: str, job: dict[str, Any], *, plain: bool
) -> None:
    from jobs.bench.compute.precision_arms import PlainArm
    from jobs.bench.harness.sessions import SessionArm, alternate_steps, chosen_precision

    arms = {precision: SessionArm(job, precision=precision) for precision in PRECISIONS}
    rivals = {f"plain {precision}": PlainArm(job, precision) for precision in ("fp32", "bf16")} if plain else {}
    both: dict[str, SessionArm | PlainArm] = {**arms, **rivals}
    for arm in both.values():
        arm.run(WARM_STEPS)  # optimizer state, allocator, oneDNN's kernels; the losses for the gate
    _gate(found, name, arms, rivals)
    seconds = arms["fp32"].run(WARM_STEPS) / WARM_STEPS
    steps = max(1, min(200, round(options.block_s / seconds)))
    times = alternate_steps(both, steps=steps, blocks=options.blocks)
    for key, values in times.items():
        found.arms[f"{name}, {key}"] = values
    share = _model_share(arms["fp32"], times["fp32"])
    gains = {
        precision: found.compare(times, of="fp32", to=precision, name=f"{name}: fp32 / {precision}", share=share)
        for precision in ("bf16", "fp16")
    }
    value, reason, trials = chosen_precision(job)
    found.values["models"][name] = {
        "ms_per_step": {key: median_ms(values) for key, values in times.items()},
        "steps_per_block": steps,
        "auto": {"value": value, "reason": reason, "trials": trials, "agrees": _agrees(value, gains["bf16"])},
        "saved_for_backward": {precision: _saved_bytes(arms[precision]) for precision in ("fp32", "bf16")},
    }
    if rivals:
        _compare_gains(found, name, times)


def _gate(found: BenchMeasurement, name: str, arms: dict[str, SessionArm], rivals: dict[str, PlainArm]) -> None:
    for rival, arm in rivals.items():
        ours = arms[rival.removeprefix("plain ")].losses
        found.gate(equal_series(f"{name}: ours equals {rival}", ours, arm.losses, relative=1e-6))
    reference = arms["fp32"].losses
    for precision in ("bf16", "fp16"):
        label = f"{name}: the loss in {precision} is that of fp32"
        found.gate(equal_series(label, arms[precision].losses, reference, relative=LOSS_TOLERANCE))


def _model_share(arm: SessionArm, times: list[float]) -> float:
    """Fraction of an fp32 step that forward and backward take, the only part that a precision affects."""
    from raytrain.autotune.comparisons import compare_precisions

    session = arm.session
    indices, _ = session.loader.global_batch(session.state.cursor)
    micro = next(iter(session.loader.micro_batches(indices)))
    trial = compare_precisions(
        session.trainable,
        micro,
        candidates=["fp32"],
        gradients=session.step.gradients,
        workers=session.workers,
        device=session.device,
        budget_s=0.0,
    )[0]
    return min(1.0, trial.seconds / median_interval(times).median)


def _saved_bytes(arm: SessionArm) -> dict[str, float]:
    """Bytes saved for backward: of one micro-batch (`total`, including a lower precision's copies of the weights), and
    of each further row (`per_row`, activations only)."""
    from jobs.bench.harness.sessions import SavedForBackward

    session = arm.session
    indices, _ = session.loader.global_batch(session.state.cursor)

    def saved(rows: int) -> int:
        micro = session.loader.one(indices[:rows])
        counter = SavedForBackward(session.trainable.module)
        return counter.during(lambda: session.step.forward(micro.batch, global_weight=micro.weight))

    full, half = len(indices), len(indices) // 2
    total = saved(full)
    return {"total": total, "per_row": (total - saved(half)) / (full - half)}


def _agrees(chosen: str, gain: Ratio) -> bool:
    """Whether `auto` chose the faster precision of full steps; within its threshold of a tie both count as right."""
    tie = gain.low > 1 - WORTHWHILE_GAIN and gain.high < 1 + 2 * WORTHWHILE_GAIN
    return tie or chosen == ("bf16" if gain.median >= 1 + WORTHWHILE_GAIN else "fp32")


def _compare_gains(found: BenchMeasurement, name: str, times: dict[str, list[float]]) -> None:
    """Our gain from bf16 over that of the plain loop, repetition by repetition."""
    ours = [a / b for a, b in zip(times["fp32"], times["bf16"], strict=True)]
    theirs = [a / b for a, b in zip(times["plain fp32"], times["plain bf16"], strict=True)]
    found.compare(
        {"ours": ours, "the plain loop's": theirs}, of="ours", to="the plain loop's", goal=Goal(at_least=0.9),
        name=f"{name}: our gain from bf16 / the plain loop's own gain", words=("smaller", "larger"),
    )  # fmt: skip
    found.compare(times, of="plain fp32", to="fp32", name=f"{name}: plain / ours, fp32")
    found.values["models"][name]["gain"] = {
        "ours": median_interval(ours).median, "plain": median_interval(theirs).median
    }  # fmt: skip


# -- what follows ---------------------------------------------------------------------------------


def break_even(gains: dict[int, float]) -> float | None:
    """The width from which on a lower precision is faster at all measured widths; None if there is none.

    Interpolated over the logarithm of the width between the last width at which it is slower and the next one.
    """
    widths = sorted(gains)
    losing = [width for width in widths if gains[width] <= 1]
    if not losing:
        return float(widths[0])
    last = losing[-1]
    if last == widths[-1]:
        return None
    following = widths[widths.index(last) + 1]
    part = (1 - gains[last]) / (gains[following] - gains[last])
    return math.exp(math.log(last) + part * (math.log(following) - math.log(last)))


def _claims(found: BenchMeasurement, options: PrecisionOptions, units: str) -> None:
    gains = {ratio.name: ratio for ratio in found.ratios}
    models: dict[str, Any] = found.values["models"]
    by_width = {width: gains[f"mlp {width}: fp32 / bf16"].median for width in options.widths}
    even = break_even(by_width)
    found.values["break_even_width"] = even
    best = max(options.widths, key=lambda width: by_width[width])
    speed = gains[f"mlp {best}: fp32 / bf16"]
    crossing = f"no width up to {options.widths[-1]} gains" if even is None else f"break-even near width {even:.0f}"
    found.claim(
        f"bf16 trains at least {PROMISED_SPEED} times as fast as fp32 at some width",
        speed.low >= PROMISED_SPEED,
        f"at width {best} {speed:.2f}; {crossing}; matrix units: {units}",
    )
    ratios = {
        kind: {
            name: row["saved_for_backward"]["bf16"][kind] / row["saved_for_backward"]["fp32"][kind]
            for name, row in models.items()
        }
        for kind in ("per_row", "total")
    }
    found.values["saved_bytes_ratio"] = ratios
    for family, names in (("a perceptron", [n for n in models if n != "gpt"]), ("a small GPT", ["gpt"])):
        shown = ", ".join(f"{n} {ratios['per_row'][n]:.2f} ({ratios['total'][n]:.2f})" for n in names if n in models)
        if shown:
            found.claim(
                f"bf16 keeps at least {PROMISED_MEMORY:.0%} fewer bytes of activations for backward, in {family}",
                max(ratios["per_row"][n] for n in names) <= 1 - PROMISED_MEMORY,
                f"bytes of each further row (of a whole batch, copies of weights included), against fp32's: {shown}",
            )
    wrong = [name for name, row in models.items() if not row["auto"]["agrees"]]
    chose = ", ".join(f"{name} {row['auto']['value']}" for name, row in models.items())
    found.claim(
        "`precision.dtype: auto` chooses bf16 where it is faster and fp32 where it is slower",
        not wrong,
        f"{chose}{'; full steps say otherwise for ' + ', '.join(wrong) if wrong else ''}",
    )
