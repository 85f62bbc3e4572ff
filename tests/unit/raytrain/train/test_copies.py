"""The copy of a user's module is like the original, and leaves it alone; parametrized ones can be pickled."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, weight_norm
from torch.nn.utils.parametrizations import orthogonal, spectral_norm
from torch.nn.utils.parametrizations import weight_norm as new_weight_norm

from jobs.driver.check_job import _pickler
from raytrain.train.job import copy_of
from raytrain.train.placing import make_sendable


class Symmetric(nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        return given.triu() + given.triu(1).T

    def right_inverse(self, value: Tensor) -> Tensor:
        return value.triu()


class Doubled(nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        return given * 2

    def right_inverse(self, value: Tensor) -> Tensor:
        return value / 2


class Computed(nn.Module):
    """Parametrized in five ways, one weight twice, with a reference back to the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = new_weight_norm(nn.Linear(4, 6)), spectral_norm(nn.Linear(6, 6))
        self.c, self.d, self.e = orthogonal(nn.Linear(6, 6)), nn.Linear(6, 6), nn.Linear(6, 1)
        parametrize.register_parametrization(self.d, "weight", Symmetric())
        parametrize.register_parametrization(self.d, "weight", Doubled())
        parametrize.register_parametrization(self.d, "bias", nn.Tanh(), unsafe=True)
        self.a.owner = [self]  # pyright: ignore[reportAttributeAccessIssue]
        self.a.note = "kept"  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        return self.e(self.d(self.c(self.b(self.a(x)))))


def stepped(module: nn.Module, x: Tensor) -> Tensor:
    """The outputs after three steps of SGD."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.eval()(x)


def test_parametrized_modules_arrive_as_they_were_sent() -> None:
    torch.manual_seed(0)
    module, x = Computed(), torch.randn(3, 4)
    with pytest.raises(RuntimeError, match="only supported through state_dict"):
        _pickler().dumps(Computed())
    make_sendable(module)
    sent: Any = pickle.loads(_pickler().dumps(module))
    make_sendable(sent)
    again: Any = pickle.loads(_pickler().dumps(sent))
    copied: Any = copy_of(sent)
    assert again.a.owner[0] is again and again.a.note == "kept" and isinstance(again.d, nn.Linear)
    assert list(again.state_dict()) == list(module.state_dict()) and len(again.d.parametrizations.weight) == 2
    assert all(parametrize.is_parametrized(part) for part in (again.a, again.b, again.c, again.d))
    expected = stepped(module, x)
    assert torch.equal(stepped(again, x), expected) and torch.equal(stepped(copied, x), expected)
    again.d.weight = torch.eye(6) * 0.1  # goes through the right inverses
    assert torch.equal(again.d.weight, torch.eye(6) * 0.1) and not torch.equal(sent.d.weight, again.d.weight)


class Hooked(nn.Module):
    """Hooks and attributes on parameters, and a hook that reads another part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)
        self.tied = self.first.weight
        self.first.weight.lr_scale = 0.5  # pyright: ignore[reportAttributeAccessIssue]
        self.second.bias.owner = self.first  # pyright: ignore[reportAttributeAccessIssue]
        self.seen: list[float] = []
        self.first.weight.register_hook(lambda gradient: gradient * self.second.weight.detach().sum())
        self.first.bias.register_hook(self.scaled)
        self.second.weight.register_hook(partial(torch.mul, self.second.bias.detach().clone().new_full((), 3.0)))
        self.second.bias.register_post_accumulate_grad_hook(lambda bias: self.seen.append(float(bias.grad)))
        self.first.register_forward_hook(lambda _module, _given, output: output * self.second.bias)
        self.shift = lambda value: value + self.second.bias

    def scaled(self, gradient: Tensor) -> Tensor:
        return gradient * (1 + len(self.seen))

    def forward(self, x: Tensor) -> Tensor:
        return self.shift(self.second(self.first(x)))


def test_hooks_and_attributes_of_parameters_are_carried_over_to_the_copies() -> None:
    torch.manual_seed(1)
    module, plain, x = Hooked(), Hooked(), torch.randn(5, 3)
    plain.load_state_dict(module.state_dict())
    copied = copy_of(module)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert torch.equal(stepped(copied, x), stepped(plain, x)), "as a module that was never copied"
    assert copied.seen == plain.seen and len(copied.seen) == 3 and not module.seen
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(one.grad is None for one in module.parameters())
    assert copied.first.weight.lr_scale == 0.5 and copied.second.bias.owner is copied.first
    assert copied.tied is copied.first.weight and len(copied.tied._backward_hooks) == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_a_hook_computes_can_be_copied() -> None:
    torch.manual_seed(2)
    module, x = weight_norm(nn.Linear(3, 2)), torch.randn(4, 3)
    copied = copy_of(module)
    expected = stepped(module, x)
    assert torch.equal(stepped(copied, x), expected) and copied.weight_v is not module.weight_v


def test_tensors_whose_storage_has_no_type_arrive_with_their_strides() -> None:
    module = nn.Linear(2, 2)
    dtypes = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64)
    for dtype in dtypes:
        module.register_buffer(str(dtype).partition(".")[2], torch.arange(1, 7).reshape(2, 3).to(dtype).t())
    module.scale = nn.Parameter(torch.ones(3).to(torch.float8_e5m2), requires_grad=False)
    make_sendable(module)
    sent = pickle.loads(_pickler().dumps(module)).state_dict()
    for name, tensor in module.state_dict().items():
        assert sent[name].dtype == tensor.dtype and sent[name].stride() == tensor.stride()
        assert torch.equal(sent[name].to(torch.complex64), tensor.to(torch.complex64))
    assert list(sent) == list(module.state_dict())
