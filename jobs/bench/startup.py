"""Bench `startup`: seconds from the start of a command to the end of its first training step.

`raytrain train` against the example of Ray Train's documentation, a bare `TorchTrainer`, and against a script without
Ray: the same model, text, batch and threads, each in a process of its own that starts Ray itself. `raytrain check` to
its end, two steps in each precision included, against the same first step.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from cluster.config import Count
from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal
from jobs.bench.harness.options import TextOptions, key
from jobs.bench.harness.processes import MEMBER, run_command
from jobs.bench.harness.sessions import gpt_model, job_of, write_text
from jobs.bench.startup_arms import NOTE
from raytrain.config.decode import dump_yaml
from raytrain.errors import RunError

#: Seconds of `raytrain train` over those of a bare TorchTrainer.
GOAL = Goal(at_most=1.15)
TIMEOUT_S = 240.0
#: Seconds of `raytrain check` over those of a bare TorchTrainer's first step; those of its part before the training,
#: without Ray's start.
CHECK_GOAL, MACHINES_GOAL_S = Goal(at_most=1.3), 5.0
OURS, BARE, SCRIPT, CHECK = "raytrain train", "TorchTrainer", "script without Ray", "raytrain check"


class StartupOptions(TextOptions):
    blocks: Count = key(5, "starts of each command that are kept", quick=1)
    dropped: int = key(1, "starts before those, which fill the page cache", quick=0, ge=0)
    workers: Count = key(1, "workers of each command; the script has one process")


def run(options: StartupOptions, found: BenchMeasurement) -> None:
    found.block = "seconds to the end of the first step"
    machines: list[float] = []
    with tempfile.TemporaryDirectory(prefix="bench-startup-") as folder:
        place = Path(folder)
        commands = _commands(options, place)
        arms = {name: partial(_first_step, command, place / "note") for name, command in commands.items()}
        arms[CHECK] = partial(_checked, place, machines)
        found.say(f"{options.dropped + options.blocks} starts of {len(arms)} commands")
        times = found.alternate(arms, blocks=options.blocks, dropped=options.dropped)
    found.gate(Check("every command took a step", True, f"{sum(map(len, times.values()))} starts"))
    first = "seconds to the first step, raytrain train /"
    found.compare(times, of=OURS, to=BARE, goal=GOAL, name=f"{first} TorchTrainer")
    found.compare(times, of=OURS, to=SCRIPT, name=f"{first} script without Ray")
    label = "seconds of raytrain check / TorchTrainer's first step"
    found.compare(times, of=CHECK, to=BARE, goal=CHECK_GOAL, name=label)
    kept = found.values["seconds of the machine part of raytrain check"] = machines[options.dropped :]
    middle = statistics.median(kept)
    effect = f"the machine part of raytrain check takes at most {MACHINES_GOAL_S:g} s"
    found.claim(effect, middle <= MACHINES_GOAL_S, f"median {middle:.2f} s")


def _commands(options: StartupOptions, place: Path) -> dict[str, list[str]]:
    """The commands that take a step, with their files in this folder."""
    text = write_text(place, options, steps=4)
    job = job_of(
        options, gpt_model(options), text, name="startup", workers=options.workers, threads=options.thread_count,
        precision={"dtype": "fp32"}, loop={"max_steps": 1, "global_batch_size": options.batch},
        save={"dir": str(place / "runs")},
        telemetry={"observers": ["jobs.bench.startup_arms:FirstStep"], "tensorboard": False},
    )  # fmt: skip
    (place / "job.yaml").write_text(dump_yaml(job))
    settings = {
        **options.sizes, "workers": options.workers, "batch": options.batch // options.workers, "text": str(text),
        "threads": options.thread_count, "storage": str(place / "storage"), "note": str(place / "note"),
    }  # fmt: skip
    (place / "settings.json").write_text(json.dumps(settings))
    start = [sys.executable, "-m"]
    commands = {OURS: [*start, "jobs", "train", str(place / "job.yaml")]}
    for name, function in ((BARE, "train_with_ray"), (SCRIPT, "train_script")):
        commands[name] = [*start, MEMBER, f"jobs.bench.startup_arms:{function}", str(place / "settings.json"), "0"]
    return commands


def _checked(place: Path, machines: list[float]) -> float:
    """Seconds of `raytrain check`; appends those of its machine part."""
    began = time.time()
    command = [sys.executable, "-m", "jobs", "check", "--json", f"save.dir={place / 'checked'}"]
    said = run_command(command, timeout_s=TIMEOUT_S)
    took = time.time() - began
    machines.append(float(json.loads(said)["seconds"]["machines"]))
    return took


def _first_step(command: list[str], note: Path) -> float:
    """Seconds from the start of a command to the end of its first step. Errors: RunError, it took none."""
    note.unlink(missing_ok=True)
    began = time.time()
    run_command(command, timeout_s=TIMEOUT_S, environment={NOTE: str(note)})
    if not note.exists():
        raise RunError(f"{' '.join(command)} took no step")
    return float(note.read_text()) - began
