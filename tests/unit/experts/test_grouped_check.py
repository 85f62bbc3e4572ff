"""A grouped product that is wrong on a device is found by comparison, and the experts compute in a loop instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from experts import grouped
from experts import grouped as grouped_check
from experts.grouped import GroupedExperts, Shape, take_fallbacks, why_not
from experts.hosts.host import ExpertHost
from experts.layer import MoELayer
from experts.router import TopKRouter
from raytrain.execution.driver_channel import FELL_BACK
from raytrain.report.findings import fall_backs
from raytrain.report.records import RunRecords

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = Shape(CPU, torch.bfloat16, 16, 32)
right = F.grouped_mm


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The rows count as bf16 rows on a GPU, and nothing has been compared in this process."""
    monkeypatch.setattr(grouped, "_can_group", lambda *_of: True)
    monkeypatch.setattr(grouped_check, "_VERDICTS", {})
    yield
    take_fallbacks()


class Wrong(torch.autograd.Function):
    """A grouped product with an error in one of its three results, for experts without rows or for all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.kind = kind
        y = right(x, weight, offs=ends)
        return y * 1.2 if kind == "forward" else y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, ends = ctx.saved_tensors
        with torch.enable_grad():
            inputs = (x.detach().requires_grad_(), weight.detach().requires_grad_())
            found = torch.autograd.grad(right(*inputs, offs=ends), inputs, gradient)
        empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
        rows, weights = found[0].clone(), found[1].clone()
        if ctx.kind == "rows":
            rows *= 0.5
        elif ctx.kind == "tiny garbage of empty experts":
            weights[empty] = 1e-6
        elif ctx.kind == "garbage of empty experts":
            weights[empty] = float("nan")
        elif ctx.kind == "all weights":
            weights = weights.roll(1, 0)
        return rows, weights, None, None


def wrong(kind: str) -> Callable[..., Tensor]:
    return lambda x, weight, offs: Wrong.apply(x, weight, offs, kind)


KINDS = {
    "forward": "the result differs", "rows": "the gradient of the rows differs",
    "all weights": "the gradient of the weights differs",
    "garbage of empty experts": "the gradient of an expert without rows is not zero",
    "tiny garbage of empty experts": "the gradient of an expert without rows is not zero",
}  # fmt: skip


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (256, 64)])
def test_a_right_product_is_used(sizes: tuple[int, int]) -> None:
    before = torch.get_rng_state()
    assert why_not(Shape(CPU, torch.bfloat16, *sizes)) == ""
    assert torch.equal(torch.get_rng_state(), before), "the run draws the same numbers"


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_product_is_found(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(F, "grouped_mm", wrong(kind))
    assert KINDS[kind] in why_not(SHAPE)


def test_a_kernel_that_is_missing_is_a_reason_and_memory_that_runs_out_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_inputs: Any, **_named: Any) -> Tensor:
        raise RuntimeError("grouped gemm is not supported on this GPU\nmore")

    monkeypatch.setattr(F, "grouped_mm", missing)
    assert why_not(SHAPE) == "grouped gemm is not supported on this GPU"

    def short(*_inputs: Any, **_named: Any) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(F, "grouped_mm", short)
    with pytest.raises(torch.OutOfMemoryError):
        grouped_check.use_grouped(CPU, torch.bfloat16, width=16, hidden=32)
    assert grouped_check._VERDICTS == {}


@pytest.mark.parametrize(
    ("capability", "hip", "refused"),
    [
        ((7, 5), None, True), ((8, 0), None, True), ((8, 9), None, True), ((9, 0), None, False),
        ((10, 3), None, False), ((12, 0), None, True), ((9, 4), "7", False), ((11, 0), "7", False),
    ],
)  # fmt: skip
def test_gpus_for_which_torch_has_no_kernel_are_not_asked(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None, refused: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(grouped_check, "_difference", lambda _shape: "compared")
    assert ("needs 9 or 10" in why_not(Shape(GPU, torch.bfloat16, 16, 32))) == refused


def test_experts_compute_in_a_loop_where_the_product_is_wrong_and_the_run_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    experts = GroupedExperts(4, 16, 32).bfloat16()
    x, counts = torch.randn(16, 16).bfloat16(), torch.tensor([5, 0, 11, 0])
    expected = torch.autograd.grad(experts._looped(x, counts.tolist()).square().sum(), list(experts.parameters()))
    monkeypatch.setattr(F, "grouped_mm", wrong("garbage of empty experts"))
    found = torch.autograd.grad(experts(x, counts).square().sum(), list(experts.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert experts.grouped_on == (CPU, torch.bfloat16) and not experts.grouped_is_right
    lines = take_fallbacks()
    assert len(lines) == 2 and "16 to 32 in bfloat16" in lines[0] and take_fallbacks() == []
    events = [{"kind": "fallback", "what": "kernels", "reason": line} for line in lines]
    findings = fall_backs(RunRecords(name="run", path="run", events=events))
    assert [one.severity for one in findings] == ["warning"] * 2 and lines[0] in findings[0].evidence


def test_the_comparison_works_where_no_gradients_are_kept() -> None:
    with torch.inference_mode():
        assert why_not(SHAPE) == ""
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        assert why_not(SHAPE) == ""


def test_a_right_product_is_compared_once_and_then_used(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    def counted(x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        called.append(len(weight))
        return right(x, weight, offs=offs)

    monkeypatch.setattr(F, "grouped_mm", counted)
    x, counts = torch.randn(16, 16).bfloat16(), torch.tensor([5, 0, 11, 0])
    for _ in range(2):  # two layers
        GroupedExperts(4, 16, 32).bfloat16()(x, counts)
    compared = len(grouped_check.ROWS)
    assert called == [compared, compared, 4, 4, 4, 4] and take_fallbacks() == []


def test_a_host_tells_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "grouped_mm", wrong("forward"))
    experts, host = GroupedExperts(2, 16, 32).bfloat16(), ExpertHost.__new__(ExpertHost)
    experts(torch.randn(8, 16).bfloat16(), torch.tensor([8, 0]))
    said = host.ping()
    assert len(said) == 2 and all(line.startswith(FELL_BACK) for line in said) and host.ping() == []


def test_another_device_or_format_is_compared_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.device, torch.dtype]] = []

    def verdict(device: torch.device, dtype: torch.dtype, **_: int) -> bool:
        asked.append((device, dtype))
        return device == CPU

    monkeypatch.setattr(grouped, "use_grouped", verdict)
    experts = GroupedExperts(2, 16, 32)
    kinds = [(CPU, torch.bfloat16), (GPU, torch.bfloat16), (CPU, torch.float16)]
    assert [experts.compare_kernels(*kind) for kind in kinds for _ in range(2)] == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]
    assert asked == kinds


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("activation", "capacity"), [("gelu", 0.5), ("swiglu", 0.9), ("relu", 10.0)])
def test_dropped_rows_change_nothing_although_the_product_leaves_them_undefined(
    monkeypatch: pytest.MonkeyPatch, activation: Any, bias: bool, capacity: float
) -> None:
    """Rows behind the last expert's, and their gradients, are what stood in memory: here NaN."""
    torch.manual_seed(0)
    layer = MoELayer(
        TopKRouter(16, 4, 2, capacity_factor=capacity), GroupedExperts(4, 16, 32, activation=activation, bias=bias)
    )
    x = torch.randn(3, 11, 16, requires_grad=True)

    def passes() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            y, aux = layer(x)
        assert aux is not None
        return [y, *torch.autograd.grad(y.square().sum() + aux, [x, *layer.parameters()])]

    monkeypatch.setattr(F, "grouped_mm", lambda x, weight, offs: Undefined.apply(x, weight, offs))
    ours = passes()
    dropped = Undefined.rows
    monkeypatch.setattr(GroupedExperts, "groups", lambda *_of: False)
    looped = passes()
    assert (dropped > 0) == (capacity < 10)
    for one, other in zip(ours, looped, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


class Undefined(torch.autograd.Function):
    """A grouped product that fills the rows of no expert with NaN, in the result and in the gradient of the rows."""

    rows = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        y = right(x, weight, offs=ends)
        y[ends[-1] :] = torch.nan
        Undefined.rows = len(x) - int(ends[-1])
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, ends = ctx.saved_tensors
        with torch.enable_grad():
            inputs = (x[: ends[-1]].detach().requires_grad_(), weight.detach().requires_grad_())
            found = torch.autograd.grad(right(*inputs, offs=ends), inputs, gradient[: ends[-1]])
        rows = torch.full_like(x, torch.nan)
        rows[: ends[-1]] = found[0]
        return rows, found[1], None
