"""The plain loop that our loop must equal bit for bit. It uses nothing of raytrain but the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Trained:
    """The results of a plain run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evals: list[tuple[int, float]] = field(default_factory=list)


def square_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Global norm: rows in the gradient's format, their squares in float64."""
    rows = [torch.linalg.vector_norm(p.grad.view(-1, p.grad.shape[-1]), dim=1) for p in parameters]
    return torch.cat(rows).double().square().sum().sqrt()


def plain_loop(
    module: nn.Module,
    loss_of: Callable[[nn.Module, dict[str, Tensor]], Tensor],
    columns: dict[str, Tensor],
    held_out: dict[str, Tensor],
    order_of: Callable[[int], Any],
    *,
    steps: int,
    batch: int,
    micro: int,
    lr: float,
    warmup: int,
    clip: float,
    eval_every: int,
    decay: float = 0.1,
    torch_clip: bool = False,
) -> Trained:
    """Train `module` in place."""
    parameters = list(module.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=(0.9, 0.99), fused=True)
    out, step, epoch, rows = Trained(), 0, 0, len(columns["labels"])
    while step < steps:
        order = torch.from_numpy(order_of(epoch))
        for window in order.split(batch):
            if step == steps:
                break
            step += 1
            total = 0.0
            optimizer.zero_grad()
            for part in window.split(micro):
                loss = loss_of(module, {name: column[part] for name, column in columns.items()})
                (loss * (len(part) / len(window))).backward()
                total += float(loss.detach().double() * (len(part) / len(window)))
            if torch_clip:
                norm = nn.utils.clip_grad_norm_(parameters, clip)
            else:
                norm = square_norm(parameters)
                factor = torch.clamp(clip / (norm + 1e-6), max=1.0)
                for parameter in parameters:
                    parameter.grad.mul_(factor.to(parameter.dtype))
            share = step / (warmup + 1)
            if step > warmup:
                share = 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup - 1) / (steps - warmup - 1)))
            for group in optimizer.param_groups:
                group["lr"] = lr * share
            optimizer.step()
            out.losses.append(total)
            out.norms.append(float(norm))
            if step % eval_every == 0 or step == steps:
                out.evals.append((step, plain_eval(module, loss_of, held_out, batch=4 * micro)))
        epoch += 1
    assert rows == len(order)
    return out


def plain_eval(module: nn.Module, loss_of: Callable[..., Tensor], columns: dict[str, Tensor], *, batch: int) -> float:
    """Mean loss over all rows."""
    module.eval()
    with torch.no_grad():
        total = torch.zeros((), dtype=torch.float64)
        for part in torch.arange(len(columns["labels"])).split(batch):
            loss = loss_of(module, {name: column[part] for name, column in columns.items()})
            total += loss.double() * len(part)
    module.train()
    return float(total / len(columns["labels"]))
