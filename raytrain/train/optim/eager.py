"""torch's optimizers without the import of torch's compiler.

torch's classes import the compiler only to exclude their methods from it. That takes 1.3 s of CPU time at the first
optimizer of a process, more than the import of torch itself. This project never compiles an optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

_sgd_step = inspect.unwrap(torch.optim.SGD.step)


class Eager:
    """Mixin before a torch optimizer in the bases: its methods without their compiler decorators."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class AdamW(Eager, torch.optim.AdamW):
    """torch's AdamW."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class SGD(Eager, torch.optim.SGD):
    """torch's SGD, whose first step can be skipped too.

    torch's fused SGD leaves the momentum uninitialised for the kernel to fill at the first step. If that step is
    skipped, the next one uses uninitialised memory.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Run one update. Momentum starts at zero, so the first step sets it to the gradient, as in torch."""
        for group in self.param_groups:
            if group["fused"] and group["momentum"] != 0:
                assert group["dampening"] == 0, "with dampening, a first step from zero momentum differs from torch's"
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        state = self.state[parameter]
                        if state.get("momentum_buffer") is None:
                            state["momentum_buffer"] = torch.zeros_like(parameter)
        return _sgd_step(self, closure)
