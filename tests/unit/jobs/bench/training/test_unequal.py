"""Bench `unequal`: what it refuses."""

from __future__ import annotations

import pytest

from jobs.bench.harness.command import bench_verb
from raytrain.errors import InputError


def test_a_batch_of_which_nothing_can_be_moved_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        bench_verb("unequal", ["batch=12"], out=None, quick=False, as_json=False)
    assert caught.value.key == "batch" and "16 rows" in str(caught.value)
