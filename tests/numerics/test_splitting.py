"""ARCHITECTURE.md, 2: the same step, however its micro-batches are shared out over workers."""

from __future__ import annotations

from typing import Any

import lives
import numpy as np
import pytest
from gang import run_gang

pytestmark = pytest.mark.daily

STEPS = 20
MODELS = ["gpt", "moe_gpt", "mlp"]


@pytest.fixture(scope="module")
def runs() -> dict[str, list[dict[str, Any]]]:
    """`workers x accumulation` -> what each rank made of 20 AdamW steps in float64, by model."""
    one = lives.split_runs(0, 1, MODELS, 4, STEPS)
    whole = lives.split_runs(0, 1, MODELS, 16, STEPS)
    return {
        "1 x 4": [one],
        "1 x 1": [whole],
        "2 x 2": run_gang(lives.split_runs, MODELS, 4, STEPS, world_size=2),
        "3 x uneven": run_gang(lives.split_runs, MODELS, 4, STEPS, world_size=3),
        "4 x 1": run_gang(lives.split_runs, MODELS, 4, STEPS, world_size=4),
    }


@pytest.mark.covers("LOOP-02")
@pytest.mark.parametrize("name", MODELS)
def test_accumulation_and_workers_can_be_exchanged(runs: dict[str, list[dict[str, Any]]], name: str) -> None:
    reference = runs["1 x 4"][0][name]
    assert reference["micro_batches"][:4] == [4, 4, 4, 2], "the last window of an epoch holds what is left"
    for way, ranks in runs.items():
        for rank, made in enumerate(ranks):
            mine, where = made[name], f"{way}, rank {rank}"
            np.testing.assert_allclose(mine["losses"], reference["losses"], rtol=0, atol=1e-12, err_msg=where)
            np.testing.assert_allclose(mine["norms"], reference["norms"], rtol=0, atol=1e-12, err_msg=where)
            np.testing.assert_allclose(mine["aux"], reference["aux"], rtol=0, atol=1e-12, err_msg=where)
            for key, value in reference["weights"].items():
                np.testing.assert_allclose(mine["weights"][key], value, rtol=0, atol=1e-12, err_msg=f"{where} {key}")
        assert len({made[name]["digest"] for made in ranks}) == 1, f"{way}: the ranks differ"
    assert np.median(reference["norms"]) > 0.3, "the clip was hardly ever active"


def test_the_fractions_match_their_names(runs: dict[str, list[dict[str, Any]]]) -> None:
    shares = {way: [made["gpt"]["micro_batches"][:4] for made in ranks] for way, ranks in runs.items()}
    assert shares["2 x 2"] == [[2, 2, 2, 1]] * 2
    assert shares["3 x uneven"] == [[2, 2, 2, 1], [1, 1, 1, 1], [1, 1, 1, 0]]
    assert shares["4 x 1"] == [[1, 1, 1, 1]] * 2 + [[1, 1, 1, 0]] * 2
    assert shares["1 x 1"] == [[1, 1, 1, 1]]


def test_a_micro_batch_without_a_label_changes_nothing(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Micro-batches whose labels are all -100 are among those compared above; were one averaged, it would be NaN."""
    assert sum(made["gpt"]["empty"] for made in runs["4 x 1"]) == runs["1 x 4"][0]["gpt"]["empty"]
    one_row_each = lives.split_run(0, 1, "gpt", 1, STEPS)
    assert one_row_each["empty"] > 0, "no micro-batch was without labels"
    np.testing.assert_allclose(one_row_each["losses"], runs["1 x 4"][0]["gpt"]["losses"], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("model", "optimizer"), [("gpt", "sgd"), ("moe_gpt", "muon")])
def test_other_optimizers_split_too(model: str, optimizer: str) -> None:
    reference = lives.split_run(0, 1, model, 4, STEPS, optimizer)
    ranks = run_gang(lives.split_run, model, 4, STEPS, optimizer, world_size=3)
    assert len({made["digest"] for made in ranks}) == 1
    for made in ranks:
        for key, value in reference["weights"].items():
            np.testing.assert_allclose(made["weights"][key], value, rtol=0, atol=1e-12, err_msg=key)


@pytest.mark.covers("PAR-01", "LOOP-03", "TEST-06")
def test_reduced_gradients_are_the_mean_and_every_rank_holds_the_same_weights() -> None:
    first, second = run_gang(lives.data_parallel, world_size=2)
    for made in (first, second):
        assert made["micro_batches"] == 1 and made["size"] > 1e-3
        assert made["gap"] < 1e-6 * max(1.0, made["size"])
        assert made["gap_without_reduction"] > 1e-4, "a rank's own gradient is already the mean: nothing is shown"
        assert len(made["losses"]) == 50 and made["losses"][-1] < made["losses"][0]
    assert first["digest"] == second["digest"] and first["losses"] == second["losses"]
    assert first["effective_batch"] == 8 * 1 * 2, "what the plan records: micro x accumulation x workers"
