"""From "module:function" in a job to the object it builds; no torch until a builder is called."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain.errors import InputError, RaytrainError
from raytrain.models.sizes import SizeError, missing_key, unknown_key

if TYPE_CHECKING:
    from raytrain.trainable import Trainable

OUR_PACKAGES = ("raytrain", "experts", "jobs", "cluster")
HOME = Path(__file__).resolve().parents[2]
"""The folder our four packages stand in."""

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def resolve(path: str, key: str) -> Callable[..., Any]:
    """The callable that "module:function" names; the working directory is searched last.

    Args:
        path: e.g. ``my_pkg.my_mod:build``.
        key: the job's key it came from, for messages.
    Raises:
        InputError: not of that form, no such module or attribute, the module's own import fails, or a
            folder of the working directory shadows one of our packages.
    """
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        raise InputError(key, seen=repr(path), expected="module:function, e.g. my_pkg.my_mod:build")
    check_shadowing()
    make_importable(os.getcwd())
    name, _, attributes = path.partition(":")
    found: Any = _import(name, path, key)
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise _no_attribute(found, attribute, path, key)
        found = getattr(found, attribute)
    if not callable(found):
        raise InputError(key, seen=f"{path}, a {type(found).__name__}", expected="a function or a class")
    return found


def make_importable(folder: str) -> None:
    """Append `folder` to the import path where it is not on it; never first, so it shadows nothing."""
    real = os.path.realpath(folder)
    if not any(os.path.realpath(entry or os.getcwd()) == real for entry in sys.path):
        sys.path.append(folder)
        importlib.invalidate_caches()


def check_shadowing(folder: str | None = None) -> None:
    """Refuse a working directory with code under the name of one of our packages.

    A folder without Python files (say `jobs/` full of YAML) shadows nothing and is let be; so is the
    repository itself.

    Raises:
        InputError: naming the file or folder.
    """
    here = Path(folder or os.getcwd()).resolve()
    if here == HOME:
        return
    for package in OUR_PACKAGES:
        as_folder, as_file = here / package, here / f"{package}.py"
        if as_file.is_file() or (as_folder.is_dir() and any(as_folder.glob("*.py"))):
            shadow = as_file if as_file.is_file() else as_folder
            raise InputError(
                str(shadow),
                seen=f"code of your own named {package} in the directory the command runs in",
                expected=f"no module of that name: it shadows the package {package} of raytrain",
                remedy="rename it, or run the command from another directory",
            )


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
            raise unknown_key(key, given, _name(function), [a for a in accepted if a not in filled])


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
    name = _name(function)
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


def _import(name: str, path: str, key: str) -> Any:
    try:
        return importlib.import_module(name)
    except RaytrainError:
        raise
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing != name and not name.startswith(missing + "."):
            raise InputError(
                key,
                seen=f"{path}, which imports the missing module {missing}",
                expected="a module that imports",
            ) from error
        raise InputError(
            key,
            seen=f"{path}, but there is no module {missing}",
            expected="a module that can be imported",
            remedy=f"besides the installed ones, those in {os.getcwd()} can",
        ) from error
    except Exception as error:  # whatever the user's module raises while it is imported is their input
        raise InputError(
            key,
            seen=f"{path}, whose import raises {type(error).__name__}: {error}",
            expected="a module that imports",
        ) from error


def _no_attribute(found: Any, attribute: str, path: str, key: str) -> InputError:
    names = [n for n in vars(found) if not n.startswith("_")]
    near = difflib.get_close_matches(attribute, names, n=1)
    where = getattr(found, "__file__", None) or _name(found)
    return InputError(
        key,
        seen=f"{path}, but {where} has no {attribute}",
        expected="a function or class of that module",
        remedy=f"did you mean {near[0]}?" if near else "",
    )


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters, or a single **keys where a builtin does not tell."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("keys", inspect.Parameter.VAR_KEYWORD)]


def _name(function: Any) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"{module}:{name}" if module and name else repr(function)
