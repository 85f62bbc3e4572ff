"""The lines that a person with GPUs runs: complete, and as the README of tests/gpu lists them."""

from __future__ import annotations

from pathlib import Path

from lines import LINES, markdown

GPU = Path(__file__).resolve().parents[2] / "gpu"


def test_the_readme_lists_the_lines_as_they_are() -> None:
    assert f"-->\n\n{markdown()}\n<!-- end of lines" in (GPU / "README.md").read_text(encoding="utf-8")


def test_every_line_has_a_body_and_what_it_equals_runs_before_it() -> None:
    names = [line.name for line in LINES]
    assert len(set(names)) == len(names)
    for number, line in enumerate(LINES):
        assert line.test == "" or (GPU / line.test.partition(" ")[0]).is_file(), line
        assert line.equals == "" or line.equals in names[:number], line
        processes = line.job.get("scale.workers", 1) + (
            hosts if isinstance(hosts := line.job.get("experts.hosts", 0), int) else 0
        )
        assert line.test or processes == line.gpus, f"{line.name} needs {processes} GPUs"
