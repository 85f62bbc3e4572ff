"""What a command shows while it runs: phases and their time, remaining time, a live line or plain lines.

`jobs.driver.watch` and the other verbs update it; it prints at least one line every `QUIET_S` seconds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.status import Status
from rich.text import Text

from jobs.driver.printing import print_line
from raytrain.execution.driver_channel import RESTARTING, STARTING
from raytrain.runs.records import rate_of

# ---------------------------------------------------------------- phases: what a command spent its time on

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
EXPORTING = "exporting"
AFTER_TRAINING = (TRAINING, "recovering", EXPORTING, "stopping Ray", "disconnecting from Ray", "report", "")
MEASURING = "measuring "
#: Parts of the training that rank 0 accounts for: the purpose in result.json, and its name here.
WITHIN_TRAINING = {"eval": "evaluating", "save": "saving", "compile": "compiling"}
#: Shorter ones are not printed.
PHASE_LEAST_S = 0.05


class Phases:
    """Seconds of a command by what it did, in the order in which each was first done; it `began` now or earlier."""

    def __init__(self, *, clock: Callable[[], float] = time.time, began: float | None = None) -> None:
        self._clock = clock
        self._began = self._since = clock() if began is None else began
        self._name = ""
        self.seconds: dict[str, float] = {}

    @property
    def age(self) -> float:
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
            now = self._clock()
            self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._since
            self._since = now
        self._name = name  # the first one began with the command

    def end(self) -> None:
        self.begin("")

    def line(self, account: Mapping[str, float]) -> str:
        """The seconds as one line: `52 s: checking the job 1.6, starting Ray 4.1, ...`; `account` has those by purpose,
        as in result.json."""
        within = {name: account.get(key, 0.0) for key, name in WITHIN_TRAINING.items()}
        parts = _listed(self.seconds)
        if TRAINING in parts and (named := _listed(within)):
            parts[TRAINING] += f" ({', '.join(named.values())})"
        return f"{sum(self.seconds.values()):.0f} s: {', '.join(parts.values())}"


def _listed(seconds: Mapping[str, float]) -> dict[str, str]:
    """What took long enough to be named, each with its seconds."""
    return {name: f"{name} {took:.1f}" for name, took in seconds.items() if took >= PHASE_LEAST_S}


# ---------------------------------------------------------------- elapsed and remaining time

#: The rate is that of the steps of the last so many seconds; before this many there is none.
WINDOW_S, REMAINING_LEAST_S = 60.0, 2.0


class RemainingTime:
    """Estimates the time for the steps that are left from the newest steps of this attempt."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()
        self._left_s: float | None = None
        self._since = 0.0

    def see(self, step: int, total: int | None, *, left_s: float | None = None) -> None:
        """The newest step, and the steps of the run; None while none are made: what was measured before is forgotten,
        as after a step back, since the next attempt may be faster or slower. `left_s` is given where it is known."""
        if total is None:
            self._seen.clear()
            self._left_s = None
            return
        if self._seen and step == self._seen[-1][1]:
            return
        now = self._clock()
        if self._seen and step < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now, step))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()
        self._since, self._left_s = now, left_s
        rate = self.rate()
        if left_s is None and rate and total > step and now - self._seen[0][0] >= REMAINING_LEAST_S:
            self._left_s = (total - step) / rate

    def rate(self) -> float | None:
        """Steps a second, of those that were seen last; None where that is unknown."""
        if not self._seen or self._seen[-1][0] <= self._seen[0][0]:
            return None
        (first_at, first), (at, step) = self._seen[0], self._seen[-1]
        return (step - first) / (at - first_at)

    def seconds(self) -> float | None:
        """The remaining seconds; None where they are unknown."""
        return None if self._left_s is None else max(0.0, self._left_s - (self._clock() - self._since))


class TimesColumn(ProgressColumn):
    """The column of a bar for `times_text`: its task has a field `times`, a function, so that the time passes between
    two updates."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["times"](), style="progress.elapsed", no_wrap=True)


def times_text(elapsed_s: float, left_s: float | None) -> str:
    """`0:04:46`, the elapsed time, and once the remaining time is known `0:04:46  0:11:52 left`."""
    return clock_text(elapsed_s) + ("" if left_s is None else f"  {clock_text(left_s)} left")


def clock_text(seconds: float) -> str:
    """Hours, minutes and seconds: `0:04:46`."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


# ---------------------------------------------------------------- progress

#: A new step is shown at most this often.
PLAIN_EVERY_S = 10.0
#: Something is printed at least this often, in every phase.
QUIET_S = 30.0
#: Columns of a terminal from which the bar also shows rate and memory.
WIDE = 110
METRICS_SHOWN = 3
"""Metrics of the user's loss that a line shows."""
Clock = Callable[[], float]
Missing = Callable[[], str]
"""What is awaited, and what is missing for it; "" if there is nothing to say."""
nothing_missing: Missing = str  # which returns ""


class Activity:
    """Says what the driver does before the workers report, and after: on a terminal a live line with its seconds,
    otherwise a line at its beginning and for each `QUIET_S` seconds in it.

    A context manager: a thread calls `tick` every second, and `beat`, so that the run counts as alive while it waits.
    """

    def __init__(
        self, console: Console, *, phases: Phases | None = None, beat: Callable[[], None] = lambda: None,
        clock: Clock = time.monotonic,
    ) -> None:  # fmt: skip
        self._console, self._beat, self._clock = console, beat, clock
        self.phases = phases or Phases()
        self._live: Status | None = None
        self._lock = threading.Lock()
        self._what, self._missing = "", nothing_missing
        self._since = self._last = clock()
        self._over = threading.Event()

    def __enter__(self) -> Activity:
        threading.Thread(target=self._run, daemon=True, name="activity").start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        with self._lock:
            self._show("")

    def begin(self, what: str, *, missing: Missing = nothing_missing) -> None:
        """The driver now does this, such as "starting Ray"; "" if somebody else says what happens."""
        if what:
            self.phases.begin(what)
        with self._lock:
            self._what, self._missing = what, missing
            self._since = self._last = self._clock()
            self._show(what)

    def _show(self, text: str) -> None:
        """The live line; "" ends it."""
        if not self._console.is_terminal:
            if text:
                print_line(self._console, text)
        elif self._live is not None and text:
            self._live.update(escape(text))
        elif self._live is not None:
            self._live.stop()
            self._live = None
        elif text:
            self._live = self._console.status(escape(text))
            self._live.start()

    def tick(self) -> None:
        """Print a line if the activity has said nothing for `QUIET_S` seconds."""
        with self._lock:
            now = self._clock()
            if not self._what:
                return
            if self._live is not None:
                self._live.update(escape(f"{self._what}  {now - self._since:.0f} s"))
            if now - self._last < QUIET_S:
                return
            self._last = now
            line = still(self._what, now - self._since, self._missing())
        print_line(self._console, line)

    def _run(self) -> None:
        while not self._over.wait(1.0):
            self._beat()
            self.tick()


def still(what: str, seconds: float, missing: str) -> str:
    """The line about something that takes long: `still starting Ray, for 30 s`, and what is missing."""
    return f"still {what}, for {seconds:.0f} s" + (f": {missing}" if missing else "")


class TrainingDisplay:
    """Shows the progress that rank 0 reports; a context manager.

    The progress is {"phase", "max_steps", "step", "row", "activity", "detail"}: `activity` is what rank 0 does inside
    the phase, such as an evaluation, and `detail` how far it is with something that takes long. Without "max_steps", as
    before the first step of an attempt, the phase is shown alone. With "left_s" the remaining time is this, else it
    follows from the steps that were seen.
    """

    def __init__(self, console: Console, *, phases: Phases | None = None, clock: Clock = time.monotonic) -> None:
        self._console, self._clock, self._phases = console, clock, phases or Phases()
        self.began = clock() - self._phases.age  # the command's start, from which the bar counts
        self._remaining = RemainingTime(clock)
        self._live = console.is_terminal
        self._narrow = console.width < WIDE
        self._phase = ""
        self._shown_step = -1
        self._last = self._since = clock()
        self._seen: tuple[str, int] = ("", -1)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=8 if self._narrow else 24),
            TextColumn("{task.fields[figures]}"),
            TimesColumn(),
            console=console,
            transient=True,
        )
        times = lambda: times_text(self._clock() - self.began, self.left_s)  # noqa: E731
        self._task = self._bar.add_task("starting", total=None, figures="", times=times)

    def __enter__(self) -> TrainingDisplay:
        if self._live:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._bar.stop()

    @property
    def waiting_s(self) -> float:
        """Seconds since the phase, the activity or the step last changed."""
        return self._clock() - self._since

    @property
    def left_s(self) -> float | None:
        """The remaining seconds; None where they are unknown."""
        return self._remaining.seconds()

    def print_lines(self, text: str) -> None:
        """Print the lines of rank 0's code, without any formatting."""
        for line in text.splitlines():
            print_line(self._console, line)

    def show(self, progress: dict[str, Any], *, missing: Missing = nothing_missing) -> None:
        """Show the newest progress; output is limited however often this is called. A line about a phase that takes
        long asks what is `missing`."""
        phase = str(progress.get("phase", STARTING))
        row = progress.get("row") or {}
        step = int(row.get("step") or progress.get("step") or 0)
        total = int(progress.get("max_steps") or 1)
        newest, now = max(step, int(progress.get("step") or 0)), self._clock()
        doing = str((phase == TRAINING and progress.get("activity")) or phase)
        detail = "" if phase == TRAINING else str(progress.get("detail") or "")
        self._phases.begin(READING if detail else phase)
        if (doing, newest) != self._seen:
            self._seen, self._since = (doing, newest), now
        known = progress.get("max_steps") is not None
        self._remaining.see(newest, total if known and phase == TRAINING else None, left_s=progress.get("left_s"))
        if self._live:
            parts = [f"{newest}/{total}", figures(row, brief=self._narrow)] if known else []
            self._bar.update(
                self._task, description=detail or doing, total=total if known else None, completed=newest,
                figures=" ".join(part for part in parts if part),
            )  # fmt: skip
            return
        due = now - self._last >= PLAIN_EVERY_S and step != self._shown_step
        if phase != self._phase or due:
            self._last, self._phase, self._shown_step = now, phase, step
            older = not due and newest > step  # an evaluation since then has its line already
            of_row = f"step {newest}/{total}" if older else f"step {step}/{total}  {figures(row)}".rstrip()
            where = of_row if newest and known else ""
            left_s = None if progress.get("left_s") is None else self.left_s
            where += "" if left_s is None else f"  {clock_text(left_s)} left"
            print_line(self._console, f"{phase}  {where}".rstrip())
        elif now - self._last >= QUIET_S:  # no new row came: the steps since then, or what takes so long
            self._last, seconds = now, now - self._since
            what = f"in step {newest + 1}/{total}" if doing == TRAINING else doing
            between = doing == TRAINING and seconds < PLAIN_EVERY_S
            line = f"training  step {newest}/{total}" if between else still(what, seconds, missing() or detail)
            self.print_lines(line)


def figures(row: dict[str, Any], *, brief: bool = False) -> str:
    """Loss, first metrics, rate and memory of a row in one short line; `brief`: the loss."""
    parts = []
    if row.get("kind") == "eval":
        parts.append(f"eval loss {row['loss']:.4f}")
    elif row.get("loss") is not None:
        parts.append(f"loss {row['loss']:.4f}")
    if brief:
        return "".join(parts)
    named = [(name, row.get(name)) for name in row.get("metrics", ())[:METRICS_SHOWN]]
    parts += [f"{name} {value:.4g}" for name, value in named if isinstance(value, float)]
    if rate := rate_of(row):
        parts.append(rate)
    if row.get("peak_memory_bytes"):
        parts.append(f"{row['peak_memory_bytes'] / 2**20:,.0f} MiB")
    return "  ".join(parts)
