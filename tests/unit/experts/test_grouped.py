"""Experts in half precision on a CPU compute a few distinct numbers of rows, with the results of the rows alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from experts import grouped
from experts.grouped import GroupedExperts, padded_rows

WIDTH, EXPERTS = 16, 3


def test_few_distinct_numbers_of_rows_are_computed() -> None:
    assert [padded_rows(rows) for rows in (0, 1, 64, 65, 128, 129, 2048, 2049, 4097)] == [
        0, 1, 64, 128, 128, 192, 2048, 2176, 4352,
    ]  # fmt: skip
    assert len({padded_rows(rows) for rows in range(65, 100_000)}) < 220
    assert all(rows <= padded_rows(rows) <= rows + max(63, rows // 16) for rows in range(100_000))


def trained(counts: list[int], dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[int]]:
    """(output, gradients of the rows and of every weight), and the rows of each linear map that was computed."""
    torch.manual_seed(0)
    experts = GroupedExperts(EXPERTS, WIDTH, 4 * WIDTH, activation="swiglu", bias=True)
    for bias in (experts.b1, experts.b2, experts.b3):
        torch.nn.init.normal_(bias)  # what an added row would add
    x = torch.randn(sum(counts), WIDTH, requires_grad=True)
    above = torch.randn(sum(counts), WIDTH)
    seen, linear = list[int](), F.linear

    def counted(rows: torch.Tensor, *arguments: Any) -> torch.Tensor:
        seen.append(len(rows))
        return linear(rows, *arguments)

    monkeypatch.setattr(F, "linear", counted)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        y = experts(x, torch.tensor(counts), counts)
    monkeypatch.undo()
    (y.float() * above).sum().backward()
    gradients = [x.grad, *(parameter.grad for parameter in experts.parameters())]
    return [y, *gradients], seen


@pytest.mark.parametrize("counts", [[100, 5, 77], [0, 300, 64]])
def test_added_rows_change_no_result_and_no_gradient(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, rows = trained(counts, torch.bfloat16, monkeypatch)
    assert set(rows) == {padded_rows(count) for count in counts if count}
    monkeypatch.setattr(grouped, "padded_rows", lambda rows: rows)
    alone, rows = trained(counts, torch.bfloat16, monkeypatch)
    assert set(rows) == {count for count in counts if count}
    assert ours[0].shape == alone[0].shape == (sum(counts), WIDTH)
    for one, other in zip(ours, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_full_precision_is_computed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    _, rows = trained([100, 5, 77], None, monkeypatch)
    assert set(rows) == {100, 5, 77}
