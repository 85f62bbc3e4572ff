"""Which parameters a forward may change, as far as that is known without running it."""

from __future__ import annotations

from torch import Tensor, nn


def limited_weights(module: nn.Module) -> dict[nn.Parameter, list[nn.Embedding | nn.EmbeddingBag]]:
    """The weights of embeddings with `max_norm`, each with those that look up its rows."""
    found: dict[nn.Parameter, list[nn.Embedding | nn.EmbeddingBag]] = {}
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            weight = part._parameters.get("weight")
            if weight is not None:  # a parametrized weight is computed anew for each lookup
                found.setdefault(weight, []).append(part)
    return found


def may_change(module: nn.Module) -> list[nn.Parameter]:
    """What passes may change, as far as it is known before any: frozen parameters where they are no larger than the
    others (a teacher is as large as what it learns from, a frozen base is larger than its adapters), and embeddings
    with `max_norm`. Shards are never changed."""
    own = [one for one in module.parameters() if not is_sharded(one)]
    frozen, trained = (sum(one.nbytes for one in own if one.requires_grad is how) for how in (False, True))
    limited = limited_weights(module)
    return [one for one in own if one in limited or (not one.requires_grad and frozen <= trained)]


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a shard of `fsdp`; without the import of torch's, which takes a second."""
    return hasattr(tensor, "to_local")
