"""`plan --build` and `train` refuse the same jobs with the same message, before anything is started."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

from jobs.__main__ import main
from jobs.driver.check_job import check_fits, check_on_driver
from jobs.job.spec import load_spec
from raytrain.checkpoint.writer import CheckpointWriter
from raytrain.errors import InputError
from raytrain.runs.folder import RunFolder

CODE = """
import torch
from torch import nn

class Frozen(nn.Module):
    def __init__(self, num_features):
        super().__init__()
        self.layer = nn.Linear(num_features, 1).requires_grad_(False)

def frozen(num_features):
    return Frozen(num_features)

def empty(num_features):
    return nn.Identity()

def small(num_features):
    return nn.Linear(num_features, 2)

def rows():
    return {"train": {"x": torch.zeros(40, 4), "labels": torch.arange(40) % 2}}

class Observer:
    def __init__(self, needed):
        pass
"""
MLP = "model: {builder: 'raytrain.models.mlp:mlp', hidden: [8]}"
OWN = "model: {builder: 'checks_guest:NAME'}"
SMALL = OWN.replace("NAME", "small")
ROWS = "data: {source: 'checks_guest:rows'}"
#: The parts of a job that are wrong, and what the message names.
MISTAKES = {
    "precision of a layer that is not there": (f"{MLP}\nprecision: {{fp32_layers: [nope]}}", "precision.fp32_layers"),
    "a frozen model": (OWN.replace("NAME", "frozen"), "model.builder"),
    "a model without parameters": (OWN.replace("NAME", "empty"), "model.builder"),
    "weights of other shapes": (f"{MLP[:-1]}, init_from: other}}", "model.init_from"),
    "weights of other shapes for an own model": (f"{SMALL[:-1]}, init_from: other}}", "other"),
    "compiled parts": (f"{MLP}\nloop: {{compile: default, compile_parts: [nope]}}", "loop.compile_parts"),
    "blocks to recompute": (f"{SMALL}\nloop: {{activation_checkpointing: true}}", "loop.activation_checkpointing"),
    "muon without matrices": (f"{SMALL}\noptim: {{name: muon}}", "optim.name"),
    "shards without blocks": (f"{SMALL}\nscale: {{strategy: fsdp}}", "scale.strategy"),
    "batch norms that are not there": (f"{SMALL}\nscale: {{sync_batchnorm: true}}", "scale.sync_batchnorm"),
    "an observer": (f"{MLP}\ntelemetry: {{observers: ['checks_guest:nope']}}", "telemetry.observers"),
    "an observer's arguments": (f"{MLP}\ntelemetry: {{observers: ['checks_guest:Observer']}}", "telemetry.observers"),
    "experts": (f"{SMALL}\nexperts: {{num_experts: 4}}", "experts.num_experts"),
    "hosts": (f"{SMALL}\nexperts: {{hosts: 2}}", "experts.hosts"),
    "a budget of tokens": (f"{MLP}\nDATA tokens_per_batch: 64", "data.tokens_per_batch"),
    "a module that shadows raytrain": (MLP, "raytrain.py"),
}


@pytest.fixture
def folder(user_folder: Path, ray_refused: None) -> Path:
    (user_folder / "checks_guest.py").write_text(CODE)
    (user_folder / "other").mkdir()
    save_file({"a.weight": torch.zeros(3, 3)}, user_folder / "other" / "model.safetensors")
    return user_folder


def message(*arguments: str) -> str:
    """What a command that finds wrong input prints."""
    done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code == 2, f"{arguments} exits with {done.exit_code}: {done.output}"
    assert done.stdout in ("", "checking the job: opening the data and building the model\n")
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("mistake", MISTAKES)
def test_plan_with_build_and_train_refuse_the_same_jobs(mistake: str, folder: Path) -> None:
    text, names = MISTAKES[mistake]
    text, _, more = text.partition("\nDATA ")
    data = f"{ROWS[:-1]}, {more}}}" if more else ROWS
    Path("job.yaml").write_text(f"{text}\n{data}\n")
    if names == "raytrain.py":
        Path(names).write_text("")
    before = sorted(path.name for path in folder.iterdir())
    planned = message("plan", "job.yaml", "--build")
    assert names in planned
    assert message("train", "job.yaml") == planned
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == before, "nothing is made"


def test_a_job_without_a_mistake_passes_both(folder: Path) -> None:
    Path("job.yaml").write_text(f"{MLP}\n{ROWS}\nsave: {{dir: runs}}\n")
    assert CliRunner().invoke(main, ["plan", "job.yaml", "--build"]).exit_code == 0
    started = CliRunner().invoke(main, ["train", "job.yaml"])
    assert isinstance(started.exception, AssertionError), started.output
    shutil.rmtree("runs")


class Tied(nn.Module):
    """Two names of one weight."""

    def __init__(self, width: int = 4, *, more: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, width), nn.Linear(width, 8, bias=False)
        self.head.weight = self.embed.weight
        if more:
            self.extra = nn.Linear(width, width)


def test_a_checkpoint_of_another_model_is_refused_before_the_start_and_one_of_this_is_not(tmp_path: Path) -> None:
    run = RunFolder.create(str(tmp_path), "a")
    check_fits(Tied(), run)  # nothing is saved yet
    with CheckpointWriter(run, keep=3, asynchronous=False) as writer:
        writer.save({"model": dict(Tied(width=6).state_dict())}, {"step": 3}, step=3)
        writer.save({"model": dict(Tied().state_dict())}, {"step": 5}, step=5)
    check_fits(Tied(), run)
    for other, words in ((Tied(more=True), "extra.weight is missing"), (Tied(width=6), r"has shape \(8, 4\)")):
        with pytest.raises(InputError, match=rf"the checkpoint of step 5 of another model: .*{words}") as refused:
            check_fits(other, run)
        assert refused.value.remedy == "restore its code, or start a new run", "its weights fit no other model"
    folder = Path(run.path, "checkpoints", "step_00000005")
    (folder / "model.safetensors").write_bytes(b"damaged")
    check_fits(Tied(more=True), run)  # that is for those who read it


def test_the_check_of_a_resumed_run_looks_at_its_checkpoint(folder: Path) -> None:
    run = RunFolder.create(str(folder), "a")
    with CheckpointWriter(run, keep=3, asynchronous=False) as writer:
        writer.save({"model": dict(Tied().state_dict())}, {"step": 3}, step=3)
    data = {"train": {"x": torch.zeros(8, 4), "labels": torch.zeros(8, dtype=torch.int64)}, "eval_fraction": 0.0}
    model = {"builder": "raytrain.models.mlp:mlp", "num_features": 4, "num_classes": 2}
    spec = load_spec(mapping={"model": model, "data": data}).spec
    check_on_driver(spec, run_batch=False)
    with pytest.raises(InputError, match="the checkpoint of step 3 of another model"):
        check_on_driver(spec, resumed=run, run_batch=False)


class Counted(Tied):
    """With an extra state, in which there is a tensor whose size changes."""

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"seen": torch.ones(len(list(self.parameters())))}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        del state


def test_a_checkpoint_with_an_extra_state_fits_its_module_only(tmp_path: Path) -> None:
    run = RunFolder.create(str(tmp_path), "a")
    with CheckpointWriter(run, keep=3, asynchronous=False) as writer:
        writer.save({"model": Counted().state_dict()}, {"step": 3}, step=3)
    check_fits(Counted(), run)
    with pytest.raises(InputError, match="_extra_state is not in the model"):
        check_fits(Tied(), run)


class Noisy:
    """A map-style dataset with a random transform."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((4,), float(index)) + torch.rand(4), "y": torch.zeros(1)}


class Fitted(nn.Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return ((super().forward(x) - y) ** 2).mean()


def test_the_facts_of_the_data_say_whether_items_vary() -> None:
    """The plan keeps no rows that differ from one reading to the next."""
    for data, varies in ((Noisy(), True), ([{"x": torch.zeros(4), "y": torch.zeros(1)}] * 64, False)):
        job = load_spec(mapping={"model": {"module": Fitted(4, 1)}, "data": {"train": data}})
        facts = check_on_driver(job.spec).data_facts
        assert facts is not None and facts.varies is varies


class Items:
    """A map-style dataset of these rows."""

    def __init__(self, rows: list[dict[str, torch.Tensor]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def columns(rows: list[dict[str, torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


@pytest.mark.parametrize(
    ("kind", "shortest", "longest"), [(Items, r"shape \(6,\)", r"shape \(10,\)"), (columns, "6 tokens", "10 tokens")]
)
def test_rows_of_differing_length_are_refused_where_they_are_to_be_replayed(
    kind: Callable[..., object], shortest: str, longest: str
) -> None:
    def checked(lengths: list[int], replay: dict[str, int]) -> None:
        rows = [{"input_ids": torch.arange(n) % 9, "labels": torch.arange(n) % 9} for n in lengths]
        mapping = {
            "model": {"builder": "experts.models:moe_gpt", "layers": 1, "heads": 2, "width": 16, "context": 16,
                      "vocab_size": 9},
            "data": {"train": kind(rows)},
            "experts": {"num_experts": 3, "hosts": 0, "lifecycle": {"max_experts": 6, "replay": replay}},
        }  # fmt: skip
        check_on_driver(load_spec(mapping=mapping).spec, run_batch=False)

    varied = [6 + n % 5 for n in range(40)]
    with pytest.raises(
        InputError, match=rf"replay\.bytes: got rows of {shortest} and of {longest}, expected rows of one"
    ):
        checked(varied, {"bytes": 100_000})
    checked(varied, {})
    checked([8] * 40, {"bytes": 100_000})


@pytest.mark.parametrize("length", [6, 8])
def test_memory_for_less_than_one_row_is_refused_before_anything_starts(length: int) -> None:
    needed = 2 * 8 * length + 12  # two columns of int64, and what the reservoir keeps of a row

    def checked(limit: int) -> None:
        rows = [{"input_ids": torch.arange(length) % 9, "labels": torch.arange(length) % 9} for _ in range(40)]
        mapping = {
            "model": {"builder": "experts.models:moe_gpt", "layers": 1, "heads": 2, "width": 16, "context": 16,
                      "vocab_size": 9},
            "data": {"train": Items(rows)},
            "experts": {"num_experts": 3, "hosts": 0, "lifecycle": {"max_experts": 6, "replay": {"bytes": limit}}},
        }  # fmt: skip
        check_on_driver(load_spec(mapping=mapping).spec)

    checked(needed)
    with pytest.raises(InputError, match=rf"replay\.bytes: got {needed - 1}, expected at least {needed}"):
        checked(needed - 1)
