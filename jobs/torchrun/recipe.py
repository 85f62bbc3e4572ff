"""The commands that train one job on several machines by torchrun, without a Ray cluster: `plan --print torchrun`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import click

from jobs.torchrun.launch import check_launched
from raytrain.errors import InputError

if TYPE_CHECKING:
    from jobs.job.spec import JobSpec

LOOPBACK = "127.0.0.1"
HELP = {
    "nproc_per_node": "for --print torchrun: processes of a node, each a worker",
    "nnodes": "for --print torchrun: the number of nodes",
    "node_rank": "for --print torchrun: only the command of this node",
    "master_addr": "for --print torchrun: the address of node 0",
    "master_port": "for --print torchrun: a free port of node 0",
}


@dataclass(frozen=True)
class TorchrunRecipe:
    """The options of torchrun, by the names that it gives them."""

    nproc_per_node: int = 1
    nnodes: int = 1
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int = 29500

    def commands(self, arguments: Sequence[str]) -> list[str]:
        """The command of each node, or only that of `node_rank`, which train this job together.

        Args:
            arguments: of the verb `train`.

        Raises:
            InputError: several nodes without the address of the first, or a node that does not exist.
        """
        if self.nnodes > 1 and self.master_addr is None:
            raise InputError(
                "--master_addr", got="no value", expected="the address at which the other nodes reach node 0",
                remedy="such as --master_addr 10.0.0.4",
            )  # fmt: skip
        if self.node_rank is not None and self.node_rank >= self.nnodes:
            expected = f"0 to {self.nnodes - 1}, as --nnodes is {self.nnodes}"
            raise InputError("--node_rank", got=str(self.node_rank), expected=expected)
        nodes = range(self.nnodes) if self.node_rank is None else [self.node_rank]
        return [
            f"torchrun --nproc_per_node={self.nproc_per_node} --nnodes={self.nnodes} --node_rank={node} "
            f"--master_addr={self.master_addr or LOOPBACK} --master_port={self.master_port} "
            f"-m jobs train {shlex.join(arguments)}".rstrip()
            for node in nodes
        ]

    def check(self, spec: JobSpec) -> None:
        """Check that the job fits; see `check_launched`."""
        check_launched(spec, processes=self.nproc_per_node * self.nnodes)

    def notes(self) -> list[str]:
        """What the nodes need besides the commands."""
        if self.nnodes == 1:
            return []
        if str(self.master_addr).startswith(("127.", "localhost")):
            return [f"node 0 is on loopback: run all {self.nnodes} commands on this machine"]
        return [
            f"run one on each of the {self.nnodes} nodes, in the same folder; save.dir and the data on shared storage",
            "all nodes need the same token of Ray: `ray get-auth-token --generate` on one of them, then copy "
            "~/.ray/auth_token",
        ]


def torchrun_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a verb with the options of `TorchrunRecipe`, each with dashes or with underscores; None: not given."""
    for field in reversed(fields(TorchrunRecipe)):
        kind, metavar = (str, "HOST") if field.name == "master_addr" else (int, "N")
        names = dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}"))
        verb = click.option(*names, field.name, type=kind, metavar=metavar, help=HELP[field.name])(verb)
    return verb


def recipe_of(given: dict[str, Any], *, wanted: bool) -> TorchrunRecipe | None:
    """The recipe with the options that were given; None without `--print torchrun`.

    Raises:
        InputError: an option without `--print torchrun`, or a number below 1.
    """
    options = {name: value for name, value in given.items() if value is not None}
    for name, value in options.items():
        if not wanted:
            raise InputError(
                f"--{name}", got=str(value), expected="--print torchrun with it, which prints a command for each node"
            )
        if isinstance(value, int) and value < (0 if name == "node_rank" else 1):
            least = 0 if name == "node_rank" else 1
            raise InputError(f"--{name}", got=str(value), expected=f"an integer >= {least}")
    return TorchrunRecipe(**options) if wanted else None
