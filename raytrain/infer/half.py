"""Weights of products in the format of the products: converted once, not by autocast in every pass.

The results are those of autocast to the bit, which would round the same values in the same way. Everything else
(norms, embeddings, routers) stays as it is, for autocast to treat.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from types import CodeType, FunctionType

import torch
from torch import nn

#: Layers that do nothing with their weights but a product, which autocast computes in its own format.
PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
CONV1D_OF_TRANSFORMERS = "transformers.pytorch_utils.Conv1D"
#: What code names that may use a layer's weight otherwise, or the layer outside autocast.
READING = {"weight", "bias", "parameters", "named_parameters", "_parameters", "state_dict", "autocast"}


def halve(module: nn.Module, dtype: torch.dtype, *, untie: bool = True) -> None:
    """Convert the float32 weights and biases of products to the format of autocast, in place.

    Layers stay as they are whose weight another module shares, or that belong to a module whose code reads weights
    itself.

    Args:
        module: for inference under autocast only; may be on the meta device.
        dtype: bfloat16 or float16.
        untie: give a head that is tied to an embedding a copy of its own, since a looked-up row stays in float32; else
            it stays tied.
    """
    uses = Counter(id(one) for part in module.modules() for one in part._parameters.values() if one is not None)
    tables = Counter(id(part.weight) for part in module.modules() if type(part) is nn.Embedding)
    read = {id(child) for part in module.modules() if _reads_weights(type(part)) for child in part.modules()}
    for part in module.modules():
        for name in _names_of_products(part) if id(part) not in read else ():
            held = part._parameters.get(name)
            if held is None or held.dtype != torch.float32:
                continue
            if uses[id(held)] == 1 + untie * tables[id(held)]:
                part._parameters[name] = nn.Parameter(held.detach().to(dtype), requires_grad=False)


def _names_of_products(part: nn.Module) -> tuple[str, ...]:
    """Parameters that a module uses in products only."""
    if "forward" in vars(part) or part._forward_hooks or part._forward_pre_hooks:  # of somebody else
        return ()
    kind = type(part)
    if kind in PRODUCTS or f"{kind.__module__}.{kind.__qualname__}" == CONV1D_OF_TRANSFORMERS:
        return ("weight", "bias")
    return getattr(kind, "stacked_matrices", ())  # of experts


@functools.cache
def _reads_weights(kind: type) -> bool:
    """Whether the code of a module's class, or a function that it calls, names the weights of its layers. What its
    initialisation did with them is over, and transformers' models are written for weights in half precision."""
    if kind in PRODUCTS or hasattr(kind, "stacked_matrices") or kind.__module__.startswith("transformers."):
        return False
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    held = [value for base in bases for name, value in vars(base).items() if "init" not in name]
    made = [inspect.unwrap(getattr(one, "fget", None) or getattr(one, "__func__", one)) for one in held]
    return any(_names(one.__code__, one, set()) & READING for one in made if isinstance(one, FunctionType))


def _names(code: CodeType, function: FunctionType, seen: set[FunctionType]) -> set[str]:
    """Attributes, globals and texts that the code of a function names, and those of the functions that it calls."""
    seen.add(function)
    found = {*code.co_names, *(one for one in code.co_consts if isinstance(one, str))}
    inner = [(one, function) for one in code.co_consts if isinstance(one, CodeType)]
    called = [function.__globals__.get(name) for name in code.co_names]
    own = [one for one in called if isinstance(one, FunctionType) and not one.__module__.startswith("torch.")]
    return found.union(*(_names(*one, seen) for one in inner + [(one.__code__, one) for one in own if one not in seen]))
