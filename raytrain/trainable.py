"""What the loop trains: a module, its loss, and hooks; and how a plain `nn.Module` becomes one."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from raytrain.errors import InputError

if TYPE_CHECKING:
    from raytrain.train.memory.oom import Shortage
    from raytrain.train.parallel.collectives import WorkersGroup
    from raytrain.train.parallel.interleave import Interleaver

Batch = dict[str, Any]
IGNORED_LABEL = -100
GLOBAL_COUNT = "num_items_in_batch"


@dataclass(frozen=True)
class LossOutput:
    """What a loss function returns for one micro-batch; every value a mean over the batch's weight.

    Attributes:
        loss: scalar, without auxiliary losses.
        aux: scalar, added to `loss` before backward (a router's balance loss), reported apart.
        metrics: scalars by name, "accuracy" where it has a meaning; detached.
    """

    loss: Tensor
    aux: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass of this worker: `batch` on the device, `weight` of it (samples or tokens), whether
    it is the `last` of its step as far as is known."""

    batch: Batch
    weight: int
    last: bool = False


@dataclass(frozen=True)
class LocalStep:
    """What one rank knows between backward and the optimizer step.

    Attributes:
        step: the step about to be committed, from 1.
        sum_of_squares: float64 scalar over the reduced gradients of this rank's share.
        nonfinite: bool scalar, true where a gradient or the loss is not finite.
        counts: this rank's routed tokens (`Trainable.counts`), or None.
        lr: learning rate of this step.
        inverse_scale: of fp16's loss scale, which gradients elsewhere still carry; device scalar, None where there
            is no scale.
    """

    step: int
    sum_of_squares: Tensor
    nonfinite: Tensor
    counts: Tensor | None = None
    lr: float = 0.0
    inverse_scale: Tensor | None = None


@dataclass(frozen=True)
class GlobalStep:
    """What every rank agreed on: the clip norm (float64 scalar), whether to skip, the summed counts."""

    norm: Tensor
    skip: Tensor
    counts: Tensor | None = None


Notice = tuple[str, dict[str, Any]]
"""(kind, fields) of an event."""


@dataclass(frozen=True)
class Death:
    """A process that held state and is no more.

    Attributes:
        who: as people call it.
        node, pid: where it was; empty and None where it never stood.
        time: when that was noticed, in unix seconds.
        why: in the words of who noticed.
    """

    who: str
    node: str
    pid: int | None
    time: float
    why: str

    @property
    def title(self) -> str:
        """Who and where, in one line."""
        where = f" on {self.node}" if self.node else ""
        return f"{self.who}{where}{f' (pid {self.pid})' if self.pid else ''}"


class RemoteCheckpoint(Protocol):
    """State that other processes write into a checkpoint's directory beside rank 0."""

    def begin_save(self, step: int) -> None:
        """Have it snapshotted as it is after `step`; its owners write it in the background. All workers call it."""
        ...

    def finish_save(self, folder: str) -> dict[str, Any]:
        """Wait for them: {"files": name -> WrittenFile, and more for the manifest}. Rank 0's writer calls it.

        Raises:
            RunError: one could not write.
        """
        ...


class RemoteState(RemoteCheckpoint, Protocol):
    """Every call is one of all workers, but for `finish_save`, which rank 0's writer makes, and those that say so.

    Attributes:
        note: what is different about where it lives since the time before, for the record; mostly nothing.
        deaths: who has died since the last step that was committed and before this came to be, in order.
        workers_group: where the workers' own group must end together with theirs; None = torch's default group.
        interleaver: lets another pass run while one waits for other processes.
    """

    note: str
    deaths: list[Death]
    workers_group: WorkersGroup | None
    interleaver: Interleaver

    def waited_s(self) -> float:
        """Seconds that this worker has spent waiting for them, so far; no collective."""
        ...

    def notices(self) -> list[Notice]:
        """What has happened since the last call, for `events.jsonl`; asked after each step, no collective. After the
        first step a "death" for each of `deaths`, with the seconds that it took."""
        ...

    def idle(self) -> Tensor:
        """Take part in a micro-batch of other workers, without rows; a scalar zero to call backward on."""
        ...

    def end_passes(self, *, short: bool) -> None:
        """This worker's passes of a step or of an evaluation are over. Where `short`, before their end: it had no
        memory for them, and those of the others go on without it until `discard`."""
        ...

    def shortages(self) -> list[Shortage]:
        """Which of the other processes had no memory for an evaluation; with a step they say so in `agree`."""
        ...

    def discard(self) -> None:
        """Forget what passes without a step have left behind: gradients and counts."""
        ...

    def gather_module(self) -> nn.Module | None:
        """The module with everything that lives elsewhere, on rank 0 (None on the others); the end of training."""
        ...

    def restore(self, folder: str, *, step: int) -> None:
        """Have it loaded from a checkpoint. Raises CheckpointError, at the latest with the next step."""
        ...


@dataclass(frozen=True)
class IntervalRow:
    """What a window of steps leaves behind.

    Attributes:
        metrics: scalars for the row of metrics.jsonl.
        row: of experts.jsonl in the run folder.
        traces: step -> content of its routing trace, on rank 0.
        events: (kind, fields) for events.jsonl.
    """

    metrics: dict[str, float]
    row: dict[str, Any]
    traces: dict[int, bytes] = field(default_factory=dict)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


class IntervalLog(Protocol):
    """What a model tells at each logged row beside its scalars: sums over the steps since the row before."""

    def device_values(self) -> Tensor:
        """(n,) on the device, the same on every worker; read together with the row's other values."""
        ...

    def host_values(self) -> list[float]:
        """This worker's own numbers, as many as every other worker's."""
        ...

    def forget(self) -> None:
        """What ran since the last step was none: a measurement, of which nothing may stay."""
        ...

    def close(self, step: int, device: list[float], workers: list[list[float]]) -> IntervalRow:
        """End the window with both, as read, and those of all workers; the next one begins."""
        ...


@dataclass
class Trainable:
    """A model as the loop sees it. Only `module` and `loss` are required.

    Attributes:
        module: the parameters; the loop moves it to the device and may wrap it.
        loss: `loss(module, batch) -> LossOutput`; where `takes_global_count`, also given the keyword
            `num_items_in_batch` (the weight of the whole step), and its loss is then summed as it is.
        weight: `weight(batch) -> int` of a host batch, samples or tokens the loss averages over;
            None = `labels_weight`.
        optimizers: `optimizers(module, optim) -> list` of objects with torch's verbs.
        state_parts: `state_parts() -> {name: Stateful}`, further parts of a checkpoint.
        agree: `agree(LocalStep) -> GlobalStep`; None = an all-reduce over the workers.
        between_steps: `between_steps(step)` once after each commit.
        commit: `commit(GlobalStep)` together with the optimizer step, with the summed counts; nothing in it
            is read from the device.
        blocks: name of the module's list of repeated blocks, or names of lists and blocks (recomputing, sharding,
            compiling one by one); None = the class of modules that repeats (`raytrain.models.blocks`).
        flops_per_sample: forward and backward, for the utilisation figure, or None.
        takes_global_count: see `loss`.
        counts: this rank's counts of the pending step (int64 or float64 tensor), which the loop sums
            over the workers and hands to `commit`; None = nothing is counted.
        log_metrics: device scalars by name that the loop reads at log intervals only.
        interval_log: more than scalars at log intervals; None = nothing.
        elsewhere: what lives in other processes, or None.
        worst_case: a context in which what depends on the data (routing) takes the most memory it can; None = nothing
            does but the length of the rows.
        export: `export(state, folder)` writes the weights as files of the model's own kind, `model.safetensors` among
            them; None = that file alone.
        translate: tensors by the names of such a file -> by the names in `module`, where the two may differ.
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
    counts: Callable[[], Tensor | None] | None = None
    log_metrics: Callable[[], dict[str, Tensor]] | None = None
    interval_log: IntervalLog | None = None
    remote: RemoteState | None = None
    worst_case: Callable[[], AbstractContextManager[None]] | None = None
    export: Callable[[dict[str, Tensor], str], None] | None = None
    translate: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None

    @classmethod
    def from_module(cls, module: nn.Module, *, loss: Callable[..., Any] | None = None) -> Trainable:
        """Wrap a module.

        Args:
            module: in the transformers convention where `loss` is None: `module(**batch)` returns a
                scalar loss, a mapping with "loss", or an object with `.loss`. Where its `forward` (or
                `loss`) names the parameter `num_items_in_batch`, it gets the global count.
            loss: `loss(module, batch) -> Tensor | LossOutput | (Tensor, metrics)`.
        Raises:
            InputError: `module` is no `nn.Module`; later, from the returned `loss`: a batch key that
                `forward` does not take or misses, or a result that holds no scalar loss.
        """
        if not isinstance(module, nn.Module):
            raise InputError("model.builder", seen=f"a {type(module).__name__}", expected="a torch.nn.Module")
        if loss is not None:
            counted = _names_global_count(loss)
            return cls(module, _own_loss(loss), takes_global_count=counted)
        return cls(module, _convention_loss(module), takes_global_count=_names_global_count(module.forward))


@contextlib.contextmanager
def in_eval(module: nn.Module) -> Iterator[None]:
    """Inside, all of a module is in eval mode; then each part as it was: a user may keep frozen parts so."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def labels_weight(batch: Batch) -> int:
    """Weight of a host batch: its labels other than -100 where they are integers, else its rows."""
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and is_integer(labels):
        return int((labels != IGNORED_LABEL).sum())
    return rows(batch)


def shifted_labels_weight(batch: Batch) -> int:
    """The same for a model that compares what it says at one place with the label of the next: a row's first label
    counts for nothing."""
    return int((batch["labels"][..., 1:] != IGNORED_LABEL).sum())


def parameters_of(module: nn.Module) -> int:
    """Number of parameters, frozen ones included."""
    return sum(parameter.numel() for parameter in module.parameters())


def rows(batch: Batch) -> int:
    """Rows of a batch: the first dimension of its first tensor."""
    for value in batch.values():
        if isinstance(value, Tensor) and value.ndim:
            return value.shape[0]
    seen = f"a batch of {sorted(batch)} without a tensor"
    raise InputError("data.source", seen=seen, expected="tensors (B, ...)")


def need_keys(batch: Batch, *names: str) -> None:
    """Raises InputError (data.source) where a batch lacks one of the keys a built-in model reads."""
    for name in names:
        if name not in batch:
            raise InputError(
                "data.source",
                seen=f"batches with the keys {sorted(batch)}",
                expected=f"the keys {', '.join(names)}, which this model reads",
                remedy="rename the columns, or choose a model for this kind of data",
            )


def is_integer(tensor: Tensor) -> bool:
    """Whether `tensor` holds whole numbers (class labels, token ids), bool included."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of labels other than -100 that the largest of `logits` (..., C) names; `labels` (...)."""
    valid = labels != IGNORED_LABEL
    hits = ((logits.argmax(-1) == labels) & valid).sum()
    return hits.double() / valid.sum().clamp(min=1)


def loss_output(value: Any, *, labels: Any = None, training: bool = True) -> LossOutput:
    """Read a `LossOutput` out of what a user's loss or forward returned.

    Takes a scalar, a (loss, metrics) pair, a mapping with "loss" or an object with `.loss`. In
    evaluation, "accuracy" is what the result itself names, else it is computed where there is one
    integer label per row: with one per token it cannot be known whether the model shifts inside.
    """
    if isinstance(value, LossOutput):
        return value
    if isinstance(value, Tensor):
        return LossOutput(_scalar(value))
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        return LossOutput(_scalar(value[0]), metrics=_metrics(value[1]))
    loss, logits, named = (_field(value, name) for name in ("loss", "logits", "accuracy"))
    metrics = _metrics({"accuracy": named}) if isinstance(named, Tensor) else {}
    one_per_row = isinstance(logits, Tensor) and isinstance(labels, Tensor) and is_integer(labels)
    if not training and not metrics and one_per_row and logits.ndim == 2 and labels.shape == logits.shape[:1]:
        metrics = {"accuracy": accuracy(logits.detach(), labels)}
    return LossOutput(_scalar(loss, value), metrics=metrics)


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _metrics(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}


def _scalar(loss: Any, result: Any = None) -> Tensor:
    """`loss` as a scalar floating-point tensor, or an InputError that says what came instead."""
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
        "model.builder",
        seen=seen,
        expected='a scalar loss, a dict with "loss", or an object with .loss from module(**batch)',
        remedy="return one of these (a mean over the batch), give the batch its labels, or pass "
        "Trainable.from_module(module, loss=fn)",
    )


def _names_global_count(function: Callable[..., Any]) -> bool:
    """Whether `num_items_in_batch` is a parameter by name; **kwargs alone may be ignored inside."""
    try:
        return GLOBAL_COUNT in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _own_loss(function: Callable[..., Any]) -> Callable[..., LossOutput]:
    def loss(module: nn.Module, batch: Batch, **count: Any) -> LossOutput:
        value = function(module, batch, **count)
        return loss_output(value, labels=batch.get("labels"), training=module.training)

    return loss


def _convention_loss(module: nn.Module) -> Callable[..., LossOutput]:
    """The loss of the transformers convention; the signature is read once, here."""
    parameters = inspect.signature(module.forward).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    accepted = frozenset(p.name for p in named)
    required = frozenset(p.name for p in named if p.default is p.empty) - {GLOBAL_COUNT}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    name = type(module).__name__

    def loss(module: nn.Module, batch: Batch, **count: Any) -> LossOutput:
        keys = batch.keys()
        if not (required <= keys and (takes_any or keys <= accepted)):
            _refuse_keys(name, keys - accepted if not takes_any else set(), required - keys, accepted)
        return loss_output(module(**batch, **count), labels=batch.get("labels"), training=module.training)

    return loss


def _refuse_keys(name: str, unknown: Set[str], missing: Set[str], accepted: frozenset[str]) -> None:
    parts = [f"the batch keys {sorted(unknown)} that {name}.forward does not take"] if unknown else []
    parts += [f"no batch keys {sorted(missing)} that {name}.forward needs"] if missing else []
    raise InputError(
        "data.source",
        seen=" and ".join(parts),
        expected=f"batches with keys among {sorted(accepted - {GLOBAL_COUNT})}",
        remedy="rename the columns, add **kwargs to forward, or pass Trainable.from_module(module, loss=fn)",
    )
