"""Weights of products in the format of the products: converted once, not by autocast in every pass.

The results are those of autocast to the bit, which rounds the same values in the same way. Everything else (norms,
embeddings, routers) stays as it is, for autocast to treat.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from raytrain.models.gpt import GPT

OWN = ("raytrain.", "experts.")
#: Layers that do nothing with their weights but a product, which autocast computes in its own format.
PRODUCTS = (
    "torch.nn.modules.linear.Linear", "torch.nn.modules.conv.Conv2d", "transformers.pytorch_utils.Conv1D",
    "raytrain.models.gpt.Head",
)  # fmt: skip


def halve(module: nn.Module, dtype: torch.dtype, *, untie: bool = True) -> None:
    """Convert the float32 weights and biases of products to the format of autocast, in place.

    Only in built-in language models and those of transformers, whose code uses them in products alone; a user's forward
    may read a weight itself. Layers that others have changed, or that share a weight, stay as they are too.

    Args:
        module: for inference under autocast only; may be on the meta device.
        untie: give a head that is tied to an embedding a copy, since rows are looked up in float32; else it stays tied.
    """
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
