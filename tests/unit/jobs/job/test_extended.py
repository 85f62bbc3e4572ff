"""A job that changes another one, or a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.job.spec import load_spec, recipe_names
from raytrain.errors import InputError

BASE = """
model: {builder: raytrain.models.gpt:gpt, layers: 3, width: 32, heads: 2}
data: {source: stdlib, max_bytes: 9000}
optim: {lr: 0.5, betas: [0.8, 0.9]}
loop: {max_steps: 7, epochs: 2}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "base.yaml").write_text(BASE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_values_replace_those_of_the_base_key_by_key(folder: Path) -> None:
    """The base is beside the file that names it, whatever the current folder is."""
    middle = write(folder, "shared/middle.yaml", "extends: base.yaml\nmodel: {layers: 1}\nloop: {epochs: null}\n")
    last = write(folder, "job.yaml", "extends: shared/middle.yaml\noptim: {betas: [0.1, 0.2]}\nseed: 3\n")
    found = load_spec(last, ["loop.log_every=5"])
    spec, sources = found.spec, found.sources
    assert spec.model.keys == {"layers": 1, "width": 32, "heads": 2} and spec.data.keys == {"max_bytes": 9000}
    assert (spec.optim.lr, spec.optim.betas, spec.seed) == (0.5, (0.1, 0.2), 3), "a list is one value"
    assert (spec.loop.max_steps, spec.loop.epochs, spec.loop.log_every) == (7, None, 5)
    assert {sources[key] for key in ("optim.lr", "optim.betas", "seed", "model.layers")} == {"file"}
    assert (sources["loop.log_every"], sources["loop.eval_every"]) == ("command line", "default")
    middle.unlink()
    again = load_spec(write(folder, "recorded.yaml", found.text), ["loop.log_every=5"])
    assert again.spec == spec and "shared/middle.yaml" in found.text and "\nextends:" not in found.text
    resumed = load_spec(write(folder, "merged.yaml", found.merged_text))
    assert resumed.spec == spec, "the record of a run needs no other file"


def test_a_recipe_is_a_base_too_and_another_model_takes_none_of_its_arguments(folder: Path) -> None:
    own = load_spec(write(folder, "a.yaml", "extends: default\noptim: {lr: 0.5}\n"))
    recipe = load_spec(Path("default"))
    assert own.spec.optim.lr == 0.5 and own.spec.model == recipe.spec.model and own.sources["model.layers"] == "recipe"
    other = load_spec(write(folder, "b.yaml", "extends: shared/base.yaml\nmodel: {builder: my:net, size: 2}\n"))
    assert other.spec.model.keys == {"size": 2} and other.spec.data.keys == {"max_bytes": 9000}
    data = load_spec(write(folder, "c.yaml", "extends: shared/base.yaml\ndata: {source: text, path: x}\n"))
    assert data.spec.data.keys == {"path": "x"} and data.spec.model.keys["layers"] == 3
    assert load_spec(mapping={"extends": "default", "seed": 5}).spec.seed == 5


def test_circles_missing_bases_and_wrong_values_are_named(folder: Path) -> None:
    write(folder, "one.yaml", "extends: two.yaml\n")
    write(folder, "two.yaml", "extends: one.yaml\n")
    with pytest.raises(InputError, match=r"extends: got a circle: .*one\.yaml -> .*two\.yaml -> .*one\.yaml"):
        load_spec(folder / "one.yaml")
    with pytest.raises(InputError, match=r"extends: did you mean default\? Got defalt: there is no .*/defalt"):
        load_spec(write(folder, "d.yaml", "extends: defalt\n"))
    with pytest.raises(InputError, match=r"extends: got \[\"default\"\]"):
        load_spec(write(folder, "e.yaml", "extends: [default]\n"))
    wrong = write(folder, "f.yaml", "extends: shared/base.yaml\nloop: {max_step: 1}\n")
    with pytest.raises(InputError, match=r"loop\.max_step: did you mean loop\.max_steps\?"):
        load_spec(wrong)


def test_every_recipe_can_be_extended(folder: Path) -> None:
    for name in recipe_names():
        if name == "custom":  # its module is the user's
            continue
        assert load_spec(write(folder, f"of_{name}.yaml", f"extends: {name}\nseed: 9\n")).spec.seed == 9
