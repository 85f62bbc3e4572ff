"""The table of `raytrain top`, from samples of three kinds of nodes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from jobs.__main__ import main
from jobs.top import frame_text

GIB = 2**30


def device(name: str, **more: Any) -> dict[str, Any]:
    values = {"utilisation": 97.4, "memory_used": 61 * GIB, "memory_total": 80 * GIB, "memory_run": 60 * GIB}
    other = {"temperature_c": 64.0, "power_w": 402.6, "throttle": []}
    return {"device": name, **values, **other, **more}


def process(pid: int, name: str, cpu: float | None) -> dict[str, Any]:
    return {"pid": pid, "name": name, "rss": GIB, "anonymous": GIB, "cpu_percent": cpu}


def test_a_frame_shows_the_devices_of_all_nodes_and_the_workers_from_the_busiest() -> None:
    slow = device("cuda:1", utilisation=None, throttle=["power cap"], temperature_c=None, power_w=None)
    workers = [process(8, "/usr/bin/python my/job.py", 12.4), process(9, "ray::A.f", 88.6)]
    rows = [
        {"node": "a", "devices": [device("cuda:0"), slow], "processes": [process(7, "ray::IDLE", None)]},
        {"node": "b", "devices": [], "processes": workers},
        {"node": "c", "missing": "no answer within 5 s"},
    ]
    lines = [" ".join(line.split()) for line in frame_text(rows, width=100).splitlines()]
    assert lines[0].endswith(" 3 nodes, 3 workers of Ray")
    assert lines[2:5] == [
        "a cuda:0 97 % 61 GiB of 80 GiB 60 GiB 64 C 403 W nothing",
        "a cuda:1 - 61 GiB of 80 GiB 60 GiB - - power cap",
        "c no answer within 5 s",
    ]
    assert lines[6:] == ["b 9 ray::A.f 89 % 1 GiB", "b 8 python my/job.py 12 % 1 GiB", "a 7 ray::IDLE - 1 GiB"]
    alone = frame_text([{**rows[0], "processes": []}], width=80)
    assert "node" not in alone.splitlines()[1] and "worker" not in alone.splitlines()[1]


def test_this_machine_is_shown_without_ray_and_wrong_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "")
    monkeypatch.setattr("jobs.driver.runtime.connected", None)
    done = CliRunner().invoke(main, ["top", "--frames", "3", "--every", "0.01", "--json"])
    frames = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.exit_code == 0 and len(frames) == 3 and frames[0][0]["devices"][0]["memory_used"] > 0
    for wrong, key in ((["--every", "0"], "--every"), (["--frames", "0"], "--frames")):
        refused = CliRunner().invoke(main, ["top", *wrong])
        assert refused.exit_code == 2 and refused.stderr.startswith(f"error: {key}: got 0, expected ")
