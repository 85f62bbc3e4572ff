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
"""The folder that contains our four packages."""


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


def shadow_in(folder: Path, package: str) -> Path | None:
    """The code in a folder that has the name of one of our packages, if it is not ours; without Python files, such as
    `jobs/` full of YAML, a folder shadows nothing."""
    as_file, as_folder = folder / f"{package}.py", folder / package
    found = as_file if as_file.is_file() else as_folder if any(as_folder.glob("*.py")) else None
    return None if folder == HOME else found


def hides(package: str, own: Path | str) -> InputError:
    """The error for the user's own module with the name of one of our packages."""
    expected = f"another name, since it hides the package {package} of raytrain"
    return InputError(str(own), got=f"your own module named {package}", expected=expected, remedy="rename it")


def _claim(package: str, folder: Path) -> None:
    """Import one of our packages from beside this one, whatever a script has in its folder."""
    sys.path.insert(0, str(HOME))
    held = importlib.import_module(package)
    sys.path.remove(str(HOME))
    if os.path.realpath(held.__file__ or "") != str(HOME / package / "__init__.py"):
        raise hides(package, held.__file__ or str(held))
    if (own := shadow_in(folder, package)) is not None:  # which training refuses
        warnings.warn(str(hides(package, own)), stacklevel=3)


sys.modules[__name__].__class__ = _Package
for _name in OUR_PACKAGES[1:]:
    _claim(_name, Path(sys.path[0]).resolve())
