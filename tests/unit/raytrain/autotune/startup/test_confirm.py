"""What a search found, confirmed in the real run."""

from __future__ import annotations

import pytest

from raytrain.autotune.startup.confirm import print_difference


@pytest.mark.parametrize("confirmed", [True, False])
def test_the_terminal_shows_where_a_run_differs_from_its_search(
    confirmed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    print_difference({"confirmed": confirmed, "reason": "a step takes 9 ms, the search found 1 ms"})
    assert ("unlike the search: a step takes 9 ms" in capsys.readouterr().out) is not confirmed
