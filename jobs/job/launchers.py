"""Options of other launchers, such as `--num_processes 4` of Accelerate, as the keys that mean the same here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raytrain.errors import InputError

#: For every verb that takes a job.
LAUNCHER = {"num_processes": "scale.workers", "mixed_precision": "precision.dtype"}
#: For the other verbs that take a job.
TRAINING = {
    "experts": "experts.num_experts", "parallel_strategy": "experts.hosts", "compile": "loop.compile",
    "compile_mode": "loop.compile", "cudnn_benchmark": "loop.cudnn_benchmark",
}  # fmt: skip
SWITCHES = ("compile",)
"""Options that may stand alone, for true."""
#: For `infer`.
INFERENCE = {
    "data_source": "infer.input", "max_samples": "infer.max_samples", "strategy": "infer.template",
    "output_dir": "infer.output", "batch_size": "infer.batch_size", "max_new_tokens": "infer.max_new_tokens",
    "temperature": "infer.temperature",
}  # fmt: skip
MACHINES = "num_machines"
_VALUES = {
    ("precision.dtype", "no"): "fp32", ("infer.max_samples", "None"): "null",
    ("loop.compile", "true"): "default", ("loop.compile", "false"): "off",
    ("experts.hosts", "data_parallel"): "0", ("experts.hosts", "expert_parallel"): "colocated",
}  # fmt: skip


def as_keys(arguments: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """The arguments with `section.key=value` in the place of each known option; all others stay as they are.

    Args:
        names: option, without its dashes and with underscores -> key.
    Raises:
        InputError: an option without a value, or several machines without a cluster.
    """
    found, waiting = [], list(arguments)
    while waiting:
        given = waiting.pop(0)
        name, mark, value = given[2:].partition("=")
        name = name.replace("-", "_")
        if not given.startswith("--") or name not in (*names, MACHINES):
            found.append(given)
            continue
        if not mark and name in SWITCHES and (waiting[:1] or [""])[0].lower() not in ("true", "false"):
            value = "true"
        elif not mark:
            if not waiting:
                raise InputError(given, got="no value", expected=f"{given} VALUE")
            value = waiting.pop(0)
        if name == MACHINES:
            _check_machines(value, arguments)
        else:
            key, plain = names[name], value.lower() if value in ("True", "False") else value
            found.append(f"{key}={_VALUES.get((key, plain), plain)}")
    return found


def _check_machines(value: str, arguments: Sequence[str]) -> None:
    """Ray knows the machines of its cluster: more than one need nothing but its address."""
    if value != "1" and not any(given.startswith("cluster.address=") for given in arguments):
        raise InputError(
            f"--{MACHINES}", got=value, expected="1, or the address of a Ray cluster of these machines",
            remedy="add cluster.address=HOST:PORT; workers are spread over its nodes",
        )  # fmt: skip
