"""What the author of a module said about it, checked once before the first step: it is kept, or refused by name.

The driver checks the module that it builds, before Ray starts, and each session the one that it trains. Modules may be
on the meta device. What only a pass can show is checked by `jobs.driver.checks.first_batch`.
"""

from __future__ import annotations

from raytrain.trainable import Trainable


def check_module(trainable: Trainable, *, key: str, strategy: str) -> None:
    """Refuse a module that could not be trained or saved as its author wrote it.

    Args:
        key: that the module comes from, for messages: "model.builder" or "model.module".
        strategy: resolved `scale.strategy`; "auto" where it is not known yet.

    Raises:
        InputError: naming the part of the module, and what to change.
    """
