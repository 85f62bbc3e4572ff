"""What other programs call the keys of a job, for messages about keys and options that do not exist here."""

from __future__ import annotations

from typing import Any

from cluster.config import TelemetryConfig

NAMES = {
    "loop.global_batch_size": ("batch_size", "bs", "train_batch_size"),
    "loop.micro_batch_size": ("per_device_train_batch_size", "per_device_batch_size"),
    "loop.max_steps": ("steps", "iterations", "num_steps"),
    "loop.epochs": ("num_train_epochs", "num_epochs"),
    "optim.lr": ("lr", "learning_rate"),
    "optim.name": ("optimizer", "optim"),
    "optim.weight_decay": ("wd",),
    "scale.workers": ("gpus", "num_gpus", "num_workers", "devices", "nproc_per_node"),
    "scale.mode": ("device",),
    "precision.dtype": ("fp16", "bf16", "amp", "precision"),
    "save.dir": ("output_dir", "output", "out", "save_dir"),
    "model.builder": ("model",),
    "model.init_from": ("checkpoint", "init"),
    "data.source": ("dataset", "data"),
    "infer.input": ("input",),
    "cluster.address": ("ray_address",),
}
"""Key -> its names in other programs."""

SWITCHES = {
    "compile": ("loop.compile", "default", "off"),
    "pin_memory": ("data.storage", "pinned", "stream"),
    "log_gpu_memory": ("telemetry.log_memory", "true", "false"),
    "monitor_gpu": ("telemetry.every", str(TelemetryConfig().every), "0"),
}
"""What is true or false in other programs -> the key, and its values for true and for false."""

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def switched(name: str, value: Any) -> str | None:
    """`key=value` for a switch of other programs; None if there is no such switch, or the value is neither true nor
    false."""
    text = str(value).lower()
    if name not in SWITCHES or text not in (*_TRUE, *_FALSE):
        return None
    key, on, off = SWITCHES[name]
    return f"{key}={on if text in _TRUE else off}"


def meant(name: str, value: Any = None) -> str | None:
    """The key that `name` stands for in other programs, or `key=value` for a switch; None if it stands for none."""
    if name in SWITCHES:
        return switched(name, value) or switched(name, True)
    return next((key for key, names in NAMES.items() if name in names), None)
