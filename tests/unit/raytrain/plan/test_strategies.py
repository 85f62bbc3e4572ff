"""The strategies of a plan with stated rates: which there are, their order, and why the chosen one is not a faster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.devices.calibration import MachineRates, RatesAtThreads
from cluster.devices.inventory import Device, Inventory, Node
from experts.config import ExpertsConfig
from experts.plan.bytes import shared_out
from raytrain.config.sections import (
    DataConfig,
    LoopConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    SaveConfig,
    ScaleConfig,
)
from raytrain.plan.facts import ExpertFacts, ModelFacts, PassFacts
from raytrain.plan.plan import Plan, make_plan
from raytrain.plan.strategies import UNDER_LOAD, Strategy, _saved

GIB = 1 << 30
PASSES = PassFacts(1000, 600, 500, 300, 4000.0, 300, 128)
DENSE = ModelFacts(4_000_000, 16_000_000, 1000, 6e9, "a test", blocks=(1_000_000,) * 4, passes=PASSES)


def mixture(*, expert: int = 8_000_000, trunk: int = 100_000, rows: int = 256) -> ModelFacts:
    """Two layers of four experts; a sample is `rows` rows of each layer."""
    experts = ExpertFacts(((expert,) * 4,) * 2, 64, rows, 512, 1280)
    size = trunk + experts.total
    flops = 6.0 * rows * trunk + experts.flops_per_sample
    return ModelFacts(size, 4 * size, 1000, flops, "a test", experts, blocks=(size // 2,) * 2, passes=PASSES)


def rates(*, gain: float, wire: float = 1e10, trip_s: float = 1e-5, busy: bool = False) -> MachineRates:
    """A machine of which all four cores together are `gain` times as fast as one in the threads of one process."""
    one = RatesAtThreads(1, {"fp32": ((128, 100e9),)}, 5e9, 8e9, 3e-6)
    return MachineRates("cpu", (one, one.with_threads(4, gain=gain)), trip_s, wire, busy=busy)


def box(*, gpus: int = 0, cpus: int = 4, memory: int = 64 * GIB) -> Inventory:
    found = tuple(Device("cuda", "NVIDIA A100", 80 * GIB, (8, 0), f"GPU-{at}", at) for at in range(gpus))
    return Inventory((Node("a", cpus, memory, found),), "a test", "Test CPU", {})


def planned(
    facts: ModelFacts | None, measured: MachineRates | None, *, inventory: Inventory | None = None, hosts: Any = "auto",
    cluster: dict[str, Any] | None = None, loop: dict[str, Any] | None = None, **scale: Any,
) -> Plan:  # fmt: skip
    experts = None if facts is None else facts.experts
    return make_plan(
        model=ModelConfig(builder="a:b"), data=DataConfig(source="c:d"), optim=OptimConfig(),
        precision=PrecisionConfig(dtype="fp32"), loop=LoopConfig(global_batch_size=16, **(loop or {})),
        save=SaveConfig(), scale=ScaleConfig(**scale), experts_hosts=hosts if experts else None,
        experts_inflight="auto", cluster=ClusterConfig(**(cluster or {})), seed=1, inventory=inventory or box(),
        model_facts=facts, data_facts=None, measured=measured,
        share_out=shared_out(experts, ExpertsConfig()) if experts else None,
    )  # fmt: skip


def names(made: Plan) -> list[str]:
    return [one.name for one in made.strategies]


def chosen(made: Plan) -> Strategy:
    found = [one for one in made.strategies if one.chosen]
    assert len(found) == 1
    return found[0]


@pytest.mark.covers("PAR-05")
def test_strategies_are_ordered_by_the_rates_of_the_machine() -> None:
    threads = planned(mixture(), rates(gain=3.9, wire=1e7))
    assert names(threads)[0] == "1 process", "its threads use every core, and nothing is sent"
    assert chosen(threads).reason == "chosen by auto: predicted to be the fastest of those that fit"
    parallel = planned(mixture(), rates(gain=1.0), hosts=0)
    assert names(parallel)[-1] == "1 process", "threads gain nothing, so more processes do"
    for made in (threads, parallel):
        seconds = [one.seconds or 0.0 for one in made.strategies]
        assert seconds == sorted(seconds) and len(set(seconds)) == len(seconds) and seconds[0] > 0
    wired = planned(mixture(), rates(gain=1.0, wire=1e6), hosts=0)
    places = names(wired)
    assert places[0] == "1 process" and places.index("4 workers, experts in shards") < places.index(
        "4 data-parallel workers"
    ), "rows are fewer bytes than the gradients of all experts"
    dense = planned(DENSE, rates(gain=1.0, wire=1e7))
    assert names(dense).index("4 data-parallel workers") < names(dense).index("4 FSDP workers"), "it gathers weights"


def test_every_strategy_that_the_devices_hold_is_listed_once() -> None:
    local = ["1 process", "2 data-parallel workers", "4 data-parallel workers", "2 FSDP workers", "4 FSDP workers"]
    assert sorted(names(planned(DENSE, None))) == sorted(local)
    shards = ["2 workers, experts in shards", "4 workers, experts in shards"]
    hosts = ["1 worker, 2 expert hosts", "2 workers, 2 expert hosts"]
    assert sorted(names(planned(mixture(), None))) == sorted([*local, *shards, *hosts])
    assert names(planned(mixture(), None, inventory=box(cpus=1))) == ["1 process"]
    asked = planned(mixture(), None, workers=3, hosts=3)
    assert sorted(names(asked)) == sorted([*local, *shards, *hosts, "3 workers, 3 expert hosts"])
    assert chosen(asked).name == "3 workers, 3 expert hosts"
    gpus = planned(mixture(), None, inventory=box(gpus=4, cpus=16))
    assert set(names(gpus)) == {
        "1 process", "4 data-parallel workers", "4 FSDP workers", "4 workers, experts in shards",
        "3 workers, 1 expert host", "2 workers, 2 expert hosts",
    }  # fmt: skip
    keys = {one.name: one.keys_text for one in gpus.strategies}
    assert keys["4 FSDP workers"] == "scale.workers=4 scale.strategy=fsdp"
    assert keys["2 workers, 2 expert hosts"] == "scale.workers=2 experts.hosts=2"
    assert keys["4 workers, experts in shards"] == "scale.workers=4 experts.hosts=colocated"


def test_the_chosen_one_has_the_figures_of_the_plan_and_survives_json() -> None:
    for made in (
        planned(mixture(), rates(gain=2.0), hosts=2, workers=2),
        planned(DENSE, rates(gain=2.0), workers=2, loop={"micro_batch_size": 2}),
        planned(mixture(), rates(gain=2.0), workers=4, strategy="fsdp"),
    ):
        one = chosen(made)
        assert (one.seconds, one.memory) == (made.value("step_time", None), made.value("memory", None))
        assert Plan.from_json(made.to_json()) == made


def test_every_strategy_has_the_threads_that_the_job_configures() -> None:
    free, single = (planned(DENSE, rates(gain=3.9), threads=number) for number in ("auto", 1))
    assert {one.name: one.threads for one in free.strategies} == {
        "1 process": 4, "2 data-parallel workers": 2, "2 FSDP workers": 2, "4 data-parallel workers": 1,
        "4 FSDP workers": 1,
    }  # fmt: skip
    assert {one.threads for one in single.strategies} == {1}
    before, after = ({one.name: one.seconds or 0.0 for one in made.strategies} for made in (free, single))
    for name in ("1 process", "2 data-parallel workers", "2 FSDP workers"):
        assert after[name] > 1.5 * before[name], "half of the cores or more are idle"
    for name in ("4 data-parallel workers", "4 FSDP workers"):
        assert after[name] == before[name]


def test_what_auto_does_not_take_is_explained() -> None:
    slow = rates(gain=1.0)
    workers = chosen(planned(DENSE, slow)).reason
    assert workers.startswith("chosen by auto: 4 ") and "auto adds no workers on CPUs" in workers
    assert "% of" in workers and workers.endswith("scale.workers=4 takes it")
    given = chosen(planned(DENSE, slow, workers=1)).reason
    assert given.startswith("set by scale.workers; 4 ") and given.rstrip().endswith("s")
    hosts = planned(mixture(), rates(gain=3.9), hosts=2)
    assert chosen(hosts).reason.startswith(f"set by experts.hosts; {names(hosts)[0]} would save")
    few = planned(replace(DENSE, flops_per_sample=1e6), None, inventory=box(gpus=4))
    one = next(one for one in few.strategies if one.name == "1 process")
    assert chosen(few).workers == 4 and "would save" in chosen(few).reason, (one.seconds, chosen(few).seconds)
    assert "auto uses one per GPU; scale.workers=1 takes it" in chosen(few).reason


@pytest.mark.parametrize("gain", [1.0, 1.6, 1.7, 1.75, 1.8, 1.9, 3.0])
def test_one_rule_says_why_workers_are_not_added_on_cpus_however_much_they_would_save(gain: float) -> None:
    made = planned(DENSE, rates(gain=gain))
    reason = chosen(made).reason
    assert chosen(made).workers == 1 and "must save" not in reason
    rule = "auto adds no workers on CPUs" in reason or "auto uses FSDP only when" in reason
    assert ("would save" in reason) == rule
    assert "as fast as" not in made.choices()["workers"].reason


@pytest.mark.parametrize(
    ("ratio", "text"), [(0.904, "9.5%"), (0.9, "9.9%"), (0.896, "10%"), (0.91, "9%"), (0.8, "20%")]
)
def test_what_would_be_saved_is_not_rounded_up_to_what_it_must_exceed(ratio: float, text: str) -> None:
    assert _saved(ratio) == text


def test_a_strategy_that_does_not_fit_is_marked_and_is_no_reason() -> None:
    large = planned(DENSE, rates(gain=1.0), inventory=box(memory=int(1.4 * GIB)))
    fits = {one.name: one.fits for one in large.strategies}
    assert fits["1 process"] is True and fits["4 data-parallel workers"] is False
    reasons = {one.name: one.reason for one in large.strategies}
    assert reasons["4 data-parallel workers"] == "does not fit the memory; scale.workers=4"
    assert "4 data-parallel workers" not in reasons["1 process"]
    asked = chosen(planned(DENSE, rates(gain=1.0), inventory=box(memory=int(1.4 * GIB)), workers=4))
    assert asked.reason == "set by scale.workers, and does not fit the memory; scale.workers=1 fits"


def test_rates_measured_under_load_compare_nothing() -> None:
    calm, loaded = (planned(mixture(), rates(gain=1.0, busy=busy)) for busy in (False, True))
    assert "assumed rates" in chosen(planned(mixture(), None)).reason and "assumed" not in chosen(calm).reason
    assert calm.value("hosts", None) == 2, "the hosts are predicted to be faster"
    assert loaded.value("hosts", None) == 0
    assert "no processes are added for it" in loaded.choices()["hosts"].reason
    first, *others = loaded.strategies
    assert first.chosen and first.name == "1 process" and first.reason == f"chosen by auto; {UNDER_LOAD}"
    assert others and all(one.reason.startswith("not compared; ") and not one.comparable for one in others)
    assert all("times" in one.reason for one in calm.strategies if not one.chosen)


def test_without_the_sizes_of_the_model_there_are_no_strategies() -> None:
    assert planned(None, rates(gain=1.0)).strategies == ()
    unknown = planned(replace(DENSE, flops_per_sample=None), rates(gain=1.0))
    assert {one.seconds for one in unknown.strategies} == {None} and chosen(unknown).reason == "chosen by auto"
