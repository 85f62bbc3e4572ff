"""Classes keep the numbers that the weights of a folder or run have for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from folders import make_folder, write_lines

from cluster.devices.inventory import local_inventory
from jobs.driver.check_job import check_on_driver
from jobs.inference.target import open_target
from jobs.job.facts import resolved
from jobs.job.spec import load_spec
from raytrain.data.rows.contract import Source
from raytrain.data.sources.open import open_source
from raytrain.errors import InputError
from raytrain.infer.predictor import TextClassifier
from raytrain.models.transformers import classifier

pytest.importorskip("transformers", reason="transformers is not installed (the extra `transformers`)")

CLASSIFIER = "raytrain.models.transformers:classifier"


def trained(folder: Path, names: tuple[str, ...]) -> Path:
    """The folder of a classifier with these classes, as transformers writes it."""
    make_folder(folder, "distilbert", task="masked")
    classifier(path=str(folder), num_labels=len(names), class_names=names).module.save_pretrained(folder)
    return folder


def job(folder: Path, labels: list[Any], model: dict[str, Any] | None = None, **data: Any) -> Any:
    lines = write_lines(folder.parent / "rows.jsonl", [{"text": "the mill", "class": one} for one in labels])
    source = {"source": "jsonl", "path": str(lines), "text_field": "text", "label_field": "class", "eval_fraction": 0}
    mapping = {"model": {"builder": CLASSIFIER, "path": str(folder), **(model or {})}, "data": {**source, **data},
               "precision": {"dtype": "fp32"}}  # fmt: skip
    return resolved(load_spec(mapping=mapping).spec)


def opened(*args: Any, **data: Any) -> tuple[Source, list[int]]:
    spec = job(*args, **data)
    assert resolved(spec) == spec, "to resolve a job again changes nothing"
    source = open_source(spec.data, context=None)
    return source, source.train.gather(np.arange(len(source.train)))["labels"].tolist()


@pytest.mark.parametrize("names", [("yes", "no"), ("c", "a", "b")])
def test_a_trained_folder_numbers_its_classes(names: tuple[str, ...], tmp_path: Path) -> None:
    folder = trained(tmp_path / "model", names)
    source, labels = opened(folder, [*names, names[0]])
    assert labels == [*range(len(names)), 0]
    assert (source.classes, source.class_names) == (len(names), names)


def test_some_of_the_classes_keep_their_numbers(tmp_path: Path) -> None:
    source, labels = opened(trained(tmp_path / "model", ("c", "a", "b")), ["b", "c"])
    assert labels == [2, 0] and source.classes == 3


def test_other_classes_are_refused_with_both(tmp_path: Path) -> None:
    folder = trained(tmp_path / "model", ("yes", "no"))
    with pytest.raises(InputError, match=r"label_field: got the classes ham, no, expected .* yes, no;") as error:
        opened(folder, ["no", "ham"])
    assert "data.class_names" in str(error.value)
    source, labels = opened(folder, ["no", "ham"], class_names=["no", "ham"])
    assert labels == [0, 1] and source.class_names == ("no", "ham")


@pytest.mark.parametrize("kind", ["unnamed", "another task", "random", "numbers"])
def test_the_data_numbers_its_classes_where_the_folder_has_no_head_for_them(kind: str, tmp_path: Path) -> None:
    folder = trained(tmp_path / "model", ("LABEL_0", "LABEL_1") if kind == "unnamed" else ("yes", "no"))
    if kind == "another task":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": ["DistilBertForMaskedLM"]}))
    model = {"init": "random"} if kind == "random" else {}
    labels = [1, 0] if kind == "numbers" else ["zoo", "ant"]
    source, found = opened(folder, labels, model)
    assert found == [1, 0] and source.class_names == (None if kind == "numbers" else ("ant", "zoo"))


@pytest.mark.parametrize("names", [("yes", "no"), ("c", "a", "b")])
def test_numbers_are_those_of_the_classes_of_a_trained_folder(names: tuple[str, ...], tmp_path: Path) -> None:
    folder = trained(tmp_path / "model", names)
    source, labels = opened(folder, [0, 0])
    assert labels == [0, 0] and source.classes == len(names), "its head stays, also where not all classes are there"
    more = len(names)
    with pytest.raises(
        InputError, match=rf"label_field: got class {more}, expected 0 to {more - 1}: {', '.join(names)}"
    ):
        opened(folder, [0, more])
    assert opened(folder, [0, more], class_names=[f"n{k}" for k in range(more + 1)])[0].classes == more + 1


def test_names_without_their_numbers_are_read(tmp_path: Path) -> None:
    """A config made with id2label alone."""
    folder = trained(tmp_path / "model", ("yes", "no"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "label2id": {"LABEL_0": 0, "LABEL_1": 1}}))
    assert opened(folder, ["no", "yes"])[1] == [1, 0]


def test_weights_of_another_place_number_the_classes(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base", "distilbert", task="masked")
    start = trained(tmp_path / "start", ("yes", "no"))
    assert opened(base, ["no", "yes"], {"init_from": str(start)})[1] == [1, 0]
    assert opened(base, ["no", "yes"], {"init_from": str(tmp_path / "gone")})[1] == [0, 1], "others say that it is gone"
    with pytest.raises(InputError, match=r"the classes ham, no, expected .* yes, no"):
        opened(base, ["no", "ham"], {"init_from": str(start)})


@pytest.mark.parametrize("place", ["run", "checkpoint"])
def test_a_table_has_the_classes_of_the_run_that_it_starts_from(place: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from raytrain.models.mlp import mlp

    step = tmp_path / "run" / "checkpoints" / "step_00000004"
    step.mkdir(parents=True)
    state = mlp(num_features=2, hidden=[4], num_classes=2).module.state_dict()
    save_file(dict(state), step / "model.safetensors")
    about = {
        "parts": {"model": ["model.safetensors"]},
        "tied": {},
        "extra": {"source_facts": {"class_names": ["a", "b"]}},
    }
    (step / "manifest.json").write_text(json.dumps(about))
    (step / "COMPLETE").write_text("")
    start = step if place == "checkpoint" else tmp_path / "run"
    for names, fits in (("ab", True), ("ac", False)):
        rows = "".join(f"{row},{row % 3},{names[row % 2]}\n" for row in range(8))
        (tmp_path / "rows.csv").write_text("x,y,kind\n" + rows)
        model = {"builder": "raytrain.models.mlp:mlp", "hidden": [4], "init_from": str(start)}
        data = {"source": "csv", "path": str(tmp_path / "rows.csv"), "label": "kind", "eval_fraction": 0}
        spec = resolved(load_spec(mapping={"model": model, "data": data, "precision": {"dtype": "fp32"}}).spec)
        if fits:
            assert check_on_driver(spec, run_batch=False).source.class_names == ("a", "b")
        else:
            with pytest.raises(InputError, match=r"the classes a, c, expected .* a, b"):
                check_on_driver(spec, run_batch=False)


@pytest.mark.long
def test_a_text_is_cut_where_training_cut_it(run_cli: Any, tmp_path: Path) -> None:
    make_folder(tmp_path / "base", "distilbert", task="masked")
    rows = [{"text": "mill rain " * 30, "y": "ab"[n % 2]} for n in range(16)]
    lines = write_lines(tmp_path / "rows.jsonl", rows)
    mapping = {
        "name": "cut", "model": {"builder": CLASSIFIER, "path": str(tmp_path / "base")},
        "data": {"source": "jsonl", "path": str(lines), "text_field": "text", "label_field": "y", "max_length": 6},
        "precision": {"dtype": "fp32"}, "loop": {"max_steps": 2, "global_batch_size": 8},
        "scale": {"workers": 1, "threads": 1}, "telemetry": {"tensorboard": False},
    }  # fmt: skip
    (tmp_path / "job.yaml").write_text(json.dumps(mapping))
    done = run_cli("train", "job.yaml", "--debug", cwd=tmp_path)
    assert done.code == 0, done.text
    schema = pa.schema([("text", pa.string())])
    for overrides, length in (([], 6), (["data.max_length=9"], 9)):
        target = open_target(str(tmp_path / "runs" / "latest"), overrides, local_inventory())
        predictor = target.model.load(target.spec.infer, schema)
        assert isinstance(predictor, TextClassifier)
        assert [len(ids) for ids in predictor.encode([rows[0]["text"], "mill"])] == [length, 1]
