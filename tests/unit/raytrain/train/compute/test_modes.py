"""Modes and parts of torch.compile from the job to the record of a run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from lab import MLP, MOE, class_rows, make_job, make_session, token_rows, train

import raytrain.train.compile
from experts.router import TopKRouter
from jobs.job.spec import load_spec
from raytrain.errors import InputError
from raytrain.plan.plan import Plan
from raytrain.train.compile import CompiledParts, forget_graphs

ROWS = {"train": class_rows(32), "eval_fraction": 0.0}
AOT: Any = torch._dynamo.lookup_backend("aot_eager")


@pytest.fixture(autouse=True)
def no_cpp(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Traced as ever, but nothing is written in C++."""
    monkeypatch.setattr(raytrain.train.compile, "CompiledParts", partial(CompiledParts, lower=AOT))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.covers("COMP-02")
def test_each_mode_is_accepted_and_recorded_and_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in ("default", "reduce-overhead", "max-autotune"):
        loop = {"max_steps": 1, "compile": mode}
        job, _ = make_job(MLP, ROWS, loop=loop)
        record = Plan.from_json(job.plan.to_json())
        assert record.compile is not None and record.compile.value == mode
        rows, _ = train(make_session(MLP, ROWS, loop=loop))
        (event,) = [event for event in rows.events if event["kind"] == "compile"]
        assert event["requested"] == mode and event["achieved"] == "1 of 1 parts"
        with monkeypatch.context() as patch:
            patch.setattr(torch._dynamo, "reset", lambda: pytest.fail("there are no graphs on a CPU to forget"))
            forget_graphs()
    with pytest.raises(InputError) as caught:
        load_spec(overrides=["loop.compile=fastest"])
    assert caught.value.key == "loop.compile" and "max-autotune" in str(caught.value)


@pytest.mark.long
@pytest.mark.covers("COMP-03", "COMP-04")
def test_every_layers_experts_and_router_say_compiled_and_the_key_chooses_which() -> None:
    """The experts of a layer are one module of stacked weights: what it says holds for each of them."""
    data, experts = {"train": token_rows(32), "eval_fraction": 0.0}, {"num_experts": 4, "top_k": 2}
    eager, _ = train(make_session(MOE, data, loop={"max_steps": 2}, experts=experts, precision="fp64"))
    seen: dict[str, list[str]] = {}
    for asked in (["experts"], ["router"], ["experts", "router"], "all"):
        loop = {"max_steps": 2, "compile": "default", "compile_parts": asked}
        session = make_session(MOE, data, loop=loop, experts=experts, precision="fp64")
        rows, _ = train(session)
        assert session.switches.compiled is not None
        status = session.switches.compiled.status()
        assert {part["achieved"] for part in status["parts"]} == {"compiled"}, status["reasons"]
        assert rows.losses == pytest.approx(eager.losses, rel=1e-12)
        seen[str(asked)] = sorted(part["name"] for part in status["parts"])
    layers = [f"blocks.{layer}.feed_forward." for layer in range(2)]
    assert seen["['experts']"] == [layer + "experts" for layer in layers]
    assert seen["['router']"] == [layer + "router" for layer in layers]
    assert seen["['experts', 'router']"] == sorted([*seen["['experts']"], *seen["['router']"]])
    assert seen["all"] == ["model"]
    counts = [part.w1.shape[0] for name, part in session.trainable.module.named_modules() if name.endswith(".experts")]
    assert counts == [4, 4]


@pytest.mark.long
def test_compiled_routers_count_once_with_activation_checkpointing_and_break_the_graph_only_at_the_counts() -> None:
    """A block with experts in a loop reads how many rows each gets, which cuts every frame around that place once."""
    data, experts = {"train": token_rows(32), "eval_fraction": 0.0}, {"num_experts": 4, "capacity_factor": 1.0}
    found = {}
    for compiled in ("off", "default"):
        loop = {"max_steps": 3, "compile": compiled, "activation_checkpointing": True}
        session = make_session(MOE, data, loop=loop, experts=experts, precision="fp64")
        rows, _ = train(session)
        routers = [part for part in session.trainable.module.modules() if isinstance(part, TopKRouter)]
        dropped = rows.of("train", "dropped_fraction")
        counted = [interval["layers"] for interval in rows.intervals]
        found[compiled] = (rows.losses, dropped, [router.bias_E.tolist() for router in routers], counted)
    assert found["default"][0] == pytest.approx(found["off"][0], rel=1e-12)
    assert found["default"][1:] == found["off"][1:] and max(found["off"][1]) > 0 and len(found["off"][3]) == 3
    assert session.switches.compiled is not None
    status = session.switches.compiled.status()
    assert status["achieved"] == "2 of 2 parts" and status["graph_breaks"] <= 4, status["breaks_at"]
    assert all("Data dependent" in why for why in status["breaks_at"])
