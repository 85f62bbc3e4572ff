"""One micro-batch runs before anything starts: errors of the user's code are wrong input, and nothing else changes."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from jobs.__main__ import main
from jobs.driver import first_batch
from jobs.driver.build import PassSizes
from jobs.driver.check_job import check_on_driver
from jobs.job.spec import load_spec
from raytrain.data.rows.map_style import VARIATION_READINGS, VARIATION_SAMPLE
from raytrain.errors import InputError

CODE = """
import bdb
import sys
import torch
from torch import nn
from torch.nn import functional as F

CALLS = []

class Net(nn.Module):
    def __init__(self, fault=""):
        super().__init__()
        self.layer, self.fault = nn.Linear(4, 3), fault
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, labels):
        print("a line of the user's")
        CALLS.append("forward")
        self.seen += 1
        if self.fault == "detached":
            return F.cross_entropy(self.hidden(x), labels).detach()
        return F.cross_entropy(self.hidden(x), labels)

    def hidden(self, x):
        if self.fault == "shape":
            return self.layer(x[:, :3])
        if self.fault == "name":
            return self.layr(x)
        if self.fault == "root":
            return self.layer(x) + (-1 - x.square().sum()).sqrt()
        if self.fault == "exit":
            sys.exit(3)
        if self.fault == "thirty-two":
            return self.layer(x.reshape(32, 4))
        if self.fault == "cuda":
            return self.layer(x).to("cuda:7")
        if self.fault == "memory":
            return self.layer(x) + torch.zeros(1 << 50).sum()
        if self.fault == "endless":
            while True:
                pass
        if self.fault == "segmentation":
            import ctypes
            ctypes.string_at(0)
        if self.fault == "eval" and not self.training:
            raise OverflowError("only in evaluation")
        if self.fault == "in place":
            out = self.layer(x).exp()
            return out.add_(1) * out.detach()
        return self.layer(x)

def build(fault=""):
    return Net(fault)

def frozen(fault=""):
    return Net().requires_grad_(False)

class Silent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

def fails(fault=""):
    return {}["fault"]

def reads_weights(fault=""):
    net = Net(fault)
    if net.layer.weight.sum().item() == 0:
        raise ValueError("no weights")
    return net

class Items:
    def __init__(self, fault):
        self.fault = fault
    def __len__(self):
        return 40
    def __getitem__(self, index):
        CALLS.append(index)
        if self.fault == "row" and index == self.bad:
            return {"x": torch.zeros(4), "labels": int("a label")}
        if self.fault == "stop":
            raise bdb.BdbQuit  # as `breakpoint()` does without a terminal
        if self.fault == "one":
            return {"x": torch.zeros(4), "labels": index % 3 + 1}
        if self.fault == "nan":
            return {"x": torch.full((4,), float("nan")), "labels": 0}
        return {"x": torch.zeros(4), "labels": index % 3}

def rows(fault="", first=0):
    found = Items(fault)
    found.bad = first
    return {"train": found}

def columns():
    return {"train": {"x": torch.zeros(40, 4), "labels": torch.zeros(40, dtype=torch.int64)}}

def named():
    names = [["a", "b", "c"][row % 3] for row in range(40)]
    return {"train": {"x": torch.zeros(40, 4), "labels": names}, "eval": {"x": torch.zeros(4, 4), "labels": ["d"] * 4}}

def collate(rows):
    return {"x": torch.stack([row["x"] for row in rows]), "labels": torch.tensor([row["label"] for row in rows])}

def lost(fault=""):
    raise LookupError("no such bucket")
"""


@pytest.fixture
def guest(user_folder: Path, ray_refused: None, request: pytest.FixtureRequest) -> str:
    name = f"first_batch_guest_{abs(hash(request.node.name))}"
    (user_folder / f"{name}.py").write_text(CODE)
    return name


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, list(arguments))
    started = isinstance(done.exception, AssertionError) and "Ray was started" in str(done.exception)
    return (0 if started else done.exit_code), done.output


def without_phases(output: str) -> str:
    """What a command printed, but for the line that says that it checks the job."""
    first, _, rest = output.partition("\n")
    assert first == "checking the job: opening the data and building the model"
    return rest


def job(guest: str, *, model: str = "builder: GUEST:build", data: str = "source: GUEST:columns", more: str = "") -> str:
    Path("job.yaml").write_text(f"model: {{{model}}}\ndata: {{{data}}}\n{more}\n".replace("GUEST", guest))
    return "job.yaml"


#: Parts of a job that fail in the user's own code: the key and what else is in the message.
FAULTS = {
    "labels from one": (
        {"data": "source: GUEST:rows, fault: one"},
        [
            "IndexError: Target 3 is out of bounds",
            "expected labels from 0 to the number of outputs less one",
            "in forward:",
        ],
    ),
    "a class that only the evaluation has": (
        {"data": "source: GUEST:named"},
        ["Target 3 is out of bounds", "(eval)", "the data has 4 classes (a, b, c, d)", "gets their number as num_cl"],
    ),
    "a shape": (
        {"model": "builder: GUEST:build, fault: shape"},
        [
            "model.builder: got RuntimeError: mat1 and mat2",
            "in the forward pass of",
            "in forward:",
            "in hidden: return",
        ],
    ),
    "an attribute": ({"model": "builder: GUEST:build, fault: name"}, ["AttributeError", "in hidden: return self.layr"]),
    "an exit": ({"model": "builder: GUEST:build, fault: exit"}, ["SystemExit: 3", "in hidden: sys.exit(3)"]),
    "evaluation": ({"model": "builder: GUEST:build, fault: eval"}, ["OverflowError: only in evaluation", "(eval)"]),
    "a builder": ({"model": "builder: GUEST:fails"}, ["model.builder: got KeyError", 'in fails: return {}["fault"]']),
    "the first row": ({"data": "source: GUEST:rows, fault: row"}, ["data.source: got ValueError", "in __getitem__:"]),
    "a breakpoint": (
        {"data": "source: GUEST:rows, fault: stop"},
        ["data.source: got BdbQuit", "`raytrain train --debug`"],
    ),
    "a data function": ({"data": "source: GUEST:lost"}, ["data.source: got LookupError: no such bucket", "in lost:"]),
    "collate": (
        {"data": 'source: GUEST:rows, collate: "GUEST:collate"'},
        ["data.collate: got KeyError: 'label'", "in collate:"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_errors_of_the_users_code_are_wrong_input_with_its_own_frames_only(fault: str, guest: str) -> None:
    parts, expected = FAULTS[fault]
    file = job(guest, **parts)
    code, output = run("train", file)
    assert code == 2 and all(part in output for part in expected), output
    frames = [line for line in output.splitlines() if line.startswith("  ")]
    assert frames and all(line.startswith(f"  {guest}.py:") for line in frames)
    assert "Traceback" not in output and not Path("runs").exists()
    assert run("plan", file, "--build") == (2, without_phases(output))
    code, told = run("tune", file)
    assert (code, without_phases(told)) == (2, without_phases(output))


@pytest.mark.parametrize(
    ("builder", "says"),
    [
        ("build, fault: detached", ("a loss without a gradient", "detach() or argmax()")),
        ("frozen", ("requires a gradient",)),
        ("Silent", ("a Silent without a method forward", "returns the loss")),
    ],
)
def test_a_model_that_cannot_learn_is_wrong_input_in_one_line(builder: str, says: tuple[str, ...], guest: str) -> None:
    code, output = run("train", job(guest, model=f"builder: GUEST:{builder}"))
    (line,) = [line for line in output.splitlines() if not line.startswith("checking")]
    assert code == 2 and line.startswith("error: model.builder: got ") and all(part in line for part in says), output


def test_a_backward_pass_that_fails_is_wrong_input(guest: str, run_cli: Any) -> None:
    file = job(guest, model="builder: GUEST:build, fault: in place")
    done = run_cli(
        "plan", file, "--build", cwd=Path.cwd()
    )  # a process of its own: torch refuses a second one in a fork
    assert done.code == 2 and "in the backward pass of" in done.err, done.err
    assert "modified by an inplace operation" in done.err


#: What the check cannot tell, and the reason that is printed; the run then starts.
UNKNOWN = {
    "memory": "it needs more memory than this check may use",
    "endless": "it took longer than 1 s",
    "segmentation": "its process ended without an answer",
}


@pytest.mark.parametrize("fault", UNKNOWN)
def test_what_the_check_cannot_tell_is_said_and_does_not_stop_the_run(
    fault: str, guest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_batch, "TIME_LIMIT_S", 1.0)
    code, output = run("train", job(guest, model=f"builder: GUEST:build, fault: {fault}"))
    assert code == 0 and f"the first micro-batch is not tried before the start: {UNKNOWN[fault]}" in output, output
    assert f"warning: the first micro-batch is not tried before the start: {UNKNOWN[fault]}" in run(
        "plan", "job.yaml", "--build"
    )[1].replace("\n", " ")


def test_an_error_about_a_gpu_counts_only_in_a_run_on_cpus(guest: str) -> None:
    file = job(guest, model="builder: GUEST:build, fault: cuda")
    code, output = run("train", file, "scale.mode=cpu")
    assert code == 2 and "in hidden: return self.layer(x).to(" in output
    code, output = run("train", file, "cluster.address=127.0.0.1:1")  # whose machines are not known yet
    assert code == 0 and "it fails on the CPU, and the run may be on a GPU" in output


def test_a_model_for_a_certain_number_of_rows_passes_and_a_large_one_is_left_out(
    guest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = job(guest, model="builder: GUEST:build, fault: thirty-two", data="source: GUEST:columns, eval_fraction: 0.0")
    assert run("train", file)[0] == 0
    code, output = run("train", file, "loop.micro_batch_size=16")
    assert code == 2 and "in hidden: return self.layer(x.reshape(32, 4))" in output
    monkeypatch.setattr(first_batch, "MOST_FLOPS", 15 * 6 * 3)
    code, output = run("train", file)
    assert code == 0 and "a larger micro-batch, which might pass, is too large" in output
    monkeypatch.setattr(first_batch, "MOST_FLOPS", 1)
    assert "GFLOP on a CPU" in run("train", file)[1]
    monkeypatch.setattr(first_batch, "MEMORY_SHARE", 1e-12)
    assert "the model and its gradients take 0 MiB" in run("train", file)[1]


@pytest.mark.parametrize("how", ["dies", "endless"])
def test_code_that_ends_or_hangs_after_the_passes_leaves_what_they_have_shown(
    how: str, guest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def split(_: first_batch.FirstBatch) -> None:
        if how == "dies":
            os.abort()
        threading.Event().wait()

    monkeypatch.setattr(first_batch, "NOTE_LIMIT_S", 5.0)
    monkeypatch.setattr(first_batch.FirstBatch, "sizes", lambda _: {"activation_bytes": 5, "flops": 7.0})
    monkeypatch.setattr(first_batch.FirstBatch, "split_changes", split)
    found = check_on_driver(load_spec(Path(job(guest))).spec).first
    assert found == first_batch.FirstPass(sizes=PassSizes(5, 7.0))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"model": "builder: GUEST:build, fault: root"},
            "model.builder: got a loss of nan for the first {rows}, expected a finite loss with the first weights; "
            "does it divide by zero, or take the logarithm or the root of 0 or less?",
        ),
        (
            {"data": "source: GUEST:rows, fault: nan"},
            "data.source: got a loss of nan for the first {rows}, with values that are not finite in x, "
            "expected a finite loss with the first weights",
        ),
    ],
)
def test_a_first_loss_that_is_not_finite_is_wrong_input(guest: str, parts: dict[str, str], message: str) -> None:
    code, output = run("train", job(guest, **parts))
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    rows = line.partition("the first ")[2].partition(" rows")[0]
    assert code == 2 and line == f"error: {message}".format(rows=f"{rows} rows"), output
    assert run("train", job(guest, **parts, more="precision: {dtype: fp16}"))[0] == 0, "its loss scale may help"


def test_nothing_of_this_process_changes(
    guest: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    module = importlib.import_module(guest)
    net: nn.Module = module.Net()
    states = (random.getstate(), str(np.random.get_state()), torch.get_rng_state())
    dataset = module.rows()["train"]
    fork, forks = os.fork, []

    def counted_fork() -> int:
        forks.append(fork())
        return forks[-1]

    monkeypatch.setattr(os, "fork", counted_fork)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    checked = check_on_driver(load_spec(mapping={"model": {"module": net}, "data": {"train": dataset}}).spec)
    assert checked.first.skipped is None
    assert checked.model_facts.activation_bytes_per_sample and checked.model_facts.flops_per_sample
    assert len(forks) == 1, "one process runs the model and counts"
    assert net.training and all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    counts = Counter(module.CALLS)
    assert "forward" not in counts and len(counts) <= VARIATION_SAMPLE + 2, "some rows are read, not all"
    assert sum(counts.values()) <= VARIATION_SAMPLE * VARIATION_READINGS + 8
    assert states[:2] == (random.getstate(), str(np.random.get_state())) and torch.equal(
        states[2], torch.get_rng_state()
    )
    assert capfd.readouterr().out == ""


def test_a_builder_that_reads_its_weights_is_built_on_the_cpu(guest: str) -> None:
    assert run("train", job(guest, model="builder: GUEST:reads_weights"))[0] == 0
    code, output = run("train", job(guest, model="builder: GUEST:reads_weights, fault: name"))
    assert code == 2 and "in hidden: return self.layr" in output


LENGTHS = [torch.ones(1 + i % 3, 4) for i in range(40)]
LABELS = torch.arange(40) % 3


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layer(x.mean(1)), labels)


class Masked(Plain):
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        assert attention_mask.shape == x.shape[:2]
        return super().forward(x * attention_mask[..., None], labels)


RAGGED = [{"x": LENGTHS[i], "labels": int(LABELS[i])} for i in range(40)]
EQUAL = [{"x": torch.ones(3, 4), "labels": int(LABELS[i])} for i in range(40)]


@pytest.mark.parametrize("large", [False, True], ids=["run", "too large to run"])
@pytest.mark.parametrize(
    ("train", "needs_mask"),
    [(RAGGED, True), ({"x": LENGTHS, "labels": LABELS}, True), (EQUAL, False)],
    ids=["items of different lengths", "columns of different lengths", "equal lengths"],
)
def test_a_model_that_does_not_fit_the_mask_is_told_before_the_start(
    train: Any, needs_mask: bool, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(first_batch, "MOST_FLOPS", 1)

    def check(module: nn.Module) -> None:
        check_on_driver(load_spec(mapping={"model": {"module": module}, "data": {"train": train}}).spec)

    check(Masked() if needs_mask else Plain())
    with pytest.raises(InputError) as refused:
        check(Plain() if needs_mask else Masked())
    assert ("that Plain.forward does not accept" if needs_mask else "that Masked.forward needs") in refused.value.got
    assert "attention_mask" in refused.value.got and "data.collate" in refused.value.remedy
    assert ("differ in length" if needs_mask else "equal lengths") in refused.value.remedy
