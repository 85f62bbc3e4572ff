"""`python -m raytrain`: the command line, as `raytrain` and `python -m jobs`."""

from __future__ import annotations

import importlib

if __name__ == "__main__":
    importlib.import_module("jobs.__main__").main()
