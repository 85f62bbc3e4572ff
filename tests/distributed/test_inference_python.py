"""Inference from Python where Ray runs already: Ray Datasets in and out, and errors of the model in an actor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TRAINED = """
import gc

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, labels):
        gc.collect()
        return {"loss": F.cross_entropy(self.layer(x), labels)}


def build():
    return Net()


def rows():
    return {"train": {"x": torch.randn(64, 4), "labels": torch.arange(64) % 3}}
"""
JOB = "model: {builder: trained_guest:build}\ndata: {source: trained_guest:rows}\nloop: {max_steps: 2}\n"
GUEST = """
import torch
from torch import nn


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))

    def forward(self, value):
        return value.reshape(len(value)).float() * self.weight


def build():
    return Doubled()


def broken():
    raise KeyError("no such part")
"""
OPEN = """
import gc
import os

gc.enable()
for number in os.listdir("/proc/self/fd"):
    if os.path.exists(f"/proc/self/fd/{number}"):
        print(os.readlink(f"/proc/self/fd/{number}"))
"""
SCRIPT = """
import gc
import json
import os
import ray
import time
import torch
from pathlib import Path
from safetensors.torch import save_file
from jobs.infer import infer
from raytrain.errors import RaytrainError

save_file({"weight": torch.zeros(5)}, "other.safetensors")
gc.disable()  # until the training
rows = ray.data.range(90, override_num_blocks=9).map(lambda row: {"value": row["id"], "name": f"n{row['id']}"})
found = {"errors": []}
result = infer("doubled_guest:build", input=rows, output="out", workers=2, quiet=True,
               overrides=["infer.id_column=name", "infer.unit_rows=8", "scale.threads=1"])
made = result.dataset()
found["kind"], found["rows"] = type(made).__name__, made.count()
table = result.table()
found["ids"], found["predictions"] = table["id"].to_pylist(), table["prediction"].to_pylist()
found["bars"] = ray.data.DataContext.get_current().enable_progress_bars
for given in (["model.builder=doubled_guest:broken"], ["model.init_from=other.safetensors"]):
    try:
        infer("doubled_guest:build", input=rows, output="none", workers=2, overrides=given, quiet=True)
        found["errors"].append(None)
    except RaytrainError as error:
        found["errors"].append([type(error).__name__, str(error), Path("none").exists()])


def actors_left():
    parents, names = {}, {}
    for process in (one for one in Path("/proc").iterdir() if one.name.isdigit()):
        try:
            names[process.name] = (process / "cmdline").read_text().rstrip("\\0")
            parents[process.name] = (process / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
    mine = str(os.getpid())
    return [name for one, name in names.items() if "Unit" in name and parents.get(parents.get(one)) == mine]


end = time.monotonic() + 20
while actors_left() and time.monotonic() < end:
    time.sleep(0.05)
found["left"] = actors_left()
print("FOUND", json.dumps(found))
"""


@pytest.mark.timeout(300)
def test_ray_datasets_are_input_and_output_and_actors_tell_why_a_model_does_not_load(
    shared_driver: Any, tmp_path: Path
) -> None:
    (tmp_path / "doubled_guest.py").write_text(GUEST)
    (tmp_path / "script.py").write_text(SCRIPT)
    printed = shared_driver.run_script(tmp_path / "script.py", timeout=280)
    lines = [line for line in printed.splitlines() if line.startswith("FOUND ")]
    assert lines, printed
    found = json.loads(lines[-1][6:])
    assert (found["kind"], found["rows"]) == ("Dataset", 90)
    assert found["ids"] == [f"n{row}" for row in range(90)] and found["predictions"] == [2.0 * row for row in range(90)]
    assert found["bars"] is True, "the options of the user's own Datasets stay as they are"
    assert found["left"] == [], "actors hold memory and CPUs until they end"
    broken, weights = found["errors"]
    assert broken[0] == "RunError" and "the model did not load: KeyError: 'no such part'" in broken[1]
    assert weights[0] == "InputError" and "model.init_from" in weights[1]
    assert [one[2] for one in (broken, weights)] == [False, False], (
        "nothing is left that a corrected command would find"
    )

    # The forked check of the first batch must not collect what Ray Data left behind.
    (tmp_path / "trained_guest.py").write_text(TRAINED)
    (tmp_path / "job.yaml").write_text(JOB)
    run = shared_driver.train(tmp_path / "job.yaml", "scale.mode=cpu", "scale.threads=1", cwd=tmp_path, timeout=60)
    assert (run / "result.json").is_file()
    (tmp_path / "open.py").write_text(OPEN)
    assert str(run) not in shared_driver.run_script(tmp_path / "open.py", timeout=20), "each run would keep files open"
