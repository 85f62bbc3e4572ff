"""What a module's author said and no run could keep is refused by name, with what to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from raytrain.errors import InputError
from raytrain.train.module_checks import check_module
from raytrain.trainable import Trainable


class Net(nn.Module):
    """A linear layer and one buffer."""

    def __init__(self, held: Tensor | None = None, extra: Any = None) -> None:
        super().__init__()
        self.linear, self.extra = nn.Linear(3, 4), extra
        self.register_buffer("held", held)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).mean()


class Extra(Net):
    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class WithoutSetter(Net):
    def get_extra_state(self) -> Any:
        return 1


class Leaner(Net):
    """Leaves the bias out of its state, and does not miss it when it is loaded."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state.pop("linear.bias")
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False, assign=assign)


def transposing(*, back: bool) -> Net:
    """Its state has the weight transposed, under a name of its own."""
    net = Net()

    def forth(_module: Any, state: Any, prefix: str, _metadata: Any) -> None:
        state[f"{prefix}turned"] = state.pop(f"{prefix}linear.weight").t()

    def undo(_module: Any, state: Any, prefix: str, *_more: Any) -> None:
        state[f"{prefix}linear.weight"] = state.pop(f"{prefix}turned").t()

    net.register_state_dict_post_hook(forth)
    if back:
        net.register_load_state_dict_pre_hook(undo)
    return net


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2))


def refusal(module: nn.Module, strategy: str = "data_parallel", **more: Any) -> str | None:
    trainable = Trainable.from_module(module, loss=lambda module, batch: module(batch["x"]))
    for name, value in more.items():
        setattr(trainable, name, value)
    try:
        check_module(trainable, key="model.module", strategy=strategy)
    except InputError as error:
        return str(error)
    return None


CANNOT = "cannot be saved"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "complex128": (lambda: Net(torch.zeros(2, dtype=torch.complex128)), f"held: a tensor of torch.complex128 {CANNOT}"),
    "float8 without a name": (lambda: Net(torch.zeros(2).to(torch.float8_e5m2fnuz)), f"e5m2fnuz {CANNOT}"),
    "sparse": (lambda: Net(torch.eye(3).to_sparse()), f"held: a tensor of layout torch.sparse_coo {CANNOT}"),
    "quantized": (
        lambda: Net(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)), "held: a quantized tensor"
    ),
    "nested": (lambda: Net(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])), "held: a nested tensor"),
    "subclass": (lambda: Net(TwoTensor(torch.ones(2), torch.ones(2))), "held: a TwoTensor, whose values"),
    "a set": (lambda: Extra(extra={"ids": {1, 2}}), f"_extra_state.ids: a builtins.set {CANNOT}"),
    "a sparse tensor inside": (lambda: Extra(extra=[torch.eye(2).to_sparse()]), "_extra_state.0: a tensor of layout"),
    "no setter": (WithoutSetter, r"a WithoutSetter \(the model itself\) with get_extra_state alone"),
    "leaves out": (Leaner, "a Leaner whose state_dict leaves out linear.bias, which are trained"),
    "does not load": (lambda: transposing(back=False), r"Missing key\(s\) in state_dict: \"linear.weight\""),
    "lazy": (lazy, r"a LazyLinear whose weight has no size yet \(1\), expected .* call it with one batch"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_could_not_be_kept_is_refused_by_name(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(AssertionError, match=words):
        assert refusal(make()) is None


@pytest.mark.parametrize(
    "make",
    [
        Net, lambda: Net(torch.zeros(2, dtype=torch.complex64)), lambda: Net(torch.zeros(2).to(torch.float8_e4m3fn)),
        lambda: Net(torch.zeros(2, dtype=torch.uint16)),
        lambda: Extra(extra={"a": [1, (None, 2.5)], "t": torch.eye(2)}),
        Extra, lambda: transposing(back=True),
        lambda: nn.Sequential(Extra(extra=torch.ones(3)), Net(torch.eye(3).to_sparse()).linear),
    ],
)  # fmt: skip
def test_what_can_be_kept_passes_and_is_left_alone(make: Callable[[], nn.Module]) -> None:
    module = make()
    before = [value.clone() for value in module.parameters()]
    assert refusal(module) is None
    assert all(map(torch.equal, before, module.parameters()))


def test_a_state_that_is_not_persistent_may_be_anything() -> None:
    net = Net()
    net.register_buffer("other", torch.eye(3).to_sparse(), persistent=False)
    assert refusal(net) is None


def test_sharding_needs_the_names_of_the_parameters() -> None:
    text = refusal(transposing(back=True), "fsdp")
    assert text == (
        "scale.strategy: got fsdp with a Net whose state_dict has names of its own (turned), "
        "expected data_parallel for this model"
    )


def test_further_parts_of_a_checkpoint_are_looked_at() -> None:
    class Part:
        def state_dict(self) -> dict[str, Any]:
            return {"seen": {3}}

    text = refusal(Net(), state_parts=lambda: {"mine": Part()})
    assert text is not None and "state_parts mine.seen: a builtins.set cannot be saved" in text


def test_a_builder_on_the_meta_device_is_checked_too() -> None:
    with torch.device("meta"):
        module = Extra(torch.zeros(3), extra={"seen": {1}})
        reads = Extra(torch.zeros(3))
    reads.__class__ = type("Reads", (Extra,), {"get_extra_state": lambda self: self.held[0].item()})
    text = refusal(module)
    assert text is not None and "_extra_state.seen" in text
    assert refusal(reads) is None, "what reads values is left to the session, which has them"
