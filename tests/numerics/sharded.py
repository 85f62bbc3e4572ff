"""Runs with sharded parameters, for processes of a gang; they return numbers, never tensors."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lab import GPT, digest, full_weights, make_session, token_rows, train, train_and_save
from torch import Tensor, nn

import raytrain.train.parallel.fsdp
from raytrain.checkpoint.reader import newest_valid
from raytrain.errors import RunError
from raytrain.models.gpt import Block, FeedForward, language_loss
from raytrain.runs.folder import RunFolder
from raytrain.train.job import place_of
from raytrain.train.session import Session
from raytrain.trainable import Trainable

ROWS, STEPS = 53, 7
"""Windows of 24 rows: two whole ones and one of 5 in each epoch, in which the third of three workers has none."""


def session_of(strategy: str, *, precision: str = "fp64", **sections: Any) -> Session:
    data = {"train": token_rows(ROWS, ragged=True), "eval": token_rows(9, seed=5, ragged=True)}
    model = sections.pop("model", GPT)
    loop = {"max_steps": STEPS, "global_batch_size": 24, "micro_batch_size": 4, "eval_every": 3}
    return make_session(
        model, data, precision=precision,
        scale={"strategy": strategy}, optim={"max_grad_norm": 0.05, "lr": 0.003, **sections.pop("optim", {})},
        loop={**loop, **sections.pop("loop", {})}, **sections,
    )  # fmt: skip


def found(session: Session) -> dict[str, Any]:
    rows, _ = train(session)
    weights = full_weights(session)
    own = {} if session.job.planned("strategy") != "fsdp" else session.strategy.facts()["sharded"]
    return {
        "losses": rows.losses, "norms": rows.of("train", "grad_norm"), "evals": rows.of("eval", "loss"),
        "scales": rows.of("train", "loss_scale"), "skipped": rows.of("train", "skipped_steps"),
        "weights": weights, "own": own, "held": held(session),
    }  # fmt: skip


def held(session: Session) -> dict[str, int]:
    """Bytes on this worker: of weights, gradients and optimizer state."""
    moments = [v for o in session.optimizers for s in o.state.values() for v in s.values() if v.ndim]
    parts = {
        "weights": list(session.trainable.module.parameters()), "gradients": session.step.gradients.buffers,
        "moments": moments,
    }  # fmt: skip
    return {name: sum(own(one).nbytes for one in tensors) for name, tensors in parts.items()}


def own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue]


def trained(_rank: int, _world: int, strategy: str, sections: dict[str, Any]) -> dict[str, Any]:
    return found(session_of(strategy, **sections))


# ---------------------------------------------------------------- what a builder of one's own may do


class Odd(nn.Module):
    """Tied embedding and head, a frozen block, a frozen half of another, and a parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(31, 16)
        self.layers = nn.ModuleList([Block(16, 2, 0.0, FeedForward(16, 48)) for _ in range(3)])
        self.head = nn.Linear(16, 31, bias=False)
        self.head.weight = self.tokens.weight
        self.layers[0].requires_grad_(False)
        self.layers[1].feed_forward.requires_grad_(False)  # pyright: ignore[reportAttributeAccessIssue]
        self.layers[2].unused = nn.Parameter(torch.ones(5))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss} if self.training else {"loss": loss, "logits": logits}


def odd() -> Trainable:
    """The builder; its blocks are found, not named."""
    return Trainable(Odd(), language_loss)


# ---------------------------------------------------------------- what is together at a time


def together(_rank: int, _world: int, sections: dict[str, Any]) -> dict[str, Any]:
    """The most bytes of whole parameters, and of whole gradients, that were there at once, looked at whenever a layer
    runs or has run."""
    session = session_of("fsdp", **sections)
    groups = [group for state in _states(session) for group in state._fsdp_param_groups]
    seen: list[tuple[int, int]] = []
    gradients: list[int] = []

    def look(*_about: Any) -> None:
        sizes = [
            sum(t.untyped_storage().size() for p in group.fsdp_params for t in getattr(p, "all_gather_outputs", ()))
            for group in groups
        ]
        seen.append((sum(sizes), sum(size > 0 for size in sizes)))
        there = [one for group in groups for one in group.fsdp_params if hasattr(one, "_unsharded_param")]
        whole = [one._unsharded_param.grad for one in there]
        gradients.append(sum(grad.nbytes for grad in whole if grad is not None))

    for part in session.trainable.module.modules():
        if isinstance(part, nn.Linear | nn.LayerNorm | nn.Embedding):
            part.register_forward_hook(look)
            part.register_full_backward_hook(look)
    train(session)
    look()
    told = {"most": max(seen), "after": seen[-1], "looks": len(seen), "gradients": max(gradients)}
    return {**told, **session.strategy.facts()["sharded"]}


def _states(session: Session) -> list[Any]:
    modules = session.trainable.module.modules()
    return [part._get_fsdp_state() for part in modules if hasattr(part, "_get_fsdp_state")]  # pyright: ignore


# ---------------------------------------------------------------- checkpoints


def saved(rank: int, world_size: int, strategy: str, path: str, until: int, resumed: bool) -> dict[str, Any]:
    """Train, saving every second step, to the end or to one step after `until`."""
    run = RunFolder(path)
    session = session_of(strategy)
    if resumed:
        loaded = newest_valid(run, place=place_of(session.job, rank=rank, world_size=world_size)).checkpoint
        assert loaded is not None
        session.restore(loaded)
    begun = session.state.step
    reporter, _ = train_and_save(session, run, every=2, should_stop=lambda: session.state.step >= until)
    weights = {name: own(value) for name, value in session.trainable.module.state_dict().items()}
    moments = [
        {name: own(value) for name, value in state.items()}
        for optimizer in session.optimizers
        for state in optimizer.state_dict()["state"].values()
    ]
    return {"losses": reporter.losses, "from": begun, "state": digest(weights, moments)}


def unwritable(rank: int, _world: int, path: str) -> str:
    """What ends a run whose second worker cannot write its rows."""
    session = session_of("fsdp", loop={"max_steps": 1})

    def full(*_about: Any, **_named: Any) -> Any:
        raise OSError(28, "No space left on device")

    if rank == 1:
        raytrain.train.parallel.fsdp.write_parts = full
    try:
        train_and_save(session, RunFolder(path), every=1)
    except (RunError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def not_finite(rank: int, world_size: int, strategy: str, precision: str, fault: str) -> dict[str, Any]:
    """Six steps; at the third the last rank's loss or gradient is not finite. What each step left behind."""
    session = session_of(strategy, precision=precision, loop={"max_steps": 6}, optim={"warmup_steps": 0})
    inner, states = session.trainable.loss, [local_state(session)]

    def loss(module: nn.Module, batch: dict[str, Any], **count: Any) -> Any:
        out = inner(module, batch, **count)
        if not module.training or rank != world_size - 1 or session.state.step != 2:
            return out
        infinite = float("inf")
        return replace(out, loss=out.loss * infinite if fault == "gradient" else out.loss + infinite)

    session.trainable.loss = loss
    session.trainable.between_steps = lambda _step: states.append(local_state(session))
    rows, outcome = train(session)
    return {
        "states": states, "scales": rows.of("train", "loss_scale"), "skipped": rows.of("train", "skipped_steps"),
        "norms": rows.of("train", "grad_norm"), "outcome": outcome.kind,
        "named": [event["what"] for event in rows.events if event["kind"] == "nonfinite"],
    }  # fmt: skip


def local_state(session: Session) -> str:
    """A hash of this worker's weights and moments."""
    weights = [own(one) for one in session.trainable.module.state_dict().values()]
    moments = [
        own(value)
        for optimizer in session.optimizers
        for state in optimizer.state.values()
        for name, value in sorted(state.items())
        if name != "step"
    ]
    return digest(weights, moments)


def waited(_rank: int, _world: int) -> dict[str, float]:
    """Seconds that a step waits for others, on a clock by which each meeting inside a pass takes a thousand."""
    ticks = itertools.count(0.0, 1000.0)
    raytrain.train.parallel.fsdp.time = SimpleNamespace(perf_counter=lambda: next(ticks))  # pyright: ignore
    session = session_of("fsdp", loop={"max_steps": 1, "eval_every": 1000}, model={**GPT, "layers": 4})
    seen: list[float] = []
    taken = session.step.run

    def run(*args: Any, **keys: Any) -> Any:
        output = taken(*args, **keys)
        seen.append(output.communication_s)
        return output

    session.step.run = run  # type: ignore[method-assign]
    indices = session.loader.global_batch(session.state.cursor).indices
    train(session)
    return {"communication": seen[0], "passes": session.loader.passes(indices)}


def close(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of losses, norms, evaluations and weights."""
    gaps = [abs(a - b) for name in ("losses", "norms", "evals") for a, b in zip(one[name], other[name], strict=True)]
    gaps += [float(np.abs(one["weights"][name] - other["weights"][name]).max()) for name in one["weights"]]
    return max(gaps)
