"""The precision probe's own behaviour. (That it changes nothing: tests/numerics/test_probe_is_neutral.py.)"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from lab import MLP, class_rows, make_session
from torch import Tensor, nn

from raytrain.autotune.batch_search import ROUNDS, Proposal, SearchResults, decide
from raytrain.autotune.measurement import Candidate, has_winner
from raytrain.autotune.preserve import preserve_model
from raytrain.autotune.size_curve import BatchSpace
from raytrain.autotune.startup import PRECISION_ROUNDS
from raytrain.autotune.step_probe import StepProbe
from raytrain.train.session import Session
from raytrain.trainable import Trainable

MIN_ROUNDS, MAX_ROUNDS = PRECISION_ROUNDS


def session_of() -> Session:
    return make_session(MLP, {"train": class_rows(64), "eval_fraction": 0.0}, loop={"micro_batch_size": 8})


def compared(session: Session, candidates: list[str], **more: Any) -> list[Any]:
    points = [Candidate(name, 8) for name in candidates]
    return [*StepProbe(session).measure_in_turn(
        points, budget=None, rounds=PRECISION_ROUNDS, updates=False, clear=has_winner, **more
    )]  # fmt: skip


@pytest.mark.parametrize("said", [True, False])
def test_a_precision_that_cannot_run_is_a_result_and_is_not_retried(said: bool) -> None:
    session = session_of()
    inner, tried = session.trainable.loss, Counter()

    def loss(module: nn.Module, batch: Any) -> Any:
        half = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.float16
        tried["fp16" if half else "other"] += 1
        if half:
            raise RuntimeError("\"op\" not implemented for 'Half'\nmore lines" if said else "")
        return inner(module, batch)

    session.trainable.loss = loss
    full, half = compared(session, ["fp32", "fp16"], budget_s=0.0)
    assert half.reason == ("\"op\" not implemented for 'Half'" if said else "RuntimeError")
    assert half.outcome == "error" and not half.pass_s
    assert full.outcome == "ok" and 0 < sum(full.pass_s) < 60 and tried["fp16"] == 1


def test_an_error_outside_of_operations_is_not_hidden() -> None:
    session = session_of()

    def loss(module: nn.Module, batch: Any) -> Any:
        raise TypeError("a mistake of its author")

    session.trainable.loss = loss
    with pytest.raises(TypeError, match="a mistake"):
        compared(session, ["fp32", "bf16"])


@pytest.mark.parametrize(
    ("budget", "bf16_s", "rounds"),
    [
        (0.0, (1.0, 1.0), MIN_ROUNDS + 1),
        (1e9, (1.0, 1.0), MAX_ROUNDS + 1),
        (1e9, (0.5, 0.6), MIN_ROUNDS + 1),  # clearly the faster one
        (1e9, (0.5, 0.99), MAX_ROUNDS + 1),  # faster, but once by less than the gain that is worth while
        (1e9, (2.0, 3.0), MIN_ROUNDS + 1),  # clearly the slower one
        (1e9, (0.005, 0.006), MAX_ROUNDS + 1),  # of passes of milliseconds all are needed
    ],
)
def test_rounds_alternate_until_the_time_is_up_or_one_has_won(
    monkeypatch: pytest.MonkeyPatch, budget: float, bf16_s: tuple[float, float], rounds: int
) -> None:
    session = session_of()
    inner, order, now = session.trainable.loss, [], [0.0]

    def loss(module: nn.Module, batch: Any) -> Any:
        order.append("bf16" if torch.is_autocast_enabled("cpu") else "fp32")
        fp32_s = 0.01 if max(bf16_s) < 0.01 else 1.0
        now[0] += bf16_s[order.count("bf16") % 2] if order[-1] == "bf16" else fp32_s
        return inner(module, batch)

    monkeypatch.setattr("raytrain.autotune.step_probe.seconds_of", lambda _device: now[0])
    session.trainable.loss = loss
    compared(session, ["fp32", "bf16"], budget_s=budget)
    assert order == ["fp32", "bf16"] * rounds


@pytest.mark.parametrize(
    ("fp32_s", "bf16_s", "rounds", "chosen"),
    [
        ((1.0, 1.0), (0.5, 0.5), 3, "bf16"),
        ((1.0, 1.9), (0.2, 1.2), 5, "bf16"),  # each has rounds that are slower than the other's fast ones
        ((1.0, 1.0), (0.2, 1.2), 12, "fp32"),
        ((1.0, 1.0), (1.5, 1.6), 3, "fp32"),
    ],
)
def test_a_comparison_goes_on_where_times_vary_and_what_wins_each_round_is_chosen(
    monkeypatch: pytest.MonkeyPatch, fp32_s: tuple[float, float], bf16_s: tuple[float, float], rounds: int, chosen: str
) -> None:
    """On a busy machine, where the faster precision would need more than three rounds to be believed."""
    session = session_of()
    inner, calls, now = session.trainable.loss, Counter(), [0.0]

    def loss(module: nn.Module, batch: Any) -> Any:
        name = "bf16" if torch.is_autocast_enabled("cpu") else "fp32"
        calls[name] += 1
        now[0] += (bf16_s if name == "bf16" else fp32_s)[calls[name] % 2]
        return inner(module, batch)

    monkeypatch.setattr("raytrain.autotune.step_probe.seconds_of", lambda _device: now[0])
    session.trainable.loss, probe = loss, StepProbe(session)
    space, results = BatchSpace(("fp32", "bf16"), [8], 8, None), SearchResults()
    for name in space.precisions:
        results.add((probe.measure(Candidate(name, 8), budget=None, passes=3, with_memory=False),))
    calls.clear()
    proposal = Proposal(Candidate("bf16", 8), ROUNDS, against=(Candidate("fp32", 8),))
    results.add(compared := probe.run_proposal(proposal, budget=None))
    assert [len(one.pass_s) for one in compared] == [rounds, rounds]
    assert decide(space, results).candidate.precision == chosen


def test_each_precision_sees_the_same_dropout() -> None:
    session = make_session({**MLP, "dropout": 0.5}, {"train": class_rows(64), "eval_fraction": 0.0})
    first, second = compared(session, ["fp32", "fp32"], budget_s=0.0)
    assert (first.loss, first.grad_norm) == (second.loss, second.grad_norm)


def test_changed_state_is_restored_even_after_an_error() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    module[0].eval()
    module[0].weight.grad = torch.ones(3)
    before = module[0].running_mean.clone()
    torch.manual_seed(1)
    wanted = torch.rand(2)
    torch.manual_seed(1)
    with pytest.raises(KeyError), preserve_model(Trainable.from_module(module), torch.device("cpu")):
        module.train()
        module(torch.rand(4, 3))
        module.eval()
        raise KeyError
    assert torch.equal(module[0].running_mean, before) and torch.equal(torch.rand(2), wanted)
    assert (module[0].training, module[1].training) == (False, True)
    assert float(module[0].weight.grad.sum()) == 0.0


class Remembers(nn.Module):
    """Puts another tensor in a buffer's place, and makes a buffer as it first computes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.register_buffer("last", x.detach())
        return x


def test_a_replaced_buffer_is_restored() -> None:
    module = Remembers()
    first = module.calls
    with preserve_model(Trainable.from_module(module), torch.device("cpu")):
        module(torch.ones(2))
    assert module.calls is first and float(first) == 0.0


class CountsPasses(nn.Linear):
    """Counts its passes in an extra state."""

    seen = 0

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(given)

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_an_extra_state_is_restored() -> None:
    module = nn.Sequential(CountsPasses(2, 2), CountsPasses(2, 2))
    module(torch.ones(1, 2))
    with preserve_model(Trainable.from_module(module), torch.device("cpu")):
        module(torch.ones(1, 2))
    assert [part.seen for part in module] == [1, 1]  # pyright: ignore
