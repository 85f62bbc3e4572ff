"""What a newcomer installs: the two lines of the README, the pins, and nothing of the author's machine."""

from __future__ import annotations

import csv
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_the_readme_has_exactly_two_install_lines() -> None:
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("pip install")]
    assert lines == [
        "pip install -c constraints.txt -e . && raytrain train",
        "pip install -c constraints.txt -e '.[test]' && pytest",
    ]


def test_every_dependency_is_pinned_with_a_purpose() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    listed = project.partition("[project.scripts]")[0]
    wanted = re.findall(r'^    "([A-Za-z0-9_.-]+)[^"]*",(.*)$', listed, re.MULTILINE)
    pins = re.findall(r"^([A-Za-z0-9_.-]+)==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned = {name.lower().replace("_", "-") for name in pins}
    assert {"torch", "ray", "pytest"} <= {name for name, _ in wanted}
    assert not [name for name, _ in wanted if name.lower() not in pinned]
    assert not [name for name, comment in wanted if "#" not in comment and name != "pytest"]


def test_every_folder_of_code_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    files = [path for name in ("cluster", "raytrain", "experts", "jobs") for path in (ROOT / name).rglob("*.py")]
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in files}
    assert set(project["tool"]["setuptools"]["packages"]) == found


def test_no_file_names_a_machine() -> None:
    packages = ("cluster", "raytrain", "experts", "jobs")
    places = [f"{ROOT}/", f"{ROOT.parent}/", f"{Path.home()}/", "/ro" + "ot/", "/wo" + "rk/"]
    kinds = {".py", ".md", ".yaml", ".toml", ".txt", ".csv", ""}
    folders = [ROOT / name for name in (*packages, "tests", ".ci")]
    files = [path for path in ROOT.iterdir() if path.is_file() and path.suffix in kinds and path.name != ".git"]
    inside = [path for folder in folders for path in folder.rglob("*")]
    files += [path for path in inside if path.is_file() and path.suffix in kinds]
    assert {ROOT / "README.md", ROOT / ".ci/run", Path(__file__)} <= set(files)
    places = [place for place in places if len(place) > len("/tmp/")]  # a checkout in / or /tmp proves nothing
    named = [(path.name, place) for path in files for place in places if place in path.read_text()]
    assert not named, named


def test_the_durations_are_those_of_files_that_exist() -> None:
    """conftest.py starts the longest files first."""
    with (ROOT / "tests" / "durations.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows and not [row["file"] for row in rows if not (ROOT / "tests" / row["file"]).is_file()]
    assert [float(row["seconds"]) for row in rows] == sorted((float(row["seconds"]) for row in rows), reverse=True)


@pytest.mark.covers("COMPAT-06")
def test_accelerate_is_needed_for_a_comparison_only() -> None:
    """Ray starts the workers; the options of `accelerate launch` stand for keys (tests/unit/jobs/job)."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert about["dependencies"] and not [one for one in about["dependencies"] if one.startswith("accelerate")]
    code = [path for package in ("raytrain", "experts", "jobs", "cluster") for path in (ROOT / package).rglob("*.py")]
    imports = re.compile(r"^\s*(import|from) accelerate\b", re.MULTILINE)
    found = [path for path in code if imports.search(path.read_text())]
    assert len(code) > 100 and all("bench" in path.parts for path in found), found
