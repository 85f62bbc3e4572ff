"""Model FLOPs utilisation in the logged rows: the model's FLOPs against the peak of the devices in use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from lab import GPT, make_session, token_rows, train

from raytrain.plan import machines as accelerators
from raytrain.plan.choice import Resolved
from raytrain.report.figures import summarise
from raytrain.report.records import RunRecords
from raytrain.train.parallel.collectives import Workers

TOKENS = {"train": token_rows(64), "eval_fraction": 0.0}
PEAK = {"CPU": (2e-6, 4e-6, 5e-6, 8e-6, 1e-6)}


def gpt_flops(width: int, layers: int, *, vocabulary: int = 31, context: int = 12) -> int:
    """By hand: 6 for each weight of a matrix or norm and token, 12 for each layer, width and pair of tokens."""
    block = 4 * width**2 + 8 * width**2 + 2 * width
    weights = vocabulary * width + layers * block + width
    return 6 * weights * context + 12 * layers * width * context**2


@pytest.mark.parametrize(("width", "layers"), [(32, 2), (48, 1)])
@pytest.mark.parametrize(("precision", "peak"), [("fp32", 2e6), ("bf16", 5e6)])
def test_a_row_gives_samples_times_their_flops_over_the_peak_of_the_precision(
    width: int, layers: int, precision: str, peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerators, "GPUS", PEAK)
    sizes = {**GPT, "width": width, "layers": layers}
    rows, _ = train(make_session(sizes, TOKENS, precision=precision, loop={"max_steps": 5}))
    assert len(rows.rows) == 5
    for one in rows.rows:
        assert one["mfu"] == pytest.approx(one["samples_per_s"] * gpt_flops(width, layers) / peak)
    middle = sorted(one["mfu"] for one in rows.rows)[2]
    assert summarise(RunRecords("run", "run", train=rows.rows))["mfu"] == pytest.approx(middle, rel=1e-5)


def test_without_a_known_peak_or_known_flops_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(GPT, TOKENS, loop={"max_steps": 1})
    assert train(session)[0].of("train", "mfu") == [None], "no row of the table is a CPU's"
    monkeypatch.setattr(accelerators, "GPUS", PEAK)
    known = session.full_rate()
    assert known == pytest.approx(2e6 / gpt_flops(32, 2))
    session.sharing = 2
    assert session.full_rate() == pytest.approx(known / 2), "two workers on a device have half of it each"
    session.precision = "fp64"
    assert session.full_rate() == 0
    hosts = Resolved(2, "two hosts")
    session.precision, session.job = "fp32", replace(session.job, plan=replace(session.job.plan, hosts=hosts))
    assert session.full_rate() == 0, "other processes compute a part"


@pytest.mark.parametrize(
    ("others", "share"), [({}, 1.0), ({1: 1.0}, 1 / 2), ({1: 1.0, 2: 2.0}, 1 / 4), ({1: 0.0}, None)]
)
def test_the_peaks_of_all_workers_count(
    others: Mapping[int, float], share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`others`: the other workers' rates, as multiples of this one's."""
    monkeypatch.setattr(accelerators, "GPUS", PEAK)
    session = make_session(GPT, TOKENS, loop={"max_steps": 1})
    own = session.full_rate()
    gather = Workers.all_gather_floats

    def gathered(workers: Workers, values: list[float]) -> list[list[float]]:
        rows = gather(workers, values)
        return rows + [[factor * own if value == own else value for value in rows[0]] for factor in others.values()]

    monkeypatch.setattr(Workers, "all_gather_floats", gathered)
    (one,) = train(session)[0].rows
    assert one["mfu"] == (share and pytest.approx(share * one["samples_per_s"] / own))


@pytest.mark.parametrize("recomputed", [False, True])
def test_flops_that_only_the_plan_has_counted_are_used(recomputed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "GPUS", PEAK)
    session = make_session(GPT, TOKENS, loop={"activation_checkpointing": recomputed})
    own = session.full_rate()
    assert own == pytest.approx(2e6 / gpt_flops(32, 2)), "what the model says of itself counts in either case"
    facts = session.job.plan.model_facts
    assert facts is not None
    counted = replace(session.job.plan, model_facts=replace(facts, flops_per_sample=1e4))
    session.job = replace(session.job, plan=counted)
    session.trainable.flops_per_sample = None
    assert session.full_rate() == 200
