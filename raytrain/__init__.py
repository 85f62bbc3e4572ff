"""Trains PyTorch models: `raytrain.train(job)`, likewise `infer`, `tune`, `plan`, `check`, `report` and `export`.

They are the functions of `jobs`, which is imported when one is used. Four of the names are those of packages as well.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

from raytrain.errors import InputError

VERBS = ("check", "export", "infer", "plan", "report", "train", "tune")
OUR_PACKAGES = ("raytrain", "experts", "jobs", "cluster")
HOME = Path(__file__).resolve().parents[1]


class _Package(ModuleType):
    """`raytrain`, and its packages with the name of a function: the import system sets them in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in VERBS and isinstance(value, ModuleType):
            value.__class__ = _Package
        super().__setattr__(name, value)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return __getattr__(self.__name__.removeprefix("raytrain."))(*args, **options)

    def __reduce__(self) -> tuple[Any, ...]:  # cloudpickle knows modules by their exact type
        return importlib.import_module, (self.__name__,)


def __getattr__(name: str) -> Any:
    if name not in VERBS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"jobs.{name}"), name)


def shadow_in(folder: Path, package: str, own: str | None = None) -> InputError | None:
    """The error for code of the user's `own`, or found in a folder, with the name of one of our packages; None if it is
    ours. Without Python files, such as `jobs/` full of YAML, a folder shadows nothing."""
    files = [*folder.glob(f"{package}.py"), *folder.glob(f"{package}/*.py")] if folder != HOME else []
    if own is None and not files:
        return None
    seen = own or str(files[0] if files[0].parent == folder else files[0].parent)
    expected = f"another name, since it hides the package {package} of raytrain"
    return InputError(seen, got=f"your own module named {package}", expected=expected, remedy="rename it")


def _claim(package: str, folder: Path) -> None:
    """Import one of our packages from beside this one, whatever a script has in its folder."""
    sys.path.insert(0, str(HOME))
    held = importlib.import_module(package)
    sys.path.remove(str(HOME))
    at = Path(os.path.realpath(held.__file__ or ""))
    # Ray unpacks the packages that a submission brings into folders of their own
    ours = at == HOME / package / "__init__.py" or (at.parent / "MODULES.md").is_file()
    error = shadow_in(folder, package, None if ours else str(held.__file__))
    if error is not None and not ours:
        raise error
    if error is not None:  # training refuses it
        warnings.warn(str(error), stacklevel=3)


sys.modules[__name__].__class__ = _Package
for _name in OUR_PACKAGES[1:]:
    _claim(_name, Path(sys.path[0]).resolve())
