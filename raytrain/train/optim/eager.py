"""torch's optimizers as classes that never import torch's compiler.

torch's own do, for nothing but to tell the compiler to leave their methods alone: 1.3 s of CPU time at the first
optimizer of a process, more than torch itself takes. Nothing here compiles an optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

_sgd_step = inspect.unwrap(torch.optim.SGD.step)


class Eager:
    """Before a torch optimizer among the bases: its methods without what wraps them for the compiler."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class AdamW(Eager, torch.optim.AdamW):
    """torch's AdamW."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class SGD(Eager, torch.optim.SGD):
    """torch's SGD, which may skip its first step too.

    torch's own fused one allocates momentum unset for the kernel to fill at the first step; one that is skipped fills
    nothing, and the next step moves by whatever was there.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update; momentum begins at zero, which the first step makes its gradient, as torch does."""
        for group in self.param_groups:
            if group["fused"] and group["momentum"] != 0:
                assert group["dampening"] == 0, "else a first step from zero is another"
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        state = self.state[parameter]
                        if state.get("momentum_buffer") is None:
                            state["momentum_buffer"] = torch.zeros_like(parameter)
        return _sgd_step(self, closure)
