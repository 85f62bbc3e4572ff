"""The style sheet of the pages: what paper shows."""

from __future__ import annotations

import re

from raytrain.report.style import STYLE

PRINT = STYLE[STYLE.index("@media print{") :]


def test_what_is_closed_stays_closed_on_paper_and_rows_are_not_divided():
    assert "details" not in PRINT and "content-visibility" not in STYLE
    (whole,) = re.findall(r"([^\n{}]+)\{break-inside:avoid\}", PRINT)
    assert {".tile", ".chart", ".finding", "tr", ".events li"} == {part.strip() for part in whole.split(",")}


def test_backgrounds_that_carry_meaning_are_printed():
    assert re.search(r"\*\{[^}]*print-color-adjust:exact", PRINT)
