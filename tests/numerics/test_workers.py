"""Several workers are seen as one: sums, small messages, and the figures of a row."""

from __future__ import annotations

import math

import lives
import pytest
from gang import run_gang
from lab import MLP, class_rows, make_session

from raytrain.train.parallel.collectives import Workers


def test_the_verbs_of_three_workers_and_of_one() -> None:
    for rank, made in enumerate(run_gang(lives.collectives, world_size=3)):
        assert made["place"] == (rank, 3)
        assert made["sum"] == [[6.0, 6.0, 6.0], [7.0]]
        assert made["flags"] == [3, 3, 3 * 2**40]
        assert made["floats"] == [[0.0, 0.1], [1.0, 0.1], [2.0, 0.1]]
        assert made["bytes"] == [b"\x00\x00", b"", b"\x02\x02\x02\x02"] and made["nothing"] == [b""] * 3
        assert made["broadcast"] == [[0.0, 0.0], [0]]
        assert made["waited"]
    alone = lives.collectives(0, 1)
    assert alone["place"] == (0, 1) and alone["sum"] == [[1.0] * 3, [1.0]] and alone["flags"] == [0, 1, 2**40]
    assert alone["bytes"] == [b"\x00\x00"] and Workers().wait_s == 0.0


@pytest.mark.covers("MON-14")
def test_a_row_holds_least_mean_and_most_over_the_workers() -> None:
    ranks = run_gang(lives.aggregated, world_size=2)
    own = list(zip(ranks[0]["own"], ranks[1]["own"], strict=True))  # by row: (seconds, data seconds, peak) of each
    assert len(own) == len(ranks[0]["rows"]) == 3
    for row, told in zip(ranks[0]["rows"], own, strict=True):
        for index, name in enumerate(("step_time_s", "data_time_s")):
            values = [values[index] for values in told]
            assert row[f"{name}_min"] == min(values) and row[f"{name}_max"] == max(values)
            assert math.isclose(row[name], sum(values) / 2) and min(values) < max(values)
        work = [seconds - waited for seconds, _, waited, *_ in told]
        assert row["work_time_s_max"] == max(work) > row["work_time_s_median"] == min(work)
        assert work[row["slowest_rank"]] == max(work) and math.isclose(
            row["wait_time_s"], (told[0][2] + told[1][2]) / 2
        )
        assert row["slowest_data_time_s"] == told[row["slowest_rank"]][1]
        assert row["peak_memory_bytes_min"] == 1000 and row["peak_memory_bytes_mean"] == 1500.0
        assert row["peak_memory_bytes"] == 2000
    assert [r["loss"] for r in ranks[0]["rows"]] == [r["loss"] for r in ranks[1]["rows"]]


def test_two_workers_score_the_eval_split_as_one_does_though_one_of_them_has_no_row_of_it() -> None:
    one, two = run_gang(lives.aggregated, world_size=2)
    assert one["alone"] == two["alone"] and one["evals"][-1]["loss"] == two["evals"][-1]["loss"]
    session = make_session(
        MLP,
        {"train": class_rows(80), "eval": class_rows(3, seed=8)},
        loop={"max_steps": 10, "log_every": 0, "micro_batch_size": 8},
    )
    session.loop(reporter=(rows := lives.Rows()), should_stop=lambda: False).run(session.state)
    assert rows.of("eval", "loss")[-1] == pytest.approx(one["evals"][-1]["loss"], rel=1e-5)
    assert rows.of("eval", "accuracy")[-1] == one["evals"][-1]["accuracy"]


def test_metrics_come_from_the_workers_that_have_rows_where_rank_0_has_none() -> None:
    """Rank 0's micro-batch of the eval split has no labels, so it counts for nothing."""
    one, two = run_gang(lives.scored, world_size=2)
    alone = lives.scored(0, 1)
    assert one == two and sorted(one) == ["accuracy", "loss"]
    assert one["loss"] == pytest.approx(alone["loss"], rel=1e-6) and one["accuracy"] == alone["accuracy"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_metrics_of_training_losses_are_means_over_the_micro_batches_of_all_workers(world_size: int) -> None:
    ranks = run_gang(lives.with_metrics, world_size=world_size) if world_size > 1 else [lives.with_metrics(0, 1)]
    expected = float(class_rows(20)["x"][:, 0].double().mean())
    for rows in ranks:
        assert [row["first"] for row in rows] == [pytest.approx(expected, rel=1e-5)] * 4
        assert [row.get("late") for row in rows] == [None, None, 7.0, 7.0]
        assert rows[0]["metrics"] == ["first", "lr"] and rows[3]["metrics"] == ["first", "lr", "late"]
        assert all(row["lr"] < 1 for row in rows), "a column of the row stays"
