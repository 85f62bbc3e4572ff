"""ARCHITECTURE.md, 11: between two logged rows the loop reads nothing from the device, at a logged row once.

Counted on the CPU, where nothing would stop a read from going unnoticed but this count.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from lab import GPT, MLP, MOE, DeviceReads, Rows, class_rows, make_session, token_rows
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from experts import grouped
from raytrain.train.session import Session

LAYERS, STEPS, LOG_EVERY = 2, 12, 5
SPARSE_STEPS = 56
EXPERTS = {"experts": {"num_experts": 4, "top_k": 2, "hosts": 0}}
GROWING = {"experts": {**EXPERTS["experts"], "lifecycle": {"max_experts": 6}}}
CASES: dict[str, tuple[dict[str, Any], Any, dict[str, Any], int]] = {
    "mlp": (MLP, class_rows, {}, 0),
    "gpt": (GPT, token_rows, {}, 0),
    "moe_gpt": (MOE, token_rows, EXPERTS, LAYERS),
    "moe_gpt, lifecycle": (MOE, token_rows, GROWING, LAYERS),
    "moe_gpt, muon": (MOE, token_rows, {**EXPERTS, "optim": {"name": "muon"}}, LAYERS),
}
"""Model, rows, sections, and the reads a forward pass is allowed: one for each layer of experts."""


def session_of(name: str, precision: str, storage: str, *, log_every: int = LOG_EVERY, steps: int = STEPS) -> Session:
    model, rows, sections, _ = CASES[name]
    return make_session(
        model,
        {"train": rows(60), "eval_fraction": 0.0, "storage": storage},
        precision=precision,
        loop={"max_steps": steps, "micro_batch_size": 8, "log_every": log_every},
        **sections,
    )


def reads_by_step(session: Session) -> dict[int, list[str]]:
    """Step -> where the device was read, from the end of one step to the end of the next; set-up left out."""
    reads, steps = DeviceReads(), {}

    def asked(step: int) -> list[int]:
        steps[step], reads.spots = reads.spots, []
        return inner(step)

    loop = session.loop(reporter=Rows(), should_stop=lambda: False)
    inner, loop._requests = loop._requests, asked  # the last thing of an iteration, unless it saves
    with reads:
        loop.run(session.state)
    return steps


@pytest.mark.covers("LOOP-17")
@pytest.mark.parametrize("storage", ["resident", "stream"])
@pytest.mark.parametrize(
    ("name", "precision"), [(name, precision) for name in CASES for precision in ("fp32", "fp16")] + [("gpt", "bf16")]
)
def test_the_device_is_read_once_for_a_logged_row_and_never_between(name: str, precision: str, storage: str) -> None:
    session = session_of(name, precision, storage)
    steps = reads_by_step(session)
    assert sorted(steps) == list(range(1, STEPS + 1))
    for step, spots in steps.items():
        # 60 rows in windows of 16: two micro-batches of 8, and in the fourth window one of 8 and one of 4
        layers = 2 * CASES[name][3]
        logged = step in (1, STEPS) or step % LOG_EVERY == 0
        counted = Counter(spots)
        assert counted.pop("tolist in experts/grouped.py:forward", 0) == layers, (step, spots)
        assert counted == ({"tolist in raytrain/train/loop.py:read_row": 1} if logged else {}), (step, spots)


@pytest.mark.covers("LOOP-17")
@pytest.mark.parametrize("log_every", [50, 0])
@pytest.mark.parametrize(("name", "precision"), [("mlp", "fp32"), ("mlp", "fp16"), ("moe_gpt", "fp32")])
def test_the_device_is_not_read_in_long_stretches_without_rows(name: str, precision: str, log_every: int) -> None:
    steps = reads_by_step(session_of(name, precision, "resident", log_every=log_every, steps=SPARSE_STEPS))
    read_at = [step for step, spots in steps.items() if any("experts/grouped" not in spot for spot in spots)]
    assert read_at == [1, *([50] if log_every else []), SPARSE_STEPS]
    reads = [spot for spots in steps.values() for spot in spots if "experts/grouped" not in spot]
    assert reads == ["tolist in raytrain/train/loop.py:read_row"] * len(read_at)


@pytest.mark.covers("LOOP-17")
@pytest.mark.parametrize(
    "more", [{}, {"capacity_factor": 0.75}, {"activation": "swiglu", "bias": True, "capacity_factor": 0.5, "top_k": 1}]
)
def test_grouped_experts_read_nothing_in_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """As on a GPU with a kernel: the counts of rows stay on the device, also where a capacity drops some."""
    monkeypatch.setattr(grouped, "_can_group", lambda *_of: True)
    monkeypatch.setitem(CASES, "moe", (MOE, token_rows, {"experts": {**EXPERTS["experts"], **more}}, 0))
    steps = reads_by_step(session_of("moe", "bf16", "resident"))
    for step, spots in steps.items():
        logged = step in (1, STEPS) or step % LOG_EVERY == 0
        assert Counter(spots) == ({"tolist in raytrain/train/loop.py:read_row": 1} if logged else {}), (step, spots)


def test_the_counter_sees_every_way_to_read() -> None:
    x = torch.arange(1, 4.0)
    ways = {
        "item": lambda: x.sum().item(),
        "tolist": lambda: x.tolist(),
        "float": lambda: float(x[0]),
        "int": lambda: int(x[0]),
        "bool": lambda: bool(x[0] > 0),
        "if": lambda: 1 if (x > 0).all() else 0,
        "index": lambda: [5, 6, 7][torch.tensor(1)],
        "numpy": lambda: x.numpy(),
        "nonzero": lambda: x.nonzero(),
        "mask": lambda: x[x > 1],
        "repeats": lambda: x.repeat_interleave(torch.tensor([1, 2, 1])),
        "equal": lambda: torch.equal(x, x),
    }
    for name, way in ways.items():
        with DeviceReads() as reads:
            way()
        assert len(reads.spots) == 1, (name, reads.spots)
    with DeviceReads() as reads:
        x.matmul(x), x[torch.tensor([2, 0])], x.masked_fill(x > 1, 0.0), x.clone().add_(x)
    assert not reads.spots and Tensor.item is reads._kept["item"]


class CountNorms(TorchDispatchMode):
    """The number of norms, and of their elements."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "norm" in func.name() and "layer_norm" not in func.name():
            self.sizes.append(args[0].numel() if isinstance(args[0], Tensor) else -1)
        return func(*args, **(kwargs or {}))


@pytest.mark.covers("LOOP-05")
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_step_computes_one_norm_and_names_a_non_finite_gradient(value: float) -> None:
    session = session_of("gpt", "fp32", "resident")
    parameters = sum(p.numel() for p in session.trainable.module.parameters())
    loop = session.loop(reporter=Rows(), should_stop=lambda: False)
    with CountNorms() as norms:
        loop.run(session.state)
    # all numbers once; one worker's gradients lie apart, so that a CPU calls torch for each, and a GPU once for all
    weights = len(list(session.trainable.module.parameters()))
    assert len(norms.sizes) == weights * STEPS and sum(norms.sizes) == parameters * STEPS

    broken = session_of("gpt", "fp32", "resident")
    name, weight = "blocks.1.attention.qkv.weight", broken.trainable.module.blocks[1].attention.qkv.weight
    weight.register_hook(lambda grad: torch.where(torch.tensor(broken.state.step + 1 in (4, 5)), value, grad))
    reporter = Rows()
    outcome = broken.loop(reporter=reporter, should_stop=lambda: False).run(broken.state)
    assert outcome.kind == "done" and reporter.of("train", "skipped_steps") == [0, 2, 2, 2]
    (event,) = reporter.events  # steps 4 and 5 were bad, 5 was logged
    assert (event["kind"], event["step"]) == ("nonfinite", 5)
    assert event["what"] == f"the gradients of {name}"
