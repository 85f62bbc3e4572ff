"""Models in folders of transformers: what is built of them, what is refused, and what a run leaves behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import make_folder, texts, write_lines
from lab import make_session, train

from jobs.driver.check_job import check_on_driver
from jobs.driver.planning import plan_job
from jobs.job.facts import resolved
from jobs.job.spec import load_spec
from raytrain.config.sections import ModelConfig
from raytrain.errors import InputError
from raytrain.execution.export import export
from raytrain.infer.model import InferenceModel
from raytrain.models.huggingface import folder_facts
from raytrain.models.sizes import SizeError
from raytrain.models.transformers import ReadsWeights, causal_lm, classifier, keeps_documents_apart
from raytrain.models.weights.headers import find_weights
from raytrain.models.weights.stored import StartingWeights, StoredTensors
from raytrain.runs.folder import RunFolder
from raytrain.train.module_checks import check_module
from raytrain.trainable import parameters_of, shifted_labels_weight

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra `transformers`)")

LM, CLASSIFIER = "raytrain.models.transformers:causal_lm", "raytrain.models.transformers:classifier"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `llama`, `gpt2` and `distilbert`."""
    place = tmp_path_factory.mktemp("models")
    for kind in ("llama", "gpt2"):
        make_folder(place / kind, kind)
    make_folder(place / "distilbert", "distilbert", task="masked")
    return place


def rows_of(batch: int = 3, length: int = 9, *, vocabulary: int = 280) -> dict[str, torch.Tensor]:
    ids = torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[1, 6:] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_loss_is_that_of_transformers(models: Path, kind: str) -> None:
    trainable = causal_lm(path=str(models / kind))
    batch = rows_of()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(models / kind)(**batch).loss
    ours = trainable.loss(trainable.module.eval(), batch)
    torch.testing.assert_close(ours.loss, theirs, rtol=1e-6, atol=0)
    assert set(ours.metrics) == {"accuracy"} and trainable.loss(trainable.module.train(), batch).metrics == {}
    assert trainable.weight is shifted_labels_weight and shifted_labels_weight(batch) == 3 * 8 - 3


def test_a_classifier_has_a_new_head_and_the_trunk_of_the_folder(models: Path) -> None:
    trainable = classifier(path=str(models / "distilbert"), class_names=("no", "yes"), num_classes=2)
    trunk = transformers.AutoModel.from_pretrained(models / "distilbert").state_dict()
    state = trainable.module.state_dict()
    assert all(torch.equal(state[f"distilbert.{name}"], tensor) for name, tensor in trunk.items())
    assert state["classifier.weight"].shape == (2, 32) and trainable.module.config.id2label == {0: "no", 1: "yes"}
    batch = {**rows_of(), "labels": torch.tensor([0, 1, 1])}
    out = trainable.loss(trainable.module.eval(), batch)
    torch.testing.assert_close(out.loss, trainable.module(**batch).loss)
    assert 0 <= float(out.metrics["accuracy"]) <= 1


def test_a_language_model_becomes_a_classifier(models: Path) -> None:
    """Its rows end where padding begins, which it finds by the tokenizer's id."""
    trainable = classifier(path=str(models / "llama"), num_labels=3)
    module = trainable.module.eval()
    row = torch.tensor([[7, 8, 9]])
    wide = torch.tensor([[7, 8, 9, 2, 2]])
    alone = module(input_ids=row, attention_mask=torch.ones_like(row)).logits
    among = module(input_ids=wide, attention_mask=(wide != 2).long()).logits
    torch.testing.assert_close(alone, among)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_packed_documents_do_not_read_each_other(models: Path, kind: str) -> None:
    module = causal_lm(path=str(models / kind)).module.eval()
    assert keeps_documents_apart(module)
    ids = rows_of()["input_ids"][:1]
    together = module(input_ids=ids, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])).logits[:, 4:]
    torch.testing.assert_close(together, module(input_ids=ids[:, 4:]).logits)


def test_dropout_is_not_mistaken_for_attention_across_documents(models: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(models / "gpt2", tmp_path / "dropping")
    config = json.loads((folder / "config.json").read_text())
    config |= {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    (folder / "config.json").write_text(json.dumps(config))
    trainable = causal_lm(path=str(folder), init="random")
    assert trainable.module.training
    packed = {**rows_of(), "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 3)}
    losses = [trainable.loss(trainable.module, packed).loss for _ in range(2)]
    assert losses[0] != losses[1], "something is dropped"


def test_frozen_parameters_have_no_gradient_and_no_state(models: Path) -> None:
    ids = rows_of(16)
    session = make_session(
        {"builder": LM, "path": str(models / "llama"), "freeze": ["model.embed_tokens.*", "*.mlp.*"]},
        {"train": ids, "eval": ids},
    )
    module = session.trainable.module
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    train(session)
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name in before if "embed" in name or ".mlp." in name} and len(frozen) == 7
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name]) is (name in frozen), name
        assert (parameter.grad is None) is (name in frozen)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert sum(flat.numel() for flat in session.step.gradients.buffers) == trained
    assert sum(len(group["params"]) for group in session.optimizers[0].param_groups) == len(before) - len(frozen)


def test_a_run_exports_a_folder_that_transformers_loads(models: Path, tmp_path: Path) -> None:
    """And that another run starts from."""
    lines = write_lines(tmp_path / "rows.jsonl", texts(24))
    data = {"source": "jsonl", "path": str(lines), "text_field": "text", "tokenizer": str(models / "llama"),
            "max_length": 24, "labels": "same"}  # fmt: skip
    session = make_session({"builder": LM, "path": str(models / "llama")}, data, loop={"max_steps": 3})
    train(session)
    run = RunFolder.create(str(tmp_path / "runs"), "run")
    export(session, session.trainable.module, run)
    folder = Path(run.weights).parent
    made, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()) and made.lm_head.weight is made.model.embed_tokens.weight
    assert made.config.use_cache
    ours = session.trainable.module.state_dict()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in made.state_dict().items())
    assert transformers.AutoTokenizer.from_pretrained(folder)("the rain").input_ids
    assert json.loads(Path(run.sample).read_text())["prompt"]
    after = {"builder": LM, "path": str(models / "llama"), "init": "random", "init_from": run.path}
    follower = make_session(after, data)
    assert all(torch.equal(tensor, ours[name]) for name, tensor in follower.trainable.module.state_dict().items())


class Wrapped(torch.nn.Module):
    """Holds a model, as adapters do; with `more` also a tensor of its own."""

    def __init__(self, inner: Any, *, more: bool = False) -> None:
        super().__init__()
        self.base_model, self.config = inner, inner.config
        if more:
            self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **batch: Any) -> Any:
        return self.base_model(input_ids=input_ids, attention_mask=attention_mask, **batch)


def wrapped(path: str, init: str = "weights", vocab_size: int | None = None) -> Any:
    """A user's builder."""
    made = causal_lm(path=path, init=init, vocab_size=vocab_size)
    made.module = Wrapped(made.module)
    return made


def in_half(folder: Path, kind: str, dtype: torch.dtype, **options: Any) -> Path:
    """A folder in half precision, but for its norms."""
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder / kind, dtype=dtype)
    for name, parameter in whole.named_parameters():
        if "norm" in name or "ln_" in name:
            parameter.data = parameter.data.float()
    made = folder / f"{kind}-{dtype}-{len(options)}".replace("torch.", "")
    whole.save_pretrained(made, **options)
    transformers.AutoTokenizer.from_pretrained(folder / kind).save_pretrained(made)
    return made


def stored_dtypes(folder: Path) -> dict[str, str]:
    return dict(find_weights(str(folder), key="").dtypes)


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        ("llama", torch.bfloat16, {}), ("gpt2", torch.float16, {}),
        ("llama", torch.bfloat16, {"max_shard_size": "20KB"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("builder", [LM, f"{__name__}:wrapped"])
def test_a_folder_in_half_precision_comes_back_in_it(
    models: Path, tmp_path: Path, kind: str, dtype: torch.dtype, options: dict[str, Any], builder: str
) -> None:
    """Also from a checkpoint, and of a module that wraps the model; what the folder keeps in float32 stays so."""
    folder = in_half(models, kind, dtype, **options)
    lines = write_lines(tmp_path / "rows.jsonl", texts(24))
    data = {"source": "jsonl", "path": str(lines), "text_field": "text", "tokenizer": str(folder), "max_length": 24,
            "labels": "same"}  # fmt: skip
    session = make_session({"builder": builder, "path": str(folder)}, data, loop={"max_steps": 3})
    train(session)
    ours = {name.removeprefix("base_model."): one for name, one in session.trainable.module.state_dict().items()}
    assert {one.dtype for one in ours.values()} == {torch.float32}
    run = RunFolder.create(str(tmp_path / "runs"), "run")
    export(session, session.trainable.module, run)
    written = Path(run.weights).parent
    assert stored_dtypes(written) == stored_dtypes(folder) and len(set(stored_dtypes(folder).values())) == 2
    made, report = transformers.AutoModelForCausalLM.from_pretrained(written, output_loading_info=True)
    assert not any(report.values()) and made.dtype == dtype
    saved = {name: one.to(dtype) if one.ndim > 1 else one for name, one in ours.items()}
    by_header = StoredTensors(str(written))
    assert all(torch.equal(by_header[name].float(), saved[name].float()) for name in by_header if "norm" not in name
               and "bias" not in name and "ln_" not in name)  # fmt: skip
    norm = next(name for name in by_header if "norm" in name or "ln_" in name)
    assert torch.equal(by_header[norm], ours[norm])
    after = {"builder": builder, "path": str(folder), "init": "random", "init_from": run.path}
    follower = make_session(after, data).trainable.module.state_dict()
    assert all(torch.equal(by_header[name.removeprefix("base_model.")].float(), one) for name, one in follower.items()
               if name.removeprefix("base_model.") in by_header)  # fmt: skip


def test_a_folder_in_full_precision_and_random_weights_stay_as_they_train(models: Path, tmp_path: Path) -> None:
    for name, path, init in (
        ("a", models / "gpt2", "weights"),
        ("b", in_half(models, "gpt2", torch.float16), "random"),
    ):
        made = causal_lm(path=str(path), init=init)
        assert made.export is not None
        made.export(dict(made.module.state_dict()), str(tmp_path / name))
        assert set(stored_dtypes(tmp_path / name).values()) == {"F32"}
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "float32"


def test_a_module_that_wraps_a_language_model_answers_as_one(models: Path) -> None:
    about = InferenceModel(ModelConfig(builder="mine:wrapped"), tokenizer=str(models / "llama"))
    inner: Any = causal_lm(path=str(models / "llama")).module
    named = Wrapped(inner)
    named.forward = lambda **batch: inner(**batch)  # type: ignore[method-assign]
    assert about.is_language_model(named) and about.is_language_model(inner)
    named.config = None
    assert not about.is_language_model(named)


@pytest.mark.parametrize("kind", ["more", "less", "adapters"])
def test_a_module_that_is_not_what_it_would_export_is_refused(models: Path, kind: str) -> None:
    made = causal_lm(path=str(models / "llama"))
    inner: Any = made.module
    if kind == "adapters":  # inside, as peft does it
        inner.model.layers[1].mlp.up_proj.lora_A = torch.nn.Linear(2, 2)
    made.module = inner.model if kind == "less" else Wrapped(inner, more=kind == "more")
    named = {"more": "more tensors .*scale", "less": "(more|less) tensors .*", "adapters": "more tensors .*lora_A"}[
        kind
    ]
    with pytest.raises(InputError, match=rf"^model.builder: got a module with {named}.*set trainable.export = None"):
        check_module(made, key="model.builder", strategy="data_parallel")
    made.export = None
    check_module(made, key="model.builder", strategy="data_parallel")


def test_weights_under_the_names_of_another_format_are_translated(tmp_path: Path) -> None:
    """Mixtral's files hold each expert by itself, a module holds them joined."""
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=290, num_local_experts=3, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    path = str(tmp_path)
    spec = resolved(load_spec(mapping={
        "model": {"builder": LM, "path": path, "init": "random", "init_from": path}, "data": {"train": rows_of()},
    }).spec)  # fmt: skip
    check_on_driver(spec)
    taken = causal_lm(path=path, init="random")
    StartingWeights(path).fill(taken.module, taken.translate)
    whole = causal_lm(path=path).module.state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in taken.module.state_dict().items())


def test_a_routers_balance_loss_is_reported_separately(tmp_path: Path) -> None:
    """Where the config asks for it; with the loss it is transformers' own."""
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=290, num_local_experts=3, max_position_embeddings=32, output_router_logits=True,
    )  # fmt: skip
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    trainable = causal_lm(path=str(tmp_path))
    ours, theirs = trainable.loss(trainable.module, rows_of()), trainable.module(**rows_of())
    assert ours.aux is not None and float(ours.aux.detach()) > 0
    torch.testing.assert_close(ours.loss + ours.aux, theirs.loss)


def test_on_the_meta_device_headers_are_enough(models: Path) -> None:
    with torch.device("meta"):
        assert next(causal_lm(path=str(models / "llama")).module.parameters()).is_meta
        classifier(path=str(models / "distilbert"), num_labels=2)


def test_sizes_are_those_of_the_headers(models: Path) -> None:
    keys = {"path": str(models / "llama"), "freeze": ["model.layers.0.*"]}
    module = causal_lm(**keys).module
    facts = folder_facts(LM, keys)
    assert facts is not None and facts.parameters == parameters_of(module)
    assert facts.trainable_bytes == 4 * sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert folder_facts(LM, {**keys, "init": "random"}) is None and folder_facts("raytrain.models.gpt:gpt", {}) is None


def broken(models: Path, tmp_path: Path, **change: Any) -> str:
    """The llama with another config.json."""
    shutil.copytree(models / "llama", tmp_path / "broken")
    config = json.loads((tmp_path / "broken" / "config.json").read_text())
    (tmp_path / "broken" / "config.json").write_text(json.dumps({**config, **change}))
    return str(tmp_path / "broken")


def test_weights_that_do_not_fit_are_one_message(models: Path, tmp_path: Path) -> None:
    """Headers alone do not settle it, as files may have other names: then the CPU reads them."""
    path = broken(models, tmp_path, num_hidden_layers=3, intermediate_size=40)
    with torch.device("meta"), pytest.raises(ReadsWeights):
        causal_lm(path=path)
    spec = resolved(load_spec(mapping={"model": {"builder": LM, "path": path}, "data": {"train": rows_of()}}).spec)
    with pytest.raises(InputError) as error:
        check_on_driver(spec)
    assert error.value.key == "model.path"
    assert "9 missing (model.layers.2." in error.value.got and "and 4 more); 6 misshapen (" in error.value.got


@pytest.mark.parametrize(
    ("keys", "key", "says"),
    [
        ({"path": "nowhere"}, "model.path", "no folder at nowhere"),
        ({"path": 3}, "model.path", "got 3"),
        ({"init": "zeros"}, "model.init", "weights or random"),
        ({"context": 65}, "model.context", "at most 64"),
        ({"freeze": ["layers.*"]}, "model.freeze", "which no parameter matches, expected names such as model.embed"),
        ({"freeze": [3]}, "model.freeze", "a list of patterns"),
        ({"vocab_size": 400}, "data.tokenizer", "400 tokens in the data"),
        ({"builder": CLASSIFIER, "num_labels": 2, "num_classes": 3}, "model.num_labels", "at least 3"),
        ({"builder": CLASSIFIER}, "model.num_labels", "a number of classes"),
        ({"layers": 3}, "model.layers", "does not accept"),
    ],
)
def test_a_mistake_names_its_key(models: Path, keys: dict[str, Any], key: str, says: str) -> None:
    mapping = {"model": {"builder": LM, "path": str(models / "llama"), **keys}, "data": {"train": rows_of()}}
    with pytest.raises(InputError, match=says) as error:
        check_on_driver(load_spec(mapping=mapping).spec)
    assert error.value.key == key


def test_a_plan_says_it_too(tmp_path: Path) -> None:
    model = {"builder": LM, "path": str(tmp_path / "x")}
    with pytest.raises(InputError, match="no folder at"):
        plan_job(load_spec(mapping={"model": model, "data": {"train": rows_of()}}))


def test_a_folder_of_another_kind_is_refused(models: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json in"):
        causal_lm(path=str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="no model_type in"):
        causal_lm(path=str(tmp_path))
    with pytest.raises(InputError, match=r"model.path: got .*distilbert"):
        causal_lm(path=str(models / "distilbert"))
    with pytest.raises(InputError, match="that this version of transformers knows"):
        causal_lm(path=broken(models, tmp_path, model_type="unheard_of"))


def test_without_the_extra_the_message_names_it(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for call in (lambda: causal_lm(path=str(models / "llama")), lambda: folder_facts(LM, {"path": "x"})):
        with pytest.raises(InputError, match=r"transformers is not installed.*pip install 'raytrain\[transformers\]'"):
            call()


def test_a_bad_size_is_one_of_ours(models: Path) -> None:
    with pytest.raises(SizeError):
        causal_lm(path=str(models / "llama"), context=0)


def test_a_classifier_learns_and_its_evaluations_have_an_accuracy(models: Path, tmp_path: Path) -> None:
    """Four sentences tell themselves apart by their first words."""
    lines = write_lines(tmp_path / "rows.jsonl", texts(80))
    data = {"source": "jsonl", "path": str(lines), "text_field": "text", "label_field": "class", "max_length": 24,
            "tokenizer": str(models / "distilbert")}  # fmt: skip
    session = make_session(
        {"builder": CLASSIFIER, "path": str(models / "distilbert")}, data, optim={"lr": 0.01},
        loop={"max_steps": 40, "eval_every": 20},
    )  # fmt: skip
    rows, _ = train(session)
    assert rows.of("eval", "accuracy")[-1] > 0.9 and len(rows.of("eval", "accuracy")) == 2
    assert session.trainable.module.config.id2label == {0: "a", 1: "b", 2: "c", 3: "d"}
