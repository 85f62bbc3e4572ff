"""Thirty mistakes and more in a YAML or an override: each is exit 2, and the right key is named."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jobs.job.spec import load_spec, refuse_later
from raytrain.errors import InputError

JOB = """\
name: mine
model:
  builder: raytrain.models.gpt:gpt
  layers: 4
  width: 128
data:
  source: text
  path: input.txt
"""


@dataclass(frozen=True)
class Mistake:
    """One mistake: lines added to a good job (or a text in its place), overrides, and what must be said."""

    key: str
    adds: str = ""
    text: str | None = None
    overrides: list[str] = field(default_factory=list)
    says: tuple[str, ...] = ()

    @property
    def job(self) -> str:
        return JOB + self.adds if self.text is None else self.text


FILE = "job.yaml"
MISTAKES = {
    # names
    "unknown section": Mistake("optimizer", "optimizer: {lr: 1}", says=("did you mean optim.lr?", "precision")),
    "unknown key": Mistake("loop.max_step", "loop: {max_step: 3}", says=("did you mean loop.max_steps?",)),
    "key of another section": Mistake("loop.lr", "loop: {lr: 1}", says=("did you mean optim.lr?",)),
    "key at the top": Mistake("max_steps", "max_steps: 3", says=("did you mean loop.max_steps?",)),
    "duplicate key": Mistake("loop.epochs", "loop:\n  epochs: 1\n  epochs: 2", says=("lines 10 and 11",)),
    "duplicate section": Mistake("data", "data: {source: text}", says=("lines 6 and 9",)),
    "number as a key": Mistake("data.3", text=JOB + "  3: x\n"),
    "unknown section in an override": Mistake("loops", overrides=["loops.epochs=1"], says=("mean loop.epochs?",)),
    "unknown key in an override": Mistake("optim.learning_rate", overrides=["optim.learning_rate=1"],
                                          says=("did you mean optim.lr?",)),
    # types
    "boolean for an integer": Mistake("loop.max_steps", "loop: {max_steps: true}", says=("a boolean",)),
    "string for an integer": Mistake("loop.max_steps", 'loop: {max_steps: "7"}', says=("without quotes",)),
    "underscore in a number": Mistake("loop.max_steps", "loop: {max_steps: 1_000}", says=("underscores",)),
    "date for an integer": Mistake("seed", "seed: 2024-01-01", says=('"2024-01-01" (a string)',)),
    "fraction for an integer": Mistake("loop.epochs", "loop: {epochs: 1.5}", says=("1.5 (a number)",)),
    "yes for a boolean": Mistake("loop.deterministic", "loop: {deterministic: yes}", says=("true or false",)),
    "integer for a string": Mistake("save.dir", "save: {dir: 7}", says=("in quotes",)),
    "list for a scalar": Mistake("optim.lr", "optim: {lr: [1e-3]}", says=("a list",)),
    "scalar for a list": Mistake("optim.betas", "optim: {betas: 0.9}"),
    "scalar for a section": Mistake("loop", "loop: 3", says=("max_steps",)),
    "list for a section": Mistake("scale", "scale: [2]", says=("a mapping",)),
    "empty section": Mistake("loop", "loop:\n", says=("null",)),
    "null without a meaning": Mistake("loop.log_every", "loop: {log_every: null}", says=("got null",)),
    "empty override": Mistake("optim.lr", overrides=["optim.lr="], says=("nothing after the =", "optim.lr=null")),
    "key of another program": Mistake("batch_size", overrides=["batch_size=3"], says=("mean loop.global_batch_size?",)),
    # ranges and words
    "zero steps": Mistake("loop.max_steps", "loop: {max_steps: 0}", says=(">= 1",)),
    "negative interval": Mistake("loop.log_every", "loop: {log_every: -1}", says=(">= 0",)),
    "zero learning rate": Mistake("optim.lr", "optim: {lr: 0}", says=("> 0",)),
    "infinite learning rate": Mistake("optim.lr", overrides=["optim.lr=.inf"], says=("finite",)),
    "three betas": Mistake("optim.betas", "optim: {betas: [0.9, 0.95, 0.99]}", says=("a list of 2",)),
    "beta of one": Mistake("optim.betas", "optim: {betas: [0.9, 1.0]}", says=("< 1",)),
    "eval of more than all": Mistake("data.eval_fraction", "", None, ["data.eval_fraction=1.5"], ("< 1",)),
    "unknown precision": Mistake("precision.dtype", "precision: {dtype: bfloat16}",
                                 says=("did you mean bf16?", "fp32")),
    "unknown schedule": Mistake("optim.schedule", "optim: {schedule: cosin}", says=("did you mean cosine?",)),
    "false for a word": Mistake("loop.compile", "loop: {compile: false}", says=("off",)),
    "unknown strategy": Mistake("scale.strategy", "scale: {strategy: pipeline_parallel}", says=("fsdp",)),
    "workers upside down": Mistake("scale.workers", "scale: {workers: [4, 2]}", says=("min <= max",)),
    "no hosts of a kind": Mistake("experts.hosts", "experts: {hosts: {A100: 0}}", says=("A100: 4",)),
    "negative seed": Mistake("seed", overrides=["seed=-1"]),
    "name with a space": Mistake("name", overrides=["name=my run"], says=("letters",)),
    "name with a slash": Mistake("name", overrides=["name=../other"]),
    "name too long": Mistake("name", overrides=["name=" + "x" * 65], says=("64",)),
    "name that is a number": Mistake("name", overrides=["name=7"], says=("in quotes", "'name=\"7\"'")),
    "name of the folder above": Mistake("name", overrides=["name=.."], says=("not dots alone",)),
    "name of the folder itself": Mistake("name", overrides=["name=."], says=("not dots alone",)),
    # what must be there, and what does not fit together
    "no model": Mistake("model", text="data: {source: text}", says=("builder",)),
    "no data": Mistake("data", text="model: {builder: 'a:b'}", says=("source",)),
    "no builder": Mistake("model.builder", text="model: {width: 3}\ndata: {source: text}"),
    "no source": Mistake("data.source", text="model: {builder: 'a:b'}\ndata: {path: input.txt}"),
    "builder without a function": Mistake("model.builder", overrides=["model.builder=raytrain.models.gpt"],
                                          says=("module:function",)),
    "module in a file": Mistake("model.module", overrides=["model.module=MyNet"], says=("Python",)),
    "dataset in a file": Mistake("data.train", overrides=["data.train=train.csv"], says=("Python",)),
    "micro-batch that does not divide": Mistake(
        "loop.micro_batch_size", "loop: {global_batch_size: 32, micro_batch_size: 5}",
        says=("loop.global_batch_size, 32",)),
    "more experts per token than experts": Mistake("experts.top_k", "experts: {num_experts: 2, top_k: 3}",
                                                   says=("experts.num_experts, 2",)),
    "more widths than experts": Mistake("experts.hidden", "experts: {num_experts: 2, hidden: [8, 8, 16]}",
                                        says=("3 widths", "experts.num_experts is 2")),
    "more experts per token than widths": Mistake("experts.top_k", "experts: {hidden: [8], top_k: 2}",
                                                  says=("experts.num_experts, 1",)),
    "a width of nothing": Mistake("experts.hidden", "experts: {hidden: [8, 0]}"),
    "gate of no shared expert": Mistake("experts.shared_gate", "experts: {shared_gate: true}",
                                        says=("experts.shared_expert: true",)),
    "replicas without hosts": Mistake("experts.replicas", "experts: {hosts: 0, replicas: 1}"),
    "moves without hosts": Mistake("experts.rebalance_every", "experts: {hosts: 0, rebalance_every: 5}",
                                   says=("null where experts.hosts is 0",)),
    "experts of a dense model": Mistake("experts.num_experts", "experts: {num_experts: 4}",
                                        says=("raytrain.models.gpt:gpt", "experts.models:moe_gpt")),
    "hosts of a dense model": Mistake("experts.hosts", "experts: {hosts: colocated}", says=("auto or 0",)),
    "patience without evaluation": Mistake("loop.patience", "loop: {patience: 2}",
                                           overrides=["data.eval_fraction=0"], says=("data.eval_fraction",)),
    # what comes later
    "fewer at most than at least": Mistake("scale.workers", "scale: {workers: [2, 1]}", says=("min <= max",)),
    "searched batch size": Mistake("loop.global_batch_size", overrides=["loop.global_batch_size=auto"]),
    # what is no YAML, and no override
    "open bracket": Mistake(FILE, "loop: {max_steps: 3", says=("line",)),
    "tab": Mistake(FILE, "loop:\n\tepochs: 1", says=("line 10", "spaces")),
    "list at the top": Mistake(FILE, text="- model\n- data\n", says=("a mapping",)),
    "empty file": Mistake(FILE, text="", says=("an empty file",)),
    "two documents": Mistake(FILE, "---\nname: x", says=("document",)),
    "python tag": Mistake("model.layers", text=JOB.replace("layers: 4", "layers: !!python/name:os.fork")),
    "override without =": Mistake("loop.max_steps", overrides=["loop.max_steps"], says=("section.key=",)),
    "override of nothing": Mistake("=3", overrides=["=3"], says=("section.key=value",)),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_exit_2_and_its_key_is_named(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(FILE).write_text(mistake.job)
    with pytest.raises(InputError) as caught:
        refuse_later(load_spec(FILE, mistake.overrides).spec, "train")
    assert caught.value.exit_code == 2
    assert caught.value.key == mistake.key
    assert [words for words in mistake.says if words not in str(caught.value)] == []


def test_there_are_thirty_of_them_and_the_job_without_them_is_good(tmp_path: Path) -> None:
    assert len({(mistake.job, *mistake.overrides) for mistake in MISTAKES.values()}) >= 30
    (tmp_path / FILE).write_text(JOB)
    refuse_later(load_spec(tmp_path / FILE).spec, "train")
