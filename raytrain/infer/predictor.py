"""Predictors: a loaded model that answers rows of a table, a batch at a time, and how rows become its inputs.

`runner.py` calls `predict` for each batch; `quantize.py`, stages and generation only change what is behind it.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from cluster.wording import counted
from raytrain.data.sources.tables import (
    ColumnChoice,
    column_kind,
    convert,
    csv_kinds,
    is_list,
    is_nested,
    is_text,
    number_in,
    typed,
)
from raytrain.errors import InputError, RunError
from raytrain.infer.generate import Sampling, cut_at_stop, generate
from raytrain.infer.input import KEY
from raytrain.trainable import MASK, in_eval, rows

# ---------------------------------------------------------------- row values


def list_lengths(table: Any, names: Sequence[str]) -> np.ndarray:
    """Values of each row in those of the columns that are lists of any length, (rows, such columns); 0 for null."""
    from pyarrow import compute, types

    kinds = {name: table.schema.field(name).type for name in names}
    lists = [name for name, kind in kinds.items() if types.is_list(kind) or types.is_large_list(kind)]
    found = [compute.call_function("list_value_length", [table[name]]).fill_null(0).to_numpy() for name in lists]
    return np.stack(found, axis=1) if found else np.zeros((table.num_rows, 0), np.int64)


def wrong_values(table: Any, choice: ColumnChoice) -> dict[int, str]:
    """Row -> why it cannot be answered, of rows in which a number is missing, not finite, or no number."""
    from pyarrow import compute

    found = dict[int, str]()
    for name in (*choice.stacked, *choice.named):
        column = table[name]
        for row in np.flatnonzero(column.is_null().to_numpy()).tolist():
            found.setdefault(row, f"column '{name}' has no value")
        if column_kind(column.type) == "number" or is_text(column.type):
            wrong = np.flatnonzero(~np.isfinite(numbers_of(column)))
            rows, cells = wrong, [column[int(row)].as_py() for row in wrong]
        elif is_list(column.type) and not is_nested(column.type):
            flat = compute.call_function("list_flatten", [column])
            lengths = compute.call_function("list_value_length", [column]).fill_null(0).to_numpy()
            wrong = np.flatnonzero(~np.isfinite(numbers_of(flat)))
            rows = np.repeat(np.arange(len(column)), lengths)[wrong]
            cells = [flat[int(at)].as_py() for at in wrong]
        else:
            continue
        for row, cell in zip(rows.tolist(), cells, strict=True):
            found.setdefault(row, f"column '{name}' has no finite number: {cell!r}")
    return dict(sorted(found.items()))


def numbers_of(column: Any) -> np.ndarray:
    """A column of numbers, or of texts that are numbers, as float64; NaN for what is none."""
    if is_text(column.type):
        column = typed(column, csv_kinds(column)[0])
    if is_text(column.type):
        cells = (number_in(cell) for cell in column.to_pylist())
        return np.array([math.nan if cell is None else cell for cell in cells], dtype=np.float64)
    return column.cast("float64", safe=False).to_numpy()  # whole numbers above 2**53 are rounded


def check_numbers(schema: Any, choice: ColumnChoice) -> None:
    """Raise InputError for a column that holds no numbers, by its type."""
    for name in (*choice.stacked, *choice.named):
        kind = schema.field(name).type
        if column_kind(kind) == "other" and not is_text(kind):
            raise InputError(KEY, got=f"column '{name}' of type {kind}", expected="numbers or lists of numbers")


def mismatch(name: str, given: int, wanted: int) -> str:
    """The sentence about a row with another number of values than the model takes."""
    return f"{name} has {counted(given, 'value')}, the model takes {wanted}"


def check_list_sizes(schema: Any, takes: Mapping[str, int]) -> None:
    """Raise InputError if the schema says that all rows have another number of values than the model takes."""
    from pyarrow import types

    for name, wanted in takes.items():
        kind = schema.field(name).type if name in schema.names else None
        size = kind.list_size if kind is not None and types.is_fixed_size_list(kind) else None
        if kind is not None and (types.is_integer(kind) or types.is_floating(kind)):
            size = 1
        if size not in (None, wanted) and not is_nested(kind):
            seen = f"the column {name} with {counted(size, 'value')} in each row"
            raise InputError(KEY, got=seen, expected=f"{wanted}, as the model takes")


def wrong_width(error: BaseException, batch: Mapping[str, Any]) -> str | None:
    """Why a batch failed, if a linear layer got another number of values than it takes; None for any other error."""
    trace = error.__traceback__
    while trace is not None:
        layer, x = trace.tb_frame.f_locals.get("self"), trace.tb_frame.f_locals.get("input")
        if isinstance(layer, nn.Linear) and isinstance(x, Tensor) and x.shape[-1:] != (layer.in_features,):
            given = int(x.shape[-1]) if x.ndim else 1
            tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
            name = next((name for name, value in tensors.items() if value[0].numel() == given), None)
            if name is None:
                return f"a layer got {given} values, it takes {layer.in_features}"
            return mismatch(name, given, layer.in_features)
        trace = trace.tb_next
    return None


# ---------------------------------------------------------------- predictor


LOGITS = "logits"
MODEL_KEY = "model.builder"
ANSWERS = (
    "a tensor with one row for each row of the batch, alone, as `logits`, or as the only such tensor of a dict (see "
    "jobs/README.md, Your own model and data)"
)
"""What a forward may return for a batch without labels."""

Autocast = Callable[[], AbstractContextManager[Any]]


class ModelOutputError(RunError):
    """What a model returned holds no answers: an error of its code, which no row can be the cause of."""


@dataclass(frozen=True)
class Answers:
    values: list[Any]  # one for each row
    tokens: list[int] | None = None  # generated tokens of each row; None where nothing is generated


class Predictor(ABC):
    """A loaded model that answers rows of a table, a batch at a time: all or none of them, in order."""

    module: nn.Module  # the model
    # whether the predictions are texts of many tokens, so that nobody knows how long an answer will be
    generates: ClassVar[bool] = False

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Input columns that it reads."""

    @property
    def answer_tokens(self) -> int:
        return 1

    def shortened(self, tokens: int) -> Predictor:
        del tokens
        return self

    @abstractmethod
    def lengths(self, table: Any) -> list[int]:
        """About how long each row is, to batch rows of equal lengths; equal where rows do not differ."""

    def refused(self, table: Any) -> dict[int, str]:
        """Rows of a table that cannot be answered, which is known without computing them, and why."""
        del table
        return {}

    @abstractmethod
    def predict(self, table: Any, numbers: Sequence[int]) -> Answers:
        """Answer the rows of an Arrow table, all or none. `numbers`: each row's place in the input. Raises
        Exception: any, of the model or about a row."""


@dataclass
class RowPredictor(Predictor):
    """Rows of numbers -> classes or values, with any module that gives one output for each row."""

    module: nn.Module  # called with those batch keys that its forward names, or with the first one
    choice: ColumnChoice  # the columns, as in training
    classes: tuple[str, ...] | None = None  # names of the classes, None where they are numbers
    regression: bool = False  # whether outputs are values instead of classes
    num_classes: int | None = None  # of the training data; None if it has none, or that is unknown
    # of `x`, where the training data were images: a row of a file holds their values in one list
    image_shape: tuple[int, ...] | None = None
    autocast: Autocast = nullcontext
    # column of lists -> its values in a row, as far as that is known
    takes: Mapping[str, int] = field(default_factory=dict)
    # input -> the format of its numbers in training: a column of a file may hold whole numbers by chance
    dtypes: Mapping[str, str] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.choice.stacked, *self.choice.named)

    def refused(self, table: Any) -> dict[int, str]:
        """Rows with another number of values than the model takes, or with a value that is no finite number."""
        from pyarrow import compute

        found = dict[int, str]()
        for name, wanted in self.takes.items():
            if list_lengths(table, [name]).size and not is_nested(table.schema.field(name).type):
                lengths = compute.call_function("list_value_length", [table[name]]).fill_null(wanted).to_numpy()
                found |= {
                    int(row): mismatch(name, int(lengths[row]), wanted) for row in np.flatnonzero(lengths != wanted)
                }
        return wrong_values(table, self.choice) | dict(sorted(found.items()))

    def lengths(self, table: Any) -> list[int]:
        return list_lengths(table, self.choice.named).max(axis=1, initial=1).tolist()

    @torch.no_grad()
    def predict(self, table: Any, numbers: Sequence[int]) -> Answers:
        del numbers
        if takes_mask(self.module):
            return Answers(self._answers(table))
        lengths = list_lengths(table, self.choice.named)
        if not lengths.size or (lengths == lengths[0]).all():
            return Answers(self._answers(table))
        found: list[Any] = [None] * table.num_rows
        _, group = np.unique(lengths, axis=0, return_inverse=True)
        for number in range(group.max() + 1):  # rows whose lists have equal lengths
            own = np.flatnonzero(group.reshape(-1) == number)
            for row, value in zip(own.tolist(), self._answers(table.take(own)), strict=True):
                found[row] = value
        return Answers(found)

    def _answers(self, table: Any) -> list[Any]:
        """The answers of a batch. Raises RunError: a row has another number of values than the model takes."""
        batch, wrong = self._batch(table), None
        named: tuple[str, Tensor] | None = None
        try:
            with in_eval(self.module), self.autocast():
                named = named_outputs(self.module, batch)
        except RuntimeError as error:
            wrong = wrong_width(error, batch)
            if wrong is None:
                raise
        if named is None:  # no longer inside the handler: its frames hold the batch
            raise RunError(wrong)
        name, outputs = named
        return self._values(outputs.cpu(), rows(batch), scores=name == LOGITS)

    def _batch(self, table: Any) -> dict[str, Any]:
        from raytrain.data.sources.in_memory import table_split

        for name in self.columns:  # one cell that is no number makes a column of a CSV file text, as does keeping it
            if is_text(table.schema.field(name).type):
                column = typed(table[name], csv_kinds(table[name])[0])
                table = table.set_column(table.schema.get_field_index(name), name, column)
        split = table_split(convert(table, self.choice, classes=None, key=KEY))
        device = next(self.module.parameters()).device
        batch = dict(split.gather(np.arange(table.num_rows)))
        for name in batch.keys() & self.dtypes.keys():
            # whole numbers where training had fractions become float32, and fractions that are all whole become whole
            # numbers where it had these
            values, dtype = batch[name], getattr(torch, self.dtypes[name])
            if isinstance(values, Tensor) and values.is_floating_point() != dtype.is_floating_point:
                made = values.to(torch.float32 if dtype.is_floating_point else dtype)
                if dtype.is_floating_point or torch.equal(made.to(values.dtype), values):
                    batch[name] = made
        shape, x = self.image_shape, batch.get("x")
        if shape is not None and isinstance(x, Tensor) and x.shape[1:] == (math.prod(shape),):
            batch["x"] = x.reshape(-1, *shape)
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}

    def _values(self, outputs: Tensor, count: int, *, scores: bool) -> list[Any]:
        """One number in a row is a value, or a class if it is a whole number; several are the scores of classes, or
        the values of a vector. `scores`: they are logits, or what a module returned alone."""
        if outputs.shape[:1] != (count,):
            raise ModelOutputError(
                f"the model returned outputs of shape {tuple(outputs.shape)} for {counted(count, 'row')}"
            )
        flat = outputs.reshape(count, -1)
        single = flat.shape[1] == 1
        if not (outputs.is_floating_point() or outputs.is_complex()):
            whole = (flat[:, 0] if single else flat).to(torch.int64).tolist()
            return self._names(whole) if single and not self.regression else whole
        flat = flat.float()
        if not torch.isfinite(flat).all():
            raise RunError("the model returned outputs that are not finite")
        if single:
            return flat[:, 0].tolist()
        if self.regression or not (scores or flat.shape[1] == self.num_classes):
            return flat.tolist()
        if outputs.ndim != 2:
            raise ModelOutputError(
                f"the model returned scores of shape {tuple(outputs.shape)}, not one vector for each row"
            )
        return self._names(flat.argmax(1).tolist())

    def _names(self, numbers: list[int]) -> list[Any]:
        return numbers if self.classes is None else [self.classes[number] for number in numbers]


def named_outputs(module: nn.Module, batch: Mapping[str, Any]) -> tuple[str, Tensor]:
    """What a module returns for a batch without labels, and its name: a tensor, the first of a tuple, the logits, or
    the only tensor of a dict that has a row for each row of the batch. A tensor without a name counts as logits.
    Raises ModelOutputError: it returns none of these."""
    named = _forward_names(module)
    given = {name: value for name, value in batch.items() if named is None or name in named}
    result = module(**given) if given else module(next(iter(batch.values())))
    if isinstance(result, tuple) and result:
        result = result[0]
    if isinstance(result, Tensor):
        return LOGITS, result
    held = result if isinstance(result, Mapping) else {LOGITS: getattr(result, LOGITS, None)}
    tensors = {str(name): one for name, one in held.items() if isinstance(one, Tensor)}
    if LOGITS in tensors:
        return LOGITS, tensors[LOGITS]
    count = rows(dict(batch))
    able = [(name, one) for name, one in tensors.items() if one.shape[:1] == (count,)]
    if len(able) == 1:
        return able[0]
    shapes = ", ".join(f"{name} {tuple(one.shape)}" for name, one in tensors.items())
    what = f"a {type(result).__name__}" if not isinstance(result, Mapping) else f"a dict with {shapes or 'no tensor'}"
    raise ModelOutputError(f"{type(module).__name__} returned {what} for {counted(count, 'row')} without labels")


def takes_mask(module: nn.Module) -> bool:
    """Whether rows may be padded: the module is given an `attention_mask` that says where."""
    named = _forward_names(module)
    return named is None or MASK in named


def takes_any(module: nn.Module, names: Sequence[str]) -> bool:
    taken = _forward_names(module)
    return taken is None or not taken.isdisjoint(names)


def _forward_names(module: nn.Module) -> frozenset[str] | None:
    parameters = inspect.signature(module.forward).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return frozenset(one.name for one in parameters)


class Codec(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: list[int]) -> str: ...


Generate = Callable[..., list[list[int]]]
"""Continues prompts: (prompts, sampling=..., numbers=...) -> the tokens of each answer."""


class PromptPredictor(Predictor):
    prompt: Any  # column -> the text of a prompt (`raytrain.infer.model`)

    @property
    def columns(self) -> tuple[str, ...]:
        return self.prompt.columns

    def lengths(self, table: Any) -> list[int]:
        """Characters of each prompt; 0 for a row that has none, which fails later."""
        return [len(text or "") for text in self.prompt.lenient(table)]


@dataclass
class TextPredictor(PromptPredictor):
    module: nn.Module  # a causal language model
    codec: Codec  # of its tokens
    prompt: Any
    sampling: Sampling
    context: int | None = None  # most tokens that the model sees
    own_generate: Generate | None = None  # continues prompts instead of `generate`
    autocast: Autocast = nullcontext
    generates: ClassVar[bool] = True

    @property
    def answer_tokens(self) -> int:
        return self.sampling.max_new_tokens

    def shortened(self, tokens: int) -> TextPredictor:
        return replace(self, sampling=replace(self.sampling, max_new_tokens=min(tokens, self.answer_tokens)))

    def predict(self, table: Any, numbers: Sequence[int]) -> Answers:
        prompts = [self._tokens(text) for text in self.prompt.texts(table)]
        with self.autocast():
            if self.own_generate is not None:
                tokens = self.own_generate(prompts, sampling=self.sampling, numbers=numbers)
            else:
                tokens = generate(
                    self.module, prompts, sampling=self.sampling, rows=numbers, context=self.context,
                    decode=self.codec.decode,
                )  # fmt: skip
        texts = [cut_at_stop(self.codec.decode(ids), self.sampling.stop) for ids in tokens]
        return Answers(texts, [len(ids) for ids in tokens])

    def _tokens(self, text: str) -> list[int]:
        ids = self.codec.encode(text)
        if not ids:
            raise InputError(self.prompt.key, got="an empty prompt", expected="at least one token")
        room = self.context
        if room is not None and self.own_generate is not None:  # which does not shift its window
            room = max(1, room - self.sampling.max_new_tokens)
        return ids if room is None else ids[-room:]


@dataclass
class TextClassifier(PromptPredictor):
    """Texts -> classes, with a classifier of transformers or any module that takes `input_ids` and `attention_mask`."""

    module: nn.Module
    encode: Callable[[list[str]], list[np.ndarray]]
    prompt: Any
    pad: int
    classes: tuple[str, ...] | None = None
    autocast: Autocast = nullcontext

    @torch.no_grad()
    def predict(self, table: Any, numbers: Sequence[int]) -> Answers:
        del numbers
        ids = self.encode(self.prompt.texts(table))
        longest = max(len(one) for one in ids)
        padded = torch.full((len(ids), longest), self.pad, dtype=torch.int64)
        mask = torch.zeros(len(ids), longest, dtype=torch.int64)
        for row, one in enumerate(ids):
            padded[row, : len(one)], mask[row, : len(one)] = torch.from_numpy(one.astype(np.int64)), 1
        device = next(self.module.parameters()).device
        with in_eval(self.module), self.autocast():
            _, outputs = named_outputs(self.module, {"input_ids": padded.to(device), MASK: mask.to(device)})
        if not torch.isfinite(outputs).all():
            raise RunError("the model returned outputs that are not finite")
        found = outputs.float().argmax(-1).tolist()
        return Answers(found if self.classes is None else [self.classes[number] for number in found])
