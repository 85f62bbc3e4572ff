"""`raytrain bench all`: the selection of benches, their keys, and the table of claims and verdicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jobs.bench.all import AllOptions, keys_by_bench
from jobs.bench.harness.options import BENCHES, bench_verb, count_line, markdown, options_of, table
from raytrain.errors import InputError


def test_claims_and_ratios_with_a_goal_become_rows_with_their_verdicts(
    bench_document: Callable[..., dict[str, Any]],
) -> None:
    documents = {
        "loop": bench_document(),
        "claims": bench_document(quick=True),
        "experts": bench_document(passed=False),
    }
    rows = table(documents)
    cells = [(row["bench"], row["claim"], row["figure"], row["verdict"]) for row in rows]
    figure = "1.500 [1.250, 2.000] over 7 blocks"
    assert cells[:3] == [
        ("loop", "it is faster | better", "1.01", "not reproduced"),
        ("loop", "a / b: at least 1.2", figure, "reproduced"),
        ("loop", "c / d: at most 1.0", figure, "not reproduced"),
    ]
    assert cells[3] == ("loop", "no goal", figure, "b is faster") and cells[7][1] == "no goal"
    judged = [row[3] for row in cells[5:] if row[1] != "no goal"]
    assert judged == ["not measurable here"] * 3, "--quick sizes, or a failed gate"
    assert cells[8][:2] == ("experts", BENCHES["experts"]) and len(cells) == 9
    lines = markdown(rows)
    assert all(line.count("|") == 5 for line in lines) and len(lines) == 11
    assert count_line(rows).startswith("7 claims: 1 reproduced, 3 not reproduced, 3 not measurable here")


def test_all_selects_every_bench_but_the_longest_and_itself_and_passes_their_keys_on() -> None:
    assert set(AllOptions().only) == set(BENCHES) - {"all", "lr", "continual"}
    options = options_of("all", ["loop.blocks=3", "infer.blocks=4", "loop.workers=[1]", "dir=x"], quick=False)
    assert isinstance(options, AllOptions) and options.dir == "x"
    found = keys_by_bench(options.changes, ["loop", "infer"])
    assert found == {"loop": ["blocks=3", "workers=[1]"], "infer": ["blocks=4"]}
    for wrong in ("only=[lr]", "lop.blocks=3"):
        with pytest.raises(InputError, match=r"got (lr|lop before the dot), expected"):
            bench_verb("all", [wrong], out=None, quick=True, as_json=False)
