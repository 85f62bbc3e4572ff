"""A process of a bench: python -m jobs.bench.harness.member MODULE:FUNCTION SETTINGS.json RANK

Calls `FUNCTION(settings, rank)`. No arm is started as the script of its own module: the folder of a script counts as
that of the user's code, and ours holds names such as `experts`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path


def main(target: str, path: str, rank: str) -> None:
    """Run as the process of this rank; that of torchrun, where it starts the processes."""
    module, _, function = target.partition(":")
    settings = json.loads(Path(path).read_text())
    getattr(importlib.import_module(module), function)(settings, int(os.environ.get("RANK", rank)))


if __name__ == "__main__":
    main(*sys.argv[1:])
