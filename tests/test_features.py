"""tests/features.csv against the `covers` marks of the tests.

A row is `done` where a test outside tests/gpu covers it, `gpu` where only one in tests/gpu does, or `later`.
The file is written from the marks, never by hand: `python tests/test_features.py --write`.
"""

from __future__ import annotations

import ast
import csv
import io
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
TABLE = TESTS / "features.csv"
COLUMNS = ["id", "status", "capability", "shown"]
AREAS = {
    "DEV": 18, "PREC": 11, "MEM": 19, "DATA": 22, "LOOP": 21, "COMP": 9, "ATTN": 8, "PAR": 17, "EXP": 19,
    "SLP": 15, "KG": 8, "TUNE": 13, "MON": 18, "VIS": 12, "INF": 22, "NODE": 11, "CLI": 39, "CFG": 18,
    "VER": 17, "TRB": 43, "BP": 23, "TEST": 9, "COMPAT": 9, "PERF": 39, "FUT": 14, "SRC": 16,
}  # fmt: skip
"""How many rows each area of FEATURES.md has."""

ROWS_PER_TEST = 3
"""A test that claims more shows none of them well."""


@dataclass(frozen=True)
class Mark:
    """One `pytest.mark.covers(...)`: its rows, and the test, or one case of it, that they stand on."""

    rows: tuple[str, ...]
    node: str
    of_case: bool
    line: int


def _is_covers(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.covers"


def _marks_of(function: ast.FunctionDef, *, name: str) -> Iterator[Mark]:
    """The marks in a test's decorators; one inside `pytest.param(...)` belongs to that case alone."""
    cases = {
        id(call)
        for decorator in function.decorator_list
        for param in ast.walk(decorator)
        if isinstance(param, ast.Call) and ast.unparse(param.func) == "pytest.param"
        for call in ast.walk(param)
    }
    for decorator in function.decorator_list:
        for call in ast.walk(decorator):
            if isinstance(call, ast.Call) and _is_covers(call.func):
                rows = tuple(ast.literal_eval(argument) for argument in call.args)
                node = f"{name}::{function.name}"
                yield Mark(rows=rows, node=node, of_case=id(call) in cases, line=call.lineno)


def marks_in(path: Path, *, name: str) -> list[Mark]:
    """Every `covers` mark of one test file, read without importing it.

    Raises:
        ValueError: a mark does not belong to a test, such as in `pytestmark`.
    """
    tree = ast.parse(path.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    tests = [function for function in functions if function.name.startswith("test_")]
    marks = [mark for test in tests for mark in _marks_of(test, name=name)]
    seen = sorted(node.lineno for node in ast.walk(tree) if isinstance(node, ast.expr) and _is_covers(node))
    if seen != sorted(mark.line for mark in marks):
        raise ValueError(f"{name}: a covers mark outside of a test's decorators (lines {seen})")
    return marks


def all_marks() -> list[Mark]:
    """The marks of every test file, in the order of their paths."""
    return [
        mark
        for path in sorted(TESTS.rglob("test_*.py"))
        for mark in marks_in(path, name=path.relative_to(TESTS.parent).as_posix())
    ]


def read_table() -> list[dict[str, str]]:
    """The rows of features.csv."""
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


def rows_from(marks: list[Mark], *, table: list[dict[str, str]]) -> list[dict[str, str]]:
    """The table as the marks make it: `shown` is a row's first test; a `later` row keeps its reason."""
    rows = []
    for row in table:
        nodes = [mark.node for mark in marks if row["id"] in mark.rows]
        on_cpu = [node for node in nodes if not node.startswith("tests/gpu/")]
        was_later = row["status"] == "later"
        if nodes:
            status, shown = ("done", on_cpu[0]) if on_cpu else ("gpu", nodes[0])
        else:
            status, shown = "later", row["shown"] if was_later else ""
        rows.append({**row, "status": status, "shown": shown})
    return rows


def as_text(rows: list[dict[str, str]]) -> str:
    """The rows as the file holds them."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


# ---------------------------------------------------------------- the tests


def test_every_row_appears_once_and_in_order() -> None:
    expected = [f"{area}-{n:02d}" for area, count in AREAS.items() for n in range(1, count + 1)]
    assert [row["id"] for row in read_table()] == expected
    assert all(row["capability"].strip() for row in read_table())


def test_marks_name_rows_that_exist() -> None:
    known = {row["id"] for row in read_table()}
    unknown = [(mark.node, row) for mark in all_marks() for row in mark.rows if row not in known]
    assert not unknown, unknown
    assert all(mark.rows for mark in all_marks()), "a covers mark without a row"


def test_the_table_matches_the_marks() -> None:
    table = read_table()
    written = as_text(rows_from(all_marks(), table=table))
    assert TABLE.read_text() == written, "run: python tests/test_features.py --write"


def test_a_test_covers_at_most_three_rows_or_one_a_case() -> None:
    marks = all_marks()
    whole = Counter(mark.node for mark in marks for _ in mark.rows if not mark.of_case)
    assert not [node for node, rows in whole.items() if rows > ROWS_PER_TEST]
    assert not [mark for mark in marks if mark.of_case and len(mark.rows) != 1]


def test_gpu_rows_are_shown_in_the_gpu_folder() -> None:
    nodes = {mark.node for mark in all_marks()}
    for row in read_table():
        if row["status"] == "done":
            assert row["shown"] in nodes and not row["shown"].startswith("tests/gpu/"), row
        elif row["status"] == "gpu":
            assert row["shown"] in nodes and row["shown"].startswith("tests/gpu/"), row
        else:
            assert row["status"] == "later", row


def test_marks_are_read_from_decorators_and_cases(tmp_path: Path) -> None:
    source = tmp_path / "test_some.py"
    mark = "pytest.mark." + "covers"
    source.write_text(
        f"import pytest\n@{mark}('DEV-01', 'DEV-02')\ndef test_a():\n    pass\n"
        f"@pytest.mark.parametrize('x', [pytest.param(1, marks={mark}('DEV-03'))])\n"
        "def test_b(x):\n    pass\n"
    )
    found = [(mark.node, mark.rows, mark.of_case) for mark in marks_in(source, name="t.py")]
    assert found == [("t.py::test_a", ("DEV-01", "DEV-02"), False), ("t.py::test_b", ("DEV-03",), True)]
    rows = [{"id": f"DEV-0{n}", "status": "later", "capability": "c", "shown": "why"} for n in (3, 4)]
    made = rows_from(marks_in(source, name="tests/gpu/t.py"), table=rows)
    stands = [(row["status"], row["shown"]) for row in made]
    assert stands == [("gpu", "tests/gpu/t.py::test_b"), ("later", "why")]


def test_a_mark_outside_a_test_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "test_some.py"
    source.write_text("import pytest\npytestmark = pytest.mark." + "covers('DEV-01')\n")
    try:
        marks_in(source, name="t.py")
    except ValueError as error:
        assert re.search(r"t\.py.*outside", str(error))
    else:
        raise AssertionError("a module-wide covers mark went through")


def main(arguments: list[str]) -> int:
    """`--write` rewrites features.csv from the marks; without it the counts are printed."""
    rows = rows_from(all_marks(), table=read_table())
    if arguments == ["--write"]:
        TABLE.write_text(as_text(rows))
    counts = Counter(row["status"] for row in rows)
    print(", ".join(f"{status} {count}" for status, count in sorted(counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
