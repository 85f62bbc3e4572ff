"""What a command spent its time on, from its start to its last line, as its user saw it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from raytrain.execution.driver_channel import RESTARTING

#: Phases whose seconds are added up under one name; the others have their own.
TOGETHER = {
    "preparing the workers' job": "starting workers",
    "setting up the workers": "starting workers",
    "waiting for room in the cluster": "waiting for room",
    "confirming what the search found": "measuring",
    "writing the report": "report",
}
#: Phases of an attempt before its first step. After a failure they belong to the restart, as in `result.json`; so does
#: everything after the training began but `AFTER_TRAINING`: a cluster that was lost is connected to again.
READING = "reading the data"
BEFORE_TRAINING = ("starting workers", "waiting for room", "measuring", READING)
TRAINING = "training"
EXPORTING, ENDING = "exporting", "ending the workers"
AFTER_TRAINING = (TRAINING, "recovering", EXPORTING, "stopping Ray", "disconnecting from Ray", "report", "")
MEASURING = "measuring "
#: Parts of the training that rank 0 accounts for: the purpose in result.json, and its name here.
WITHIN_TRAINING = {"eval": "evaluating", "save": "saving", "compile": "compiling"}
#: Shorter ones are not printed.
LEAST_S = 0.05


class Phases:
    """Seconds of a command by what it did, in the order in which each was first done.

    Args:
        clock: unix seconds; replaced in tests.
        began: when the command began; None: now.
    """

    def __init__(self, *, clock: Callable[[], float] = time.time, began: float | None = None) -> None:
        self._clock = clock
        self._began = self._since = clock() if began is None else began
        self._name = ""
        self.seconds: dict[str, float] = {}

    @property
    def age(self) -> float:
        """Seconds since the command began."""
        return self._clock() - self._began

    def begin(self, what: str) -> None:
        """The command now does this, such as "starting Ray"; what comes after a colon is left out."""
        name = what.partition(":")[0]
        name = "measuring" if name.startswith(MEASURING) else TOGETHER.get(name, name)
        if self._name == RESTARTING and name in BEFORE_TRAINING:
            return
        if (TRAINING in self.seconds or self._name == TRAINING) and name not in AFTER_TRAINING:
            name = RESTARTING
        if name == self._name:
            return
        if self._name:
            self._add()
        self._name = name  # the first one began with the command

    def end(self) -> None:
        """The last phase is over."""
        self.begin("")

    def _add(self) -> None:
        now = self._clock()
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._since
        self._since = now

    def line(self, account: Mapping[str, float]) -> str:
        """The seconds as one line: `52 s: checking the job 1.6, starting Ray 4.1, ...`.

        Training and restarts are separated by the account: the workers of a lost node may train on until they learn
        of it, and what restarts within the workers is no phase. So is the export from the end of the workers after it.

        Args:
            account: seconds of this command by purpose, as in result.json.
        """
        within = [
            f"{name} {account[key]:.1f}" for key, name in WITHIN_TRAINING.items() if account.get(key, 0) >= LEAST_S
        ]
        parts = []
        divided = self._divided(account.get("restart", 0.0), account.get("export", 0.0))
        for name, seconds in divided.items():
            if seconds >= LEAST_S:
                detail = f" ({', '.join(within)})" if name == TRAINING and within else ""
                parts.append(f"{name} {seconds:.1f}{detail}")
        return f"{sum(self.seconds.values()):.0f} s: {', '.join(parts)}"

    def _divided(self, restart_s: float, export_s: float) -> dict[str, float]:
        """The seconds, with `restart_s` of those since the training began as restarts, and `export_s` as the export."""
        found = dict[str, float]()
        both = self.seconds.get(TRAINING, 0.0) + self.seconds.get(RESTARTING, 0.0)
        for name, seconds in self.seconds.items():
            if name == TRAINING:
                found |= {TRAINING: max(0.0, both - restart_s), RESTARTING: min(restart_s, both)}
            elif name == EXPORTING:
                found |= {EXPORTING: min(export_s, seconds), ENDING: max(0.0, seconds - export_s)}
            elif name != RESTARTING or TRAINING not in self.seconds:
                found[name] = seconds
        return found
