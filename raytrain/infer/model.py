"""A model with its weights, its data's facts and its prompts, as what every worker of an inference job loads.

`jobs.inference.target` makes an `InferenceModel` on the driver, and `worker.py` loads it.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from raytrain.config.messages import abbreviated, suggestion
from raytrain.config.sections import InferConfig, ModelConfig
from raytrain.data.sources.tables import ColumnChoice, column_kind, is_text
from raytrain.data.sources.text import ByteVocabulary, CharVocabulary
from raytrain.errors import InputError
from raytrain.infer.generate import Sampling, greedy_answers
from raytrain.infer.input import KEY, as_json, own_names, shortest
from raytrain.infer.predictor import (
    MODEL_KEY,
    Codec,
    Generate,
    Predictor,
    RowPredictor,
    TextClassifier,
    TextPredictor,
    check_list_sizes,
    check_numbers,
    takes_any,
    takes_mask,
)
from raytrain.infer.quantize import halve, quantize
from raytrain.infer.summary import KnownClasses
from raytrain.models.huggingface import (
    CAUSAL_LM,
    CLASSIFIER,
    POSITION_KEYS,
    TextCodec,
    encode_rows,
    longest_input,
    open_tokenizer,
    pad_id,
    read_config,
)
from raytrain.models.sizes import ROW_BUILDERS
from raytrain.train.job import build_trainable
from raytrain.train.memory.device import room_on
from raytrain.trainable import RemoteState, Trainable

# ---------------------------------------------------------------- prompts


#: Columns that hold the prompt if `infer.prompt_field` is not set, in this order.
USUAL = ("prompt", "text", "question", "instruction")

TEMPLATE = "infer.template"

Chat = Callable[[list[dict[str, str]]], str]
"""Messages as the text of the tokenizer's chat template."""


@dataclass(frozen=True)
class Prompt:
    parts: tuple[tuple[str, str | None], ...]  # texts, each with the column whose value follows it, or None
    key: str  # the key that errors name
    chat: Chat | None = None  # gets the text as the user's message; None for the text alone
    exact: frozenset[str] = frozenset()  # columns that the input also has as JSON texts (`as_json`)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for _, name in self.parts if name is not None))

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.names, *(as_json(name) for name in self.names if name in self.exact))

    def texts(self, table: Any) -> list[str]:
        """The prompt of each row. Raises InputError for a row without a value, and as `check`."""
        self.check(table.schema)
        rows = self._rows(table)
        for name in (name for row in rows for name in self.names if row[name] is None):
            raise InputError(self.key, got=f"no value in the column {name}", expected="a value in every row")
        texts = [self._joined(row) for row in rows]
        return texts if self.chat is None else [self.chat([{"role": "user", "content": text}]) for text in texts]

    def check(self, schema: Any) -> None:
        """Raise InputError for a column of lists, mappings or bytes; a template may also name columns of numbers."""
        from pyarrow import types

        for name in self.names:
            kind = schema.field(name).type
            number = column_kind(kind) == "number" or types.is_temporal(kind)
            if is_text(kind) or types.is_null(kind) or (number and self.key == TEMPLATE):
                continue
            remedy = f'infer.template="{{{name}}}" writes numbers as text' if number else "a prompt is one text"
            raise InputError(self.key, got=f"the column {name}, which holds {kind}", expected="a text in every row",
                             remedy=remedy)  # fmt: skip

    def lenient(self, table: Any) -> list[str | None]:
        """As `texts`, with None for a row without a value."""
        return [
            None if any(row[name] is None for name in self.names) else self._joined(row) for row in self._rows(table)
        ]

    def _rows(self, table: Any) -> list[dict[str, Any]]:
        return shortest(table.select(list(self.columns))).to_pylist()

    def _joined(self, row: dict[str, Any]) -> str:
        return "".join(text + ("" if name is None else _written(row, name)) for text, name in self.parts)


def _written(row: Mapping[str, Any], name: str) -> str:
    """A value as the file has it, as far as that is known, and true and false as in JSON and CSV."""
    value, exact = row[name], row.get(as_json(name))
    if isinstance(value, str):
        return value
    return exact if exact is not None else str(value).lower() if isinstance(value, bool) else str(value)


def prompt_of(
    names: list[str], *, field: str | None, template: str | None, templates: dict[str, str], chat: Chat | None,
    exact: Collection[str] = (),
) -> Prompt:  # fmt: skip
    """The prompt that the keys `infer.prompt_field`, `template` and `templates` describe, for an input with these
    columns. Raises InputError: an unknown name, a column that the input lacks, or no column to take."""
    if template is not None:
        text = templates.get(template, template)
        if text is template and "{" not in template:
            known = ", ".join(templates) or "none is given in infer.templates"
            raise InputError(
                "infer.template",
                got=template,
                expected=f"one of infer.templates ({known}), or a text with {{column}}",
                remedy=suggestion(template, templates),
            )  # fmt: skip
        return Prompt(_parts(text, names), TEMPLATE, chat, frozenset(exact))
    column = field or next((name for name in USUAL if name in names), None)
    if column is None or column not in names:
        seen = "no value" if field is None else f"'{field}', which is not in infer.input"
        raise InputError(
            "infer.prompt_field", got=seen, expected=f"one of its columns {', '.join(names)}",
            remedy="" if field is None else suggestion(field, names),
        )  # fmt: skip
    return Prompt((("", column),), "infer.prompt_field", chat)


def _parts(template: str, names: list[str]) -> tuple[tuple[str, str | None], ...]:
    """The parts of a template such as `"Question: {question}"`."""
    wrong = partial(InputError, "infer.template")
    try:
        found = list(string.Formatter().parse(template))
    except ValueError as error:
        raise wrong(got=f"{template!r}: {error}", expected="a text with {column}") from error
    for _, column, spec, conversion in found:
        if column is not None and (spec or conversion):
            seen = column + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            expected = f"{{{column}}}: a value is written as the file has it"
            raise wrong(got=f"{{{seen}}}", expected=expected, remedy="write another form into a column of its own")
        if column is not None and column not in names:
            remedy = suggestion(column, names) or "write {{ and }} for braces in the text"
            expected = f"columns of infer.input: {', '.join(names)}"
            raise wrong(got=f"the field {{{column}}}", expected=expected, remedy=remedy)
    if all(column is None for _, column, *_ in found):
        raise wrong(got=f"{template!r} without a column", expected="a text with {column}")
    return tuple((text, column) for text, column, *_ in found)


def template_columns(infer: InferConfig) -> set[str]:
    """The columns that `infer.template` names; `prompt_of` finds what is wrong with it."""
    text = dict(infer.templates).get(infer.template or "", infer.template or "")
    with contextlib.suppress(ValueError):
        return {column for _, column, _, _ in string.Formatter().parse(text) if column is not None}
    return set()


# ---------------------------------------------------------------- model


#: Built-in builders of models of texts.
TEXT_BUILDERS = ("raytrain.models.gpt:gpt", "experts.models:moe_gpt", CAUSAL_LM)
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class InferenceModel:
    """What a worker needs to load a model; can be pickled."""

    model: ModelConfig  # the `model` section with absolute paths; its `init_from` is the trained weights
    sections: Mapping[str, Any] = field(default_factory=dict)  # other sections that a builder takes, by name
    # facts of the training data for the builder (`source_facts`)
    facts: Mapping[str, Any] = field(default_factory=dict)
    # how the training data was read: {"characters"} or {"stacked", "named"}; empty if unknown
    reads: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None  # folder of the tokenizer, None if the model has none
    dtype: str = "fp32"  # format of the forward passes: fp32, bf16 or fp16
    device: str = "cpu"  # e.g. "cpu" or "cuda:0".
    seed: int = 0  # of the draws
    longest: int | None = None  # tokens that texts of one class each were cut to in training; None: the model's limit

    def check_header(self, infer: InferConfig, schema: Any) -> None:
        """Check the columns of the input as far as that does not need the model. Raises InputError: a column is
        missing, or its rows have another number of values than the model takes."""
        builder = str(self.model.builder)
        continues = builder in TEXT_BUILDERS and ("vocab_size" in self.facts or self.tokenizer is not None)
        if continues or builder == CLASSIFIER:
            _prompt(infer, schema)
        elif builder in ROW_BUILDERS or self.reads.get("stacked") or self.reads.get("named"):
            stacked, named = tuple(self.reads.get("stacked", ())), tuple(self.reads.get("named", ()))
            named = named if stacked or named else ("x",)
            _check_trained_on(schema, (*stacked, *named))
            check_numbers(schema, ColumnChoice(stacked, named, None))
            if builder in ROW_BUILDERS:
                check_list_sizes(schema, self._takes(named))

    def classes(self) -> KnownClasses | None:
        """The classes that it answers with, as far as that is known before it is loaded; None for another model."""
        names, count = self.facts.get("class_names"), self.facts.get("num_classes")
        texts = self.model.builder == CLASSIFIER
        if names is None and texts:
            named = read_config(str(self.model.keys.get("path"))).get("id2label") or {}
            count = self.model.keys.get("num_labels") or count or len(named)
            known = [str(named[number]) for number in sorted(named, key=int)]
            names = known if len(known) == count else [f"LABEL_{number}" for number in range(count)]
        if names is not None:
            return KnownClasses(len(names), tuple(names), numbered=texts)
        return None if count is None else KnownClasses(max(count, self.model.keys.get("num_classes") or 0))

    def used(self, infer: InferConfig) -> set[str] | None:
        """The columns that it may read, as far as that is known before it is loaded; None if only its forward tells."""
        texts = self.model.builder == CLASSIFIER or self.tokenizer is not None or "vocab_size" in self.facts
        named = {*self.reads.get("stacked", ()), *self.reads.get("named", ())}
        if texts:
            field = [] if infer.prompt_field is None else [infer.prompt_field]
            return {*USUAL, *template_columns(infer), *field, *named}
        return named or ({"x"} if self.model.builder in ROW_BUILDERS else None)

    def load(self, infer: InferConfig, schema: Any, module: nn.Module | None = None) -> Predictor:
        """Build the model, load its weights, and check it against the input. `schema`: Arrow schema of the input.
        `module`: already loaded, such as a `raytrain.infer.stages.split.SplitModule` or that of `beside_others`;
        used as it is. Raises InputError: the weights do not fit the model, or the input has not the columns that it
        reads."""
        if module is None:
            module = self._built().module
            if infer.quantize is None:
                self.halve(module)
            else:
                room = room_on(torch.device(self.device))
                if room is not None and sum(parameter.nbytes for parameter in module.parameters()) > room:
                    quantize(module)
            module = self._ready(module)
        autocast = self.autocast()
        if self.model.builder == CLASSIFIER or (hasattr(module, "num_labels") and hasattr(module, "score")):
            if self.tokenizer is None:
                raise InputError("model.path", got="a model of texts without a tokenizer", expected="a folder with one")
            tokenizer = open_tokenizer(self.tokenizer)
            config: Any = getattr(module, "config", None)
            own = getattr(config, "id2label", None) or {}
            names = self.facts.get("class_names") or [str(own[number]) for number in sorted(own)] or None
            limits = _context(module), tokenizer.model_max_length, self.longest
            longest = min(one for one in limits if one is not None)
            encode = partial(encode_rows, tokenizer, special=True, max_length=longest)
            return TextClassifier(
                module, encode, _prompt(infer, schema), pad_id(tokenizer),
                classes=None if names is None else tuple(names), autocast=autocast,
            )  # fmt: skip
        if self.is_language_model(module):
            return self._generator(module, infer, schema, autocast)
        return self._row_predictor(module, schema, infer, autocast)

    def _built(self) -> Trainable:
        model = self.model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)  # weights that are not loaded are the same in every worker
            return build_trainable(model, sections=dict(self.sections), facts=dict(self.facts))

    def _ready(self, module: nn.Module) -> nn.Module:
        return module.to(self.device).eval().requires_grad_(False)

    def halve(self, module: nn.Module, *, untie: bool = True) -> None:
        """Hold the weights of products in the format of its passes; see `raytrain.infer.quantize`."""
        if self.dtype in HALF:
            halve(module, HALF[self.dtype], untie=untie)

    def beside_others(self) -> tuple[nn.Module, RemoteState]:
        """This process's part of a model whose builder hands others to processes of their own, with their weights.
        Raises InputError: the weights do not fit the model. StateLost: one of the other processes has died."""
        trainable = self._built()
        trainable.remote.end_passes(short=False)  # they get their weights now, not with the first batch
        self.halve(trainable.module)
        return self._ready(trainable.module), trainable.remote

    def autocast(self) -> Callable[[], contextlib.AbstractContextManager[Any]]:
        if self.dtype not in HALF:
            return contextlib.nullcontext
        return partial(torch.autocast, torch.device(self.device).type, dtype=HALF[self.dtype])

    # ---------------------------------------------------------------- kinds of models

    def is_language_model(self, module: nn.Module) -> bool:
        """Whether it continues texts: it has a vocabulary, and its forward takes `input_ids`."""
        parameters = inspect.signature(module.forward).parameters
        kinds = getattr(getattr(module, "config", None), "architectures", None) or ()
        wraps = any(one.kind is one.VAR_KEYWORD for one in parameters.values()) and "CausalLM" in str(kinds)
        return ("input_ids" in parameters or wraps) and ("vocab_size" in self.facts or self.tokenizer is not None)

    def _row_predictor(self, module: nn.Module, schema: Any, infer: InferConfig, autocast: Any) -> RowPredictor:
        stacked, named = tuple(self.reads.get("stacked", ())), tuple(self.reads.get("named", ()))
        if not stacked and not named:
            kinds = {one.name: "text" if is_text(one.type) else column_kind(one.type) for one in schema}
            carried = (*infer.keep, infer.id_column)  # of a CSV file they are texts, which may be numbers
            named = tuple(
                name for name, kind in kinds.items() if kind != "other" and (kind != "text" or name in carried)
            )
            takes = _named_parameters(module)
            named = tuple(name for name in named if name in takes)
        named += self._demanded(module, schema, (*named, *(["x"] if stacked else [])))
        if not stacked and not named:
            raise InputError(
                "infer.input", got=f"the columns {abbreviated(list(schema.names), 8)}",
                expected=f"columns with the names of forward's parameters: {', '.join(_named_parameters(module))}",
            )  # fmt: skip
        _check_trained_on(schema, (*stacked, *named))
        names, image = self.facts.get("class_names"), self.facts.get("image_shape")
        takes = {} if takes_mask(module) else self._takes(named)
        check_list_sizes(schema, takes)
        choice = ColumnChoice(stacked, named, None)
        check_numbers(schema, choice)
        return RowPredictor(
            module, choice, classes=None if names is None else tuple(names),
            regression=self.facts.get("num_classes") is None and bool(self.reads), autocast=autocast, takes=takes,
            num_classes=self.facts.get("num_classes"), image_shape=None if image is None else tuple(image),
            dtypes=self.facts.get("feature_dtypes") or {},
        )  # fmt: skip

    def _demanded(self, module: nn.Module, schema: Any, given: Sequence[str]) -> tuple[str, ...]:
        """Columns of the input for the parameters of forward that have no default, beside those `given`: a forward
        that also trains may demand the labels. Raises InputError: the input has no such column."""
        plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = inspect.signature(module.forward).parameters.values()
        required = [one.name for one in parameters if one.kind in plain and one.default is inspect.Parameter.empty]
        missing = [name for name in required if name not in given]
        if given and not takes_any(module, given):
            missing = missing[1:]  # its first parameter gets the first column, whatever its name
        wanting = [name for name in missing if name not in schema.names]
        if wanting and given:
            names = ", ".join(wanting)
            raise InputError(
                MODEL_KEY, got=f"a forward that demands {names}, which the input has no column for",
                expected=f"a forward that answers rows without {names}",
                remedy=f"write {', '.join(f'{name}=None' for name in wanting)} and return no loss without it",
            )  # fmt: skip
        return tuple(name for name in missing if name in schema.names)

    def _takes(self, named: Sequence[str]) -> dict[str, int]:
        """Values of a row in the column `x`, as the keys of a built-in model or the training data say; empty if neither
        does."""
        keys, own = self.model.keys, self.model.builder in ROW_BUILDERS
        image, values = (keys.get(name) if own else None for name in ("image_shape", "num_features"))
        values = values or (math.prod(image) if image else self.facts.get("num_features") if self.reads else None)
        return {} if values is None or "x" not in named else {"x": int(values)}

    def _generator(self, module: nn.Module, infer: InferConfig, schema: Any, autocast: Any) -> TextPredictor:
        characters = self.reads.get("characters")
        codec: Codec = ByteVocabulary() if characters is None else CharVocabulary(characters)
        chat: Chat | None = None
        end = frozenset[int]()
        if self.tokenizer is not None:
            codec, tokenizer = TextCodec(self.tokenizer, plain=infer.chat), open_tokenizer(self.tokenizer)
            # The tokenizer's end token, and those with which the model's own `generate` ends, such as that of a turn.
            more = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
            given = [tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])]
            end = frozenset(int(one) for one in given if one is not None)
            if infer.chat and not getattr(tokenizer, "chat_template", None):
                raise InputError("infer.chat", got="true with a tokenizer without a chat template", expected="false")
            if infer.chat:
                chat = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
        elif infer.chat:
            raise InputError("infer.chat", got="true with a model without a tokenizer", expected="false")
        prompt = _prompt(infer, schema, chat)
        sampling = Sampling(
            infer.max_new_tokens, temperature=infer.temperature, top_k=infer.top_k, top_p=infer.top_p, end_ids=end,
            stop=tuple(infer.stop), seed=self.seed,
        )  # fmt: skip
        context = self.model.keys.get("context") or _context(module)
        made: Any = module
        own: Generate | None = None
        if hasattr(module, "own_generate"):  # of a model over stages
            own = made.own_generate(codec, sampling)
        elif hasattr(module, "generate") and hasattr(module, "generation_config") and not sampling.temperature:
            # transformers' own, which has its models' caches; its draws depend on the batch, so only without any
            own = partial(greedy_answers, module, codec)
        if own is not None and context is not None and infer.max_new_tokens >= context:
            expected = f"less than the {context} tokens that the model sees"
            raise InputError("infer.max_new_tokens", got=str(infer.max_new_tokens), expected=expected)
        return TextPredictor(module, codec, prompt, sampling, context=context, own_generate=own, autocast=autocast)


def _check_trained_on(schema: Any, names: Sequence[str]) -> None:
    given = list(schema.names)
    missing = [name for name in names if name not in given]
    if missing:
        raise InputError(
            KEY, got=f"the columns {abbreviated(given, 8)}",
            expected=f"{abbreviated(names, 8)}, which the model reads: {abbreviated(missing, 8)} "
            f"{'is' if len(missing) == 1 else 'are'} missing",
            remedy=suggestion(missing[0], [name for name in given if name not in names]),
        )  # fmt: skip


def _named_parameters(module: nn.Module) -> list[str]:
    skipped = ("labels", "num_items_in_batch")
    return [name for name in inspect.signature(module.forward).parameters if name not in skipped]


def _context(module: nn.Module) -> int | None:
    config: Any = getattr(module, "config", None)
    own = {name: getattr(config, name, None) for name in POSITION_KEYS}
    return longest_input(config.to_dict() if hasattr(config, "to_dict") else own)


def _prompt(infer: InferConfig, schema: Any, chat: Chat | None = None) -> Prompt:
    templates = dict(infer.templates)
    names = own_names(schema)
    exact = [name for name in names if as_json(name) in schema.names]
    made = prompt_of(
        names, field=infer.prompt_field, template=infer.template, templates=templates, chat=chat, exact=exact
    )
    made.check(schema)
    for name in made.names:
        if str(schema.field(name).type) == "null":  # Arrow's type of a column without any value
            got = f"no value in the column {name} in any row of infer.input"
            raise InputError(made.key, got=got, expected="a text in every row")
    return made
