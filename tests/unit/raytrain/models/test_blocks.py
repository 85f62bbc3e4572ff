"""The repeated blocks of a model, named or found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raytrain.errors import InputError
from raytrain.models.blocks import blocks_of, outside, repeated
from raytrain.trainable import LossOutput, Trainable


class Layer(nn.Module):
    """A block: two products and a norm."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.steps = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)


class Stack(nn.Module):
    """An embedding, an encoder and a decoder of the same blocks, and a tied head."""

    def __init__(self, *, encoder: int = 2, decoder: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 4)
        self.encoder = nn.ModuleList(Layer() for _ in range(encoder))
        self.decoder = nn.ModuleDict({f"d{index}": Layer() for index in range(decoder)})
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.tokens.weight


def trainable(module: nn.Module, blocks: Any = None) -> Trainable:
    return Trainable(module, lambda *_: LossOutput(torch.zeros(())), blocks=blocks)


def names(module: nn.Module, blocks: Any = None) -> list[str]:
    return [name for name, _ in blocks_of(trainable(module, blocks), key="loop.compile")]


def refused(module: nn.Module, blocks: Any = None) -> InputError:
    with pytest.raises(InputError) as caught:
        names(module, blocks)
    return caught.value


def test_blocks_are_those_the_builder_names_in_one_list_or_several() -> None:
    assert names(Stack(decoder=0), "encoder") == ["encoder.0", "encoder.1"]
    assert names(Stack(), ["encoder", "decoder"]) == ["encoder.0", "encoder.1", "decoder.d0", "decoder.d1"]
    assert names(Stack(encoder=1, decoder=0), ["encoder.0"]) == ["encoder.0"], "a block by its own name"


def test_else_they_are_the_repeated_class_that_owns_the_most() -> None:
    assert names(Stack()) == ["encoder.0", "encoder.1", "decoder.d0", "decoder.d1"], "not the products inside them"
    plain = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2))
    assert names(plain) == ["0", "2", "4"]
    assert repeated(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.ReLU())) == []


def test_a_tied_weight_outside_of_blocks_is_reported_once() -> None:
    module = Stack()
    found = blocks_of(trainable(module), key="scale.strategy")
    assert [name for name, _ in outside(module, found)] == ["tokens.weight"]


def test_parameters_missing_in_a_list_are_named() -> None:
    error = refused(Stack(), "encoder")
    assert error.key == "model.builder" and "miss parameters of 2 like them" in str(error)
    assert "decoder.d0.steps.0.weight" in str(error) and "and 7 more" in str(error)


@pytest.mark.parametrize(
    ("blocks", "words"),
    [("layers", "encoder"), (["encoder", "encoder.0.steps"], "nested in each other"), ("encoder.0.steps.9", "encoder")],
)
def test_names_that_do_not_fit_are_refused(blocks: Any, words: str) -> None:
    error = refused(Stack(decoder=0), blocks)
    assert error.key == "model.builder" and words in str(error)


def test_a_model_without_blocks_names_the_key_that_needs_them() -> None:
    error = refused(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert error.key == "loop.compile" and "does not name blocks" in str(error)
    nothing = nn.Sequential(nn.ModuleList([nn.ReLU(), nn.ReLU()]), nn.Linear(2, 2))
    assert "own no parameter" in str(refused(nothing, "0"))
