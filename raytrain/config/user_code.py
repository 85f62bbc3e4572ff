"""Import the user's code that a job names as "module:function". Torch-free."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster.environment import take_variables
from raytrain import HOME, OUR_PACKAGES, shadow_in
from raytrain.config.messages import suggestion
from raytrain.errors import InputError, RaytrainError, first_line

_IN_PLACE_OF: dict[str, str] = {}
"""Working directory of this process -> that of the command, where the user's code is."""
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def resolve(path: str, key: str) -> Callable[..., Any]:
    """The callable that "module:function" names; the working directory is searched last. `key` is the key of the job
    that names it, for messages. Raises InputError: not of that form, no such module or attribute, the module's own
    import fails, or a folder of the working directory shadows one of our packages."""
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        raise InputError(key, got=repr(path), expected="module:function, e.g. my_pkg.my_mod:build")
    folder = _IN_PLACE_OF.get(os.getcwd(), os.getcwd())
    check_shadowing(folder)
    make_importable(folder)
    name, _, attributes = path.partition(":")
    found: Any = _import(name, path, key)
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            names = [n for n in vars(found) if not n.startswith("_")]
            where = getattr(found, "__file__", None) or function_name(found)
            got, remedy = f"{path}, which {where} does not define", suggestion(attribute, names)
            raise InputError(key, got=got, expected="a function or class of that module", remedy=remedy)
        found = getattr(found, attribute)
    if not callable(found):
        raise InputError(key, got=f"{path}, a {type(found).__name__}", expected="a function or a class")
    return found


def import_from(folder: str) -> None:
    """In a process of Ray, whose working directory is that of the daemon which started it: from now on user code is
    imported from `folder`, the working directory of the command, and has the variables that are meant for it."""
    _IN_PLACE_OF[os.getcwd()] = folder
    make_importable(folder)
    take_variables()


_passed_over: set[str] = set()


def make_importable(folder: str) -> None:
    """Append `folder` to the import path if it is missing there; never first, so that it shadows nothing."""
    real = os.path.realpath(folder)
    if not any(os.path.realpath(entry or os.getcwd()) == real for entry in sys.path):
        sys.path.append(folder)
        importlib.invalidate_caches()


def check_shadowing(folder: str | None = None) -> None:
    """Refuse code under the name of one of our packages in the working directory or beside the script: a process of
    Ray would import it in the place of ours. Raises InputError, naming the file or folder."""
    script = getattr(sys.modules.get("__main__"), "__spec__", None) is None  # and no `python -m`: that adds no folder
    beside = os.path.dirname(sys.argv[0]) if script else ""
    for place in filter(None, (folder or os.getcwd(), beside)):
        for package in OUR_PACKAGES:
            if (error := shadow_in(Path(place).resolve(), package)) is not None:
                raise error


def pass_over_breakpoints() -> None:
    """From now on `breakpoint()` in this process and those that it starts only says where it is: there is no terminal.

    A debugger that was chosen keeps its breakpoints: by PYTHONBREAKPOINT, or Ray's own by RAY_DEBUG. Ray chooses its
    own without being asked, which waits until somebody connects to it.
    """
    if "RAY_DEBUG" not in os.environ and os.environ.get("PYTHONBREAKPOINT", "ray.").startswith("ray."):
        os.environ["PYTHONBREAKPOINT"] = f"{__name__}.passed_over"


def passed_over(*args: Any, **keywords: Any) -> None:
    """In place of `breakpoint()`: a line the first time at each place."""
    caller = sys._getframe(1)
    place = f"{_short_path(caller.f_code.co_filename)}:{caller.f_lineno}"
    if place not in _passed_over:
        _passed_over.add(place)
        print(f"breakpoint() at {place} is passed over, as there is no terminal here: `raytrain train --debug` stops")


def users_error(error: BaseException, *, key: str, doing: str) -> InputError:
    """What the user's own code raised, as wrong input, with the frames of that code and no others; `doing` says when,
    e.g. "in the forward pass"."""
    seen = f"{type(error).__name__}: {first_line(error)}, raised {doing}"
    return InputError(key, got=seen, expected="code that runs without an error", remedy=raised_at(error))


def raised_at(error: BaseException) -> str:
    """Where an error was raised, a line for each frame of the user's own code; the last frame if none is."""
    own = _own_frames(error) or traceback.extract_tb(error.__traceback__)[-1:]
    return "\n".join(["it was raised at", *(f"  {_place(frame)}: {frame.line}" for frame in own)])


def users_place(error: BaseException) -> str:
    """The innermost frame of the user's own code in which an error was raised, `file:line in function`, or ""."""
    return "".join(_place(frame) for frame in _own_frames(error)[-1:])


def _own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [one for one in traceback.extract_tb(error.__traceback__) if is_users_file(one.filename)]


def _place(frame: traceback.FrameSummary) -> str:
    return f"{_short_path(frame.filename)}:{frame.lineno} in {frame.name}"


@contextlib.contextmanager
def users_errors(key: str | Callable[[BaseException], str], doing: str) -> Iterator[None]:
    """Turn what the user's own code raises inside into an InputError (`users_error`); `key` may depend on the error."""
    try:
        yield
    except RaytrainError:
        raise
    except Exception as error:  # any error of the user's code is wrong input
        raise users_error(error, key=key if isinstance(key, str) else key(error), doing=doing) from error


def _short_path(path: str) -> str:
    """The path from the working directory, for a file in it."""
    inside = os.path.relpath(path) if os.path.isabs(path) else path
    return path if inside.startswith("..") else inside


def is_users_file(path: str) -> bool:
    """Whether a source file is the user's own: neither ours, nor Python's, nor of an installed package."""
    if path.startswith(("<frozen", "<string>")):
        return False
    real = os.path.realpath(path)
    return not any(real.startswith(folder + os.sep) for folder in _others_folders())


@functools.cache
def _others_folders() -> list[str]:
    """The folders of our packages, of Python's own modules and of installed packages."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = {os.path.realpath(sysconfig.get_path(name)) for name in names}
    return [*(str(HOME / package) for package in OUR_PACKAGES), *installed]


def imported_names(node: ast.AST, package: Sequence[str]) -> Iterator[str]:
    """The names that a piece of code in a module of `package` imports, each of which may be a module: in an import, or
    a constant given to `import_module`."""
    if isinstance(node, ast.Import):
        yield from (one.name for one in node.names)
        return
    source, level, names = "", 0, []
    if isinstance(node, ast.ImportFrom):
        source, level, names = node.module or "", node.level, [one.name for one in node.names]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        first = node.args[0] if node.args else None
        text = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
        source, level = text.lstrip("."), len(text) - len(text.lstrip("."))
    above = package[: len(package) + 1 - level] if level else []
    whole = ".".join(filter(None, [*above, source]))
    yield from filter(None, [whole, *(".".join(filter(None, [whole, name])) for name in names)])


def function_name(function: Any) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"{module}:{name}" if module and name else repr(function)


def _import(name: str, path: str, key: str) -> Any:
    try:
        return importlib.import_module(name)
    except RaytrainError:
        raise
    except Exception as error:  # any error that the user's module raises on import is an error in their input
        expected, remedy = "a module that can be imported", ""
        missing = (error.name or name) if isinstance(error, ModuleNotFoundError) else ""
        if missing and (missing == name or name.startswith(missing + ".")):
            got, remedy = f"whose module {missing} does not exist", f"the current directory is {os.getcwd()}"
            expected = "an installed module, or one in the current directory"
        elif missing:
            got = f"which imports the missing module {missing}"
        else:
            got = f"whose import raises {type(error).__name__}: {first_line(error)}"
        raise InputError(key, got=f"{path}, {got}", expected=expected, remedy=remedy) from error
