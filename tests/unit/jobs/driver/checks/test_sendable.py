"""Python objects of a job that cannot be sent to the workers are named before anything starts."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from jobs.driver.check_job import check_on_driver
from jobs.job.spec import load_spec
from raytrain.errors import InputError
from raytrain.train.job import copy_of


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.inner = nn.Linear(4, 4)


class Net(nn.Module):
    """With a lock: in itself, in a part, in a dict, or nowhere."""

    def __init__(self, where: str = "") -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        if where == "itself":
            self.k = threading.Lock()
        if where == "part":
            self.parts = nn.ModuleList([nn.Linear(4, 4), Part()])
        if where == "dict":
            self.notes = {"a": 1, "locks": [threading.Lock()]}

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.linear(x), labels)}


class Rows:
    """A dataset that reads from a generator."""

    def __init__(self) -> None:
        self.lines = (index for index in range(20))

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(4), "labels": torch.tensor(index % 3)}


class Opened(Rows):
    """The same, started again by each worker."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


ROWS = {"x": torch.ones(20, 4), "labels": torch.zeros(20, dtype=torch.int64)}


def refusal(model: Any, train: Any = ROWS, **data: Any) -> str:
    job = {"model": {"module": model}, "data": {"train": train, **data}, "loop": {"max_steps": 2}}
    with pytest.raises(InputError) as caught:
        check_on_driver(load_spec(mapping=job).spec)
    return str(caught.value)


@pytest.mark.parametrize(("where", "path"), [("itself", "k"), ("part", "parts.1.lock"), ("dict", "notes.locks.0")])
def test_an_attribute_of_a_module_that_cannot_be_pickled_is_named(where: str, path: str) -> None:
    text = refusal(Net(where))
    assert text.startswith(
        f"model.module: got a Net whose attribute {path} (a _thread.lock) cannot be sent to the work"
    )
    assert "expected an object that can be pickled; create that part where it is first used" in text


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_tensors_do_not_reach_the_workers(kind: str) -> None:
    net = Net()
    getattr(net.linear.bias, kind)(lambda gradient: None)
    assert refusal(net) == (
        "model.module: got a Net with a hook on the tensor linear.bias, which no worker would receive, expected hooks "
        "on modules only; register it in a function that builds the model, and name that as model.builder"
    )


def test_parametrized_modules_are_sent() -> None:
    net = Net()
    nn.utils.parametrizations.orthogonal(net.linear)
    check_on_driver(load_spec(mapping={"model": {"module": net}, "data": {"train": ROWS}}).spec)


def test_datasets_and_collate_functions_are_checked_as_well() -> None:
    lock = threading.Lock()

    def collate(rows: list[Any]) -> Any:
        with lock:
            return rows

    assert refusal(Net(), Rows()).startswith("data.train: got a Rows whose attribute lines (a generator) ")
    assert refusal(Net(), eval=Rows()).startswith("data.eval: got a Rows whose attribute lines")
    text = refusal(Net(), Opened(), collate=collate)
    assert text.startswith("data.collate: got a function whose attribute lock (a _thread.lock)")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((item for item in [1, 2]), r"got a generator, expected .*map-style dataset.*; pass a list of what it yields"),
        (DataLoader([1, 2]), r"got a DataLoader, expected .*map-style dataset.*; pass loader.dataset"),  # type: ignore
    ],
    ids=["generator", "loader"],
)
def test_what_is_no_dataset_is_refused_with_what_to_pass_instead(data: Any, words: str) -> None:
    with pytest.raises(InputError, match=f"^data.train: {words}"):
        check_on_driver(load_spec(mapping={"model": {"module": Net()}, "data": {"train": data}}).spec)


def test_what_can_be_pickled_passes_without_copies_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class may leave out what it cannot send, and classes of a script are sent by value."""

    def copied(*_: Any) -> Any:
        raise AssertionError("a tensor was copied")

    monkeypatch.setattr(torch.UntypedStorage, "__reduce__", copied)
    job = {"model": {"module": copy_of(Net())}, "data": {"train": Opened()}}
    check_on_driver(load_spec(mapping=job).spec)


def test_ray_is_not_imported_for_it() -> None:
    """It reads its environment when it is imported, before the settings of a private Ray are made."""
    script = (
        "import sys, torch\nfrom torch import nn\nfrom jobs.driver.check_job import _refusal\n"
        "class Net(nn.Linear):\n    pass\nassert _refusal(Net(2, 2)) is None and 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
