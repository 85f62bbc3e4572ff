"""Which nodes a run leaves out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raytrain.execution.trainer import choose_nodes, faulty_nodes, is_hardware
from raytrain.runs.faults import Fault, write_fault
from raytrain.runs.folder import RunFolder


def fault(attempt: int, node: str | None, error: str = "WorkerDied", message: str = "", rank: int = 0) -> Fault:
    return Fault(attempt, rank, None, error, message, "", "fp32", False, False, 0, float(attempt), node=node)


def test_two_deaths_or_errors_of_the_device_on_one_node_are_too_many() -> None:
    ecc = "CUDA error: uncorrectable ECC error encountered"
    assert is_hardware(fault(1, "a")) and is_hardware(fault(1, "a", "AcceleratorError", ecc))
    assert not is_hardware(fault(1, "a", "RuntimeError", "mat1 and mat2 shapes cannot be multiplied"))
    assert faulty_nodes([fault(1, "a"), fault(2, "b"), fault(3, None), fault(4, None)]) == []
    assert faulty_nodes([fault(1, "a"), fault(2, "b"), fault(3, "a", "AcceleratorError", ecc)]) == ["a"]
    assert faulty_nodes([fault(1, "a"), fault(2, "a", "ValueError", "planted")]) == []


class Channel:
    """Records the warnings."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.warn = self

    def remote(self, *given: Any) -> None:
        self.told.append(given)


def node(name: str, cpus: float, *, alive: bool = True) -> dict[str, Any]:
    return {"NodeID": name, "NodeManagerAddress": f"at-{name}", "Alive": alive, "Resources": {"CPU": cpus}}


@pytest.mark.parametrize(
    ("nodes", "least", "expected"),
    [
        ([node("a", 8), node("b", 1), node("c", 1)], 2, {"ray.io/node-id": "!in(a)"}),
        ([node("a", 8), node("b", 1)], 2, None),
        ([node("a", 8), node("b", 1)], 1, {"ray.io/node-id": "!in(a)"}),
        ([node("a", 8), node("b", 1), node("c", 1, alive=False)], 2, None),
        ([node("a", 8, alive=False), node("b", 4)], 2, None),
    ],
    ids=["room elsewhere", "no room", "room for fewer", "another is dead", "it has gone"],
)
def test_a_faulty_node_is_left_out_where_the_others_have_room(
    tmp_path: Path, nodes: list[dict[str, Any]], least: int, expected: dict[str, str] | None
) -> None:
    run, channel = RunFolder(str(tmp_path)), Channel()
    selector = partial(choose_nodes, str(tmp_path), {"CPU": 1}, least, channel, lambda: nodes)
    write_fault(run, fault(1, "a"))
    assert selector() is None, "once"
    write_fault(run, fault(2, "a"))
    assert selector() == expected
    assert [told[3] for told in channel.told] == ([{"node": "a", "address": "at-a"}] if expected else [])
