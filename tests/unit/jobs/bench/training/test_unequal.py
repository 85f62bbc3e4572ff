"""Bench `unequal`: refused options."""

from __future__ import annotations

import pytest

from jobs.bench.harness.command import bench_verb
from raytrain.errors import InputError


def test_a_batch_with_too_few_micro_batches_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        bench_verb("unequal", ["batch=12"], out=None, quick=False, as_json=False)
    assert caught.value.key == "batch" and "16 rows" in str(caught.value)
