"""Prompts: the text that a model gets for a row, from a column, a template or the tokenizer's chat template."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raytrain.config.messages import suggestion
from raytrain.data.sources.tables import column_kind, is_text
from raytrain.errors import InputError

#: Columns that hold the prompt if `infer.prompt_field` is not set, in this order.
USUAL = ("prompt", "text", "question", "instruction")

TEMPLATE = "infer.template"

Chat = Callable[[str], str]


@dataclass(frozen=True)
class Prompt:
    """How a row becomes the text of a prompt.

    Attributes:
        parts: texts, each with the column whose value follows it, or None.
        key: the key that errors name.
        chat: puts the text into the tokenizer's chat template; None for the text alone.
    """

    parts: tuple[tuple[str, str | None], ...]
    key: str
    chat: Chat | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it names, once each."""
        return tuple(dict.fromkeys(name for _, name in self.parts if name is not None))

    def texts(self, table: Any) -> list[str]:
        """The prompt of each row. Raises InputError for a row without a value, and as `check`."""
        self.check(table.schema)
        return [self._text(row) for row in table.select(list(self.columns)).to_pylist()]

    def check(self, schema: Any) -> None:
        """Raise InputError for a column of lists, mappings or bytes; a template may also name columns of numbers."""
        from pyarrow import types

        for name in self.columns:
            kind = schema.field(name).type
            number = column_kind(kind) == "number" or types.is_temporal(kind)
            if is_text(kind) or types.is_null(kind) or (number and self.key == TEMPLATE):
                continue
            remedy = f'infer.template="{{{name}}}" writes numbers as text' if number else "a prompt is one text"
            raise InputError(self.key, got=f"the column {name}, which holds {kind}", expected="a text in every row",
                             remedy=remedy)  # fmt: skip

    def lenient(self, table: Any) -> list[str | None]:
        """As `texts`, with None for a row without a value."""
        found = table.select(list(self.columns)).to_pylist()
        return [None if None in row.values() else self._joined(row) for row in found]

    def _text(self, row: dict[str, Any]) -> str:
        for name, value in row.items():
            if value is None:
                raise InputError(self.key, got=f"no value in the column {name}", expected="a value in every row")
        text = self._joined(row)
        return text if self.chat is None else self.chat(text)

    def _joined(self, row: dict[str, Any]) -> str:
        return "".join(text + ("" if name is None else str(row[name])) for text, name in self.parts)


def prompt_of(
    names: list[str], *, field: str | None, template: str | None, templates: dict[str, str], chat: Chat | None
) -> Prompt:
    """The prompt that the keys describe.

    Args:
        names: columns of the input.
        field: `infer.prompt_field`, a column.
        template: `infer.template`: the name of one of `templates`, or a template itself if it has braces.
        templates: `infer.templates`, name -> template.

    Raises:
        InputError: an unknown name, a column that the input lacks, or no column to take.
    """
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
        return Prompt(_parts(text, names), TEMPLATE, chat)
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
    try:
        parts = [(text, field) for text, field, _, _ in string.Formatter().parse(template)]
    except ValueError as error:
        raise InputError("infer.template", got=f"{template!r}: {error}", expected="a text with {column}") from error
    for _, field in parts:
        if field is not None and field not in names:
            raise InputError(
                "infer.template", got=f"the field {{{field}}}", expected=f"columns of infer.input: {', '.join(names)}",
                remedy=suggestion(field, names) or "write {{ and }} for braces in the text",
            )  # fmt: skip
    if all(field is None for _, field in parts):
        raise InputError("infer.template", got=f"{template!r} without a column", expected="a text with {column}")
    return tuple(parts)
