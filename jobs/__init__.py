import sys
from importlib.machinery import PathFinder
from pathlib import Path

if "raytrain" not in sys.modules:  # `python -m jobs` searches the current folder first, and would run what is there
    _found = PathFinder.find_spec("raytrain")
    if _found is not None and not Path(_found.origin or "").with_name("trainable.py").is_file():
        _own = _found.origin or next(iter(_found.submodule_search_locations or []))
        print(
            f"error: {_own}: got your own module named raytrain, expected another name, since it hides the package "
            "raytrain; rename it",
            file=sys.stderr,
        )
        sys.exit(2)

import raytrain as raytrain  # which imports the other packages from beside this one
