"""Checks that the Python objects of a job can be pickled, as the workers get copies of them.

Ray does this itself only after it has started. Its pickler is a file of its package that needs nothing else of Ray:
loaded alone, since the package reads its environment when it is imported, which is before `connected` sets it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from jobs.job.spec import JobSpec
from raytrain.data.sources.in_memory import check_kind
from raytrain.errors import InputError, first_line
from raytrain.train.sending import make_sendable
from raytrain.trainable import Trainable

_PICKLER = "raytrain_ray_cloudpickle"
#: Levels of attributes that are searched for the part that cannot be pickled.
_DEPTH = 8
#: Types that can be pickled and may be large: their content is not copied to find out.
_LARGE = (torch.Tensor, nn.Parameter, torch.UntypedStorage)


def check_sendable(spec: JobSpec) -> None:
    """Check that each Python object of a job can be pickled.

    Raises:
        InputError: names the key, and the attribute that cannot.
    """
    for key, value in _objects(spec):
        module = value.module if isinstance(value, Trainable) else value
        if isinstance(module, nn.Module):
            make_sendable(module)
            _check_hooks(module, key)
        error = _refusal(value)
        if error is None:
            continue
        if key in ("data.train", "data.eval"):
            check_kind(value, key=key)
        path, part = _culprit(value)
        seen = f"a {type(value).__name__} whose attribute {path} (a {_kind(part)}) cannot be sent to the workers"
        if not path:
            seen = f"a {type(value).__name__}, which cannot be sent to the workers ({first_line(error)})"
        raise InputError(
            key, got=seen, expected="an object that can be pickled",
            remedy="create that part where it is first used, or leave it out in __getstate__",
        )  # fmt: skip


def _check_hooks(module: nn.Module, key: str) -> None:
    """Refuse hooks of tensors, which torch leaves out when it pickles a tensor."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            raise InputError(
                key, got=f"a {type(module).__name__} with a hook on the tensor {name}, which no worker would receive",
                expected="hooks on modules only", remedy="register it in a function that builds the model, and name "
                "that as model.builder",
            )  # fmt: skip


def _objects(spec: JobSpec) -> Iterator[tuple[str, Any]]:
    """Key and value of what may be a Python object."""
    model, data = spec.model, spec.data
    named = {"model.module": model.module, "data.train": data.train, "data.eval": data.eval,
             "data.collate": data.collate}  # fmt: skip
    named |= {f"model.{key}": value for key, value in model.keys.items()}
    named |= {f"data.{key}": value for key, value in data.keys.items()}
    for key, value in named.items():
        if value is not None and not isinstance(value, bool | int | float | str):
            yield key, value


def _refusal(value: Any) -> Exception | None:
    """The error with which a value refuses to be pickled; None if it can be."""
    if type(value).__module__.split(".")[0] in ("ray", "pyarrow"):
        return None
    try:
        _pickler().Checking(_Nowhere(), protocol=5, buffer_callback=lambda _buffer: None).dump(value)
    except Exception as error:  # of any type: a class may define how it is pickled
        return error
    return None


class _Nowhere:
    """A file that forgets what is written to it."""

    def write(self, data: Any) -> int:
        return len(data)


def _pickler() -> Any:
    """Ray's cloudpickle, with the class `Checking`, which does not copy large tensors."""
    if _PICKLER not in sys.modules:
        package = importlib.util.find_spec("ray")
        assert package is not None and package.origin is not None
        path = os.path.join(os.path.dirname(package.origin), "cloudpickle", "cloudpickle.py")
        found = importlib.util.spec_from_file_location(_PICKLER, path)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[_PICKLER] = module  # what it pickles refers to it by this name
        found.loader.exec_module(module)
        module.Checking = _checking(module)  # pyright: ignore[reportAttributeAccessIssue]
    return sys.modules[_PICKLER]


def _checking(module: ModuleType) -> type:
    class Checking(module.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if type(obj) in _LARGE or type(obj).__module__ == "pyarrow.lib":
                return int, ()
            return super().reducer_override(obj)

    return Checking


def _culprit(value: Any) -> tuple[str, Any]:
    """The innermost part that cannot be pickled, and its name; "" if that is the value itself."""
    names, part, seen = [], value, {id(value)}
    while len(names) < _DEPTH:
        for name, child in _parts(part):
            if id(child) not in seen and _refusal(child) is not None:
                seen.add(id(child))
                names.append(name)
                part = child
                break
        else:
            break
    return ".".join(names), part


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of what belongs to an object: submodules under their own names, as in a state dict."""
    if isinstance(value, FunctionType):
        yield from zip(value.__code__.co_freevars, map(_content, value.__closure__ or ()), strict=True)
        yield from ((name, value.__globals__[name]) for name in value.__code__.co_names if name in value.__globals__)
    elif isinstance(value, Mapping):
        yield from ((str(name), child) for name, child in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(index), child) for index, child in enumerate(value))
    else:
        if isinstance(value, nn.Module):
            yield from value.named_children()
        yield from getattr(value, "__dict__", {}).items()
        if (bound := getattr(value, "__self__", None)) is not None:  # of a method
            yield type(bound).__name__, bound


def _content(cell: CellType) -> Any:
    """The variable that a function closes over; None if it has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _kind(value: Any) -> str:
    """The name of a class as Python writes it in errors: with its module, if that is not the user's."""
    module = type(value).__module__
    return type(value).__name__ if module in ("builtins", "__main__") else f"{module}.{type(value).__name__}"
