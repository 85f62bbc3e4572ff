"""The verb infer on GPUs, as far as a CPU shows it: which devices it plans for, and what each worker sets first."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from folders import make_folder, write_lines
from pyarrow import parquet
from rich.console import Console

from cluster.devices.inventory import CAPABILITIES, Device, Inventory, Node, local_inventory
from jobs import infer as verb
from jobs.driver.runtime import Cluster
from jobs.infer import infer, run_infer
from jobs.inference import compute
from raytrain.config.sections import InferConfig
from raytrain.errors import InputError
from raytrain.infer import ray_data
from raytrain.infer.input import UnitReport
from raytrain.infer.model import InferenceModel
from raytrain.infer.ray_data import UnitActor
from raytrain.infer.worker import InferenceWorker, Work
from raytrain.models.huggingface import TextCodec

BUILDER = "raytrain.models.mlp:mlp"
SIZES = ("model.hidden=[8]", "model.num_features=4", "model.num_classes=3", "infer.unit_rows=4")


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """40 rows of four numbers."""
    x = np.zeros((40, 4), dtype=np.float32)
    parquet.write_table(
        pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 4)}), tmp_path / "x.parquet"
    )
    return str(tmp_path / "x.parquet")


def node(host: str, *types: str, cpus: int = 8) -> Node:
    """A node of a Ray cluster with GPUs of these types."""
    devices = tuple(Device("cuda", name, 0, CAPABILITIES[name], None, index) for index, name in enumerate(types))
    return Node(host, cpus, 0, devices, gpu_slots=len(types), accelerator=types[0] if types else "")


def resources(node: Node) -> dict[str, float]:
    """What Ray says that it has."""
    return {"CPU": node.cpus, "GPU": node.gpu_slots} | {f"accelerator_type:{kind}": 1 for kind in node.accelerators}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: str) -> Callable[..., dict[str, Any]]:
    """`cluster(nodes, *overrides)`: what `infer` computes where in a cluster of these nodes, started on a machine
    with one GPU of its own."""

    def start(nodes: list[Node], *overrides: str) -> dict[str, Any]:
        here = local_inventory()
        a100 = Device("cuda", "NVIDIA A100", 80 << 30, (8, 0), "GPU-1", 3)
        here = replace(here, nodes=(replace(here.nodes[0], devices=(a100,)),))
        seen: dict[str, Any] = {"addresses": []}

        @contextlib.contextmanager
        def connected(address: str, **_more: Any) -> Iterator[Cluster]:
            seen["addresses"].append(address)
            yield Cluster(False, address, str(tmp_path))

        def run_units(work: Work, units: Any, **options: Any) -> Iterator[UnitReport]:
            seen.update(options, device=work.model.device, dtype=work.model.dtype, threads=work.threads)
            yield UnitReport(0, 4, 99, 0, 1.0, "w", 0.0, 0, 0.0, 1.0, "enough seen")

        monkeypatch.setattr(verb, "local_inventory", lambda: here)
        monkeypatch.setattr(
            verb, "inventory_from_ray", lambda local: replace(local, nodes=tuple(nodes), source="Ray cluster")
        )
        monkeypatch.setattr(verb, "connected", connected)
        monkeypatch.setattr(compute, "connected", connected)
        monkeypatch.setattr(ray_data, "run_units", run_units)
        monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": resources(one)} for one in nodes])
        monkeypatch.setattr("jobs.driver.watch.autoscales", lambda: False)
        given = [*SIZES, f"infer.input={rows}", f"infer.output={tmp_path / 'out'}", "cluster.address=head:6379"]
        quiet = Console(quiet=True)
        run_infer(BUILDER, [*given, *overrides], resume=None, dry_run=False, verbose=False, console=quiet)
        return seen

    return start


def test_in_a_cluster_its_gpus_count_and_not_the_drivers(cluster: Callable[..., dict[str, Any]]) -> None:
    seen = cluster([node("head"), node("a", "T4", "T4"), node("b", "T4")])
    assert (seen["workers"], seen["gpus"], seen["device"], seen["dtype"]) == (3, 1, "cuda:0", "fp32")
    assert seen["cpus"] == 1
    assert seen["accelerator"] is None and seen["at_once"] == 1 and seen["addresses"][0] == "head:6379"
    assert seen["threads"] == 8, "a worker for each node"


def test_a_cluster_without_gpus_computes_on_its_cpus(cluster: Callable[..., dict[str, Any]]) -> None:
    seen = cluster([node("head"), node("a", cpus=6)], "scale.workers=4")
    assert (seen["workers"], seen["gpus"], seen["device"], seen["threads"]) == (4, 0, "cpu", 3)
    assert seen["cpus"] == 3, "those that it computes on"


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        ([], "scale.threads: got 9, expected at most 8 (1 worker needs 9 CPU"),
        (
            ["scale.workers=5", "scale.threads=3"],
            "scale.workers: got 5 workers, expected at most 4 (5 workers need 3 CPU each",
        ),
        (
            ["scale.workers=[5,9]", "scale.threads=3"],
            "scale.workers: got 5 workers, expected at most 4 (5 workers need 3 CPU each",
        ),
    ],
)
def test_workers_that_the_nodes_never_have_room_for_are_refused_before_the_start(
    cluster: Callable[..., dict[str, Any]], tmp_path: Path, asked: list[str], got: str
) -> None:
    with pytest.raises(InputError, match=re.escape(f"{got}; of 2 nodes, there are")):
        cluster([node("head"), node("a", cpus=6)], "scale.threads=9", *asked)
    assert not (tmp_path / "out").exists()


def test_a_pool_may_grow_beyond_what_a_cluster_has_room_for_now(cluster: Callable[..., dict[str, Any]]) -> None:
    seen = cluster([node("head"), node("a", cpus=6)], "scale.threads=3", "scale.workers=[4,9]")
    assert (seen["workers"], seen["at_once"], seen["cpus"]) == (9, 1, 3)


def test_gpus_without_a_core_each_are_not_all_used(cluster: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(InputError, match=r"scale\.workers: got 2 workers, expected at most 1"):
        cluster([node("a", "T4", "T4", cpus=1)], "scale.workers=2")
    assert cluster([node("a", "T4", "T4", cpus=1)])["workers"] == 1


def test_the_type_that_scale_names_is_required_of_ray_as_it_spells_it(cluster: Callable[..., dict[str, Any]]) -> None:
    nodes = [node("a", "T4", "T4"), node("b", "H100")]
    seen = cluster(nodes, "scale.accelerator=h100")
    assert (seen["workers"], seen["accelerator"], seen["dtype"]) == (1, "H100", "bf16")
    with pytest.raises(InputError, match=r"scale\.accelerator: got b200"):
        cluster(nodes, "scale.accelerator=b200")


def test_gpus_have_the_numbers_of_nvml_before_any_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """CUDA sorts them by speed otherwise; it reads the variable once."""
    seen: list[str | None] = []

    def looked() -> Inventory:
        seen.append(os.environ.get("CUDA_DEVICE_ORDER"))
        return replace(local_inventory(), unusable=("GPU 0 (NVIDIA H100): its driver is too old",))

    monkeypatch.setattr(verb, "local_inventory", looked)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")  # restored afterwards
    for before, after in ((None, "PCI_BUS_ID"), ("FASTEST_FIRST", "FASTEST_FIRST")):
        os.environ.pop("CUDA_DEVICE_ORDER", None)
        if before is not None:
            os.environ["CUDA_DEVICE_ORDER"] = before
        given = [*SIZES, f"infer.input={rows}"]
        run_infer(BUILDER, given, resume=None, dry_run=True, verbose=False, console=Console())
        assert seen.pop() == after
    assert "THIS RUN IS ON THE CPU, although there is a GPU that cannot be used" in capsys.readouterr().out


@pytest.mark.parametrize(("device", "current"), [("cuda:0", [0]), ("cuda:2", [2])])
def test_a_worker_chooses_its_gpu_and_keeps_to_its_memory_before_it_loads_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, current: list[int]
) -> None:
    """Kernels of a model's own may use the current device."""
    happened: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: happened.append(torch.device(device).index))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: happened.append((share, device.index))
    )
    monkeypatch.setattr(InferenceModel, "load", lambda *_given: happened.append("model"))
    model: Any = InferenceModel(None, device=device)  # type: ignore[arg-type]
    given: Any = SimpleNamespace(schema=None)
    work = Work(model, InferConfig(), given, str(tmp_path), 1, 0, memory_fraction=0.8, memory_limit=300)  # type: ignore[arg-type]
    if device == "cuda:0":  # an actor of Ray Data, which sees no other
        context = SimpleNamespace(get_node_id=lambda: "0123456789", was_current_actor_reconstructed=False)
        monkeypatch.setattr("ray.get_runtime_context", lambda: context)
        starts = SimpleNamespace(arrive=SimpleNamespace(remote=lambda: happened.append("arrived")))
        UnitActor(work, starts, 1, 0, None)
        assert happened.pop(0) == "arrived"
    else:
        InferenceWorker(work, "this process").load()
    assert happened == [*current, (0.3, current[0]), "model"]


def test_prompts_leave_room_for_the_answer_of_transformers_own_generation(tmp_path: Path) -> None:
    """A model with 16 positions has none for token 17: on a GPU the embedding's index ends the context."""
    from transformers import AutoModelForCausalLM

    folder = make_folder(tmp_path / "model", "gpt2", n_positions=16)
    prompts = ["the rain falls on the roof of the old mill.", "a miller counts the sacks"]
    write_lines(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in prompts])
    given = {"input": str(tmp_path / "in.jsonl"), "output": str(tmp_path / "out"), "quiet": True}
    table = infer(
        folder, overrides=["infer.max_new_tokens=6", "scale.threads=1", "precision.dtype=fp32"], **given
    ).table()
    assert table["error"].to_pylist() == [None, None]
    model, codec = AutoModelForCausalLM.from_pretrained(folder).eval(), TextCodec(str(folder))
    for prompt, answer in zip(prompts, table["prediction"].to_pylist(), strict=True):
        seen = codec.encode(prompt)[-10:]
        assert len(codec.encode(prompt)) > 10, "the prompt alone fills the model"
        for _ in range(6):
            seen.append(int(model(torch.tensor([seen])).logits[0, -1].argmax()))
        assert answer == codec.decode(seen[10:])
    with pytest.raises(InputError, match=r"infer\.max_new_tokens: got 16, expected less than the 16 tokens"):
        infer(folder, overrides=["infer.max_new_tokens=16"], **{**given, "output": str(tmp_path / "more")})
