"""The plan warns of a device named in the user's code, with its line; the code is not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.devices.inventory import Inventory, Node
from jobs.driver.planning import plan_job
from jobs.job.facts import named_devices
from jobs.job.spec import load_spec

CODE = """raise SystemExit("the plan runs nothing of this")
def build(width):
    model = make(width).cuda()
    return model.to("cuda:0")
def rows():
    return torch.zeros(4, device="cuda"), torch.zeros(4, device="cpu"), table.to("csv")
"""


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("x.cuda()", ".cuda()"),
        ("x.to('cuda:1', non_blocking=True)", 'to("cuda:1")'),
        ("x.to(device='mps')", 'to("mps")'),
        ("torch.device('cuda', 0)", 'device("cuda")'),
        ("torch.empty(3, device='cuda')", 'empty("cuda")'),
        ("torch.cuda.set_device(1)", ".set_device()"),
        ("torch.set_default_device('cuda')", 'set_default_device("cuda")'),
        ("x.to(y.device)", None),
        ("x.to('cpu')", None),
        ("x.to(torch.float32)", None),
        ("torch.cuda.is_available()", None),
        ("open('cuda')", None),
        ("def broken(:", None),
    ],
)
def test_calls_that_name_an_accelerator_are_found_and_others_are_not(line: str, what: str | None) -> None:
    assert list(named_devices(f"import torch\n{line}\n")) == ([] if what is None else [(2, what)])


@pytest.mark.covers("BP-01")
def test_the_plan_reports_where_a_model_or_dataset_names_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_net.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    model, data = {"builder": "my_net:build", "width": 4}, {"source": "my_net:rows"}
    job = {"model": model, "data": data, "loop": {"max_steps": 2}}
    machine = Inventory((Node("a", 2, 1 << 34),), source="test", cpu_model="cpu", cpu_flags={})
    (warning,) = [one for one in plan_job(load_spec(mapping=job), inventory=machine).warnings if "my_net.py" in one]
    assert warning.startswith(
        'my_net.py:3 .cuda(), my_net.py:4 to("cuda:0"), my_net.py:6 zeros("cuda"): raytrain moves'
    )
    (tmp_path / "my_net.py").write_text(CODE.replace('"cuda', '"cpu').replace(".cuda()", ""))
    assert not [one for one in plan_job(load_spec(mapping=job), inventory=machine).warnings if "my_net.py" in one]
