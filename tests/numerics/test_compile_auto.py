"""`loop.compile: auto`: what a run of each length measures, decides, records and reuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from lab import GPT, MLP, Rows, class_rows, digest, make_session, token_rows, train

import raytrain.autotune.startup as startup_compile
import raytrain.autotune.step_probe
import raytrain.train.loop
from raytrain.autotune.measurement import Candidate
from raytrain.autotune.startup import Calibration, read_measured, settle_compile
from raytrain.autotune.step_probe import PassTimes, StepProbe
from raytrain.checkpoint.reader import load
from raytrain.checkpoint.writer import CheckpointWriter
from raytrain.plan.choice import Deferred, Resolved
from raytrain.plan.speed import FEW_STEPS
from raytrain.runs.folder import RunFolder
from raytrain.train.compile import CompiledParts
from raytrain.train.session import Session

DATA = {"train": class_rows(128), "eval_fraction": 0.0}
TOKENS = {"train": token_rows(64), "eval_fraction": 0.0}
LONG: dict[str, Any] = {"max_steps": 10**9}


SHOWN: list[str] = []
"""The choices that a terminal would show; "" where it shows none."""


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is printed or met that another test has compiled."""
    SHOWN.clear()
    monkeypatch.setattr(Calibration, "show", lambda _self, _name, _label, value, _record: SHOWN.append(value))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def decided(session: Session, folder: Path, *, done: int = 0) -> tuple[str, str, list[str]]:
    """Value and reason in the event and in memory_probe.json, and the phases that the driver saw."""
    phases: list[str] = []
    calibration = Calibration(
        session, run := RunFolder(str(folder)), rows := Rows(), lambda at: phases.append(at["phase"])
    )
    settle_compile(calibration, done=done)
    record = read_measured(run)["compile"]
    for event in rows.events:
        assert (event["what"], event["value"], event["reason"]) == ("compile", record["value"], record["reason"])
    return record["value"], record["reason"], phases if rows.events else ["known"]


def planted(monkeypatch: pytest.MonkeyPatch, eager: float, compiled: float, **more: Any) -> None:
    """The seconds of a pass; `disturbed`: those of the passes that say how long the run will be."""
    real = StepProbe.passes_in_turn

    def times(probe: StepProbe, befores: list[Any], **named: Any) -> Any:
        _, share = real(probe, befores, **named)
        ways = [PassTimes((seconds,) * 5) for seconds in (eager, compiled)[: len(befores)]]
        if len(befores) == 1 and "disturbed" in more:
            ways = [PassTimes(more["disturbed"])]
        ways[1:] = [PassTimes(way.round_s, more.get("error", ""), more.get("unknown", False)) for way in ways[1:]]
        return ways, share

    monkeypatch.setattr(StepProbe, "passes_in_turn", times)


def test_short_runs_compile_nothing_and_few_steps_measure_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, eager=0.1, compiled=0.05)
    short = make_session(MLP, DATA, loop={"max_steps": FEW_STEPS - 1}).job.plan.compile
    assert short == Resolved("off", f"{FEW_STEPS - 1} steps are too few to pay for a compilation"), "nothing to measure"
    for steps, rows, done, calls in ((1200, 16, 1201 - FEW_STEPS, 0), (1200, 16, 0, 4), (600, 8, 0, 4)):
        loop = {"max_steps": steps, "micro_batch_size": rows}
        session = make_session(MLP, DATA, loop=loop)
        assert isinstance(session.job.plan.compile, Deferred)
        passes: list[int] = []
        session.trainable.module.register_forward_hook(lambda *_, seen=passes: seen.append(1))
        before = digest(session.parts(), session.generator_state())
        value, reason, phases = decided(session, tmp_path / f"{steps} {done}", done=done)
        assert value == "off" and reason.startswith(f"{steps - done:,} steps") and phases == [], (
            "less than 30 s to gain"
        )
        assert SHOWN.pop() == "", "nothing was compiled for it"
        assert len(passes) == calls and session.switches.compiled is None and not session.settings.compiled
        assert digest(session.parts(), session.generator_state()) == before
    assert decided(make_session(MLP, DATA, loop={"max_steps": 1500}), tmp_path / "long")[0] == "default"
    late = decided(make_session(MLP, DATA, loop={"max_steps": 1500}), tmp_path / "late", done=1000)
    assert late[0] == "off" and late[1].startswith("500 steps of 0.1 s"), "what is left counts"
    planted(monkeypatch, eager=0.1, compiled=0.05, disturbed=(2.0, 1.0, 0.02))
    busy = decided(make_session(MLP, DATA, loop={"max_steps": 1500}), tmp_path / "busy")
    assert busy[0] == "off" and busy[1].startswith("1,500 steps of 20 ms"), "other work made two of the passes long"


@pytest.mark.parametrize(
    ("seconds", "more", "value", "why"),
    [
        ((1.0, 0.5), {}, "default", "2.00 times as fast"),
        ((1.0, 0.98), {}, "off", "1.02 times as fast"),
        ((1.0, 2.0), {}, "off", "0.50 times as fast"),
        ((1.0, 0.5), {"error": "no memory"}, "off", "no memory"),
        ((1.0, 0.5), {"unknown": True}, "off", "hide what the loss is a mean over"),
    ],
)
def test_a_long_run_compiles_and_keeps_what_is_faster(
    seconds: Any, more: Any, value: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, *seconds, **more)
    session = make_session(MLP, DATA, loop=LONG)
    before = digest(session.parts(), session.generator_state())
    found, reason, phases = decided(session, tmp_path)
    assert found == value and why in reason and "1 of 1 parts compiled" in reason
    assert [value] == SHOWN, "also where the time was spent for nothing"
    assert phases == ["measuring compilation"] and digest(session.parts(), session.generator_state()) == before
    assert (session.switches.compiled is not None) == session.settings.compiled == (value == "default")
    assert ("forward" in vars(session.trainable.module)) == session.settings.compiled
    again = make_session(MLP, DATA, loop=LONG)
    assert decided(again, tmp_path)[2] == ["known"] and again.settings == session.settings
    longer = make_session(MLP, DATA, loop={"max_steps": 2 * 10**9})
    assert decided(longer, tmp_path)[2] != ["known"], "another length is another question"


def test_what_the_compiler_cannot_do_is_named_and_the_run_stays_eager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no kernel for that")

    class Broken(CompiledParts):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named, lower=broken)

    monkeypatch.setattr("raytrain.train.compile.CompiledParts", Broken)
    monkeypatch.setattr("raytrain.plan.speed.FEW_STEPS", 0)
    monkeypatch.setattr(startup_compile, "FEW_STEPS", 0)
    monkeypatch.setattr(startup_compile, "USUAL_COMPILATION_S", 0.0)
    monkeypatch.setattr("raytrain.autotune.measurement.WORTHWHILE_GAIN", 1e9)
    session = make_session(MLP, DATA, loop={"max_steps": 4})
    value, reason, _ = decided(session, tmp_path / "a")
    assert value == "off" and "0 of 1 parts compiled; RuntimeError: no kernel for that" in reason
    rows, _ = train(session)
    eager, _ = train(make_session(MLP, DATA, loop={"max_steps": 4, "compile": "off"}))
    assert rows.losses == eager.losses and not [row for row in rows.events if row["kind"] == "compile"]
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    value, reason, _ = decided(session := make_session(MLP, DATA, loop={"max_steps": 4}), tmp_path / "b")
    assert value == "off" and "cannot compile" in reason
    (event,) = [row for row in train(session)[0].events if row["kind"] == "compile"]
    assert event["achieved"] == "off" and "C++" in event["reasons"][0]


@pytest.mark.parametrize("again", [False, True])
def test_a_run_that_auto_compiled_resumes_bit_for_bit(
    again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled for real, and as if in a new process; the first record decides, also where eager is faster now."""
    planted(monkeypatch, eager=1.0, compiled=0.5)
    monkeypatch.setattr("raytrain.plan.speed.FEW_STEPS", 0)
    monkeypatch.setattr(startup_compile, "FEW_STEPS", 0)
    monkeypatch.setattr(startup_compile, "USUAL_COMPILATION_S", 0.0)
    loop = {"max_steps": 12, "global_batch_size": 24, "activation_checkpointing": again}
    model = {**GPT, "layers": 1, "dropout": 0.1}
    whole = make_session(model, TOKENS, loop=loop)
    assert decided(whole, tmp_path / "whole")[0] == "default"
    expected = train(whole)[0].losses
    eager = train(make_session(model, TOKENS, loop={**loop, "compile": "off"}))[0].losses
    np.testing.assert_allclose(expected, eager, rtol=1e-2, atol=0)  # compiled dropout draws other numbers
    torch._dynamo.reset()
    run = RunFolder(str(tmp_path))
    first = make_session(model, TOKENS, loop=loop)
    decided(first, tmp_path)
    first.loop(reporter=Rows(), should_stop=lambda: first.state.step == 5).run(first.state)
    with CheckpointWriter(run, keep="all", asynchronous=False) as writer:
        state = {"loop": first.state.to_json(), "world_size": 1, "precision": "fp32", "seed": 0}
        writer.save({**first.parts(), "rng": {"0": first.generator_state()}}, state, step=first.state.step)
    torch._dynamo.reset()
    planted(monkeypatch, eager=0.5, compiled=1.0)
    resumed = make_session(model, TOKENS, loop=loop)
    assert decided(resumed, tmp_path, done=5)[2] == ["known"]
    resumed.restore(load(run.checkpoint_dir(5)))
    rows, _ = train(resumed)
    assert rows.losses == expected[5:] and len(rows.losses) == 7
    assert resumed.switches.compiled is not None
    status = resumed.switches.compiled.status()
    assert status["achieved"] == "1 of 1 parts" and rows.losses != eager[5:], status


def test_shapes_are_static_where_all_rows_have_one_length() -> None:
    ragged = {"train": {"input_ids": [[1, 2, 3], [4, 5]] * 8, "labels": [[2, 3, 1], [5, 4]] * 8}, "eval_fraction": 0.0}
    loop = {"compile": "default"}
    for model, data, more, static in (
        (MLP, DATA, {}, True), (GPT, TOKENS, {}, True), (GPT, ragged, {}, False),
        (GPT, TOKENS, {"data": {**TOKENS, "tokens_per_batch": 48}}, False),
        ({**GPT, "builder": "experts.models:moe_gpt"}, TOKENS, {"experts": {"num_experts": 4, "top_k": 2}}, False),
    ):  # fmt: skip
        session = make_session(model, more.pop("data", data), loop=loop, prepare=False, **more)
        forwards = [vars(part).get("forward") for part in session.trainable.module.modules()]
        assert {forward._static for forward in forwards if forward is not None} == {static}


def test_layers_in_fp32_stay_so_inside_what_is_compiled_and_after_it_is_switched_off() -> None:
    session = make_session(GPT, TOKENS, precision={"dtype": "bf16", "fp32_layers": ["blocks.0"]}, loop=LONG)
    block: Any = session.trainable.module.get_submodule("blocks.0")
    for compiled, kinds in ((True, ["_InFp32", "_Compiled"]), (False, ["_InFp32", "method"])):
        session.use(startup_compile.replace(session.settings, compiled=compiled))
        assert [type(block.forward).__name__, type(block.forward._forward).__name__] == kinds


def test_cuda_graphs_of_another_size_are_forgotten_before_each_trial_the_loop_and_each_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The size in force at each of these times; nothing of another size may count in a trial, or be kept by a retry."""
    session, sizes = make_session(MLP, DATA, loop={"max_steps": 1, "micro_batch_size": 8}), list[int]()
    note = lambda: sizes.append(session.loader.batches.micro_batch)  # noqa: E731
    for module in (raytrain.autotune.step_probe, raytrain.train.loop):
        monkeypatch.setattr(module, "forget_graphs", note)
    for rows in (2, 4):
        StepProbe(session).measure(Candidate("fp32", rows), budget=None, passes=0, with_memory=True)
    assert sizes == [2, 4]
    failing: list[Exception] = [torch.OutOfMemoryError("planted")]
    session.trainable.module.register_forward_pre_hook(lambda *_: raised(failing))
    rows, _ = train(session)
    assert sizes == [2, 4, 8, 8] and [row["kind"] for row in rows.events].count("out_of_memory") == 1


def raised(errors: list[Exception]) -> None:
    """Raise the first of them, once."""
    if errors:
        raise errors.pop()
