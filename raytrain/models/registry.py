"""From "module:function" in a job to the object it builds; no torch until a builder is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from raytrain.config.user_code import function_name
from raytrain.errors import InputError, RaytrainError
from raytrain.models.sizes import SizeError, missing_key, unknown_key

if TYPE_CHECKING:
    from raytrain.trainable import Trainable


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a builder has a parameter of that name, which a section of the job or a fact of the source fills."""
    return any(
        one.name == name and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) for one in _parameters(function)
    )


def check_keys(
    function: Callable[..., Any], keys: Iterable[str], *, sections: Iterable[str], key: str = "model"
) -> None:
    """That a function takes the keys of its section; arguments as for `call_builder`, nothing is called.

    Raises:
        InputError: the first that it does not.
    """
    parameters, filled = _parameters(function), set(sections)
    accepted = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    for given in keys:
        if given not in accepted:
            raise unknown_key(key, given, function_name(function), [a for a in accepted if a not in filled])


def call_builder(
    function: Callable[..., Any],
    keys: Mapping[str, Any],
    *,
    sections: Mapping[str, Any],
    vocab_size: int | None = None,
    source_facts: Mapping[str, Any] | None = None,
    key: str = "model",
) -> Any:
    """Call a builder or dataset function with the keys of its section.

    Args:
        function: what `resolve` found.
        keys: the section's keys but ours; each goes in as a keyword argument.
        sections: other sections by name; a parameter of that name, not given as a key, receives it.
        vocab_size: short for source_facts["vocab_size"].
        source_facts: what the source knows (vocab_size, num_features, num_classes, image_shape); fills
            the parameters of these names that are not given.
        key: the section's name, for messages.
    Raises:
        InputError: a key the function does not take, a missing one, or a ValueError or TypeError of its own.
    """
    known = dict(source_facts or {})
    if vocab_size is not None:
        known["vocab_size"] = vocab_size
    check_keys(function, keys, sections=sections, key=key)
    name = function_name(function)
    parameters = _parameters(function)
    accepted = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    arguments = {n: sections[n] for n in accepted if n in sections}
    arguments |= {n: known[n] for n in accepted if known.get(n) is not None}
    arguments |= keys
    for parameter in parameters:
        needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if needed and parameter.name not in arguments:
            raise missing_key(key, parameter.name, name, accepted)
    return _call(function, arguments, name, key)


def to_trainable(result: Any) -> Trainable:
    """A builder's result as a Trainable: one as it is, an `nn.Module` by the transformers convention.

    Raises InputError (model.builder) for anything else.
    """
    from torch import nn

    from raytrain.trainable import Trainable

    if isinstance(result, Trainable):
        return result
    if isinstance(result, nn.Module):
        return Trainable.from_module(result)
    raise InputError(
        "model.builder",
        seen=f"a builder that returned {'None' if result is None else 'a ' + type(result).__name__}",
        expected="a Trainable or a torch.nn.Module",
    )


def _call(function: Callable[..., Any], arguments: dict[str, Any], name: str, key: str) -> Any:
    try:
        return function(**arguments)
    except RaytrainError:
        raise
    except SizeError as error:
        raise InputError(f"{key}.{error.key}", seen=error.seen, expected=error.expected) from error
    except (ValueError, TypeError) as error:
        raise InputError(
            key,
            seen=f"{type(error).__name__} from {name}: {error}",
            expected="keys that it accepts",
            remedy=f"it was given {', '.join(sorted(arguments)) or 'nothing'}",
        ) from error


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters, or a single **keys where a builtin does not tell."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("keys", inspect.Parameter.VAR_KEYWORD)]
