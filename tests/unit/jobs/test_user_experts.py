"""A user's own builder with expert hosts: it moves its experts to the hosts, or an error says that it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.driver.check_job import check_on_driver
from jobs.driver.planning import plan_job
from jobs.job.spec import LoadedSpec, load_spec
from raytrain.errors import InputError
from raytrain.plan.choice import Resolved
from raytrain.plan.plan import Plan

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
    return distribute(ignores(experts, num_features, num_classes), experts)

def odd(experts, num_features, num_classes):
    made = ignores(experts, num_features, num_classes)
    for part in made.module.modules():
        if isinstance(part, MoELayer):
            part.experts = nn.Identity()
    return distribute(made, experts)

class Dense(nn.Module):
    def __init__(self, num_features):
        super().__init__()
        self.layer = nn.Linear(num_features, 3)

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.layer(x), labels)

def dense(num_features):
    return Dense(num_features)
"""


@pytest.fixture(autouse=True)
def own_code(user_folder: Path) -> None:
    (user_folder / "own_experts.py").write_text(CODE)


def job(builder: str, hosts: Any, *, number: int | None = 4) -> LoadedSpec:
    made = {
        "model": {"builder": f"own_experts:{builder}"},
        "data": {"source": "own_experts:rows"},
        "experts": {"num_experts": number, "hosts": hosts},
    }
    return load_spec(mapping=made)


def check(builder: str, hosts: Any, *, number: int | None = 4) -> None:
    check_on_driver(job(builder, hosts, number=number).spec)


def why(plan: Plan) -> str:
    assert isinstance(plan.hosts, Resolved)
    return plan.hosts.reason


def test_a_builder_that_ignores_the_hosts_is_refused() -> None:
    with pytest.raises(InputError, match=r"experts\.hosts: got 2 with own_experts:ignores.* auto or 0") as caught:
        check("ignores", 2)
    assert "experts.distribute.distribute" in str(caught.value)
    with pytest.raises(InputError, match=r"experts\.hosts: got 2 with own_experts:dense, which keeps its experts"):
        check("dense", 2, number=None)
    with pytest.raises(InputError, match=r"experts\.hosts: got colocated with own_experts:ignores"):
        check("ignores", "colocated")
    check("ignores", 0)
    check("ignores", "auto")


def test_a_builder_that_hands_its_experts_over_passes() -> None:
    check("joins", 2)
    check("joins", "colocated")


def test_a_builder_without_a_number_of_experts_is_refused() -> None:
    with pytest.raises(InputError, match=r"experts\.num_experts: got 4 with own_experts:dense, which does not"):
        check("dense", "auto")
    check("dense", "auto", number=None)


def test_plan_lists_what_it_does_not_know_of_a_builder_and_finds_it_with_build() -> None:
    asked = job("ignores", 2)
    assert "whether own_experts:ignores supports remote experts is checked at the start" in why(plan_job(asked))
    with pytest.raises(InputError, match=r"experts\.hosts: got 2 with own_experts:ignores"):
        plan_job(asked, build=True)
    joins = plan_job(job("joins", 2), build=True)
    assert isinstance(joins.hosts, Resolved) and (joins.hosts.value, joins.hosts.reason) == (2, "experts.hosts")
    assert "every worker holds the experts" in why(plan_job(job("ignores", "auto")))
    assert "experts.num_experts is null" in why(plan_job(job("dense", "auto", number=None)))


def test_experts_of_another_kind_are_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"model\.builder: got Identity as the experts of a MoELayer"):
        check("odd", 2)
