"""Two passes in interleaver: the order, and how both end when one fails."""

from __future__ import annotations

import threading

import pytest
import torch

from raytrain.train.parallel.collectives import Interleaver


def walker(interleaver: Interleaver, log: list[str], name: str, waits: int, *, fails_at: int | None = None) -> str:
    """Says where it is, gives the turn away `waits` times, and says so after each."""
    for number in range(waits):
        log.append(f"{name}{number}")
        if number == fails_at:
            raise ValueError(f"{name} failed")
        interleaver.yield_turn()
    log.append(f"{name} ends")
    return name


def test_passes_alternate_strictly_and_the_longer_one_continues_alone() -> None:
    interleaver = Interleaver()
    log: list[str] = []
    for _ in range(50):
        made = interleaver.run_interleaved(
            lambda: walker(interleaver, log, "a", 2), lambda: walker(interleaver, log, "b", 4)
        )
        assert made == "b"
        assert log == ["a0", "b0", "a1", "b1", "a ends", "b2", "b3", "b ends"]
        log.clear()
        interleaver.run_interleaved(lambda: walker(interleaver, log, "a", 3), lambda: log.append("b"))
        assert log == ["a0", "b", "a1", "a2", "a ends"]
        log.clear()


def test_the_turn_belongs_to_a_pass_in_any_thread() -> None:
    """On a GPU a backward pass runs in autograd's threads."""
    interleaver, log = Interleaver(), []

    def remote() -> None:
        thread = threading.Thread(target=walker, args=(interleaver, log, "a", 2))
        thread.start()
        thread.join()

    interleaver.run_interleaved(remote, lambda: walker(interleaver, log, "b", 2))
    assert log == ["a0", "b0", "a1", "b1", "a ends", "b ends"]


def test_alone_a_pass_keeps_the_turn() -> None:
    interleaver = Interleaver()
    interleaver.yield_turn()
    interleaver.run_interleaved(lambda: None, lambda: None)
    interleaver.yield_turn()


@pytest.mark.parametrize("fails_at", [0, 1, 3])
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_failure_ends_both_passes_is_raised_and_keeps_the_interleaver_usable(name: str, fails_at: int) -> None:
    interleaver = Interleaver()
    log: list[str] = []
    with pytest.raises(ValueError, match=f"{name} failed"):
        interleaver.run_interleaved(
            lambda: walker(interleaver, log, "a", 5, fails_at=fails_at if name == "a" else None),
            lambda: walker(interleaver, log, "b", 5, fails_at=fails_at if name == "b" else None),
        )
    assert log[-1] == f"{name}{fails_at}", "the other went on"
    interleaver.yield_turn()
    log.clear()
    assert (
        interleaver.run_interleaved(lambda: walker(interleaver, log, "a", 1), lambda: walker(interleaver, log, "b", 1))
        == "b"
    )
    assert log == ["a0", "b0", "a ends", "b ends"]


def test_a_failure_after_the_others_end_is_raised_too() -> None:
    interleaver, log = Interleaver(), []
    with pytest.raises(ValueError, match="a failed"):
        interleaver.run_interleaved(
            lambda: walker(interleaver, log, "a", 3, fails_at=2), lambda: walker(interleaver, log, "b", 0)
        )
    assert log == ["a0", "b ends", "a1", "a2"]
    interleaver.yield_turn()  # as if nothing had been


def test_a_backward_pass_interleaved_with_a_forward_pass_gives_the_same_gradients() -> None:
    """What a pass computes does not depend on the thread: gradients are equal to the last bit."""
    torch.manual_seed(0)
    weight, interleaver = torch.randn(64, 64, requires_grad=True), Interleaver()

    def forward(number: int) -> torch.Tensor:
        draw = torch.randn(32, 64, generator=torch.Generator().manual_seed(number))
        return torch.tanh(draw @ weight).square().mean()

    forward(0).backward()
    forward(1).backward()
    plain, weight.grad = weight.grad, None
    following = interleaver.run_interleaved(forward(0).backward, lambda: forward(1))
    interleaver.run_interleaved(following.backward, lambda: None)
    assert torch.equal(plain, weight.grad)  # type: ignore[arg-type]
