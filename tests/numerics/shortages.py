"""Runs with injected out-of-memory errors, for test processes; they return numbers, never tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lab import GPT, MLP, MOE, Rows, class_rows, digest, make_session, token_rows, train, weights_of
from torch import Tensor

from raytrain.train.session import Session
from raytrain.trainable import LossOutput

Where = tuple[int, int, int, str]
"""Step, micro-batch (from 0), rank, "forward" or "backward" or "evaluation"."""


@dataclass
class Planted:
    """Raises `torch.OutOfMemoryError` once at each of the places of this rank; `met` are those that were reached."""

    session: Session
    places: list[Where]

    def __post_init__(self) -> None:
        self.met: list[Where] = []
        self._inner = self.session.trainable.loss
        self._step = self._count = 0
        self.session.trainable.loss = self.loss
        taken = self.session.step.backward

        def backward(*args: Any, **keys: Any) -> Any:
            self._count = 0
            return taken(*args, **keys)

        self.session.step.backward = backward  # type: ignore[method-assign]

    def loss(self, module: Any, batch: Any, **count: Any) -> LossOutput:
        training = module.training
        step = self.session.state.step + int(training)
        due = [
            place
            for place in self.places
            if place[0] == step and (place[3] == "evaluation") != training and (place[1] == self._count or not training)
        ]
        self._count += int(training)
        output = self._inner(module, batch, **count)
        for place in due[:1]:
            self.places.remove(place)
            self.met.append(place)
            if place[3] != "backward":
                raise torch.OutOfMemoryError(f"planted at {place}")
            output.loss.register_hook(lambda _gradient, place=place: fail(place))
        return output


def fail(place: Where) -> Tensor:
    raise torch.OutOfMemoryError(f"planted at {place}")


def places(seed: int, *, errors: int, steps: int, micro_batches: int, world_size: int) -> list[Where]:
    """`errors` of them, at different steps that are not next to each other; the fourth windows are small."""
    draw = np.random.default_rng(seed)
    free = [int(step) for step in draw.permutation(np.arange(1, steps + 1))]
    chosen: list[int] = []
    while len(chosen) < errors:
        step = free.pop()
        if all(abs(step - other) > 1 for other in chosen):
            chosen.append(step)
    kinds = ("forward", "backward")
    chosen.sort()
    micro = [int(draw.integers(micro_batches)) if step % 4 else 0 for step in chosen]
    return [
        (step, number, int(draw.integers(world_size)), kinds[draw.integers(2)])
        for step, number in zip(chosen, micro, strict=True)
    ]


def models() -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    """Name -> (sections, training rows). 54 rows in windows of 16: the fourth has 6, in micro-batches of 4 and 2."""
    tokens = token_rows(54, ragged=True)
    experts = {"num_experts": 4, "top_k": 2, "hosts": 0}
    return {
        "gpt": ({"model": GPT}, tokens),
        "moe_gpt": ({"model": MOE, "experts": experts}, tokens),
        "mlp": ({"model": MLP}, class_rows(54)),
    }


def run(
    rank: int, world_size: int, name: str, planted: Sequence[Where], steps: int, precision: str = "fp64", **loop: Any
) -> dict[str, Any]:
    """The results of a run with these out-of-memory errors."""
    made, rows = models()[name]
    session = make_session(
        made["model"],
        {"train": rows, "eval": token_rows(20, seed=5) if name != "mlp" else rows},
        precision=precision,
        loop={"max_steps": steps, "micro_batch_size": 4, "grow_after": 1, "eval_every": 1000, **loop},
        optim={"max_grad_norm": 0.3},
        **{key: value for key, value in made.items() if key != "model"},
    )
    mine = Planted(session, [place for place in planted if place[2] == rank])
    reporter, outcome = train(session)
    return found(session, reporter, mine) | {"outcome": outcome.kind}


def runs(rank: int, world_size: int, names: list[str], planted: Sequence[Where], steps: int) -> dict[str, Any]:
    """`run` of several models, without shortages and with them."""
    return {
        name: {"clean": run(rank, world_size, name, [], steps), "planted": run(rank, world_size, name, planted, steps)}
        for name in names
    }


def halves(rank: int, world_size: int, planted: Sequence[Where], steps: int, switch_at: int) -> dict[str, Any]:
    """A GPT with dropout: micro-batches of 4, and from a shortage at `switch_at` on of 2; and the same by hand."""
    both = {}
    for name in ("planted", "by hand"):
        session = make_session(
            {**GPT, "dropout": 0.2},
            {"train": token_rows(54, ragged=True), "eval_fraction": 0.0},
            loop={"max_steps": steps, "micro_batch_size": 4, "grow_after": None},
        )
        mine = Planted(session, [place for place in planted if place[2] == rank and name == "planted"])
        inner = session.loader.global_batch

        def window(cursor: Any, session: Session = session, inner: Any = inner) -> Any:
            if session.state.step + 1 == switch_at:
                session.loader.batches.micro_batch = 2
            return inner(cursor)

        if name == "by hand":
            session.loader.global_batch = window  # type: ignore[method-assign]
        reporter, _ = train(session)
        both[name] = found(session, reporter, mine)
    return both


def found(session: Session, reporter: Rows, planted: Planted) -> dict[str, Any]:
    """What is compared afterwards."""
    return {
        "losses": reporter.losses,
        "evals": reporter.of("eval", "loss"),
        "norms": reporter.of("train", "grad_norm"),
        "scales": reporter.of("train", "loss_scale"),
        "weights": weights_of(session),
        "digest": digest(session.trainable.module.state_dict()),
        "generators": digest(session.generator_state()),
        "events": [event for event in reporter.events if event["kind"] in ("out_of_memory", "decision")],
        "met": planted.met,
        "size": session.loader.batches.micro_batch,
    }


def others(rank: int, world_size: int) -> dict[str, Any]:
    """Single shortages of each kind, with what they are compared with."""
    both_ranks = [(3, 0, 0, "forward"), (3, 1, 1, "backward")]
    evaluation = [(4, 0, 1, "evaluation"), (8, 0, 0, "evaluation"), (8, 0, 1, "evaluation")]
    fp16 = [(5, 1, 0, "backward"), (9, 0, 1, "forward")]
    return {
        "clean": run(rank, world_size, "gpt", [], 8, eval_every=4),
        "both ranks": run(rank, world_size, "gpt", both_ranks, 8, eval_every=4),
        "evaluation": run(rank, world_size, "gpt", evaluation, 8, eval_every=4, eval_batches=None),
        "limited": run(rank, world_size, "gpt", [], 8, eval_every=4, eval_batches=1),
        "limited, short": run(rank, world_size, "gpt", evaluation, 8, eval_every=4, eval_batches=1),
        "fp16": run(rank, world_size, "gpt", [], 12, "fp16"),
        "fp16, short": run(rank, world_size, "gpt", fp16, 12, "fp16"),
        "halves": halves(rank, world_size, [(5, 1, 1, "backward")], 10, switch_at=5),
    }
