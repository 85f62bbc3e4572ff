"""Prompts have the tokens that transformers gives them, in training, inference and the sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import make_folder, make_tokenizer, write_lines

from jobs.job.facts import resolved
from jobs.job.spec import load_spec
from raytrain.config.sections import InferConfig, ModelConfig
from raytrain.data.sources.open import open_source
from raytrain.errors import InputError
from raytrain.infer.convert import converted
from raytrain.infer.generate import language_sample
from raytrain.infer.input import InputRows, input_files
from raytrain.infer.model import InferenceModel, _prompt, prompt_of, template_columns
from raytrain.models import huggingface as hf
from raytrain.models.huggingface import encode_prompts, ended

pytest.importorskip("transformers", reason="transformers is not installed (the extra `transformers`)")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

LM = "raytrain.models.transformers:causal_lm"
TEXTS = ("the rain", "<s>the mill", "the wheel</s>", "<s>a</s>", "", "</s>")
FRAMES = {"nothing": "$A", "begin": "<s> $A", "both": "<s> $A </s>", "end": "$A </s>"}


def tokenizer_with(frame: str, **given: Any) -> Any:
    """The tests' tokenizer with what its post-processor puts around a text."""
    from tokenizers.processors import TemplateProcessing

    made = make_tokenizer()
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=FRAMES[frame], special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    for name, value in given.items():
        setattr(made, name, value)
    return made


def folder_with(folder: Path, frame: str, **given: Any) -> Path:
    make_folder(folder)
    tokenizer_with(frame, **given).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("frame", FRAMES)
def test_a_prompt_has_the_tokens_of_transformers_without_an_added_end(frame: str) -> None:
    tokenizer = tokenizer_with(frame)
    for text, ids in zip(TEXTS, encode_prompts(tokenizer, TEXTS), strict=True):
        theirs = tokenizer(text)["input_ids"]
        expected = theirs[:-1] if frame in ("both", "end") else theirs
        expected = expected[1:] if expected[:2] == [0, 0] else expected  # a template has written it
        assert ids.tolist() == expected and ids.dtype == np.int32


def test_a_begin_token_that_is_also_the_end_token_stays() -> None:
    """As in OPT."""
    tokenizer = tokenizer_with("end", bos_token="</s>")
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 1)])
    found = encode_prompts(tokenizer, ["the", ""])
    assert found[0].tolist() == tokenizer("the")["input_ids"] and found[1].tolist() == [1]


def test_an_end_token_is_added_only_where_it_is_missing() -> None:
    tokenizer = tokenizer_with("nothing")
    for given, expected in (([5, 6], [5, 6, 1]), ([5, 1], [5, 1]), ([], [1])):
        assert ended(tokenizer, np.array(given, np.int32)).tolist() == expected
    tokenizer.eos_token = None
    assert ended(tokenizer, np.array([5], np.int32)).tolist() == [5]


@pytest.mark.parametrize("frame", FRAMES)
def test_training_and_inference_read_the_same_prompt(frame: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "llama", frame)
    rows = [{"prompt": text, "completion": answer} for text in TEXTS for answer in (" falls", " falls</s>")]
    data = {"source": "jsonl", "path": str(write_lines(tmp_path / "rows.jsonl", rows)), "eval_fraction": 0,
            "prompt_field": "prompt", "completion_field": "completion"}  # fmt: skip
    spec = resolved(load_spec(mapping={"model": {"builder": LM, "path": str(folder)}, "data": data}).spec)
    source = open_source(spec.data, context=None)
    model = InferenceModel(ModelConfig.model_validate({"builder": LM, "path": str(folder)}), tokenizer=str(folder))
    predictor: Any = model.load(InferConfig(max_new_tokens=4), pa.schema({"prompt": pa.string()}))
    falls = tokenizer_with("nothing")(" falls")["input_ids"]
    for row, given in enumerate(rows):
        if given["prompt"] == "" and frame in ("nothing", "end"):
            continue  # inference refuses it: there is nothing to continue
        batch = source.train.gather(np.array([row]))
        ids, learned = batch["input_ids"][0], batch["labels"][0] != -100
        assert ids[~learned].tolist() == predictor._tokens(given["prompt"])
        assert ids[learned].tolist() == [*falls, 1], "the end token is learned once"


@pytest.mark.parametrize("begins", [True, False])
def test_a_chat_template_decides_on_the_begin_token(begins: bool, tmp_path: Path) -> None:
    template = "{{bos_token}}" * begins + "{% for m in messages %}[{{m.role}}]{{m.content}}{% endfor %}"
    folder = folder_with(tmp_path / "llama", "both", chat_template=template)
    model = InferenceModel(ModelConfig.model_validate({"builder": LM, "path": str(folder)}), tokenizer=str(folder))
    predictor: Any = model.load(InferConfig(max_new_tokens=4, chat=True), pa.schema({"prompt": pa.string()}))
    text = predictor.prompt.texts(pa.table({"prompt": ["the mill"]}))[0]
    theirs = tokenizer_with("both", chat_template=template).apply_chat_template(
        [{"role": "user", "content": "the mill"}], return_dict=False
    )
    assert predictor._tokens(text) == list(theirs) and theirs.count(0) == begins


def test_an_answer_ends_with_every_end_token_of_the_folder(tmp_path: Path) -> None:
    """As that of a turn in Gemma and Llama 3."""
    import transformers

    folder = folder_with(tmp_path / "llama", "begin")
    transformers.GenerationConfig(eos_token_id=[1, 9]).save_pretrained(folder)
    model = InferenceModel(ModelConfig.model_validate({"builder": LM, "path": str(folder)}), tokenizer=str(folder))
    predictor: Any = model.load(InferConfig(max_new_tokens=4), pa.schema({"prompt": pa.string()}))
    assert predictor.sampling.end_ids == {1, 9}


@pytest.mark.parametrize("kind", ["text", "rows"])
def test_the_sample_begins_as_a_prompt_of_inference_does(kind: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "llama", "both")
    if kind == "text":
        (tmp_path / "long.txt").write_text("the rain falls on the roof. " * 80)
        data = {"source": "text", "path": str(tmp_path / "long.txt")}
    else:
        rows = [{"p": "the rain", "c": " falls on the roof of the old mill."}] * 4
        data = {"source": "jsonl", "path": str(write_lines(tmp_path / "rows.jsonl", rows)), "prompt_field": "p",
                "completion_field": "c"}  # fmt: skip
    keys = {"builder": LM, "path": str(folder), **({"context": 16} if kind == "text" else {})}
    spec = resolved(load_spec(mapping={"model": keys, "data": data}).spec)
    source = open_source(spec.data, context=keys.get("context"))

    class Heard(torch.nn.Module):
        """Keeps what it reads first."""

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.first = torch.nn.Parameter(torch.zeros(1)), None

        def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
            self.first = input_ids[0].tolist() if self.first is None else self.first
            return {"logits": torch.zeros(*input_ids.shape, 290)}

    module = Heard()
    assert language_sample(module, source, context=keys.get("context"), tokens=2) is not None
    given = [0, *make_tokenizer()("the rain")["input_ids"]] if kind == "rows" else module.first
    assert module.first == given and module.first is not None and module.first.count(0) == 1
    assert module.first[0] == 0


@pytest.mark.parametrize(
    ("kind", "template"),
    [
        (pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})), False),
        (pa.struct({"role": pa.string()}), True),
        (pa.list_(pa.int64()), True),
        (pa.binary(), False),
        (pa.int64(), False),
    ],
    ids=["messages", "a mapping", "a list", "bytes", "a number"],
)
def test_a_column_that_holds_no_texts_is_refused_by_name(kind: Any, template: bool) -> None:
    made = {"field": None, "template": "Q: {said}"} if template else {"field": "said", "template": None}
    prompt = prompt_of(["id", "said"], **made, templates={}, chat=None)
    schema = pa.schema({"id": pa.int64(), "said": kind})
    with pytest.raises(InputError, match="the column said, which holds"):
        prompt.check(schema)
    with pytest.raises(InputError, match="the column said, which holds"):
        prompt.texts(schema.empty_table())


def test_a_template_writes_numbers_and_texts() -> None:
    prompt = prompt_of(["a", "b"], field=None, template="{a} of {b}", templates={}, chat=None)
    assert prompt.texts(pa.table({"a": [1, 2], "b": ["x", "y"]})) == ["1 of x", "2 of y"]


def test_values_stand_in_prompts_as_the_file_has_them(tmp_path: Path) -> None:
    lines = '{"n": 1, "b": true, "t": "\\"x"}\n{"n": 2.5, "b": false, "t": "2"}\n{"n": null, "b": true, "t": ""}\n'
    (tmp_path / "in.jsonl").write_text(lines)
    flags = {"b": [True, False, True], "n": pa.array([0.1, 1e10, None], pa.float32()), "t": ["", "", ""]}
    parquet.write_table(pa.table(flags), tmp_path / "in.parquet")
    template = "{n}|{b}|{t}"
    found = {}
    for name in ("in.jsonl", "in.parquet"):
        files = input_files(str(tmp_path / name))
        written = converted(files, str(tmp_path / "out"), exact=template_columns(InferConfig(template=template)))
        rows = InputRows.at(written)
        prompt = _prompt(InferConfig(template=template), rows.schema)
        table = rows.read(0, 3, prompt.columns)
        found[name] = prompt.texts(table.slice(0, 2))
        assert prompt.lenient(table) == [*found[name], None]
        with pytest.raises(InputError, match="no value in the column n"):
            prompt.texts(table)
        with pytest.raises(InputError, match=r"\{m\}, expected columns of infer.input: [nbt], [nbt], [nbt];"):
            _prompt(InferConfig(template="{m}"), rows.schema)
    assert found["in.jsonl"] == ['1|true|"x', "2.5|false|2"]
    assert found["in.parquet"] == ["0.1|true|", "10000000000.0|false|"]


def test_a_folder_of_a_tokenizer_without_a_vocabulary_is_one(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    theirs = ByT5Tokenizer()
    theirs.save_pretrained(tmp_path)
    (ids,) = hf.encode_rows(hf.open_tokenizer(str(tmp_path)), ["thé mill"], special=True)
    assert ids.tolist() == theirs("thé mill")["input_ids"]
    (tmp_path / "none").mkdir()
    assert hf.has_tokenizer(str(tmp_path)) and not hf.has_tokenizer(str(tmp_path / "none"))
