"""Checks the toolchain that `torch.compile` needs on a machine, without importing torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Mapping

from packaging.version import Version

#: The first torch with `torch.compile`.
FIRST_TORCH = "2.0"


def missing_for_compile(
    device: str, *, torch_version: str | None = None, environ: Mapping[str, str] | None = None
) -> str | None:
    """Why this machine cannot compile for `device` ("cpu" or "cuda"); None if it can.

    On a CPU, torch's inductor generates C++ and calls the compiler in `CXX`, else g++. On a GPU it generates Triton
    kernels, whose launcher is compiled from C (`CC`, else gcc or clang).

    Args:
        torch_version, environ: default to those of this process.
    """
    version = torch_version or importlib.metadata.version("torch")
    if Version(version) < Version(FIRST_TORCH):
        return f"torch {version} has no torch.compile, it came with {FIRST_TORCH}"
    settings = os.environ if environ is None else environ
    if device == "cpu":
        name = settings.get("CXX") or "g++"
        if shutil.which(name, path=settings.get("PATH")) is None:
            return f"no C++ compiler: {name} is not on the PATH (CXX names another)"
        return None
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed, which compiles for a GPU"
    names = [settings["CC"]] if settings.get("CC") else ["gcc", "clang", "cc"]
    if not any(shutil.which(name, path=settings.get("PATH")) for name in names):
        return f"no C compiler for Triton's launcher: {', '.join(names)} not on the PATH (CC names another)"
    return None
