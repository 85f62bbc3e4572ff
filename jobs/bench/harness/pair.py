"""Two processes of a bench that train together: `python -m jobs.bench.NAME_member SETTINGS.json RANK`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jobs.bench.harness.lines import ADDRESS, Arms, await_end
from jobs.bench.training.loop_arms import borrowed_environment
from raytrain.errors import RunError


class Pair:
    """The two processes of bench `name`, which are one arm of that name.

    Args:
        settings: what they are told, as JSON.
        folder: for their settings and their log.
    """

    def __init__(self, arms: Arms, name: str, settings: dict[str, Any], folder: Path) -> None:
        self.arms, self.name = arms, name
        path, self._log = folder / f"{name}.json", folder / f"{name}.log"
        path.write_text(json.dumps(settings))
        command = [sys.executable, "-m", f"jobs.bench.training.{name}_member", str(path)]
        with self._log.open("ab") as log:
            self.processes = [subprocess.Popen([*command, str(rank)], stdout=log, stderr=log) for rank in (0, 1)]

    def await_ready(self) -> None:
        """Until both are there. Raises RunError with the end of their log."""
        alive = lambda: all(process.poll() is None for process in self.processes)  # noqa: E731
        try:
            self.arms.await_arm(self.name, processes=2, alive=alive)
        except RunError as error:
            raise RunError(f"{error}; its log ends with:\n{self._tail()}") from error

    def ask(self, what: str, *, steps: int = 1, **more: Any) -> list[dict[str, Any]]:
        """Both obey; what each of them answers. Raises RunError with the end of their log."""
        try:
            return self.arms.ask(self.name, {"what": what, "steps": steps, **more})
        except RunError as error:
            raise RunError(f"{error}; log:\n{self._tail()}") from error

    def close(self) -> None:
        """Let them go; whoever does not is killed."""
        self.arms.dismiss(self.name)
        for process in self.processes:
            await_end(process)

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]


@contextlib.contextmanager
def training_pair(name: str, settings_of: Callable[[Path], dict[str, Any]]) -> Iterator[Pair]:
    """The two processes, ready, of one thread each; `settings_of` may fill their folder, which goes with them."""
    with tempfile.TemporaryDirectory(prefix="rtb-") as folder, borrowed_environment(), Arms() as arms:
        os.environ |= {ADDRESS: arms.address, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        pair = Pair(arms, name, settings_of(Path(folder)), Path(folder))
        try:
            pair.await_ready()
            yield pair
        finally:
            pair.close()
