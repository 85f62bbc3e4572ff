"""The jobs and instruments of tests/numerics (`lab`, `gang`, `lives`) serve the unit tests of the loop too."""

from __future__ import annotations

import sys
from pathlib import Path

PLACE = str(Path(__file__).resolve().parents[2] / "numerics")
if PLACE not in sys.path:
    sys.path.append(PLACE)
