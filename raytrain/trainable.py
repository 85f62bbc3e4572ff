"""`Trainable`: a module, its loss and hooks, as the training loop sees them; made by hand or from an `nn.Module`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from raytrain.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from raytrain.runs.faults import Death
    from raytrain.train.memory.device import Shortage
    from raytrain.train.parallel.collectives import Interleaver, WorkersGroup

__all__ = ["LossOutput", "Trainable", "in_eval", "labels_weight"]

Batch = dict[str, Any]
IGNORED_LABEL = -100
GLOBAL_COUNT = "num_items_in_batch"
MASK = "attention_mask"


@dataclass(frozen=True)
class LossOutput:
    """What a loss function returns for one micro-batch; every value is a mean over the batch's weight.

    Attributes:
        loss: scalar, without auxiliary losses.
        aux: scalar, added to `loss` before backward (a router's balance loss), reported separately.
        metrics: scalars by name, with "accuracy" where the model has one; detached. Rows of training and of evaluation
            hold their means; a name that a row has already, such as "lr", stays the row's own.
        weight: what the loss is a mean over, such as the sum of class weights, where it is not what `Trainable.weight`
            counts; a number or a scalar, which is read from the device. None: as counted.

    Example:
        >>> import torch
        >>> from raytrain.trainable import LossOutput
        >>> LossOutput(torch.tensor(1.5), metrics={"accuracy": torch.tensor(0.5)}).aux is None
        True
    """

    loss: Tensor
    aux: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)
    weight: Tensor | float | None = None


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward and backward pass on one worker."""

    batch: Batch  # on the device
    weight: int  # samples or tokens that its loss averages over
    last: bool = False  # whether it is the last of its step, as far as is known


@dataclass(frozen=True)
class LocalStep:
    """What one rank knows between backward and the optimizer step.

    Attributes:
        inverse_scale: factor that remote gradients still need: the inverse of fp16's loss scale, and the correction
            where losses have told another weight than the loader; a device scalar, or None.
    """

    step: int  # the step about to be committed, from 1
    sum_of_squares: Tensor  # float64 scalar over the reduced gradients of this rank's share
    nonfinite: Tensor  # bool scalar, true where a gradient or the loss is not finite
    counts: Tensor | None = None  # this rank's routed tokens (`Trainable.counts`), or None
    lr: float = 0.0  # learning rate of this step
    inverse_scale: Tensor | None = None


@dataclass(frozen=True)
class GlobalStep:
    """What every rank agreed on: clip norm (float64 scalar), skip or not, summed counts, non-finite remote parts."""

    norm: Tensor
    skip: Tensor
    counts: Tensor | None = None
    nonfinite: tuple[str, ...] = ()


Notice = tuple[str, dict[str, Any]]
"""(kind, fields) of an event."""


class RemoteCheckpoint(Protocol):
    """State that other processes than rank 0 write into the directory of each checkpoint."""

    def begin_save(self, step: int) -> None:
        """Snapshot the state after `step` and write it in the background, where it is held. All workers call it."""

    def finish_save(self, folder: str) -> dict[str, Any]:
        """Wait for the files: {"files": name -> WrittenFile, and more for the manifest}. Rank 0's writer calls it.
        Raises RunError where a process could not write."""
        ...


class RemoteState:
    """Parts of a model that other processes hold; here, of a model that the workers hold completely: nothing.

    All workers make every call together, except `finish_save`, which rank 0's writer makes, and those marked as no
    collective.

    Attributes:
        deaths: processes that died after the last committed step and before this object was made, in order.
        lost_steps: how many steps a run went back for that.
        workers_group: the workers' process groups, where they must end together with those of the other processes;
            None = torch's default group.
        interleaver: runs another pass while one waits for other processes; None where no pass waits.
    """

    distributed = False  # whether there is any: passes then exchange messages with other processes
    note = ""  # what has changed about where the state is held since the last time, for the record; usually empty
    deaths: Sequence[Death] = ()
    lost_steps = 0
    workers_group: WorkersGroup | None = None
    interleaver: Interleaver | None = None

    def begin_save(self, step: int) -> None:
        """See `RemoteCheckpoint`."""

    def finish_save(self, folder: str) -> dict[str, Any]:
        """See `RemoteCheckpoint`."""
        return {}

    def waited_s(self) -> float:
        """Seconds that this worker has spent waiting for other processes so far; no collective."""
        return 0.0

    def notices(self) -> list[Notice]:
        """Events since the last call, for `events.jsonl`; called after each step, no collective. After the first step
        they include a "death" for each of `deaths`, with the seconds that the recovery took."""
        return []

    def idle(self) -> Tensor:
        """Take part in a micro-batch of other workers, without rows; returns a scalar zero to call backward on."""
        return torch.zeros((), requires_grad=True)

    def end_passes(self, *, short: bool) -> None:
        """End this worker's passes of a step or evaluation; with `short` early, for lack of memory, until `discard`."""

    def shortages(self) -> list[Shortage]:
        """Out-of-memory errors of the other processes in an evaluation; those in a step are reported by `agree`."""
        return []

    def discard(self) -> None:
        """Drop the gradients and counts of passes that no step follows."""

    def gather_module(self, module: nn.Module) -> nn.Module | None:
        """`module` with all remote parts in it, on rank 0 (None on the others where there are any); ends training."""
        return module

    def restore(self, folder: str, *, step: int, files: list[str]) -> None:
        """Load the state from a checkpoint, whose `files` hold it. Raises CheckpointError, perhaps in the next step."""
        if files:
            raise CheckpointError(
                f"{folder} holds {', '.join(files)}, state of processes other than the workers: resume it with such "
                "processes (experts.hosts a number, or colocated)"
            )


@dataclass(frozen=True)
class IntervalRow:
    """What a model reports for a log interval."""

    metrics: dict[str, float]  # for the row of metrics.jsonl
    row: dict[str, Any]  # of experts.jsonl in the run folder
    traces: dict[int, bytes] = field(default_factory=dict)  # step -> content of its routing trace, on rank 0
    events: list[Notice] = field(default_factory=list)  # for events.jsonl


class IntervalLog(Protocol):
    """What a model reports at each logged row besides its scalars: sums over the steps since the last row."""

    def device_values(self) -> Tensor:
        """(n,) on the device, the same on every worker; read together with the row's other values."""
        ...

    def host_values(self) -> list[float]:
        """This worker's own numbers, as many as every other worker's."""
        ...

    def forget(self) -> None:
        """Discard what ran since the last step: it was a measurement."""

    def close(self, step: int, device: list[float], workers: list[list[float]]) -> IntervalRow:
        """End the interval, with both kinds of values as read from all workers, and begin the next one."""
        ...


@dataclass
class Trainable:
    """A model as the loop sees it. Only `module` and `loss` are required.

    Attributes:
        module: the parameters; the loop moves it to the device and may wrap it.
        loss: `loss(module, batch) -> LossOutput`; with `takes_global_count` it also gets the keyword
            `num_items_in_batch` (the weight of the whole step), and its losses are summed without weights.
        weight: `weight(batch) -> int` of a host batch, samples or tokens of the loss's mean; None = `labels_weight`.
        optimizers: `optimizers(module, optim) -> list` of objects with torch's verbs.
        state_parts: `state_parts() -> {name: Stateful}`, further parts of a checkpoint.
        agree: `agree(LocalStep) -> GlobalStep`; None = an all-reduce over the workers.
        between_steps: `between_steps(step)` once after each commit.
        commit: `commit(GlobalStep)` together with the optimizer step, with the summed counts; reads no device value.
        blocks: name of the module's list of repeated blocks, or names of lists and blocks, for activation
            checkpointing, sharding and compiling by block; None = the modules that repeat (`raytrain.models.blocks`).
        flops_per_sample: forward and backward, for the utilisation figure, or None.
        takes_global_count: see `loss`.
        reads_weight: whether a loss that does not return its weight tells it by the operation that computed it
            (`raytrain.train.mean_weight`); only where `weight` is None.
        counts: this rank's counts of the pending step (int64 or float64 tensor), which the loop sums over the workers
            and hands to `commit`; None = nothing is counted.
        log_metrics: device scalars by name that the loop reads at log intervals only.
        notices: `notices() -> [(kind, fields)]`, events since the last call, which rank 0 records after each step.
        interval_log: more than scalars at log intervals; None = nothing.
        sleep: `sleep(step, training) -> [(kind, fields)]`, called after each step with the loop's `TrainingStep`: what
            a model does between steps besides training; its seconds are a part of the time account. Returns events.
        remote: parts that other processes hold.
        hand_over: `hand_over(trainable)` moves parts of the model to other processes; called once, when its builder has
            returned and `model.init_from` is loaded. None = nothing moves.
        communicates: whether its passes contain collectives of its own over torch's default group (embeddings gathered
            for a contrastive loss). Every worker then runs equally many passes: one without rows of its own runs a
            training row in eval mode, with its loss times zero, whose results the model's collectives see.
        worst_case: a context in which what depends on the data (routing) takes the most memory; None = row lengths do.
        export: `export(state, folder)` writes the weights as files in the model's own format, including
            `model.safetensors`; None = that file alone.
        translate: renames tensors of such a file to the names in `module`, where the two may differ.

    Example:
        >>> import torch
        >>> from raytrain.trainable import Trainable
        >>> def loss(module, batch):
        ...     return torch.nn.functional.mse_loss(module(batch["x"]), batch["y"])
        >>> trainable = Trainable.from_module(torch.nn.Linear(4, 1), loss=loss)
        >>> trainable.loss(trainable.module, {"x": torch.zeros(5, 4), "y": torch.zeros(5, 1)}).loss.shape
        torch.Size([])
    """

    module: nn.Module
    loss: Callable[..., LossOutput]
    weight: Callable[[Batch], int] | None = None
    optimizers: Callable[..., list[Any]] | None = None
    state_parts: Callable[[], dict[str, Any]] | None = None
    agree: Callable[[LocalStep], GlobalStep] | None = None
    between_steps: Callable[[int], None] | None = None
    commit: Callable[[GlobalStep], None] | None = None
    blocks: str | Sequence[str] | None = None
    flops_per_sample: float | None = None
    takes_global_count: bool = False
    reads_weight: bool = False
    counts: Callable[[], Tensor | None] | None = None
    log_metrics: Callable[[], dict[str, Tensor]] | None = None
    notices: Callable[[], list[Notice]] | None = None
    interval_log: IntervalLog | None = None
    sleep: Callable[[int, Any], list[Notice]] | None = None
    remote: RemoteState = field(default_factory=RemoteState)
    hand_over: Callable[[Trainable], None] | None = None
    communicates: bool = False
    worst_case: Callable[[], contextlib.AbstractContextManager[None]] | None = None
    export: Callable[[dict[str, Tensor], str], None] | None = None
    translate: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None

    @classmethod
    def from_module(cls, module: nn.Module, *, loss: Callable[..., Any] | None = None) -> Trainable:
        """Wrap a module.

        Args:
            module: in the transformers convention where `loss` is None: `module(**batch)` returns a scalar loss, a
                mapping with "loss", or an object with `.loss`. Where its `forward` (or `loss`) names
                `num_items_in_batch`, as a parameter or as a key of its **kwargs, it gets the global count. A "weight"
                beside the loss is what the loss is a mean over; without it, the operation that computed the mean tells
                it (class weights, `ignore_index`, labels shifted inside, masks), else the labels or rows are counted.
            loss: `loss(module, batch) -> Tensor | LossOutput | (Tensor, metrics)`.
        Raises:
            InputError: `module` is no `nn.Module`; later, from `loss`: a wrong batch key, or no scalar loss.
        """
        if not isinstance(module, nn.Module):
            raise InputError("model.builder", got=f"a {type(module).__name__}", expected="a torch.nn.Module")
        if loss is not None:

            def own(module: nn.Module, batch: Batch, **count: Any) -> LossOutput:
                return loss_output(loss(module, batch, **count), labels=batch.get("labels"), training=module.training)

            return cls(module, own, takes_global_count=_names_global_count(loss), reads_weight=True)
        counted = _names_global_count(module.forward)
        return cls(module, _convention_loss(module), takes_global_count=counted, reads_weight=True)


@contextlib.contextmanager
def in_eval(module: nn.Module) -> Iterator[None]:
    """Inside, the whole module is in eval mode; afterwards each part has its own mode back: a user may keep frozen
    parts in eval mode.

    Example:
        >>> import torch
        >>> from raytrain.trainable import in_eval
        >>> module = torch.nn.Dropout()
        >>> with in_eval(module):
        ...     module.training
        False
        >>> module.training
        True
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def labels_weight(batch: Batch, count: int | None = None) -> int:
    """Weight of a host batch: its labels other than -100 where they are integers, else its rows (`count`, if given).

    Example:
        >>> import torch
        >>> from raytrain.trainable import labels_weight
        >>> labels_weight({"labels": torch.tensor([[5, -100, 7], [-100, -100, 1]])})
        3
    """
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and is_integer(labels):
        return int((labels != IGNORED_LABEL).sum())
    return rows(batch) if count is None else count


def shifted_labels_weight(batch: Batch) -> int:
    """`labels_weight` for a model that predicts the next token: a row's first label does not count."""
    return int((batch["labels"][..., 1:] != IGNORED_LABEL).sum())


def parameters_of(module: nn.Module) -> int:
    """Number of parameters, frozen ones included."""
    return sum(parameter.numel() for parameter in module.parameters())


def rows(batch: Batch) -> int:
    """Rows of a batch: the first dimension of its first tensor."""
    for value in batch.values():
        if isinstance(value, Tensor) and value.ndim:
            return value.shape[0]
    raise InputError("data.source", got=f"a batch of {sorted(batch)} without a tensor", expected="tensors (B, ...)")


def need_keys(batch: Batch, *names: str) -> None:
    """Raises InputError (data.source) where a batch lacks one of the keys that a built-in model reads."""
    if not batch.keys() >= set(names):
        seen, expected = f"batches with the keys {sorted(batch)}", f"the keys {', '.join(names)}, which it reads"
        remedy = "rename the columns, or choose a model for this kind of data"
        raise InputError("data.source", got=seen, expected=expected, remedy=remedy)


def is_integer(tensor: Tensor) -> bool:
    """Whether `tensor` holds whole numbers, bool included."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of `labels` (...) other than -100 that equal the argmax of `logits` (..., C)."""
    valid = labels != IGNORED_LABEL
    return ((logits.argmax(-1) == labels) & valid).sum().double() / valid.sum().clamp(min=1)


def loss_output(value: Any, *, labels: Any = None, training: bool = True) -> LossOutput:
    """Convert what a user's loss or forward returned into a `LossOutput`.

    Takes a scalar, a (loss, metrics) pair, a mapping with "loss" or an object with `.loss`. In evaluation, "accuracy"
    is the one in the result, else computed where there is one integer label per row: labels of tokens may be shifted.
    """
    if isinstance(value, LossOutput):
        return value
    if isinstance(value, Tensor):
        return LossOutput(_scalar(value))
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        return LossOutput(_scalar(value[0]), metrics=_metrics(value[1]))
    told: list[Any] = [
        value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        for name in ("loss", "logits", "accuracy", "weight")
    ]
    loss, logits, named, weight = told
    if isinstance(weight, Tensor) and weight.numel() != 1:
        raise InputError(
            "model.builder", got=f"a weight of shape {tuple(weight.shape)} beside the loss",
            expected="one number: how many rows, tokens or pixels the loss is a mean over",
        )  # fmt: skip
    metrics = _metrics({"accuracy": named}) if isinstance(named, Tensor) else {}
    one_per_row = isinstance(logits, Tensor) and isinstance(labels, Tensor) and is_integer(labels)
    if not training and not metrics and one_per_row and logits.ndim == 2 and labels.shape == logits.shape[:1]:
        metrics = {"accuracy": accuracy(logits.detach(), labels)}
    own = weight if isinstance(weight, Tensor | float | int) else None
    return LossOutput(_scalar(loss, value), metrics=metrics, weight=own)


def _metrics(values: Mapping[str, Any]) -> dict[str, Tensor]:
    numbers = {name: value for name, value in values.items() if isinstance(value, Tensor | float | int)}
    return {name: torch.as_tensor(value).detach() for name, value in numbers.items()}


def _scalar(loss: Any, result: Any = None) -> Tensor:
    """`loss` as a scalar floating-point tensor. Raises InputError naming what it is instead."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss.reshape(())
    if isinstance(loss, Tensor):
        seen = f"a {loss.dtype} tensor of shape {tuple(loss.shape)} as the loss"
    elif loss is None and result is not None:
        names = f" with the keys {sorted(map(str, result))}" if isinstance(result, Mapping) else ""
        seen = f"a {type(result).__name__}{names} that holds no loss"
    else:
        seen = f"{type(loss).__name__} as the loss"
    raise InputError(
        "model.builder", got=seen,
        expected='a scalar loss, a dict with "loss", or an object with .loss from module(**batch)',
        remedy="return one of these (a mean over the batch), give the batch its labels, or pass "
        "Trainable.from_module(module, loss=fn)",
    )  # fmt: skip


def _names_global_count(function: Callable[..., Any]) -> bool:
    """Whether `num_items_in_batch` is a named parameter, or a name in the code of a function with **kwargs; **kwargs
    alone does not count, as it may be ignored."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    code = getattr(inspect.unwrap(function), "__code__", None)
    return GLOBAL_COUNT in parameters or (takes_any and code is not None and _mentions(code.co_consts, GLOBAL_COUNT))


def _mentions(constants: tuple[Any, ...], name: str) -> bool:
    """Whether a name is among the constants of some code, or of functions inside it."""
    return any(
        one == name
        or (isinstance(one, tuple) and _mentions(one, name))
        or (isinstance(one, CodeType) and _mentions(one.co_consts, name))
        for one in constants
        if isinstance(one, str | tuple | CodeType)
    )


def _convention_loss(module: nn.Module) -> Callable[..., LossOutput]:
    """The loss of the transformers convention; reads the signature of `forward` once."""
    parameters = inspect.signature(module.forward).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    accepted = frozenset(p.name for p in named)
    required = frozenset(p.name for p in named if p.default is p.empty) - {GLOBAL_COUNT}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def check_keys(batch: Batch) -> None:
        unknown, missing = set() if takes_any else batch.keys() - accepted, required - batch.keys()
        if unknown or missing:
            _refuse_keys(type(module).__name__, list(batch), unknown, missing, accepted - {GLOBAL_COUNT})

    def loss(module: nn.Module, batch: Batch, **count: Any) -> LossOutput:
        check_keys(batch)
        return loss_output(module(**batch, **count), labels=batch.get("labels"), training=module.training)

    loss.check_keys = check_keys  # pyright: ignore[reportFunctionMemberAccess]  (read before the start, without weights)
    return loss


def _refuse_keys(name: str, columns: list[str], unknown: Set[str], missing: Set[str], accepted: Set[str]) -> None:
    parts = [f"the batch keys {sorted(unknown)} that {name}.forward does not accept"] if unknown else []
    parts += [f"no batch keys {sorted(missing)} that {name}.forward needs"] if missing else []
    remedy = "rename the columns, add **kwargs to forward, or pass Trainable.from_module(module, loss=fn)"
    if not accepted & set(columns):  # forward is to change, not the name of every column
        own = f"def forward(self, {', '.join(columns)})"
        remedy = f"write {own} that returns the loss, or pass Trainable.from_module(module, loss=fn)"
    elif MASK in unknown | missing:
        why = "rows of lists, or that differ in length, have" if MASK in unknown else "rows of equal lengths have no"
        remedy = f"{why} an attention_mask: accept attention_mask=None in forward, or make batches with data.collate"
    expected = f"batches with keys among {sorted(accepted)}" if accepted else "a forward with these parameters"
    raise InputError(
        "data.source" if accepted else "model.builder", got=" and ".join(parts), expected=expected, remedy=remedy
    )
