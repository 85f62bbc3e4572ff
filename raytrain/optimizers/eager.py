"""torch's optimizers as classes that never import torch's compiler.

torch's own do, for nothing but to tell the compiler to leave their methods alone: 1.3 s of CPU time at the first
optimizer of a process, more than torch itself takes. Nothing here compiles an optimizer.
"""

from __future__ import annotations

import inspect

import torch


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
    """torch's SGD."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))
