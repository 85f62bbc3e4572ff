"""`infer.batch_size: auto`: the search with a model whose seconds and memory are given, on a clock of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from raytrain.errors import RunError
from raytrain.infer import batch_size
from raytrain.infer.batch_size import SHARE, BatchChoice, BatchSizeSearch, reason_not_to_measure
from raytrain.infer.input.rows import InputRows
from raytrain.infer.model import bytes_of_token
from raytrain.infer.predictor import Answers
from raytrain.infer.units import Unit
from raytrain.models.gpt import gpt


class Clock:
    """What `time.perf_counter` is replaced with."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Meter:
    """A peak that the model sets."""

    floor, reached = 1000, 0

    def __init__(self, device: torch.device) -> None:
        del device
        Meter.reached = self.floor

    def peak(self) -> int:
        return self.reached


@dataclass
class Fixed:
    """A batch takes `pass_s + row_s * rows` seconds for each token and `row_bytes * rows` bytes."""

    clock: Clock
    pass_s: float
    row_s: float
    row_bytes: int = 1
    fits: int = 10**9
    bad: frozenset[int] = frozenset()
    error: type[Exception] = ValueError
    answer_tokens: int = 64
    seen: list[int] = field(default_factory=list)
    generates: bool = True
    columns: tuple[str, ...] = ("text",)

    def shortened(self, tokens: int) -> Fixed:
        return replace(self, answer_tokens=min(tokens, self.answer_tokens))

    def cached_bytes(self, rows: int) -> int:
        return rows * self.answer_tokens

    def lengths(self, table: Any) -> list[int]:
        return [len(text) for text in table["text"].to_pylist()]

    def refused(self, table: Any) -> dict[int, str]:
        return {}

    def predict(self, table: Any, numbers: Sequence[int]) -> Answers:
        if len(numbers) > self.fits:
            raise torch.OutOfMemoryError("full")
        if self.bad & set(numbers):
            raise self.error("a bad row")
        self.seen.append(len(numbers))
        self.clock.now += self.answer_tokens * (self.pass_s + self.row_s * len(numbers))
        Meter.reached = max(Meter.reached, Meter.floor + self.row_bytes * len(numbers))
        return Answers(["" for _ in numbers])


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`search(budget=..., total=..., **of Fixed)` -> (the choice, the model)."""
    clock = Clock()
    monkeypatch.setattr(batch_size, "time", clock)
    monkeypatch.setattr(batch_size, "PeakMeter", Meter)
    path = tmp_path / "in.parquet"
    parquet.write_table(pa.table({"text": ["a" * (row % 7) for row in range(160)]}), path)

    def start(
        *, budget: int | None = None, total: int = 100_000, unit_rows: int = 160, **speed: Any
    ) -> tuple[BatchChoice, Fixed]:
        made = Fixed(clock, **{"pass_s": 1.0, "row_s": 0.01, **speed})
        rows, unit = InputRows.at([str(path)]), Unit(0, 0, unit_rows)
        found = BatchSizeSearch(made, rows, unit, total, torch.device("cpu"), budget)
        return found.run(), made

    return start


def test_sizes_are_doubled_while_rows_per_second_grow(search: Any) -> None:
    choice, made = search()
    assert choice.rows == 160 and "a unit has 160 rows" in choice.reason
    assert [one.rows for one in choice.measured] == [16, 32, 64, 128, 160]
    for one in choice.measured:
        assert one.rows_per_s == pytest.approx(one.rows / (64 * (1.0 + 0.01 * one.rows)))
    assert made.seen[:4] == [2, 16, 16, 16] and choice.seconds > 0
    flat, _ = search(pass_s=0.01, row_s=1.0)
    assert flat.rows == 16 and flat.reason.endswith("32 rows are not faster")


def test_the_search_takes_a_small_part_of_the_job(search: Any) -> None:
    total = 4000
    choice, _ = search(total=total, row_s=1.0)
    rate = choice.measured[-1].rows_per_s
    assert choice.seconds <= SHARE * total / rate
    short, _ = search(total=250, row_s=0.5)
    assert [one.rows for one in short.measured] == [16] and short.reason.endswith("than 10% of the job to measure")
    assert reason_not_to_measure(1000, 16, generates=True) == "a unit has 16 rows"
    assert reason_not_to_measure(400, 100, generates=True) == "400 rows are too few for a search"
    assert reason_not_to_measure(4096, 512, generates=False) == "4,096 rows are too few for a search"
    assert reason_not_to_measure(10_000, 157, generates=True) is None


def test_sizes_that_memory_does_not_allow_are_not_chosen(search: Any) -> None:
    """A row takes 10 bytes and the cache of its answer 48 more than in the search; 1,000 bytes are held before."""
    choice, made = search(budget=1000 + 58 * 64, row_bytes=10)
    assert choice.rows == 64 and choice.reason.endswith("128 rows would not fit into memory")
    assert max(made.seen) == 64 and choice.measured[-1].peak_bytes == 1000 + 58 * 64
    raised, _ = search(fits=40)
    assert raised.rows == 32 and raised.reason.endswith("64 rows do not fit into memory")
    small, _ = search(fits=5)
    assert small.rows == 4 and small.reason.endswith("8 rows do not fit into memory")
    tight, _ = search(budget=1000 + 58 * 8, row_bytes=10)
    assert tight.rows == 8


def test_a_row_that_fails_ends_the_search(search: Any) -> None:
    choice, _ = search(bad=frozenset({0}))
    assert choice.rows >= 16 and "failed" in choice.reason
    with pytest.raises(RunError, match=r"one of the rows \d+ to \d+ ended the context of the GPU \(a bad row\)"):
        search(bad=frozenset(range(160)), error=torch.AcceleratorError)


def test_the_bytes_of_a_cached_token_are_those_of_all_layers() -> None:
    module = gpt(layers=3, heads=2, width=8, context=16, vocab_size=5).module
    assert bytes_of_token(module, itemsize=4) == 3 * 2 * 8 * 4
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, intermediate_size=8,
        vocab_size=11,
    )  # fmt: skip
    assert bytes_of_token(transformers.LlamaForCausalLM(config), itemsize=2) == 2 * 2 * 2 * 8 * 2
    assert bytes_of_token(torch.nn.Linear(2, 2), itemsize=4) == 0
