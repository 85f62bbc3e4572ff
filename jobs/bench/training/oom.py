"""Bench `oom`: the cost of an out-of-memory error in a run of two workers; the results must not change.

Two processes each hold two sessions of one job in float64 and train a step of each in turn. In one session errors are
injected on one of the ranks, in the forward or backward of a micro-batch. A value is the time of a step: with an error
(the dropped passes and the step in halves), and of the session without errors at the same step. At the end the weights
of both sessions are compared.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from cluster.config import Count
from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, Say, median_interval
from jobs.bench.harness.options import BenchOptions
from jobs.bench.harness.processes import PAIR, training_pair

GOAL = Goal(at_most=2.5)
EXACT = 1e-12
ERROR, CLEAN = "step with an error", "the same step without"
TIMEOUT_S = 1800.0


class OomOptions(BenchOptions):
    """Out-of-memory errors on one of two workers, in random steps."""

    MEASURES: ClassVar[str] = "cost of out-of-memory errors on one of two workers; checks that results do not change"
    QUICK: ClassVar[dict[str, Any]] = {
        "blocks": 3, "steps_between": 4, "layers": 1, "width": 16, "context": 16, "batch": 8, "micro_batch": 2,
    }  # fmt: skip

    blocks: Count = Field(20, description="errors")
    steps_between: Annotated[int, Field(ge=2)] = Field(6, description="steps between errors, on average")
    layers: Count = Field(4, description="of the GPT")
    heads: Count = Field(4, description="of the GPT")
    width: Count = Field(128, description="of the GPT")
    context: Count = Field(64, description="tokens of a window")
    batch: Count = Field(32, description="rows of a step, over both workers")
    micro_batch: Count = Field(8, description="rows of a micro-batch, before it is halved")
    grow_after: Count = Field(2, description="loop.grow_after")

    @property
    def steps(self) -> int:
        """Steps of the whole measurement."""
        return self.blocks * self.steps_between


def run(options: OomOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure; see `OomOptions`.

    Raises:
        RunError: a process died or did not answer in time.
    """
    found = BenchMeasurement("oom", quick, options.model_dump(), "one optimizer step of two workers")
    errors = plan_errors(options)
    say(f"{len(errors)} errors in {options.steps} steps, and as many steps without errors")
    settings = {"options": options.model_dump(), "errors": errors}
    with training_pair("oom", lambda _folder: settings, answer_timeout_s=TIMEOUT_S) as pair:
        ranks = pair.ask(steps=options.steps)
    events, seconds = ranks[0]["events"], ranks[0]["seconds"]
    expected = [{"step": error["step"], "who": [f"rank {error['rank']}"]} for error in errors]
    found.gate(Check("each error is recorded as one event", events == expected, f"{len(events)} of {len(errors)}"))
    gap = max(rank["largest_difference"] for rank in ranks)
    detail = f"largest difference {gap:.3g} in float64"
    found.gate(Check("weights equal those of the run without errors", gap <= EXACT, detail))
    alike = len({rank["digest"] for rank in ranks}) == 1
    if not found.gate(Check("both ranks hold the same weights", alike, "bit for bit")) or not found.passed:
        return found
    at = [error["step"] - 1 for error in errors]
    found.arms = {ERROR: [seconds["errors"][step] for step in at], CLEAN: [seconds["clean"][step] for step in at]}
    ratio = found.compare(found.arms, of=ERROR, to=CLEAN, goal=GOAL)
    others = [step for step in range(options.steps) if step not in at]
    halved = median_interval([seconds["errors"][step] / seconds["clean"][step] for step in others])
    found.values |= {
        "errors": errors, "seconds": seconds, "micro_batch_sizes": ranks[0]["sizes"],
        "other_steps": vars(halved), "whole_run": sum(seconds["errors"]) / sum(seconds["clean"]),
    }  # fmt: skip
    found.claim(
        f"{len(errors)} out-of-memory errors on one of two ranks cost at most 2.5 step times each and change nothing",
        ratio.high <= 2.5,
        f"{ratio:.2f} steps, worst {max(ratio.values):.2f}; the steps between them {halved:.2f}; weights within "
        f"{gap:.2g}",
    )
    return found


def plan_errors(options: OomOptions) -> list[dict[str, Any]]:
    """`blocks` errors, one in each interval of `steps_between` steps: {"step", "rank", "micro_batch", "backward"}."""
    draw = np.random.default_rng(options.seed)
    micro_batches = max(1, options.batch // (PAIR * options.micro_batch))
    return [
        {
            # not the first step, which also allocates the optimizer's state
            "step": 2 + index * options.steps_between + int(draw.integers(options.steps_between - 1)),
            "rank": int(draw.integers(PAIR)),
            "micro_batch": int(draw.integers(micro_batches)),
            "backward": bool(draw.integers(2)),
        }
        for index in range(options.blocks)
    ]
