"""Ways to compute the same thing, timed in alternating rounds, so that other work on the machine affects all alike; and
context managers that restore what a measurement changes. A test compares hashes of the state."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from raytrain.accelerator import seconds_of
from raytrain.train.device import rng_state, set_rng_state
from raytrain.train.memory.retry import SavedState
from raytrain.train.optim import takes_skip_on_device
from raytrain.train.session import Session
from raytrain.trainable import Trainable

#: Rounds continue until this much time has passed, within the bounds that a caller gives.
BUDGET_S = 2.0
#: Until the rounds have taken so long, a clear result is no reason to stop: a few of milliseconds may all fall into one
#: burst of other work, and every look at the times is one more chance to be misled.
CHEAP_S = 0.25


@dataclass(frozen=True)
class TimedArm:
    """One way to compute.

    Attributes:
        work: what is timed.
        before: runs before the clock starts.
        values: reads what was computed, after the clock has stopped.
    """

    work: Callable[[], object]
    before: Callable[[], object] = lambda: None
    values: Callable[[], Sequence[float]] = tuple


@dataclass(frozen=True)
class ArmTimes:
    """What one arm showed, the same on every worker.

    Attributes:
        round_s: the slowest worker's seconds of each timed round.
        values: rank 0's, of the last round.
        error: why the arm failed, or "".
    """

    round_s: tuple[float, ...]
    values: tuple[float, ...]
    error: str

    @property
    def median_s(self) -> float:
        """Of the rounds; infinite if nothing was timed."""
        return median(self.round_s) if self.round_s else float("inf")


def timed_arms(
    arms: Sequence[TimedArm], session: Session, *, rounds: tuple[int, int], budget_s: float = BUDGET_S,
    attempt: Callable[[int, Callable[[], object]], str], stop_on_failure: bool = False,
    clear: Callable[[list[list[float]]], bool] = lambda _seconds: False,
) -> list[ArmTimes]:  # fmt: skip
    """Time all arms in alternating rounds after one warm-up round, every arm with the same random numbers. Changes
    nothing that it measures. Collective.

    Args:
        rounds: at least, and at most if those take less than `budget_s` seconds.
        attempt: is given an arm's index and runs it; returns why that failed on any worker, or "". A failed arm is not
            run again.
        stop_on_failure: with one failed arm the others are of no interest.
        clear: whether, after the least rounds and `CHEAP_S`, this worker's seconds by arm need no more of them. The
            rounds end once they need none on any worker.
    """
    workers, device = session.workers, session.device
    seconds: list[list[float]] = [[] for _ in arms]
    values: list[Sequence[float]] = [() for _ in arms]
    errors: dict[int, str] = {}

    def timed(index: int, *, counts: bool) -> None:
        arms[index].before()
        begin = seconds_of(device)
        arms[index].work()
        if counts:
            seconds[index].append(seconds_of(device) - begin)
        values[index] = arms[index].values()

    with preserve_model(session.trainable, device):
        generators, begin = rng_state(device), time.perf_counter()
        for number in range(rounds[1] + 1):
            for index in (one for one in range(len(arms)) if one not in errors):
                set_rng_state(generators, device)
                if reason := attempt(index, partial(timed, index, counts=number > 0)):
                    errors[index] = reason
                    del seconds[index][max(0, number - 1) :]  # another worker may have failed where this one did not
                    if stop_on_failure:
                        break
            least = number >= rounds[0]
            late = least and time.perf_counter() - begin > budget_s
            settled = least and sum(map(sum, seconds)) >= CHEAP_S and clear(seconds)
            some_late, all_settled = workers.all_reduce_ints([int(late), int(settled)])
            if (stop_on_failure and errors) or some_late or all_settled == workers.world_size:
                break
    shown = [tuple(values[index]) if index not in errors else () for index in range(len(arms))]
    everybody = workers.all_gather_object((seconds, shown))
    slowest = [tuple(map(max, zip(*(own[index] for own, _ in everybody), strict=True))) for index in range(len(arms))]
    return [ArmTimes(slowest[index], everybody[0][1][index], errors.get(index, "")) for index in range(len(arms))]


# -- the state of a run --------------------------------------------------------------------------


@contextlib.contextmanager
def preserve_model(trainable: Trainable, device: torch.device, *, worst: bool = False) -> Iterator[None]:
    """Restores the model's buffers, extra state, generators, gradients (to zero) and train modes.

    Args:
        worst: inside, what depends on the data (the routing of a mixture of experts) needs the most memory it can.
    """
    module = trainable.module
    saved = SavedState(module, device)
    saved.take()
    modes = [(part, part.training) for part in module.modules()]
    extra = [
        (part, copy.deepcopy(part.get_extra_state()))
        for part in module.modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
    ]
    routing = trainable.worst_case() if worst and trainable.worst_case is not None else contextlib.nullcontext()
    try:
        with routing:
            yield
    finally:
        saved.restore()
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        for part, training in modes:  # not module.train(): a user may keep frozen parts in eval mode
            part.training = training
        for part, state in extra:
            part.set_extra_state(state)
    if trainable.interval_log is not None:
        trainable.interval_log.forget()
    trainable.remote.discard()  # not after a failure: the hosts may be in the middle of an exchange


@contextlib.contextmanager
def preserve_skipped(optimizers: list[Any]) -> Iterator[None]:
    """Restores the optimizers after steps that a flag on the device skips.

    Such steps allocate the optimizer's state; what was not there before is deleted. An optimizer that cannot skip on
    the device is copied and restored with its weights.
    """
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            skips = takes_skip_on_device(optimizer)
            stack.enter_context(_same_entries(optimizer) if skips else preserve_optimizers([optimizer]))
        yield


@contextlib.contextmanager
def preserve_optimizers(optimizers: list[Any]) -> Iterator[None]:
    """Restores the optimizers and their weights after real steps; both are copied to host memory."""
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    weights = [_copy(parameter) for parameter in parameters]
    ours = [optimizer for optimizer in optimizers if isinstance(optimizer, torch.optim.Optimizer)]
    users = [(one, copy.deepcopy(one.state_dict())) for one in optimizers if not isinstance(one, torch.optim.Optimizer)]
    try:
        with contextlib.ExitStack() as stack:
            for optimizer in ours:
                stack.enter_context(_same_entries(optimizer, values=True))
            yield
    finally:
        with torch.no_grad():
            for parameter, kept in zip(parameters, weights, strict=True):
                parameter.copy_(kept)
        for optimizer, record in users:
            optimizer.load_state_dict(record)


@contextlib.contextmanager
def _same_entries(optimizer: torch.optim.Optimizer, *, values: bool = False) -> Iterator[None]:
    """Restores which entries of state and group settings there are, and with `values` what they hold; without it the
    values of tensors are not copied."""
    state = {parameter: dict(entries) for parameter, entries in optimizer.state.items()}
    held = {} if not values else {
        parameter: {name: _copy(value) for name, value in entries.items()} for parameter, entries in state.items()
    }  # fmt: skip
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    flags = {name: getattr(optimizer, name) for name in ("found_inf", "grad_scale") if hasattr(optimizer, name)}
    try:
        yield
    finally:
        for parameter in [parameter for parameter in optimizer.state if parameter not in state]:
            del optimizer.state[parameter]
        optimizer.state.update(state)
        for parameter, entries in held.items():
            for name, value in entries.items():
                if isinstance(value, Tensor):
                    state[parameter][name].copy_(value)  # in place: compiled code may hold the tensor
                else:
                    state[parameter][name] = value
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update({"params": parameters, **settings})
        for name in ("found_inf", "grad_scale"):
            if name in flags:
                setattr(optimizer, name, flags[name])
            elif hasattr(optimizer, name):
                delattr(optimizer, name)


def _copy(value: Any) -> Any:
    """A copy of a value, of a tensor in host memory."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
