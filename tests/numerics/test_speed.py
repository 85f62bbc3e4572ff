"""What makes steps faster or smaller changes no result: compiled, recomputed, and each switch by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from gang import run_gang
from lab import GPT, MLP, class_rows, digest, make_session, token_rows, train
from torch import nn

from jobs.bench.harness.sessions import saved_for_backward
from jobs.job.spec import REFERENCE
from raytrain.autotune.startup import Calibration, measure_eager_step
from raytrain.checkpoint.reader import load
from raytrain.checkpoint.writer import CheckpointWriter
from raytrain.runs.folder import RunFolder
from raytrain.train.activation_checkpointing import recompute
from raytrain.train.session import Session
from raytrain.trainable import LossOutput, Trainable

ROWS = {"train": class_rows(128), "eval_fraction": 0.0}
TOKENS = {"train": token_rows(64), "eval_fraction": 0.0}
#: Of a loss that compiled code computes in another order, after some dozens of fp32 steps.
COMPILED = 1e-4
#: Of a loss that other kernels of eager code compute (fused or plain AdamW).
EAGER = 1e-6


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Each test starts without compiled code and with default flags."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.backends.cudnn.benchmark = False


# ---------------------------------------------------------------- compiled


@pytest.mark.covers("COMP-01")
def test_compiled_and_eager_losses_agree_over_fifty_steps_and_compile_time_is_not_compute_time() -> None:
    """Torch's own inductor, with the C++ compiler of this machine."""
    loop: dict[str, Any] = {"max_steps": 50, "compile_parts": "all"}
    eager, _ = train(make_session(MLP, ROWS, loop=loop))
    session = make_session(MLP, ROWS, loop={**loop, "compile": "default"})
    runner = session.loop(reporter=(rows := RowsOf()), should_stop=lambda: False)
    began = time.monotonic()
    runner.run(session.state)
    wall = time.monotonic() - began
    assert session.switches.compiled is not None
    status = session.switches.compiled.status()
    assert status["achieved"] == "1 of 1 parts" and status["graph_breaks"] == 0, status["reasons"]
    np.testing.assert_allclose(rows.losses, eager.losses, rtol=COMPILED, atol=0)
    spent = runner.clock.seconds
    assert spent["compile"] == pytest.approx(status["seconds"]) and spent["compute"] > 0
    assert spent["compile"] + spent["compute"] <= wall, "no second counts twice"
    assert spent["compile"] + sum(rows.step_times) <= wall, "a step's time leaves the compiler out"
    (event,) = [event for event in rows.events if event["kind"] == "compile"]
    assert event["step"] == 1 and event["requested"] == "default" and event["parts"][0]["graphs"] == 1


class RowsOf:
    """A reporter that keeps losses, step times and events."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.step_times: list[float] = []
        self.events: list[dict[str, Any]] = []

    def metrics(self, row: dict[str, Any]) -> None:
        self.losses.append(row["loss"])
        self.step_times.append(row["step_time_s"])

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def interval(self, row: dict[str, Any], traces: dict[int, bytes]) -> None:
        """Of no interest here."""


@pytest.mark.covers("TRB-19")
def test_the_eager_step_is_measured_once_without_compiled_code_and_changes_nothing(tmp_path: Any) -> None:
    loop = {"max_steps": 4, "compile": "default", "compile_parts": "all", "micro_batch_size": 8}
    whole, _ = train(make_session(MLP, ROWS, loop=loop))
    session = make_session(MLP, ROWS, loop=loop)
    calls = list[bool]()
    session.trainable.module.register_forward_hook(lambda *_: calls.append(True))
    before, parts = digest(session.parts(), session.generator_state()), session.switches.compiled
    forward = session.trainable.module.forward
    calibration = Calibration(session, RunFolder(str(tmp_path)), rows := RowsOf(), lambda _: None)
    measure_eager_step(calibration)
    (event,) = rows.events
    assert event["kind"] == "eager_step" and event["seconds"] > 0
    assert (event["micro_batch"], event["passes"]) == (8, 5)
    assert parts is not None and len(calls) == 6 and {part.entered for part in parts.parts} == {0}
    assert session.trainable.module.forward is forward
    assert digest(session.parts(), session.generator_state()) == before
    measure_eager_step(calibration)
    assert len(rows.events) == 1, "a resumed run has it already"
    rest, _ = train(session)
    assert rest.losses == whole.losses and parts.status()["achieved"] == "1 of 1 parts"
    measure_eager_step(Calibration(make_session(MLP, ROWS), RunFolder(str(tmp_path / "b")), rows, lambda _: None))
    assert len(rows.events) == 1, "nothing is compiled"


def test_without_a_compiler_the_run_is_eager_and_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, _ = train(make_session(MLP, ROWS, loop={"max_steps": 3}))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    session = make_session(MLP, ROWS, loop={"max_steps": 3, "compile": "max-autotune"})
    rows, _ = train(session)
    assert rows.losses == eager.losses and session.switches.compiled is None
    (event,) = [event for event in rows.events if event["kind"] == "compile"]
    assert (event["requested"], event["achieved"]) == ("max-autotune", "off") and "C++" in event["reasons"][0]


def test_a_compiled_run_resumes_bit_for_bit_after_its_code_is_forgotten(tmp_path: Any) -> None:
    """Like a new process that gets the sizes of batches in another order: the last batch of an epoch comes first."""
    loop = {"max_steps": 12, "compile": "default", "compile_parts": "all", "global_batch_size": 24}
    whole, _ = train(make_session(MLP, ROWS, loop=loop))
    torch._dynamo.reset()
    run = RunFolder(str(tmp_path))
    first = make_session(MLP, ROWS, loop=loop)
    runner = first.loop(reporter=RowsOf(), should_stop=lambda: first.state.step == 5)
    runner.run(first.state)
    with CheckpointWriter(run, keep="all", asynchronous=False) as writer:
        state = {"loop": first.state.to_json(), "world_size": 1, "precision": "fp32", "seed": 0}
        writer.save({**first.parts(), "rng": {"0": first.generator_state()}}, state, step=first.state.step)
    torch._dynamo.reset()
    again = make_session(MLP, ROWS, loop=loop)
    again.restore(load(run.checkpoint_dir(5)))
    rest, _ = train(again)
    assert again.switches.compiled is not None and again.switches.compiled.status()["achieved"] == "1 of 1 parts"
    assert rest.losses == whole.losses[5:] and len(rest.losses) == 7


# ---------------------------------------------------------------- recomputed


class Deep(nn.Module):
    """24 blocks of a perceptron."""

    def __init__(self, width: int = 64, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(4)
        layers = (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))
        self.blocks = nn.ModuleList(nn.Sequential(*(type_of(layer) for layer in layers)) for _ in range(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def type_of(layer: nn.Module) -> nn.Module:
    """A new layer like this one."""
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, layer.out_features)
    return nn.Dropout(layer.p) if isinstance(layer, nn.Dropout) else nn.GELU()


def deep_loss(module: nn.Module, batch: dict[str, Any]) -> LossOutput:
    return LossOutput(module(batch["x"]).square().mean())


def gradients(*, every: int | None, dtype: torch.dtype = torch.float64, half: bool = False) -> tuple[Any, int]:
    """Gradients of one pass, with dropout, the generator after it, and the bytes kept for backward."""
    trainable = Trainable(Deep().to(dtype), deep_loss)
    if every is not None:
        recompute(trainable, every=every)
    torch.manual_seed(9)
    x = torch.randn(32, 64, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        outputs: list[LossOutput] = []
        forward = lambda: outputs.append(trainable.loss(trainable.module, {"x": x}))  # noqa: E731
        kept = saved_for_backward(trainable.module, forward)
        outputs[0].loss.backward()
    grads = [p.grad for p in trainable.module.parameters()]
    return [*grads, torch.get_rng_state()], kept


@pytest.mark.parametrize("half", [False, True])
def test_recomputed_gradients_are_the_same_with_dropout_and_fewer_bytes_are_kept(half: bool) -> None:
    dtype = torch.float32 if half else torch.float64
    plain, all_kept = gradients(every=None, dtype=dtype, half=half)
    for every, most in ((1, 0.2), (2, 0.6), (24, 0.99)):
        again, kept = gradients(every=every, dtype=dtype, half=half)
        for ours, theirs in zip(again, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        assert kept <= most * all_kept, (every, kept, all_kept)


def two_workers(rank: int, world_size: int, again: bool) -> tuple[list[float], str]:
    """Losses of a GPT in bf16 with dropout on the workers of a gang, and a hash of the weights."""
    model = {**GPT, "dropout": 0.1}
    session = make_session(model, TOKENS, precision="bf16", loop={"max_steps": 4, "activation_checkpointing": again})
    rows, _ = train(session)
    return rows.losses, digest(session.trainable.module.state_dict())


PEAK = """
import sys; sys.path[:0] = {paths!r}
import torch
from cluster.telemetry.processes import process_memory, reset_peak
from test_speed import Deep, deep_loss
from raytrain.train.activation_checkpointing import recompute
from raytrain.trainable import Trainable
torch.set_num_threads(1)
trainable, x = Trainable(Deep(width=128), deep_loss), torch.randn(2048, 128)
peaks = []
for again in (False, True):
    if again:
        recompute(trainable)
    for part in range(3):
        reset_peak()
        floor = process_memory().rss
        trainable.loss(trainable.module, dict(x=x)).loss.backward()
    peaks.append(process_memory().peak - floor)
print(*peaks)
"""


@pytest.mark.covers("MEM-11", "FUT-04")
def test_recomputing_24_blocks_lowers_the_peak_and_works_under_bf16_with_two_workers() -> None:
    plain, again = (run_gang(two_workers, flag, world_size=2)[0] for flag in (False, True))
    assert plain == again, "losses and weights, bit for bit"
    paths = [os.path.dirname(__file__), os.getcwd()]
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PEAK.format(paths=paths)], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, **settings, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole, less = map(int, done.stdout.split())
    assert less < 0.5 * whole, (less, whole)


# ---------------------------------------------------------------- each switch by itself


FAST: dict[str, Any] = {
    "loop": {"compile": "default", "activation_checkpointing": True, "mask_cache_mb": 8.0, "cudnn_benchmark": True},
    "optim": {"fused": True},
    "data": {"storage": "resident"},
}
OFF = [key for key in REFERENCE if key.split(".")[1] in FAST.get(key.split(".")[0], {})]


def losses_of(loop: dict[str, Any], optim: dict[str, Any], data: dict[str, Any]) -> tuple[list[float], Session]:
    model = {**GPT, "layers": 1, "heads": 1, "width": 8, "window": 4}
    session = make_session(model, {**TOKENS, **data}, loop={"max_steps": 6, **loop}, optim=optim)
    return train(session)[0].losses, session


@pytest.mark.covers("BP-22", "BP-23")
def test_each_switch_off_and_all_of_them_give_the_reference_losses() -> None:
    reference, plain = losses_of({**FAST["loop"], "reference": True}, FAST["optim"], FAST["data"])
    assert plain.switches.compiled is None and not plain.step.skips_on_device and not torch.backends.cudnn.benchmark
    assert plain.switches.masks[0].budget == 0 and plain.job.planned("storage") == "stream"
    assert not any("forward" in vars(part) for part in plain.trainable.module.modules())
    assert len(OFF) == 6
    for key in [None, *OFF]:
        sections = {name: dict(section) for name, section in FAST.items()}
        if key is not None:
            section, name = key.split(".")
            sections[section][name] = REFERENCE[key]
        losses, session = losses_of(**sections)
        parts = session.switches.compiled
        compiled = parts is not None and parts.status()["achieved"] == "1 of 1 parts"
        np.testing.assert_allclose(losses, reference, rtol=COMPILED if compiled else EAGER, atol=0, err_msg=str(key))
        assert compiled == (key != "loop.compile")
