"""A run without the private names of Ray: started by the public interface alone, it trains to its end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: Python imports this module at the start of every process: the driver's, the controller's and the workers'.
NOTHING_PRIVATE = """
import raytrain.execution.ray_private as ray_private

def find(owner, name):
    print(name, file=open(HERE + "/asked", "a"))

ray_private.find = find
"""


def test_a_run_trains_to_its_end_without_any_private_name(run_cli: Any, place: Any, guest_job: Any) -> None:
    (place.folder / "site").mkdir()
    site = NOTHING_PRIVATE.replace("HERE", repr(str(place.folder)))
    (place.folder / "site" / "sitecustomize.py").write_text(site)
    path = os.pathsep.join([str(place.folder / "site"), str(ROOT)])
    job = guest_job(scale={"workers": 2})
    done = run_cli("train", str(place.write(job)), cwd=place.folder, env=place.env | {"PYTHONPATH": path}, timeout=240)
    assert done.code == 0, done.err
    assert place.run.result["status"] == "done" and len(place.run.losses()) == 6
    names = {"Config", "ConsolePopen", "_create_default_callbacks"}
    assert names <= set((place.folder / "asked").read_text().split())
