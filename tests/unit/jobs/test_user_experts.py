"""A user's own builder beside expert hosts: it hands its experts over, or is told that it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.driver import check_on_driver
from jobs.spec import load_spec
from raytrain.errors import InputError

CODE = """
import torch
from torch import nn
from experts.distribute import distribute
from experts.layer import MoELayer
from experts.models import moe_mlp

def rows():
    return {"train": {"x": torch.zeros(50, 8), "labels": torch.zeros(50, dtype=torch.int64)}}

def ignores(experts, num_features, num_classes):
    return moe_mlp(width=8, layers=1, num_features=num_features, num_classes=3, experts=experts.connected(None))

def joins(experts, num_features, num_classes):
    made = ignores(experts, num_features, num_classes)
    return made if experts.connection is None else distribute(made, experts)

def odd(experts, num_features, num_classes):
    made = ignores(experts, num_features, num_classes)
    for part in made.module.modules():
        if isinstance(part, MoELayer):
            part.experts = nn.Identity()
    return made if experts.connection is None else distribute(made, experts)

def dense(num_features):
    return nn.Linear(num_features, 3)
"""


def check(builder: str, hosts: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    (folder / "own_experts.py").write_text(CODE)
    job = {
        "model": {"builder": f"own_experts:{builder}"},
        "data": {"source": "own_experts:rows"},
        "experts": {"num_experts": 4, "hosts": hosts},
    }
    check_on_driver(load_spec(mapping=job).spec)


def test_a_builder_that_ignores_the_hosts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for builder in ("ignores", "dense"):
        with pytest.raises(InputError, match=r"experts\.hosts: seen 2 with own_experts:\w+, which keeps its experts"):
            check(builder, 2, tmp_path, monkeypatch)
    with pytest.raises(InputError, match=r"experts\.hosts: seen colocated with own_experts:ignores"):
        check("ignores", "colocated", tmp_path, monkeypatch)
    check("ignores", 0, tmp_path, monkeypatch)
    check("ignores", "auto", tmp_path, monkeypatch)


def test_a_builder_that_hands_its_experts_over_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check("joins", 2, tmp_path, monkeypatch)
    check("joins", "colocated", tmp_path, monkeypatch)


def test_experts_of_another_kind_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"model\.builder: seen Identity as the experts of a MoELayer"):
        check("odd", 2, tmp_path, monkeypatch)
