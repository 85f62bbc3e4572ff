"""The jobs and instruments of tests/numerics (`lab`, `gang`, `lives`) serve unit tests too."""

from __future__ import annotations

import sys
from pathlib import Path

PLACE = str(Path(__file__).resolve().parents[1] / "numerics")
if PLACE not in sys.path:
    sys.path.append(PLACE)
