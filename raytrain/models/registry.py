"""Call the builder that a job names as "module:function"; torch is not imported before a builder is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from raytrain.config.user_code import function_name, raised_at
from raytrain.errors import InputError, RaytrainError
from raytrain.models.sizes import SizeError, missing_key, unknown_key

if TYPE_CHECKING:
    from raytrain.trainable import Trainable


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a builder has a parameter of this name, to be filled from a section or a fact of the source."""
    return any(
        one.name == name and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) for one in _parameters(function)
    )


def check_keys(
    function: Callable[..., Any],
    keys: Iterable[str],
    *,
    sections: Iterable[str],
    key: str = "model",
    ours: Iterable[str] = (),
) -> None:
    """Check that a function accepts the keys of its section, without calling it; arguments as for `call_builder`.
    `ours`: raytrain's own keys that the section sets (`OpenSection.given`), which are not passed on. Raises
    InputError: the first key that it does not accept, or a key of raytrain that is also a parameter of it."""
    parameters, filled = _parameters(function), set(sections)
    accepted = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for taken in sorted(set(ours) & set(accepted)):
        raise InputError(
            f"{key}.{taken}",
            got=f"a key of raytrain, and {function_name(function)} has a parameter of that name",
            expected="a parameter of another name: raytrain's own keys are not passed on",
        )
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
    source_facts: Mapping[str, Any] | None = None,
    key: str = "model",
) -> Any:
    """Call a builder or dataset function with the keys of its section.

    Nothing else of the job is passed: a parameter named `seed` or `name` is the function's own. Raises InputError: an
    unknown key, a missing one, or a ValueError or TypeError raised by the function.

    Args:
        keys: the section's keys other than those of the framework.
        sections: other sections by name (`experts`), passed to parameters of these names that are not given as keys.
        source_facts: vocab_size, num_features, num_classes, image_shape; passed in the same way.
        key: name of the section in messages."""
    known = dict(source_facts or {})
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
    try:
        return function(**arguments)
    except RaytrainError:
        raise
    except SizeError as error:
        raise InputError(f"{key}.{error.key}", got=error.got, expected=error.expected) from error
    except (ValueError, TypeError) as error:
        raise InputError(
            key, got=f"{type(error).__name__} from {name}: {error}", expected="keys that it accepts",
            remedy=f"its arguments were {', '.join(sorted(arguments)) or 'empty'}; {raised_at(error)}",
        ) from error  # fmt: skip


def to_trainable(result: Any, *, key: str = "model.builder") -> Trainable:
    """Return a builder's result as a Trainable; an `nn.Module` is wrapped by the convention of transformers. `key`:
    where it comes from, "model.builder" or "model.module". Raises InputError: it is anything else; the error names
    `key`."""
    from torch import nn

    from raytrain.trainable import Trainable

    if isinstance(result, Trainable):
        return result
    if isinstance(result, nn.Module):
        if getattr(result.forward, "__func__", None) is nn.Module.forward:
            raise InputError(
                key, got=f"a {type(result).__name__} without a method forward",
                expected="a module whose forward takes the columns of a batch and returns the loss",
            )  # fmt: skip
        return Trainable.from_module(result)
    seen = "None" if result is None else f"a {type(result).__name__}"
    expected, remedy = "a Trainable or a torch.nn.Module", ""
    if isinstance(result, type):
        seen = f"the class {result.__name__}"
        if issubclass(result, nn.Module | Trainable):
            expected, remedy = "an instance of it", f"write {result.__name__}(), with parentheses"
    got = f"a builder that returned {seen}" if key == "model.builder" else seen
    raise InputError(key, got=got, expected=expected, remedy=remedy)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("keys", inspect.Parameter.VAR_KEYWORD)]
