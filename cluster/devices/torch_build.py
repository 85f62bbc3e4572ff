"""What the installed torch is built for, read from its files: importing it would take seconds."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

INSTALL = "install a torch build for it"


@dataclass(frozen=True)
class TorchBuild:
    """A build of torch.

    Attributes:
        version: of torch; "" if it is unknown, and nothing is then known to be a problem.
        cuda, hip: the versions that it is built for; None: not built for it.
    """

    version: str = ""
    cuda: str | None = None
    hip: str | None = None

    def problem(self, needs: Literal["cuda", "hip"], *, driver: tuple[int, int] | None = None) -> str:
        """Why this build cannot use GPUs of CUDA or ROCm; "" if it can, as far as is known.

        Args:
            driver: the newest CUDA that the driver supports. An older minor version works, an older major one does not.
        """
        if not self.version:
            return ""
        built = self.cuda if needs == "cuda" else self.hip
        if built is None:
            other = "ROCm" if self.hip else "CUDA" if self.cuda else "CPUs"
            return f"torch {self.version} is built for {other} only; {INSTALL}"
        if driver is not None and driver[0] < int(built.partition(".")[0]):
            shown = f"{driver[0]}.{driver[1]}"
            return (
                f"torch {self.version} needs CUDA {built}, the driver supports {shown}; update the driver or {INSTALL}"
            )
        return ""


def installed_torch(file: Path | None = None) -> TorchBuild:
    """The build of the installed torch; `TorchBuild()` if it is not installed or does not say.

    Args:
        file: torch's `version.py`, by default that of the installed torch.
    """
    if file is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return TorchBuild()
        file = Path(spec.origin).with_name("version.py")
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return TorchBuild()
    found = dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*=\s*(.+?)\s*$", text, flags=re.MULTILINE))
    if not {"__version__", "cuda", "hip"} <= set(found):
        return TorchBuild()

    def value(name: str) -> str | None:
        text = found[name]
        return None if text == "None" else text.strip("'\"")

    return TorchBuild(value("__version__") or "", value("cuda"), value("hip"))
