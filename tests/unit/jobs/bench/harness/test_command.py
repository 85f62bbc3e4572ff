"""`raytrain bench`: names, keys, exit codes, and the counting of bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jobs.bench.harness.options import BENCHES, bench_verb, list_lines, options_of
from raytrain.errors import InputError

# ---------------------------------------------------------------- what benches count


def test_the_bytes_saved_for_backward_are_counted_exactly() -> None:
    from jobs.bench.harness.sessions import saved_for_backward

    layers = torch.nn.Linear(8, 16, bias=False), torch.nn.Tanh(), torch.nn.Linear(16, 4, bias=False)
    module = torch.nn.Sequential(*layers)
    x = torch.randn(32, 8)
    # saved: x for the first weight; the output of tanh for tanh and for the second weight, counted once
    assert saved_for_backward(module, lambda: module(x)) == 4 * (32 * 8 + 32 * 16)


def test_the_growth_of_peak_bytes_is_recognised() -> None:
    from jobs.bench.claims_attention import shape_of

    lengths = [64, 128, 256, 512]
    straight, curved = (shape_of(lengths, [7 * n**power + 100 for n in lengths]) for power in (1, 2))
    assert straight["shape"] == "linear" and curved["shape"] == "quadratic"


# ---------------------------------------------------------------- the verb


def test_the_list_names_every_bench() -> None:
    lines = list_lines()
    assert [line.split()[0] for line in lines] == list(BENCHES)
    assert {"loop", "claims", "checkpoint"} <= set(BENCHES)


@pytest.mark.parametrize("name", sorted(BENCHES))
def test_quick_values_are_smaller_and_the_command_line_wins(name: str) -> None:
    usual, quick = options_of(name, [], quick=False), options_of(name, [], quick=True)
    assert quick.blocks <= usual.blocks and quick != usual
    assert options_of(name, ["blocks=7"], quick=True).blocks == 7
    costly = ("recovery", "startup", "continual")  # a block is a process, or trains every arm on all tasks
    assert name in costly or usual.blocks >= 15, "an interval needs repetitions"


@pytest.mark.parametrize(
    ("name", "keys", "named"),
    [
        ("lop", [], "bench"),
        ("loop", ["blks=3"], "blks"),
        ("loop", ["blocks=0"], "blocks"),
        ("loop", ["blocks=two"], "blocks"),
        ("loop", ["block_steps=15"], "block_steps"),
        ("loop", ["batch=3"], "batch"),
        ("claims", ["rows=10", "accumulation=4"], "rows"),
        ("claims", ["widths=[0]"], "widths"),
    ],
)
def test_the_error_names_a_wrong_bench_or_key(tmp_path: Path, name: str, keys: list[str], named: str) -> None:
    with pytest.raises(InputError) as caught:
        bench_verb(name, keys, out=str(tmp_path / "x.json"), quick=True, as_json=False)
    assert caught.value.key == named
    assert not (tmp_path / "x.json").exists()


def test_listing_benches_loads_neither_torch_nor_ray(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['raytrain', 'bench', '--list']\n"
        "import atexit; atexit.register(lambda: print([m for m in ('torch', 'ray') if m in sys.modules]))\n"
        "from jobs.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(BENCHES) + 1
