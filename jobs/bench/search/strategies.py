"""Bench `strategies`: the predicted step time of each strategy of a job against the measured one, and their order.

The rates of the machine are measured first, once it is idle. Then the processes of every strategy train the same job,
as the workers and hosts of a run do but without Ray; blocks alternate, and waiting processes use no CPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from cluster.devices.calibration import CalibrationFile, MachineRates
from jobs.bench.harness.inputs import write_text
from jobs.bench.harness.measuring import (
    NO_DIFFERENCE,
    BenchMeasurement,
    Check,
    Claim,
    Goal,
    Say,
    alternate,
    compare,
    median_interval,
)
from jobs.bench.harness.processes import ArmProcesses, ArmServer
from jobs.bench.search.strategies_arms import JOBS, TINY, StrategiesOptions, start_arms, strategy_job
from raytrain.errors import InputError
from raytrain.plan.strategies import UNDER_LOAD, Strategy

GOAL = Goal(at_most=1.1)
"""Measured time of the strategy that is predicted to be the fastest, over that of the fastest."""

TOLERANCE = 1e-3
"""Strategies sum in different orders: their losses after a few steps in fp32 differ by rounding only."""

AGAIN_S = 5.0


def run(options: StrategiesOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure the strategies of each job; see `StrategiesOptions`.

    Raises:
        InputError: a job or a strategy that is not known.
        RunError: a process ended early.
    """
    for name in options.jobs:
        if name not in JOBS:
            raise InputError("jobs", got=name, expected=f"names of {', '.join(JOBS)}")
    found = BenchMeasurement(
        "strategies", quick, options.model_dump(), f"seconds per step, the mean of {options.block_steps} steps"
    )
    rates = measured_rates(options, say)
    found.values |= {"rates": rates.to_json(), "jobs": {}}
    with ArmServer() as server:
        models = {name: {**JOBS[name], **(TINY if quick else {})} for name in options.jobs}
        _measure_jobs(options, found, server, models, rates=rates, say=say)
    judge(found, rates)
    return found


def measured_rates(options: StrategiesOptions, say: Say) -> MachineRates:
    """The rates of this machine, measured when nothing else uses its cores; after `settle_s` in any case."""
    import torch

    from raytrain.train.compute.calibrate import calibrate

    began = time.monotonic()
    while (rates := calibrate(torch.device("cpu"))).busy and time.monotonic() - began < options.settle_s:
        say("other processes use the cores: waiting before the rates are measured")
        time.sleep(AGAIN_S)
    if not rates.busy:
        CalibrationFile.of_this_machine("cpu").write(rates)
    return rates


def _measure_jobs(
    options: StrategiesOptions, found: BenchMeasurement, server: ArmServer, models: Mapping[str, Mapping[str, Any]], *,
    rates: MachineRates, say: Say,
) -> None:  # fmt: skip
    context = max(model["context"] for model in models.values())
    steps = (options.dropped + options.blocks) * options.block_steps
    text = write_text(server.folder, batch=options.batch, context=context, steps=steps, seed=options.seed)
    for name, model in models.items():
        strategies = _predictions(options, model, text, rates=rates)
        say(f"{name}: starting the processes of {len(strategies)} strategies")
        arms = start_arms(server, options, model, strategies, text=text, first=len(found.arms))
        try:
            _measure_job(options, found, name, strategies, arms, say=say)
        finally:
            for arm in arms.values():
                arm.close()


def _predictions(
    options: StrategiesOptions, model: Mapping[str, Any], text: Path, *, rates: MachineRates
) -> list[Strategy]:
    """The strategies of a job that fit this machine, as `raytrain plan` prints them."""
    from jobs.driver.plan import plan_job
    from jobs.job.spec import load_spec

    job = strategy_job(options, model, {}, text=text, save_dir=text.parent)
    job["scale"] = {**job["scale"], "workers": "auto"}
    plan = plan_job(load_spec(mapping=job), rates=rates)
    known = [one.name for one in plan.strategies]
    for name in options.only:
        if name not in known:
            raise InputError("only", got=name, expected=f"names of {', '.join(known)}")
    return [one for one in plan.strategies if one.fits is not False and (not options.only or one.name in options.only)]


def _measure_job(
    options: StrategiesOptions, found: BenchMeasurement, job: str, strategies: Sequence[Strategy],
    arms: Mapping[str, ArmProcesses], *, say: Say,
) -> None:  # fmt: skip
    losses: dict[str, list[float]] = {name: [] for name in arms}

    def block(name: str) -> float:
        answer = arms[name].ask_slowest(steps=options.block_steps)
        losses[name].append(answer["losses"][-1])  # of the last step of the block
        return answer["seconds"] / options.block_steps

    say(f"{job}: {options.blocks} blocks of {len(arms)} strategies")
    blocks = {name: partial(block, name) for name in arms}
    times = alternate(blocks, blocks=options.blocks, dropped=options.dropped)
    first = {name: values[0] for name, values in losses.items()}
    spread = (max(first.values()) - min(first.values())) / max(first.values())
    found.gate(Check(f"{job}: every strategy trains the same", spread <= TOLERANCE, f"losses differ by {spread:.2g}"))
    found.arms |= {f"{job}: {name}": values for name, values in times.items()}
    found.values["jobs"][job] = {**summary(strategies, times), "losses": losses}
    found.compare(
        {f"{job}: {name}": values for name, values in times.items()},
        of=f"{job}: {found.values['jobs'][job]['predicted_best']}", to=f"{job}: {found.values['jobs'][job]['fastest']}",
        name=f"{job}: the strategy predicted to be the fastest / the fastest", goal=GOAL,
    )  # fmt: skip


def summary(strategies: Sequence[Strategy], times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Predicted against measured, and how far both orders agree.

    Args:
        times: name of a strategy -> seconds per step, by block.
    """
    predicted = {one.name: float(one.seconds or 0.0) for one in strategies}
    medians = {name: statistics.median(values) for name, values in times.items()}
    pairs = list(combinations(predicted, 2))
    agree = sum(_sign(predicted, pair) * _sign(medians, pair) for pair in pairs)
    clear = [pair for pair in pairs if compare(times, of=pair[0], to=pair[1]).verdict != NO_DIFFERENCE]
    right = [pair for pair in clear if _sign(predicted, pair) == _sign(medians, pair)]
    chosen = next((one.name for one in strategies if one.chosen), None)
    return {
        "strategies": [
            {
                "name": name, "predicted_s": predicted[name], "measured_s": medians[name], "chosen": name == chosen,
                "interval_s": [median_interval(times[name]).low, median_interval(times[name]).high],
                "memory": next(one.memory for one in strategies if one.name == name),
            }
            for name in sorted(predicted, key=lambda name: predicted[name])
        ],
        "predicted_best": min(predicted, key=lambda name: predicted[name]),
        "fastest": min(medians, key=lambda name: medians[name]),
        "clear_pairs": len(clear), "clear_pairs_right": len(right),
        "wrong": [list(pair) for pair in clear if pair not in right],
        "kendall_tau": agree / len(pairs) if pairs else None,
    }  # fmt: skip


def _sign(values: Mapping[str, float], pair: tuple[str, str]) -> int:
    first, second = (values[name] for name in pair)
    return (first > second) - (first < second)


def table(jobs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A Markdown table of all strategies: predicted and measured, with the interval, in milliseconds."""
    lines = ["| job | strategy | step, predicted | measured | predicted / measured |", "|---|---|---|---|---|"]
    for job, row in jobs.items():
        for one in row["strategies"]:
            low, high = (1e3 * value for value in one["interval_s"])
            name = f"{one['name']} (auto)" if one["chosen"] else one["name"]
            measured = f"{1e3 * one['measured_s']:.1f} [{low:.1f}, {high:.1f}] ms"
            ratio = one["predicted_s"] / one["measured_s"]
            lines.append(f"| {job} | {name} | {1e3 * one['predicted_s']:.1f} ms | {measured} | {ratio:.2f} |")
    return lines


def judge(found: BenchMeasurement, rates: MachineRates) -> None:
    """Add the claims, which are not measurable with rates of a busy machine, and the lines of the printed output."""
    for (job, row), ratio in zip(found.values["jobs"].items(), found.ratios, strict=True):
        tau = "none" if row["kendall_tau"] is None else f"{row['kendall_tau']:.2f}"
        pairs = f"{row['clear_pairs_right']} of {row['clear_pairs']} pairs that differ are in the predicted order"
        wrong = "".join(f"; not {first} against {second}" for first, second in row["wrong"])
        evidence = (
            f"{ratio}; predicted {row['predicted_best']}, measured {row['fastest']}; {pairs}, Kendall's tau {tau}"
        )
        effect = f"{job}: the strategy predicted to be the fastest takes at most 1.1 times the fastest's time"
        if rates.busy:
            found.claims.append(Claim(effect, "not measurable here", f"{evidence}{wrong}; {UNDER_LOAD}"))
        else:
            found.claim(effect, bool(ratio.met), evidence + wrong)
    found.advice += table(found.values["jobs"])
