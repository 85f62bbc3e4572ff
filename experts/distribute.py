"""Turns a model with experts in it into one whose experts live on hosts, or are spread over the workers.

`distribute` is what a model builder calls. The rows of experts.jsonl, the load of every expert and host, are written
here.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from cluster.wording import counted
from experts.config import ExpertsConfig, LayerShape
from experts.exchange.dispatch import REMEDY, RemoteExperts
from experts.exchange.rebalancer import LoadRebalancer
from experts.exchange.worker import ExpertClient
from experts.grouped import GroupedExperts, UnevenExperts
from experts.layer import MoELayer
from experts.lifecycle.controller import Lifecycle
from experts.lifecycle.replayed_model import Recorder
from experts.lifecycle.sleep import SleepCycle
from experts.member.checkpoint import locate
from experts.member.shard import empty_experts, stacked_names
from experts.placement.policy import PlacementRules, costs_of
from experts.placement.values import Placement, equal_hosts
from experts.router import LoadTracker
from experts.sizes import expert_costs
from experts.transport import Op
from raytrain.checkpoint.reader import STACKED, read_manifest
from raytrain.config.sections import OptimConfig
from raytrain.errors import InputError
from raytrain.runs.faults import Death
from raytrain.train.activation_checkpointing import as_with_rows
from raytrain.train.memory.device import room_on
from raytrain.train.optim import build_optimizers, muons_blocks
from raytrain.train.parallel.collectives import Interleaver
from raytrain.trainable import IntervalRow, Notice, RemoteState, Trainable

__all__ = ["distribute"]


# ---------------------------------------------------------------- interval log


class LoadLog:
    """Writes the expert rows of each log interval; implements `raytrain.trainable.IntervalLog`.

    A row: {"kind": "load", "step": the last, "steps": their number, "layers": [[rows of each expert]], "dropped": of
    each layer, "idle": [[steps since each expert had a row, null = never]]}. With experts in other processes also
    "hosts": {"version" of the placement, "rows": [[of each host] of each layer], "bytes", "busy_s"} and "workers":
    {"wait_s": seconds in the exchange, the hosts' computing included}. Rows of skipped steps and of padding count for
    the hosts, which computed them, but for no expert.

    Args:
        loads: of the routers.
        client: None where every worker holds all experts.
        lifecycle: of experts that come and go. A row then has their "ids": of each layer that of each expert, null for
            an empty slot.
    """

    def __init__(
        self, loads: LoadTracker, client: ExpertClient | None = None, lifecycle: Lifecycle | None = None
    ) -> None:
        self.loads, self.client, self.lifecycle = loads, client, lifecycle
        self._seconds_before = 0.0
        self._busy_before: list[float] = []
        self._logged_placement: Placement | None = None

    def device_values(self) -> Tensor:
        """The interval's counts, and the step of each one's last use."""
        return torch.cat([self.loads.window, self.loads.used])

    def host_values(self) -> list[float]:
        """This worker's seconds in the exchange, bytes and rows."""
        if self.client is None:
            return []
        spent, self._seconds_before = self.client.group.seconds - self._seconds_before, self.client.group.seconds
        return [spent, *self.client.traffic.take()]

    def forget(self) -> None:
        """Forget the routing trace of a measurement; its counts are reset with the routers' buffers."""
        if self.loads.trace is not None:
            self.loads.trace.forget()

    def close(self, step: int, device: list[float], workers: list[list[float]]) -> IntervalRow:
        """Return the row; metrics: `transport_s` (per step, mean of the workers), `host_imbalance` (max over mean), and
        with a lifecycle `experts` (living ones of a layer, mean of the layers)."""
        loads = self.loads
        values = iter(device)
        counts, used = ([list(itertools.islice(values, size)) for size in loads.sizes] for _ in range(2))
        row: dict[str, Any] = {
            "kind": "load",
            "step": step,
            "steps": loads.window_steps,
            "layers": [[int(count) for count in part[:-1]] for part in counts],
            "dropped": [int(part[-1]) for part in counts],
            "idle": [[loads.step - int(last) if last else None for last in part[:-1]] for part in used],
        }
        metrics: dict[str, float] = {}
        if self.lifecycle is not None:
            row["ids"] = ids = self.lifecycle.ids()
            metrics["experts"] = sum(one is not None for layer in ids for one in layer) / len(ids)
        if self.client is not None:
            row["workers"] = {"wait_s": [one[0] for one in workers]}
            row["hosts"] = self._hosts(workers)
            metrics["transport_s"] = sum(one[0] for one in workers) / len(workers) / max(1, loads.window_steps)
            rows = [sum(column) for column in zip(*row["hosts"]["rows"], strict=True)]
            metrics["host_imbalance"] = max(rows) * len(rows) / sum(rows) if sum(rows) else 1.0
        loads.window_steps = 0
        loads.window = torch.zeros_like(loads.window)
        return IntervalRow(metrics, row, loads.trace.take() if loads.trace is not None else {}, self._placement(step))

    def _placement(self, step: int) -> list[tuple[str, dict[str, Any]]]:
        """An event with the placement and the bytes of each host: the first time, and after each switch."""
        if self.client is None or self.client.placement is self._logged_placement:
            return []
        self._logged_placement = placement = self.client.placement
        optim, dtype = self.client.optim, str(self.client.dtype).removeprefix("torch.")
        costs = expert_costs(self.client.shapes, optim, dtype="fp64" if dtype == "float64" else "fp32")
        used = [placement.bytes_on(host, costs) for host in range(placement.num_hosts)]
        hosts = self.client.member.hosts
        row = {"step": step, **placement.to_json(), "bytes": used, "devices": [spec.device for spec in hosts]}
        if len({spec.kind for spec in hosts}) > 1:  # else none was measured
            row |= {"kinds": [spec.kind for spec in hosts], "speeds": [spec.speed for spec in hosts]}
        return [("placement", row)]

    def _hosts(self, workers: list[list[float]]) -> dict[str, Any]:
        assert self.client is not None
        hosts = self.client.placement.num_hosts
        total = [int(sum(column)) for column in zip(*(one[1:] for one in workers), strict=True)]
        spent = list(self.client.busy_s)
        busy = [now - before for now, before in zip(spent, self._busy_before or [0.0] * hosts, strict=True)]
        self._busy_before = spent
        rows = [total[start : start + hosts] for start in range(hosts, len(total), hosts)]
        return {"version": self.client.placement.version, "rows": rows, "bytes": total[:hosts], "busy_s": busy}


# ---------------------------------------------------------------- lifecycle


def attach_lifecycle(trainable: Trainable, lifecycle: Lifecycle) -> None:
    """Have the experts of a model come and go: connects `lifecycle` to the training loop, where all experts are in this
    process; `hand_over` to those that hold them otherwise."""
    loads = lifecycle.loads
    trainable.counts, trainable.commit, trainable.notices = lifecycle.counts, lifecycle.commit, lifecycle.notices
    trainable.interval_log = LoadLog(loads, lifecycle=lifecycle)
    trainable.state_parts = lambda: {"load": loads, "lifecycle": lifecycle}
    if lifecycle.config.connection is None:

        def build(module: nn.Module, optim: OptimConfig) -> list[torch.optim.Optimizer]:
            optimizers = build_optimizers(module, optim, lr=optim.lr, blocks=muons_blocks(trainable, optim))
            lifecycle.use(optimizers)
            return optimizers

        trainable.optimizers = build


def attach_sleep(trainable: Trainable, lifecycle: Lifecycle) -> None:
    """Have the model keep rows and replay them (`experts.lifecycle.replay`); its experts are in this process."""
    limit = lifecycle.cycle.replay.bytes
    assert limit is not None
    recorder = Recorder(trainable.loss, limit)
    cycle = SleepCycle(lifecycle, recorder)
    lifecycle.took, before = cycle.took, trainable.state_parts
    assert before is not None
    trainable.loss, trainable.sleep = recorder, cycle.after_step
    trainable.state_parts = lambda: {**before(), "sleep": cycle}


# ---------------------------------------------------------------- distribute


def distribute(trainable: Trainable, config: ExpertsConfig, *, lifecycle: Lifecycle | None = None) -> Trainable:
    """Have the experts of a model handed over to other processes once its builder has returned: they get them as they
    are then, with what is frozen.

    Without a connection the experts stay in this process, and the trainable is returned as it is: `experts.hosts: 0`,
    and any process that is no worker of a run. A builder therefore ends with `return distribute(trainable, experts)`
    wherever its experts will live.

    Args:
        trainable: built in this process, with its experts in its MoELayers; changed in place.
        config: the `experts` section that the builder received. A worker's has a connection to the other processes
            (`experts.exchange.membership.Connection`) where the run's experts are on hosts, or `colocated`.
        lifecycle: of experts that come and go.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from experts.config import ExpertsConfig
        >>> from experts.distribute import distribute
        >>> from experts.models import moe_layer
        >>> from raytrain.trainable import Trainable
        >>> class Net(nn.Module):
        ...     def __init__(self, experts):
        ...         super().__init__()
        ...         self.layer, self.head = moe_layer(4, experts), nn.Linear(4, 3)
        ...
        ...     def forward(self, x, labels):
        ...         hidden, aux = self.layer(x.unsqueeze(1))
        ...         return nn.functional.cross_entropy(self.head(hidden.squeeze(1)), labels)
        >>> def build(experts):  # named in model.builder; `experts` is that section of the job
        ...     return distribute(Trainable.from_module(Net(experts)), experts)
        >>> trainable = build(ExpertsConfig(num_experts=4))  # in this process: the experts stay
        >>> trainable.remote.distributed
        False
        >>> batch = {"x": torch.randn(5, 4), "labels": torch.tensor([0, 2, 1, 1, 0])}
        >>> trainable.loss(trainable.module, batch).loss.backward()
        >>> trainable.module.layer.experts.w1.grad.shape  # (experts, hidden, width)
        torch.Size([4, 16, 4])
    """
    if config.connection is not None:
        trainable.hand_over = partial(hand_over, config=config, lifecycle=lifecycle)
    return trainable


def hand_over(trainable: Trainable, config: ExpertsConfig, lifecycle: Lifecycle | None = None) -> None:
    """Join a generation, hand the experts over, and connect them to the training loop. Collective over the workers.

    Raises:
        InputError: the model has no MoELayer, or its experts cannot live in other processes as their author wrote them.
    """
    named = trainable.module.named_modules(remove_duplicate=False)
    names = {name: part for name, part in named if isinstance(part, MoELayer)}
    layers = list(dict.fromkeys(names.values()))
    if not layers:
        got, remedy = "a model without a MoELayer", "there are no experts to put on hosts"
        raise InputError("experts.hosts", got=got, expected="auto or 0", remedy=remedy)
    shapes = [shape_of(layer.experts, next(n for n, one in names.items() if one is layer)) for layer in layers]
    check_hand_over(trainable, names, shapes, trains=getattr(config.connection, "trains", True))
    rules = PlacementRules.of(config)
    group, membership = config.connection.join(shapes, rules)
    needed = membership.rank == 0 or membership.host is not None
    own: list[Any] = [layer.experts for layer in layers] if needed else []
    first = [[experts.weights_of(expert) for expert in range(len(experts.hidden_E))] for experts in own]
    rebalancer = None
    if membership.rank == 0 and rules.every:
        hosts = membership.hosts or equal_hosts(membership.placement.num_hosts)
        rebalancer = LoadRebalancer(rules, costs_of(shapes), hosts)
    client = ExpertClient(
        group, membership, shapes=shapes, first=first, rebalancer=membership.rebalancer or rebalancer,
        lifecycle=lifecycle,
    )  # fmt: skip
    numbered = [(name, layers.index(layer)) for name, layer in names.items()]
    stacked = [stacked_names(f"{name}.experts".lstrip("."), number, shapes[number]) for name, number in numbered]
    for number, layer in enumerate(layers):
        layer.experts = RemoteExperts(client, number, layer.experts)
    remote = RemoteExpertState(client, layers, trainable, stacked=stacked, rebalancer=rebalancer)
    for part in ("loss", "between_steps", "commit", "log_metrics"):
        call = getattr(trainable, part)
        if call is not None and not str(getattr(call, "__module__", "")).startswith("experts."):
            setattr(trainable, part, client.watched(call))
    trainable.optimizers = remote.optimizers
    if lifecycle is not None:
        lifecycle.local = False
    trainable.agree = client.agree
    trainable.remote = remote
    if isinstance(trainable.interval_log, LoadLog):
        trainable.interval_log = LoadLog(trainable.interval_log.loads, client, trainable.interval_log.lifecycle)


# ---------------------------------------------------------------- refusals
# What the author of a model said about its experts and other processes cannot keep: refused before they leave.


def shape_of(experts: nn.Module, name: str) -> LayerShape:
    """The shape of the experts of the layer of this name. Raises InputError: they cannot move to other processes."""
    if type(experts) not in (GroupedExperts, UnevenExperts):
        raise InputError(
            "model.builder", got=f"{type(experts).__name__} as the experts of a MoELayer ({name})",
            expected="experts of experts.grouped, which can move to other processes",
            remedy="experts.hosts 0 keeps any module inside the workers",
        )  # fmt: skip
    assert isinstance(experts, GroupedExperts | UnevenExperts)
    stacks = [experts.slot(expert)[0] for expert in range(len(experts.hidden_E))]
    frozen = tuple(
        tuple(weight for weight in stack.names if not getattr(getattr(stack, weight, None), "requires_grad", True))
        for stack in stacks
    )
    kind = experts.activation, experts.bias, frozen if any(frozen) else ()
    return LayerShape(experts.width, experts.hidden_E, *kind, name=name)


def check_hand_over(
    trainable: Trainable, layers: Mapping[str, MoELayer], shapes: list[LayerShape], *, trains: bool
) -> None:
    """Refuse what would be lost when the experts of these layers, by name, move to other processes.

    Args:
        trains: False where the experts only answer, so that gradients and optimizers do not matter.

    Raises:
        InputError: naming the layer, or the part of the Trainable.
    """
    numbers = {id(layer): number for number, layer in enumerate(dict.fromkeys(layers.values()))}
    for name, layer in layers.items():
        experts, place, shape = layer.experts, f"{name}.experts".lstrip("."), shapes[numbers[id(layer)]]
        own = {f"{place}.{one}" for one, _ in chain(experts.named_parameters(), experts.named_buffers())}
        odd = sorted(own ^ set(stacked_names(place, 0, shape)))
        if odd:
            raise _refused(f"{place} with other tensors than it was built with ({odd[0]})", "those of GroupedExperts")
        for path, part in experts.named_modules():
            for key, value in vars(part).items():
                if (key.endswith("_hooks") and value) or callable(value):
                    raise _refused(f"{place}{path and '.'}{path} with its own {key.strip('_')}", "experts without it")
        for path, parameter in experts.named_parameters():
            if trains and (parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)):
                raise _refused(f"{place}.{path} with a hook on its gradient", "weights of experts without hooks")
    holders = {id(one): layer for layer in layers.values() for one in layer.experts.parameters()}
    for name, parameter in trainable.module.named_parameters(remove_duplicate=False):
        layer = holders.get(id(parameter))
        if layer is not None and layers.get(name.rpartition(".experts.")[0]) is not layer:
            raise _refused(f"{name}, which is also a weight of the experts of a MoELayer", "a weight of its own")
    if not trains:
        return
    for part in ("optimizers", "agree"):
        if getattr(trainable, part) is not None:
            got = f"a Trainable with its own {part}, which the holders of the experts do not have"
            raise _refused(got, "the optimizer of the section optim", remedy=f"leave Trainable.{part} None, or ")
    if not any(one.requires_grad and id(one) not in holders for one in trainable.module.parameters()):
        raise _refused("a model that trains nothing but its experts", "a trained parameter in the workers")


def _refused(got: str, expected: str, remedy: str = "") -> InputError:
    return InputError("experts.hosts", got=got, expected=f"0, or {expected}", remedy=remedy + REMEDY)


# ---------------------------------------------------------------- remote state


def death_notices(deaths: Sequence[Death], note: str, *, step: int, lost: int, now: float) -> list[Notice]:
    """An event for each death; `step` is the first one committed after it, `lost` how many are trained again."""
    found: list[Notice] = []
    again = f", {counted(lost, 'step')} to train again" if lost else ""
    for death in deaths:
        seconds = max(0.0, now - death.time)
        at = time.strftime("%H:%M:%S", time.localtime(death.time))
        ended = f"was ended at {at}, as it did not respond" if death.silent else f"died at {at}"
        reason = (
            f"{death.title} {ended}: back to step {step - 1}{again}; step {step} was committed {seconds:.1f} s later"
        )
        fields = {"who": death.who, "node": death.node, "pid": death.pid, "died_at": death.time, "why": death.why}
        fields |= {"silent": death.silent, "from_step": step - 1, "step": step, "seconds": seconds}
        found.append(("death", {**fields, "reason": f"{reason}; {note}" if note and death is deaths[-1] else reason}))
    return found


class RemoteExpertState(RemoteState):
    """The experts of a model as state in other processes.

    Args:
        stacked: `stacked_names` of each layer.
    """

    def __init__(
        self, client: ExpertClient, layers: list[MoELayer], trainable: Trainable, *,
        stacked: list[dict[str, list[str]]], rebalancer: LoadRebalancer | None,
    ) -> None:  # fmt: skip
        self._stacked = {name: rows for layer in stacked for name, rows in layer.items()}
        self.client, self.layers, self.trainable, self._rebalancer = client, layers, trainable, rebalancer
        self.module = trainable.module
        self.note, self.workers_group = client.member.note, client.member.workers_group
        self.interleaver: Interleaver | None = client.interleaver
        self.distributed, self.deaths = True, list(client.member.deaths)
        self._deaths_reported = not self.deaths
        self.discard, self.end_passes = client.discard, client.end_passes
        self.shortages, self.begin_save = client.shortages, client.begin_save

    def optimizers(self, module: nn.Module, optim: OptimConfig) -> list[torch.optim.Optimizer]:
        """Build the optimizers of everything but the experts, whose holders build theirs from the same section."""
        parameter = next(module.parameters())
        self.client.configure(optim, dtype=parameter.dtype, device=parameter.device)
        if self._rebalancer is not None:  # the optimizer decides how many bytes an expert has
            dtype = "fp64" if parameter.dtype == torch.float64 else "fp32"
            self._rebalancer.costs = expert_costs(self.client.shapes, optim, dtype=dtype)
        optimizers = build_optimizers(module, optim, lr=optim.lr, blocks=muons_blocks(self.trainable, optim))
        if self.client.lifecycle is not None:
            self.client.lifecycle.use(optimizers)
        return optimizers

    def idle(self) -> Tensor:
        """See `RemoteState`: sends no rows through the layers, as the last pass with rows called them."""
        parameter = next(self.module.parameters())
        rows = [torch.zeros((), dtype=torch.float64, device=parameter.device, requires_grad=True)]
        for number, op in self.client.calls[torch.is_grad_enabled()]:
            experts = self.layers[number].experts
            assert isinstance(experts, RemoteExperts)
            with torch.no_grad() if op is Op.EVALUATE else as_with_rows(experts):
                row = experts.idle(self.client.shapes[number].width, dtype=parameter.dtype, device=parameter.device)
            rows.append(row.double())
        return torch.stack(rows).sum()

    def waited_s(self) -> float:
        """See `RemoteState`; includes the time in which the hosts compute."""
        return self.client.group.seconds

    def notices(self) -> list[Notice]:
        """See `RemoteState`; also those of rank 0's rebalancer."""
        found = [] if self.client.rebalancer is None else self.client.rebalancer.notices()
        if not self._deaths_reported and self.client.member.rank == 0:
            self._deaths_reported = True
            found += death_notices(
                self.deaths, self.note, step=self.client.steps, lost=self.lost_steps, now=time.time()
            )
            self.client.member.acknowledge_deaths()
        return found

    def finish_save(self, folder: str) -> dict[str, Any]:
        """See `RemoteState`; the manifest also says how the experts' tensors make up those of the module."""
        return {**self.client.finish_save(folder), STACKED: self._stacked}

    def restore(self, folder: str, *, step: int, files: list[str]) -> None:
        locate(read_manifest(folder), [shape.num_experts for shape in self.client.shapes])
        self.client.restore(folder, step=step)

    def gather_module(self, module: nn.Module) -> nn.Module | None:
        """See `RemoteState`: puts the experts back into the module, and ends the generation.

        The module comes to the CPU if its device has no room for all experts: what is read next are its weights, and a
        few passes.
        """
        parameter = next(self.module.parameters())
        dtype, device = parameter.dtype, parameter.device
        shapes = self.client.shapes
        need = dtype.itemsize * sum(shape.numel(expert) for shape in shapes for expert in range(shape.num_experts))
        room = room_on(device) if self.client.member.rank == 0 else None
        if room is not None and need > room:
            device = torch.device("cpu")
        for number, layer in enumerate(self.layers):
            weights = self.client.fetch(number)
            if weights is None:
                continue
            shape = shapes[number]
            build = partial(empty_experts, shape, range(shape.num_experts), dtype=dtype)
            try:
                experts = build(device=device)
            except torch.OutOfMemoryError:  # another process may have taken the room
                device = torch.device("cpu")
                experts = build(device=device)
            for expert, own in enumerate(weights):
                for name, view in experts.weights_of(expert).items():
                    view.copy_(own[name])
            layer.experts = layer.experts.given_back(experts) if isinstance(layer.experts, RemoteExperts) else experts
        self.client.end()
        if self.client.member.rank:
            return None
        if device.type != parameter.device.type:
            module.zero_grad()  # gradients would come along
            module.to(device)
        return module
