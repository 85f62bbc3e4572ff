"""A model of which one layer does not stand half precision, and what becomes of it."""

from __future__ import annotations

from typing import Any

import torch
from lab import Rows, class_rows, digest, make_session, optimizer_state, train
from torch import Tensor, nn

from raytrain.autotune import startup
from raytrain.autotune.startup import Calibration, settle_layers
from raytrain.runs.folder import RunFolder
from raytrain.train.session import Session

FRAGILE = "layers.4"
DEPTH, WIDTH, STEPS = 12, 24, 40


class Deep(nn.Module):
    """Twelve residual layers. What one of them returns has a large common part, which a norm takes away again: eight
    bits hold the one or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.head = nn.Linear(12, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(DEPTH))
        self.drop = nn.Dropout(0.1)
        with torch.no_grad():
            self.get_submodule(FRAGILE).bias.fill_(1000.0)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.entry(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y = y + torch.relu(norm(layer(y)))
        return {"loss": nn.functional.cross_entropy(self.head(self.drop(y)), labels)}


def session_of(
    *, precision: str = "bf16", layers: Any = "auto", dropout: bool = False, run: RunFolder | None = None
) -> Session:
    """A session on drawn rows; without dropout unless told."""
    torch.manual_seed(7)
    module = Deep()
    module.drop.p = 0.1 if dropout else 0.0
    mapping = {"dtype": precision, "fp32_layers": layers}
    data = {"train": class_rows(96), "eval_fraction": 0.0}
    loop = {"max_steps": STEPS, "micro_batch_size": 16}
    return make_session({"module": module}, data, precision=mapping, loop=loop, run=run, seed=4)


def losses(precision: str, layers: Any) -> list[float]:
    """Of a whole run."""
    session = session_of(precision=precision, layers=layers)
    return train(session)[0].losses


def settled(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """What is measured, that nothing is changed by it, and that a second attempt takes it again."""
    run = RunFolder(folder)
    session = session_of(dropout=True, run=run)
    before, reporter = _everything(session), Rows()
    settle_layers(Calibration(session, run, reporter, _silent), precisions=["bf16", "fp32"])
    again = session_of(run=run)
    measure, startup.measure_layers = startup.measure_layers, _not_again
    settle_layers(Calibration(again, run, reporter, _silent), precisions=["bf16"])
    startup.measure_layers = measure
    return {
        "untouched": before == _everything(session),
        "chosen": [_kept(session), _kept(again)],
        "events": reporter.events,
        "record": run.read_json(run.memory_probe)["fp32_layers"] if rank == 0 else None,
    }


def _kept(session: Session) -> list[str]:
    return list(session.settings.fp32_layers)


def _everything(session: Session) -> str:
    module = session.trainable.module
    modes = [part.training for part in module.modules()]
    return digest(module.state_dict(), optimizer_state(session), session.generator_state(), modes)


def _silent(status: dict[str, Any]) -> None:
    """Ignores progress."""


def _not_again(session: Session, precision: str) -> Any:
    raise AssertionError(f"measured once more in {precision}")
