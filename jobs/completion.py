"""Completion in a shell: recipes, keys and their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem


def complete_job(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Recipes, keys, values of keys that have a fixed set of words, and files."""
    from jobs.job.keys import job_rows
    from jobs.job.spec import recipe_names

    given = list[str](ctx.params.get(param.name or "") or ())
    before = given[-1] if given else ""
    apart = len(given) > 1 and before == "="  # bash takes KEY, = and VALUE for three words
    before = given[-2] if apart else before
    key, equals, start = incomplete.partition("=")
    if apart or (incomplete == "" and words_of(before)):  # click replaces the word "=" by nothing
        return _items(words_of(before), incomplete) or [CompletionItem(incomplete, type="file")]
    if equals:
        return _items([f"{key}={word}" for word in words_of(key)], f"{key}={start}")
    found = _items([*(f"{row.key}=" for row in job_rows()), *recipe_names()], incomplete)
    # click's script for bash forgets what came before a file
    return [CompletionItem(incomplete, type="file"), *found]


def complete_key(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from jobs.job.keys import job_rows

    rows = [row.key for row in job_rows()]
    return _items(list(dict.fromkeys([*(key.split(".")[0] for key in rows), *rows])), incomplete)


def complete_recipe(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from jobs.job.spec import recipe_names

    return _items(recipe_names(), incomplete)


def words_of(key: str) -> list[str]:
    """The words that a key accepts, among them `true` and `false` of a switch; none if it accepts anything else only.

    Example:
        >>> from jobs.completion import words_of
        >>> words_of("scale.strategy")
        ['auto', 'data_parallel', 'fsdp']
    """
    from jobs.job.spec import JobSpec
    from raytrain.data.sources.sections import SOURCES

    head, _, name = key.partition(".")
    sources = SOURCES.values() if head == "data" else ()
    found = list[str]()
    for root, path in ((JobSpec, key), *((source, name) for source in sources)):
        schema = root.model_json_schema()
        node: Mapping[str, Any] = schema
        for part in path.split("."):
            node = _resolved(node, schema).get("properties", {}).get(part, {})
        found += _words(node, schema)
    return list(dict.fromkeys(found))


def _words(node: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    node = _resolved(node, schema)
    given = [*node.get("enum", ()), *([node["const"]] if "const" in node else ())]
    found = [value for value in given if isinstance(value, str)]
    found += ["true", "false"] if node.get("type") == "boolean" else []
    return found + [word for choice in node.get("anyOf", ()) for word in _words(choice, schema)]


def _resolved(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    name = node.get("$ref", "").rpartition("/")[2]
    return schema["$defs"][name] if name else node


def _items(words: Sequence[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(word) for word in dict.fromkeys(words) if word.startswith(incomplete)]
