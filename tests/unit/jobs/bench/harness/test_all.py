"""`raytrain bench all`: each bench once, one table of claims and verdicts, and measurements that were made before."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.bench.all import AllOptions, chosen, keys_by_bench
from jobs.bench.harness.command import options_of
from jobs.bench.harness.options import find_benches
from jobs.bench.harness.summary import count_line, markdown, table
from raytrain.errors import InputError


def ratio(name: str, *, met: bool, goal: dict[str, Any] | None) -> dict[str, Any]:
    return {"name": name, "median": 1.5, "low": 1.25, "high": 2.0, "values": [1.0] * 7, "goal": goal, "met": met}


def document(*, quick: bool = False, passed: bool = True) -> dict[str, Any]:
    least, most = {"at_least": 1.2, "at_most": None}, {"at_least": None, "at_most": 1.0}
    ratios = [ratio("a / b", met=True, goal=least), ratio("c / d", met=False, goal=most),
              ratio("no goal", met=False, goal=None)]  # fmt: skip
    claims = [{"effect": "it is\nfaster | better", "verdict": "not reproduced", "evidence": "1.01"}]
    return {
        "quick": quick, "gate": {"passed": passed, "checks": [{"name": "equal", "passed": passed}]},
        "ratios": ratios if passed else [], "claims": claims if passed else [],
        "environment": {"date": "2026-11-22T08:00:00+00:00", "cpu_model": "A CPU"},
    }  # fmt: skip


def test_claims_and_ratios_with_a_goal_become_rows_with_their_verdicts() -> None:
    rows = table({"loop": document(), "memory": document(quick=True), "oom": document(passed=False)})
    told = [(row["bench"], row["claim"], row["figure"], row["verdict"]) for row in rows]
    figure = "1.500 [1.250, 2.000] over 7 blocks"
    assert told[:3] == [
        ("loop", "it is faster | better", "1.01", "not reproduced"),
        ("loop", "a / b: at least 1.2", figure, "reproduced"),
        ("loop", "c / d: at most 1.0", figure, "not reproduced"),
    ]
    assert [row[3] for row in told[4:]] == ["not measurable here"] * 3, "small sizes, or a gate that failed"
    assert told[6][:2] == ("oom", find_benches()["oom"].measures) and len(told) == 7
    lines = markdown(rows)
    assert all(line.count("|") == 5 for line in lines) and len(lines) == 9
    assert count_line(rows).startswith("7 claims: 1 reproduced, 3 not reproduced, 3 not measurable here")


def test_all_is_every_bench_but_advice_and_itself_and_their_keys_reach_them() -> None:
    assert set(chosen(AllOptions())) == set(find_benches()) - {"all", "lr"}
    assert chosen(AllOptions(only=["oom", "loop"], skip=["oom"])) == ["loop"]
    options = options_of("all", ["loop.blocks=3", "oom.blocks=4", "loop.workers=[1]", "dir=x"], quick=False)
    assert isinstance(options, AllOptions) and options.dir == "x"
    found = keys_by_bench(options.changes, ["loop", "oom"])
    assert found == {"loop": ["blocks=3", "workers=[1]"], "oom": ["blocks=4"]}
    for wrong in (lambda: chosen(AllOptions(only=["lr"])), lambda: keys_by_bench(["lop.blocks=3"], ["loop"])):
        with pytest.raises(InputError):
            wrong()
