"""What the author of a module said about it, checked once before the first step: it is kept, or refused by name.

The driver checks the module that it builds, before Ray starts, and each session the one that it trains. Modules may be
on the meta device. What only a pass can show is checked by `jobs.driver.checks.first_batch`.
"""

from __future__ import annotations

from torch import nn

from raytrain.errors import InputError
from raytrain.train.changeable import limited_weights
from raytrain.trainable import Trainable


def check_module(trainable: Trainable, *, key: str, strategy: str) -> None:
    """Refuse a module that could not be trained or saved as its author wrote it.

    Args:
        key: that the module comes from, for messages: "model.builder" or "model.module".
        strategy: resolved `scale.strategy`; "auto" where it is not known yet.

    Raises:
        InputError: naming the part of the module, and what to change.
    """
    _limited_weights_are_only_looked_up(trainable.module, strategy=strategy)


def _limited_weights_are_only_looked_up(module: nn.Module, *, strategy: str) -> None:
    """Under `fsdp` the limit of a lookup (`max_norm`) is lost with the gathered weight, so that backward would gather
    other values than a tied layer has computed with."""
    limited = limited_weights(module) if strategy == "fsdp" else {}
    for name, part in module.named_modules() if limited else ():
        for weight in part.parameters(recurse=False):
            if weight in limited and part not in limited[weight]:
                raise InputError(
                    "scale.strategy", got=f"fsdp with {name} ({type(part).__name__}), which shares the weight of an"
                    " embedding with max_norm", expected="a weight that only embeddings with max_norm have",
                    remedy="scale.strategy data_parallel, or an embedding without max_norm",
                )  # fmt: skip
