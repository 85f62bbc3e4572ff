"""Parts that run compiled: what is counted, what falls back, and that nothing is computed twice on the way."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.symbolic_convert
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain.config.sections import LoopConfig
from raytrain.errors import InputError
from raytrain.models.gpt import gpt
from raytrain.models.mlp import mlp
from raytrain.train import compile as compile_module
from raytrain.train.activation_checkpointing import Recomputed, recompute
from raytrain.train.compile import STATIC_AT_MOST, CompiledParts, forget_graphs, parts_to_compile
from raytrain.trainable import Trainable

AOT: Any = torch._dynamo.lookup_backend("aot_eager")
"""Traces forward and backward as inductor does, and writes no C++."""


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No test meets what another has compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """Dropout, so that whatever runs twice draws twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(F.gelu(self.linear(x)), 0.5, self.training)


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def parts_of(net: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, part) for name, part in net.named_modules() if isinstance(part, Block)]


def computed(net: nn.Module, rows: int) -> list[Tensor]:
    """Output and gradients of one pass, and the generator after it."""
    torch.manual_seed(rows)
    net.zero_grad()
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows)).requires_grad_()
    y = net(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None), torch.get_rng_state()]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.covers("COMP-08")
def test_ten_batch_sizes_recompile_at_most_twice_and_equal_parts_share_compiled_code() -> None:
    net, plain = Net(), Net()
    compiled = CompiledParts(parts_of(net), mode="default", lower=AOT)
    for rows in range(10, 0, -1):
        assert same(computed(net, rows), computed(plain, rows)), rows
    status = compiled.status()
    assert status["achieved"] == "3 of 3 parts" and status["graph_breaks"] == 0 and status["reasons"] == []
    assert 1 <= status["graphs"] <= 3 and status["recompiles"] == status["graphs"] - 1 <= 2
    assert [part["graphs"] for part in status["parts"]][1:] == [0, 0], "the first block's serve the others"
    assert net.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.covers("COMP-07")
def test_a_backend_error_falls_back_to_eager_and_records_the_reason() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no kernel for that\nand a long trace")

    net, plain = Net(), Net()
    compiled = CompiledParts(parts_of(net), mode="default", lower=broken)
    for rows in (4, 2, 4):
        assert same(computed(net, rows), computed(plain, rows))
    assert [part.achieved for part in compiled.parts] == ["eager"] * 3
    assert compiled.status()["reasons"] == ["RuntimeError: no kernel for that"]
    assert compiled.status()["achieved"] == "0 of 3 parts"


def test_a_failure_in_the_middle_of_a_run_changes_no_bit() -> None:
    """A batch of one row needs another graph, whose compilation fails: what was compiled stays."""
    graphs: list[Any] = []

    def second_fails(graph: Any, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        if len(graphs) > 1:
            raise MemoryError
        return AOT(graph, inputs)

    net, plain = Net(), Net()
    compiled = CompiledParts(parts_of(net), mode="default", lower=second_fails)
    for rows in (4, 1, 3):
        assert same(computed(net, rows), computed(plain, rows))
    assert [part.achieved for part in compiled.parts] == ["partly"] * 3
    assert compiled.status()["reasons"] == ["MemoryError: MemoryError"]


def test_code_that_cannot_be_traced_runs_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any) -> None:
        raise KeyError("inside the compiler")

    net, plain = Net(), Net()
    compiled = CompiledParts(parts_of(net), mode="default", lower=AOT)
    monkeypatch.setattr(torch._dynamo.symbolic_convert.InstructionTranslator, "run", broken)
    assert same(computed(net, 4), computed(plain, 4))
    assert {part.achieved for part in compiled.parts} == {"eager"}
    assert "inside the compiler" in compiled.parts[0].why


class Reads(nn.Module):
    """Python has to see a value in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.linear(y) if y.sum().item() > 0 else y


def test_graph_breaks_are_counted_with_where_they_are() -> None:
    net = Reads()
    compiled = CompiledParts([("", net)], mode="default", lower=AOT)
    net(torch.ones(4, 8)).sum().backward()
    status = compiled.status()
    assert status["graph_breaks"] >= 1 and status["breaks_at"] and status["graphs"] >= 2
    assert status["parts"][0]["achieved"] == "compiled" and status["parts"][0]["name"] == "model"


def test_the_status_is_returned_when_it_changed_and_seconds_are_returned_once() -> None:
    net = Net()
    compiled = CompiledParts(parts_of(net), mode="default", lower=AOT)
    assert [part.achieved for part in compiled.parts] == ["not run"] * 3
    computed(net, 4)
    status, seconds = compiled.changed_status(), compiled.take_seconds()
    assert status is not None and status["achieved"] == "3 of 3 parts" and seconds == compiled.seconds > 0
    computed(net, 5)
    assert compiled.changed_status() is None and compiled.take_seconds() == 0


def test_off_puts_everything_back() -> None:
    net = Net()
    compiled = CompiledParts(parts_of(net), mode="default", lower=AOT)
    assert "forward" in vars(net.blocks[0])
    compiled.off()
    assert not any("forward" in vars(block) for block in net.blocks)


def test_two_models_of_a_process_share_compiled_code() -> None:
    """As a session does that follows another after a rollback."""
    first = Net()
    CompiledParts(parts_of(first), mode="default", lower=AOT)
    computed(first, 4)
    second = Net()
    compiled = CompiledParts(parts_of(second), mode="default", lower=AOT)
    computed(second, 4)
    assert compiled.status()["graphs"] == 0 and compiled.status()["achieved"] == "3 of 3 parts"


# ---------------------------------------------------------------- which parts


def named(trainable: Any, asked: Any, **loop: Any) -> list[str]:
    return [name for name, _ in parts_to_compile(trainable, LoopConfig(compile_parts=asked, **loop))]


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("auto", ["blocks.0", "blocks.1"]),
        ("blocks", ["blocks.0", "blocks.1"]),
        ("all", [""]),
        (["attention"], ["blocks.0.attention", "blocks.1.attention"]),
        (["blocks.1.attention", "head"], ["blocks.1.attention", "head"]),
        (["blocks"], ["blocks.0", "blocks.1"]),
        (["blocks.0", "attention"], ["blocks.0", "blocks.1.attention"]),
    ],
)
def test_parts_by_name(asked: Any, names: list[str]) -> None:
    trainable = gpt(layers=2, heads=1, width=8, context=4, vocab_size=5)
    assert named(trainable, asked) == names


def test_cuda_graphs_are_made_of_the_full_model_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of blocks fail on a GPU as soon as one's output is another's input (pytorch #152887)."""
    trainable = gpt(layers=2, heads=1, width=8, context=4, vocab_size=5)
    graphs = LoopConfig(compile="reduce-overhead")
    assert [name for name, _ in parts_to_compile(trainable, graphs, on_gpu=True)] == [""]
    assert len(parts_to_compile(trainable, graphs)) == 2, "a CPU has no graphs"
    with pytest.raises(InputError, match=r"loop.compile_parts: got 2 parts with loop.compile reduce-overhead"):
        parts_to_compile(trainable, LoopConfig(compile="reduce-overhead", compile_parts="blocks"), on_gpu=True)
    asked: list[str] = []
    monkeypatch.setattr(torch, "_TorchCompileInductorWrapper", lambda mode, _options, _dynamic: asked.append(mode))
    for mode in ("default", "reduce-overhead", "max-autotune"):
        compile_module._backend.__wrapped__(mode, None)
    options = [torch._inductor.list_mode_options(mode).get("triton.cudagraphs", False) for mode in asked]
    assert options == [False, True, False]


def test_a_model_without_repeated_blocks_is_compiled_as_one_part() -> None:
    single = mlp(hidden=(4,), num_features=3, num_classes=2)
    assert named(single, "auto") == [""], "single layers are no blocks"
    assert "" not in named(single, "auto", activation_checkpointing=True), "unless backward computes them again"
    trainable = Trainable.from_module(nn.Linear(2, 2), loss=lambda module, batch: module(batch["x"]).sum())
    assert named(trainable, "auto") == [""]
    with pytest.raises(InputError) as caught:
        named(trainable, "blocks")
    assert caught.value.key == "loop.compile_parts"


@pytest.mark.parametrize(("asked", "again"), [(["atention"], False), ("all", True), (["blocks.7"], False)])
def test_parts_that_cannot_be(asked: Any, again: bool) -> None:
    trainable = gpt(layers=2, heads=1, width=8, context=4, vocab_size=5)
    with pytest.raises(InputError) as caught:
        named(trainable, asked, activation_checkpointing=again)
    assert caught.value.key == "loop.compile_parts"
    assert asked != ["atention"] or "attention" in str(caught.value)


def test_a_gpu_compiles_all_where_nothing_divides_the_model() -> None:
    plain = gpt(layers=2, heads=1, width=8, context=4, vocab_size=5)
    routed = replace(plain, worst_case=contextlib.nullcontext)
    default = LoopConfig(compile="default")

    def on_gpu(trainable: Trainable, loop: LoopConfig = default, **named: bool) -> int:
        return len(parts_to_compile(trainable, loop, on_gpu=True, **named))

    assert on_gpu(plain) == 1 and on_gpu(plain, sharded=True) == on_gpu(routed) == 2
    assert on_gpu(plain, LoopConfig(compile="default", activation_checkpointing=True)) == 2
    assert len(parts_to_compile(plain, default)) == 2, "on a CPU"


# ---------------------------------------------------------------- warnings, shapes and graphs


@pytest.mark.parametrize("lower", [AOT, torch._dynamo.lookup_backend("inductor")])
def test_warnings_in_a_compilation_are_no_failures_where_they_are_errors(lower: Any) -> None:
    def warns(graph: Any, inputs: Any) -> Any:
        warnings.warn("TensorFloat32 tensor cores are available", UserWarning, stacklevel=1)
        return lower(graph, inputs)

    net = Net()
    compiled = CompiledParts(parts_of(net), mode="default", lower=warns)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        computed(net, 4)
        with pytest.raises(UserWarning):  # they are errors again
            warnings.warn("the user's", UserWarning, stacklevel=1)
    assert compiled.status()["achieved"] == "3 of 3 parts" and compiled.status()["reasons"] == []


def recorded(sizes: list[bool]) -> Any:
    """A backend that notes for each graph whether its shapes are numbers."""

    def lower(graph: Any, inputs: Any) -> Any:
        sizes.append(not any(isinstance(one, torch.SymInt) for one in inputs))
        return AOT(graph, inputs)

    return lower


def test_static_shapes_have_a_graph_each_until_there_are_too_many() -> None:
    for rows, kinds in (([4, 4, 2], [True] * 2), ([*range(2, 12)], [True] * STATIC_AT_MOST + [False])):
        torch._dynamo.reset()
        net, plain, static = Net(), Net(), list[bool]()
        compiled = CompiledParts(parts_of(net), mode="default", static=True, lower=recorded(static))
        for size in [*rows, *rows]:
            assert same(computed(net, size), computed(plain, size)), size
        assert static[: len(kinds)] == kinds and not any(static[len(kinds) :]) and compiled.status()["reasons"] == []
    torch._dynamo.reset()
    CompiledParts(parts_of(net := Net()), mode="default", lower=recorded(static := []))
    computed(net, 4)
    assert static == [False], "dynamic from the first on"


def test_what_exceeds_the_limit_of_variants_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "VARIANTS_AT_MOST", 2)
    net, plain = Net(), Net()
    compiled = CompiledParts(parts_of(net), mode="default", static=True, lower=AOT)
    for rows in (2, 3, 4, 5):
        assert same(computed(net, rows), computed(plain, rows))
    assert compiled.parts[0].graphs == 2 and "compiled 2 times, the limit" in compiled.status()["reasons"][0]
    assert compiled.parts[0].achieved == "partly"


def test_cuda_graphs_are_forgotten_with_the_code_that_refers_to_them() -> None:
    for graphs, times in ((True, 2), (False, 1)):
        torch._dynamo.reset()
        net, plain = Net(), Net()
        compiled = CompiledParts(parts_of(net), mode="default", lower=AOT, graphs=graphs)
        for _ in range(2):
            assert same(computed(net, 4), computed(plain, 4))
            before = compiled.seconds
            forget_graphs()
        assert before > 0 and sum(part.graphs for part in compiled.parts) == times, "counted after a reset, too"


def test_a_model_that_recomputes_its_blocks_can_be_compiled_afterwards() -> None:
    net, plain = Net(), Net()
    for one in (net, plain):
        recompute(Trainable(one, lambda *_: None))  # pyright: ignore[reportArgumentType]
    compiled = CompiledParts(parts_of(net), mode="default", lower=AOT)
    assert same(computed(net, 4), computed(plain, 4)) and compiled.parts[0].entered == 2, "again in backward"
    with compiled.eager():
        assert same(computed(net, 4), computed(plain, 4)) and compiled.parts[0].entered == 2
    compiled.off()
    assert isinstance(net.blocks[0].forward, Recomputed)
    assert same(computed(net, 4), computed(plain, 4)) and compiled.parts[0].entered == 2
