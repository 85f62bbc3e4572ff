"""Mistakes of somebody who starts: one sentence that says what to type, exit code 2, and Ray is not started."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from jobs.__main__ import main

CODE = """
import torch
from torch import nn


def nothing():
    pass


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, features):
        return self.layer(features)


def rows():
    return {"train": {"x": torch.zeros(8, 4), "labels": torch.zeros(8, dtype=torch.long)}}


def unequal():
    return {"train": {"x": torch.zeros(8, 4), "labels": torch.zeros(7, dtype=torch.long)}}
"""
FILES = {
    "mistakes_code.py": CODE,
    "empty.txt": "",
    "tabs.yaml": "model:\n\tbuilder: x\n",
    "text.yaml": "model: mlp\n",
    "twice.yaml": "loop: {max_steps: 3}\nloop: {max_steps: 4}\n",
    "twice.csv": "a,b\n1,2\n",
    "lost.yaml": "extends: base.yaml\n",
}
MLP = "raytrain.models.mlp:mlp model.num_features=2"
OWN = "data.source=mistakes_code:rows"
#: What was typed -> parts of the sentence, of which the first says what to type or what is missing.
MISTAKES = {
    "trian": ("did you mean train?", "the unknown verb trian"),
    "job.yaml": ("did you mean `raytrain train job.yaml`?",),
    "train nojob.yaml": ("nojob.yaml: got no such file", "default"),
    "train defualt": ("did you mean default?",),
    "train --max-steps 5": ("did you mean loop.max_steps=5?",),
    "train --batch_size=8": ("did you mean loop.global_batch_size=8?",),
    "train --lr 0.1": ("did you mean optim.lr=0.1?",),
    "train --fp16": ("did you mean precision.dtype=fp16?",),
    "train -c job.yaml": ("did you mean `raytrain train job.yaml`?",),
    "train --lr": ("did you mean optim.lr=0.001?",),
    "train --epochs five": ("did you mean loop.epochs=3?",),
    "train --device cuda": ("did you mean scale.mode=single_gpu?",),
    "train --pin_memory maybe": ("--pin_memory: did you mean data.storage=auto?",),
    "train data.pin_memory=false": ("did you mean data.storage?",),
    "train log_gpu_memory=true": ("did you mean telemetry.log_memory?",),
    "train --compile=maybe": ("loop.compile: got \"maybe\"", "off, default, reduce-overhead"),
    "train --config=job.yaml": ("did you mean `raytrain train job.yaml`?",),
    "train --resum runs/latest": ("did you mean --resume?",),
    "train lr=0.1": ("did you mean optim.lr?",),
    "train optim.learning_rate=0.1": ("did you mean optim.lr?",),
    "train experts.birth.uncertainty=0.3": ("experts.birth: did you mean experts.lifecycle.birth?",),
    "train experts.max_experts=8": ("experts.max_experts: did you mean experts.lifecycle.max_experts?",),
    "train experts.lifecycle.idle_steps=9": ("did you mean experts.lifecycle.prune.idle_steps?",),
    "train experts.every=9": ("did you mean experts.lifecycle.every?",),
    "train experts.num_expert=8": ("did you mean experts.num_experts?",),
    "train loop.max_step=3": ("did you mean loop.max_steps?",),
    "train optim.lr=fast": ("a number > 0", '"fast"'),
    "train loop.max_steps=ten": ("an integer >= 1 or null; for example loop.max_steps=500",),
    "train optim.betas=0.9": ("for example 'optim.betas=[0.9, 0.99]', the default",),
    "train loop.max_steps=1.5": ("an integer >= 1", "1.5"),
    "train precision.dtype=float16": ("did you mean fp16?",),
    "train scale.mode=gpu": ("did you mean single_gpu?",),
    f"train model.builder=mistakes_code.py {OWN}": ("did you mean mistakes_code:FUNCTION?",),
    f"train model.builder=no_such_module:build {OWN}": ("module no_such_module does not exist", "current directory is"),
    f"train model.builder=mistakes_code:Nett {OWN}": ("did you mean Net?",),
    f"train model.builder=mistakes_code:nothing {OWN}": ("a builder that returned None", "torch.nn.Module"),
    f"train model.builder=mistakes_code:Net {OWN}": ("Net.forward needs", "def forward(self, x, labels)"),
    "train model.builder=mistakes_code:Net data.source=mistakes_code:unequal": ("8 in 'x', 7 in 'labels'",),
    "train data.source=text data.path=missing.txt": ("data.path: got no file at", "missing.txt"),
    "train data.source=text data.path=empty.txt": ("data.path: got an empty file",),
    "train data.source=stdlib data.maxbytes=100": ("did you mean data.max_bytes?",),
    "train scale.accelerator=A100": ("scale.accelerator: got A100", "no GPU"),
    "train scale.workers=1000": ("scale.workers: got 1000", "at most"),
    "train tabs.yaml": ("indent with spaces, not tabs", "line 2"),
    "train text.yaml": ("model: got \"mlp\"", "a mapping with the keys builder"),
    "train twice.yaml": ("lines 1 and 2", "remove one of them"),
    "train lost.yaml": ("extends: got base.yaml", "there is no"),
    "train save.dir=/proc/runs": ("set save.dir to a folder",),
    "train --resume nowhere": ("--resume: got nowhere", "the folder of a run"),
    "train --resume .": ("--resume: got ., which has no job.json", "`raytrain train` starts a run"),
    "train default moe_hosts": ("at most one JOB.yaml",),
    "train model.heads=5": ("a multiple of heads (5)",),
    "train experts.top_k=9": ("raise experts.num_experts or lower experts.top_k",),
    "plan loop.global_batch_size=10 loop.micro_batch_size=4": ("divides loop.global_batch_size, 10",),
    "infer nowhere infer.input=x.txt": ("infer: got nowhere", "a run folder"),
    f"infer {MLP}": ("infer.input: got no value", "type infer.input=FILE"),
    f"infer {MLP} infer.input=twice.csv": ("infer.input: got the columns", "expected x, which the model reads"),
    "report nowhere": ("got nowhere",),
    "keys lop": ("did you mean loop?",),
    "submit trane": ("did you mean train?",),
    "check loop.max_step=3": ("did you mean loop.max_steps?",),
    "check --shrt": ("did you mean --short?",),
    "export": ("Missing argument 'RUN'", "--help"),
}  # fmt: skip


@pytest.fixture
def folder(user_folder: Path, ray_refused: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (user_folder / name).write_text(text)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return user_folder


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_one_sentence_that_says_what_to_type(typed: str, folder: Path) -> None:
    done = CliRunner().invoke(main, shlex.split(typed))
    assert done.exit_code == 2, (done.output, done.exception)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and all(part in line for part in MISTAKES[typed]), line
    assert not (folder / "runs").exists()
    guess = MISTAKES[typed][0]
    if guess.startswith("did you mean"):
        assert line.split(": ", 2)[2].startswith(guess), "before everything else"
