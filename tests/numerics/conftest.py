"""Makes the modules next to the tests (`lab`, `gang`, `lives`, `plain`) importable, here and in child processes."""

from __future__ import annotations

import sys
from pathlib import Path

PLACE = str(Path(__file__).resolve().parent)
if PLACE not in sys.path:
    sys.path.append(PLACE)
