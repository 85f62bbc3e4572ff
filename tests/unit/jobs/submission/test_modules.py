"""The user's modules that a submitted job imports: those that its package leaves out are named before the upload."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.job.spec import load_spec
from jobs.submission.request import JobRequest, check_package, imported_files, pack
from raytrain.errors import InputError

FILES = {
    "model.py": "import torch\nfrom pkg import deep\ntry:\n    import local\nexcept ImportError:\n    local = None\n"
    "def build():\n    import late\n",
    "pkg/__init__.py": "",
    "pkg/deep.py": "from . import near\nfrom .sub.far import X\n",
    "pkg/near.py": "import model\n",
    "pkg/sub/__init__.py": "",
    "pkg/sub/far.py": "from .. import near\nX = 1\n",
    "late.py": "import json, unused_name\n",
    "local.py": "",
    "other.py": "import torch",
    "torch.py": "",
    "wrong.py": "import (",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def test_modules_are_found_through_packages_relative_imports_and_functions(folder: Path) -> None:
    found = {path.relative_to(folder).as_posix(): by for path, by in imported_files("model", folder).items()}
    assert found == {
        "model.py": "model", "pkg/__init__.py": "model", "pkg/deep.py": "model", "pkg/near.py": found["pkg/near.py"],
        "pkg/sub/__init__.py": "pkg.deep", "pkg/sub/far.py": "pkg.deep", "late.py": "model",
    }  # fmt: skip
    assert [path.name for path in imported_files("wrong", folder)] == ["wrong.py"]
    assert imported_files("raytrain.models.mlp", folder) == {}


@pytest.mark.parametrize("ignored", ["late.py", "pkg/sub/far.py", "model.py"])
def test_a_module_that_is_left_out_is_refused_with_its_file_and_the_remedy(
    folder: Path, tmp_path: Path, ignored: str
) -> None:
    (folder / ".gitignore").write_text(f"local.py\n{Path(ignored).name}\n")
    request = JobRequest("train", (), load_spec(None, ["model={builder: 'model:build'}"]).spec)
    with pytest.raises(InputError, match=rf"{ignored}, which \S+ imports") as raised:
        check_package(request, pack(folder, tmp_path / "one.zip"), folder)
    assert raised.value.key == "model.builder" and raised.value.remedy.endswith(f"the line !/{ignored} to .gitignore")
    with (folder / ".gitignore").open("a") as file:
        file.write(f"!/{ignored}\n")  # as the remedy says
    check_package(request, pack(folder, tmp_path / "two.zip"), folder)
