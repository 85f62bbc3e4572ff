"""What a pass in shards would lose or break is named; one process, which takes the model apart as several do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lab import class_rows, make_session, train
from torch import Tensor, nn
from torch.nn import functional as F

from raytrain.errors import InputError
from raytrain.train.module_checks import check_module
from raytrain.train.parallel.fsdp_passes import explained
from raytrain.trainable import LossOutput, Trainable


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12), nn.Tanh()) for _ in range(2))
        self.head, self.calls = nn.Linear(12, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def error_of(
    loss: Callable[[Any, dict[str, Tensor]], Tensor], change: Callable[[Net], Any] = lambda _net: None, *,
    precision: str = "fp32", steps: int = 3,
) -> tuple[str, int]:  # fmt: skip
    """The words of the error, and how many steps were committed before it; fails without an error."""
    net = Net()
    change(net)
    made = make_session(
        {"module": Trainable(net, lambda module, batch: LossOutput(loss(module, batch)))}, {"train": class_rows(32)},
        scale={"strategy": "fsdp"}, loop={"max_steps": steps}, precision=precision,
    )  # fmt: skip
    with pytest.raises(InputError) as caught:
        train(made)
    assert caught.value.key == "scale.strategy" and "data_parallel" in caught.value.remedy
    return str(caught.value), made.state.step


def plain(module: Net, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(module(batch["x"]), batch["labels"])


def encoded(module: Net, batch: dict[str, Tensor]) -> Tensor:
    x = batch["x"]
    for layer in module.layers:
        x = layer(x)
    return F.cross_entropy(module.head(x), batch["labels"])


def with_gradient(module: Net, batch: dict[str, Tensor]) -> Tensor:
    x = batch["x"].clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    return plain(module, batch) + gradient.square().mean()


@pytest.mark.parametrize(
    ("loss", "seen"),
    [
        (lambda m, b: plain(m, b) + 0.1 * sum(p.square().sum() for p in m.parameters()), "does not work in shards"),
        (lambda m, b: plain(m, b) + m.layers[0][0].weight.square().sum(), "does not work in shards"),
        (encoded, "does not work in shards"),
        (with_gradient, "a gradient that is taken inside forward or the loss"),
    ],
    ids=["penalty", "weight of a block", "another method", "gradient penalty"],
)
def test_what_needs_whole_parameters_outside_their_block_is_named_in_the_first_pass(loss: Any, seen: str) -> None:
    words, steps = error_of(loss)
    assert seen in words and steps == 0


class Fused(nn.Sequential):
    """Reads the weights of its norm, as fused kernels do."""

    def forward(self, input: Tensor) -> Tensor:
        linear, norm, tanh = self
        assert isinstance(norm, nn.LayerNorm)
        return tanh(F.layer_norm(linear(input), (12,), norm.weight, norm.bias))


def test_a_norm_that_is_used_without_being_called_is_named_in_half_precision() -> None:
    def change(net: Net) -> None:
        net.layers = nn.ModuleList(Fused(*layer) for layer in net.layers)  # pyright: ignore

    words, steps = error_of(plain, change, precision="bf16")
    assert "does not work in shards" in words and steps == 0


CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda weight: weight.mul_(0.5),
    "its data": lambda weight: weight.data.mul_(0.5),
    "other data": lambda weight: setattr(weight, "data", weight.data * 0.5),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("name", ["head.weight", "layers.1.0.weight"])
def test_a_parameter_that_forward_changes_is_named(name: str, how: str) -> None:
    def change(net: Net) -> None:
        part = net.get_submodule(name.rpartition(".")[0])

        def hook(module: nn.Module, *_about: Any) -> None:
            with torch.no_grad():
                CHANGES[how](module.weight)  # pyright: ignore

        part.requires_grad_(False)
        part.register_forward_pre_hook(hook)

    words, steps = error_of(plain, change)
    assert f"a forward that changes the parameter {name}" in words and steps == 0


class Later(nn.Linear):
    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 7:
            with torch.no_grad():
                self.weight.mul_(0.5)
        return super().forward(input)


def test_a_parameter_that_a_later_step_changes_is_named_there() -> None:
    words, steps = error_of(plain, lambda net: setattr(net, "head", Later(12, 4)), steps=9)
    assert "changes the parameter head.weight" in words and steps > 1


def test_errors_of_the_users_code_stay_what_they_are() -> None:
    for error in (ValueError("no"), RuntimeError("mat1 and mat2 shapes cannot be multiplied")):
        with pytest.raises(type(error), match=str(error)), explained():
            raise error


def complex_one(net: Net) -> str:
    net.layers[0].phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    return "complex parameters (layers.0.phase)"


def transposed(net: Net) -> str:
    net.head.weight = nn.Parameter(torch.ones(12, 4).t())
    return "parameters whose memory is not row-major (head.weight)"


def sparse(net: Net) -> str:
    net.frozen, net.table = nn.Embedding(5, 3, sparse=True).requires_grad_(False), nn.EmbeddingBag(5, 3, sparse=True)
    return "embeddings with sparse gradients (table)"


def accumulated(net: Net) -> str:
    net.head.bias.register_post_accumulate_grad_hook(lambda _parameter: None)
    return "hooks on accumulated gradients (head.bias)"


@pytest.mark.parametrize("change", [complex_one, transposed, sparse, accumulated])
def test_what_cannot_be_split_is_refused_before_the_start_under_fsdp_alone(change: Callable[[Net], str]) -> None:
    net = Net()
    made = Trainable(net, lambda *_: LossOutput(torch.zeros(())))
    check_module(made, key="model.builder", strategy="fsdp")
    seen = change(net)
    check_module(made, key="model.builder", strategy="auto")
    with pytest.raises(InputError) as caught:
        check_module(made, key="model.builder", strategy="fsdp")
    assert caught.value.key == "scale.strategy" and f"fsdp with {seen}" in str(caught.value)
