"""The style sheet of the pages: what applies to screens alone, and what paper shows."""

from __future__ import annotations

import re

from raytrain.report.page.style import STYLE

PRINT = STYLE[STYLE.index("@media print{") :]


def test_the_layouts_of_phones_and_of_dark_screens_do_not_apply_to_paper():
    conditions = re.findall(r"@media ([^{]+)\{", STYLE)
    assert conditions == ["screen and (prefers-color-scheme:dark)", "screen and (max-width:760px)", "print"]


def test_what_is_closed_stays_closed_on_paper():
    assert "details" not in PRINT and "content-visibility" not in STYLE


def test_long_tables_continue_on_the_next_page_and_their_rows_are_not_divided():
    (whole,) = re.findall(r"([^\n{}]+)\{break-inside:avoid\}", PRINT)
    assert {".tile", ".chart", ".finding", "tr", ".events li"} <= {part.strip() for part in whole.split(",")}
    assert ".card" not in whole


def test_backgrounds_that_carry_meaning_are_printed():
    assert re.search(r"\*\{[^}]*print-color-adjust:exact", PRINT)


def test_the_time_of_an_event_is_not_broken():
    (rule,) = re.findall(r"\n\.events time\{([^}]+)\}", STYLE)
    assert "white-space:nowrap" in rule
