"""The user's modules that a submitted job names: those that its package leaves out are named before the upload."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.job.spec import load_spec
from jobs.submission.request import JobRequest, check_id, check_package, pack
from raytrain.errors import InputError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("model.py", "pkg/__init__.py", "pkg/deep.py", "local.py"):
        path = tmp_path / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.mark.parametrize(("ignored", "key"), [("model.py", "model.builder"), ("pkg/__init__.py", "data.collate"),
                                              ("pkg/deep.py", "data.collate")])  # fmt: skip
def test_a_module_that_is_left_out_is_refused_with_its_file_and_the_remedy(
    folder: Path, tmp_path: Path, ignored: str, key: str
) -> None:
    (folder / ".gitignore").write_text(f"local.py\n{Path(ignored).name}\n")
    spec = load_spec(None, ["model={builder: 'model:build'}", "data.collate=pkg.deep:collate"]).spec
    request = JobRequest("train", (), spec)
    with pytest.raises(InputError, match=rf"{ignored}, which is not in the package") as raised:
        check_package(request, pack(folder, tmp_path / "one.zip"), folder)
    assert raised.value.key == key and raised.value.remedy.endswith(f"the line !/{ignored} to .gitignore")
    with (folder / ".gitignore").open("a") as file:
        file.write(f"!/{ignored}\n")  # as the remedy says
    check_package(request, pack(folder, tmp_path / "two.zip"), folder)


@pytest.mark.parametrize("given", [".", "..", "a b", "x" * 65])
def test_an_id_that_is_no_name_of_a_folder_is_refused(given: str) -> None:
    check_id("..a")
    with pytest.raises(InputError, match="not dots alone"):
        check_id(given)
