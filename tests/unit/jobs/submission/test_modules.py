"""The user's modules that a submitted job imports: those that its package leaves out are named before the upload."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.job.spec import load_spec
from jobs.submission.request import JobRequest, check_id, check_package, imported_files, pack
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


#: Code -> whether it may do without the module `late`.
STATEMENTS = {
    "import importlib\nimportlib.import_module('late')": False,
    "__import__('late')": False,
    "def build():\n    import late": False,
    "class A:\n    import late": False,
    "if torch:\n    import late": True,
    "try:\n    import late\nexcept (ValueError, ImportError):\n    late = 0": True,
    "try:\n    import late\nexcept:\n    late = 0": True,
    "try:\n    import importlib\n    importlib.import_module('late')\nexcept ModuleNotFoundError:\n    pass": True,
    "from contextlib import suppress\nwith suppress(ImportError):\n    import late": True,
    "import typing\nif typing.TYPE_CHECKING:\n    import late": True,
    "if __name__ == '__main__':\n    import late": True,
}


@pytest.mark.parametrize("code", STATEMENTS)
def test_an_import_under_a_condition_is_optional(code: str, folder: Path) -> None:
    (folder / "model.py").write_text(code)
    assert ("late.py" in [path.name for path in imported_files("model", folder)]) == (not STATEMENTS[code])


def test_a_package_comes_before_a_folder_without_init_elsewhere(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other" / "pkg").mkdir(parents=True)
    (folder / "pkg" / "deep.py").write_text("import importlib\nimportlib.import_module('.near', __package__)\n")
    monkeypatch.syspath_prepend(tmp_path / "other")
    names = {path.relative_to(folder).as_posix() for path in imported_files("pkg.deep", folder)}
    assert names >= {"pkg/__init__.py", "pkg/deep.py", "pkg/near.py"}
    (tmp_path / "other" / "pkg" / "__init__.py").write_text("")
    assert not imported_files("pkg.deep", folder)


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


@pytest.mark.parametrize("given", [".", "..", "a b", "x" * 65])
def test_an_id_that_is_no_name_of_a_folder_is_refused(given: str) -> None:
    check_id("..a")
    with pytest.raises(InputError, match="not dots alone"):
        check_id(given)
