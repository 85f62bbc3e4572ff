"""Runs on the cluster, as a job: prints its versions and a digest of the product installed there, as JSON.

Its text is the whole job, so it imports the standard library only.
"""

import hashlib
import importlib.util
import json
import os
import platform
from importlib import metadata


def version(name: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def digest(packages: list[str]) -> str | None:
    """Of every Python file and recipe of the packages; None if one is missing."""
    found = hashlib.sha256()
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            return None
        root = next(iter(spec.submodule_search_locations))
        files = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
        for path in sorted(path for path in files if path.endswith((".py", ".yaml"))):
            found.update(f"{package}/{os.path.relpath(path, root)}\0".encode())
            with open(path, "rb") as file:
                found.update(file.read())
    return found.hexdigest()


def report() -> dict[str, str | None]:
    """Versions by name, and the digest of the product."""
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "ray": version("ray"),
        "product": digest(["cluster", "raytrain", "experts", "jobs"]),
    }


if __name__ == "__main__":
    print(json.dumps(report()), flush=True)
