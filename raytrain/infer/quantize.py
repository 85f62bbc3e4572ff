"""Weights of inference in fewer bits: matrices in the compute dtype, or int8 with a scale for each row.

`raytrain.infer.model` calls it once, when a model has been loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain.errors import InputError
from raytrain.infer.predictor import Predictor
from raytrain.models.gpt import GPT

# ---------------------------------------------------------------- half
# Weights of products in the format of the products: converted once, not by autocast in every pass.


OWN = ("raytrain.", "experts.")
#: Layers that do nothing with their weights but a product, which autocast computes in its own format.
PRODUCTS = (
    "torch.nn.modules.linear.Linear", "torch.nn.modules.conv.Conv2d", "transformers.pytorch_utils.Conv1D",
    "raytrain.models.gpt.Head",
)  # fmt: skip


def halve(module: nn.Module, dtype: torch.dtype, *, untie: bool = True) -> None:
    """Convert the float32 weights and biases of products to the format of autocast, in place.

    Only in built-in language models and those of transformers, whose code uses them in products alone; a user's
    forward may read a weight itself. Layers that others have changed, or that share a weight, stay as they are too.
    `module`: for inference under autocast only; may be on the meta device. `untie`: give a head that is tied to an
    embedding a copy, since rows are looked up in float32; else it stays tied."""
    source = type(module).__module__
    if not source.startswith("transformers.") and not (isinstance(module, GPT) and source.startswith(OWN)):
        return
    uses = Counter(id(one) for part in module.modules() for one in part._parameters.values())
    tables = Counter(id(part.weight) for part in module.modules() if type(part) is nn.Embedding)
    for part in module.modules():
        if "forward" in vars(part) or part._forward_hooks or part._forward_pre_hooks:
            continue
        kind = type(part)
        is_product = f"{kind.__module__}.{kind.__qualname__}" in PRODUCTS
        for name in ("weight", "bias") if is_product else getattr(kind, "stacked_matrices", ()):  # of experts
            held = part._parameters[name]
            alone = uses[id(held)] == 1 + untie * tables[id(held)]
            if held is not None and held.dtype == torch.float32 and alone:
                part._parameters[name] = nn.Parameter(held.detach().to(dtype), requires_grad=False)


# ---------------------------------------------------------------- quantize
# Linear layers with int8 weights: a quarter of the bytes of float32, and how far the answers stay the same.


KEY = "infer.quantize"
#: Rows of the input whose answers are compared, and tokens of each.
COMPARED_ROWS, COMPARED_TOKENS = 32, 16
#: Values count as the same up to this share of the largest one.
CLOSE = 0.01
_LARGEST = 127
#: Up to so many rows torch's kernel for CPUs is at least as fast as a product of a converted copy.
FEW_ROWS = 16


class Int8Linear(nn.Module):
    """In place of an `nn.Linear`: x (..., in) -> (..., out). `dtype`: of the weights that products use."""

    values: Tensor  # int8 (out, in)
    scale: Tensor  # float32 (out,); a weight is its value times the scale of its output

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / _LARGEST
        self.register_buffer("values", (weight / scale.unsqueeze(1)).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias, self.dtype = linear.bias, linear.weight.dtype
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def weight(self) -> Tensor:
        """(out, in) in floating point, computed again for each call."""
        return (self.values * self.scale.unsqueeze(1)).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if (torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype) != torch.bfloat16:
            return F.linear(x, self.weight, self.bias)
        rows = x.reshape(-1, self.in_features).bfloat16()
        if device == "cpu" and len(rows) <= FEW_ROWS and self.in_features % 64 == 0:  # others it reads past the end of
            ones = rows.new_ones(self.out_features)
            y = torch.ops.aten._weight_int8pack_mm(rows, self.values, ones) * self.scale
        else:
            y = F.linear(rows, self.values.bfloat16()) * self.scale
        return (y if self.bias is None else y + self.bias).bfloat16().view(*x.shape[:-1], self.out_features)


@dataclass(frozen=True)
class Quantization:
    layers: int  # number of linear layers in int8
    # before, after: bytes of their weights
    before: int
    after: int
    rows: int = 0  # of the input that were answered with both weights; 0 if the float weights did not fit the device
    same: int = 0  # how many of the answers are the same: equal classes or texts, values within `CLOSE`


def quantize(module: nn.Module) -> Quantization:
    """Replace the linear layers of a module by `Int8Linear`, in place. A weight that another layer shares, such as a
    head that is tied to the embedding, stays as it is. Raises InputError: it has no linear layer."""
    for part, name, child in list(_own_linears(module)):
        setattr(part, name, Int8Linear(child).train(child.training))
    found = quantization_of(module)
    if found is None:
        raise InputError(KEY, got="int8 with a model without linear layers of its own", expected="null")
    return found


def saved_bytes(module: nn.Module) -> int:
    scale_bytes = 4
    return sum(
        (child.weight.element_size() - 1) * child.weight.numel() - scale_bytes * child.out_features
        for _, _, child in _own_linears(module)
    )


def _own_linears(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """(parent, name in it, layer) of each linear layer whose weight no other layer shares."""
    uses = Counter(id(one) for part in module.modules() for one in part._parameters.values())
    for part in module.modules():
        for name, child in part.named_children():
            if type(child) is nn.Linear and uses[id(child.weight)] == 1:
                yield part, name, child


def quantization_of(module: nn.Module) -> Quantization | None:
    layers = [part for part in module.modules() if isinstance(part, Int8Linear)]
    if not layers:
        return None
    before = sum(layer.values.numel() * layer.dtype.itemsize for layer in layers)
    return Quantization(len(layers), before, sum(layer.values.nbytes + layer.scale.nbytes for layer in layers))


def quantize_compared(predictor: Predictor, table: Any) -> Quantization:
    """Quantize the module of a predictor in place, and compare its answers to some rows before and after. `table`:
    Arrow table of the rows; those that cannot be answered are not compared."""
    sample = predictor.shortened(COMPARED_TOKENS)
    before = _answers(sample, table)
    found = quantize(predictor.module)
    after = _answers(sample, table)
    compared = [(a, b) for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    same = sum(same_answer(a, b) for a, b in compared)
    return Quantization(found.layers, found.before, found.after, len(compared), same)


def same_answer(a: Any, b: Any) -> bool:
    """Whether two predictions are equal, or values within `CLOSE` of the largest of them."""
    if isinstance(a, float | Sequence) and not isinstance(a, str):
        x, y = (torch.as_tensor(one, dtype=torch.float64) for one in (a, b))
        return x.shape == y.shape and bool((x - y).abs().max() <= CLOSE * torch.maximum(x.abs(), y.abs()).max())
    return a == b


def _answers(predictor: Predictor, table: Any) -> list[Any]:
    numbers = range(table.num_rows)
    try:
        return predictor.predict(table, numbers).values
    except (RuntimeError, ValueError, TypeError, KeyError):  # of a row: the job itself finds out which, and tells
        return [None] * table.num_rows
