"""The lines of `tests/gpu/run.py`: what a person with GPUs runs, what each line shows, and what must come out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        name: short and unique.
        gpus, nodes: how many it needs at least.
        shows: what it shows.
        expected: what must come out.
        test: the tests of this folder that it runs; "" for a training run or a measurement.
        measure: the subject of `measure.py`, and its arms.
        alone: it takes times or fills the memory, so that nothing may run beside it.
        job: keys of the training run, over those of `test_runs.JOB`.
        equals: the line whose losses it must have.
        kills: the process that is killed in the middle: "ExpertHost", "TrainWorker", or "" for none.
        minutes: its time limit; a line that takes longer is reported as hung.
        on_cpu: whether its body runs without GPUs too.
        across: it takes one GPU more than the largest node has, added to `scale.workers`, so it runs on two nodes.
        environ: of the command, besides its own.
        verb: of the command; "infer" answers rows with the weights of the line `one`.
    """

    name: str
    gpus: int
    shows: str
    expected: str
    test: str = ""
    measure: str = ""
    alone: bool = False
    job: dict[str, Any] = field(default_factory=dict)
    nodes: int = 1
    equals: str = ""
    kills: str = ""
    minutes: float = 4.0
    on_cpu: bool = True
    across: bool = False
    environ: dict[str, str] = field(default_factory=dict)
    verb: str = "train"


SAME = "the losses of `one`, within 0.1 %"
HALF = {"scale.gpus_per_worker": 0.5}
LIFECYCLE = {
    "max_experts": 6, "every": 5, "birth": {"uncertainty": 0.0, "cooldown_steps": 10},
    "replay": {"bytes": 200_000, "every": 20, "rows": 64, "lr": 1e-3},
}  # fmt: skip


def _layouts(gpus: int, prefix: str, *, nodes: int = 1, across: bool = False) -> list[Line]:
    """The layouts of one job on this many GPUs; half of them hold experts where hosts have GPUs of their own."""
    half = gpus // 2
    expected = f"{SAME}; the events name two nodes" if nodes > 1 else SAME
    every = {"gpus": gpus, "nodes": nodes, "across": across, "equals": "one", "expected": expected}
    return [
        Line(f"{prefix}-ddp", shows="data parallel: NCCL sums the gradients", job={"scale.workers": gpus}, **every),
        Line(f"{prefix}-fsdp", shows="sharded weights, gathered while a block computes",
             job={"scale.workers": gpus, "scale.strategy": "fsdp"}, **every),
        Line(f"{prefix}-colocated", shows="experts spread over the workers, rows exchanged by NCCL",
             job={"scale.workers": gpus, "experts.hosts": "colocated"}, **every),
        Line(f"{prefix}-hosts", shows="experts on hosts with GPUs of their own",
             job={"scale.workers": gpus - half, "experts.hosts": half}, **every),
    ]  # fmt: skip


LINES = [
    Line("machine", 1, "the driver, torch and raytrain see the same GPUs",
         "names, memory and capability agree; nothing is unusable", test="test_kernels.py -k machine"),
    Line("one", 1, "one process trains a mixture of experts, evaluates and saves", "done; the loss falls"),
    Line("numerics", 1, "12 steps in each format against float64 on the CPU; pinned and streamed rows",
         "within 1e-9, 1e-4, 5e-3 (TF32), 3e-2 (bf16), 1e-2 (fp16); rows equal to the bit", measure="numerics"),
    Line("devices", 1, "fp32, bf16 and fp16 train; every tensor is on the device; rows are copied ahead",
         "all pass on cuda", test="test_devices.py"),
    Line("one-bf16", 1, "bf16 autocast and the grouped product",
         "the losses of `one`, within 5 %; below 8.0 the plan falls back to fp16; on others than 9 and 10, the loop",
         job={"precision.dtype": "bf16"}, equals="one"),
    Line("infer", 1, "a trained model answers rows on a GPU",
         "every row is answered; nine of ten answers are those of the CPU", verb="infer", equals="one"),
    Line("generation", 1, "generated tokens when the pass of one token is captured as a CUDA graph, and when not",
         "equal in fp32; captured in bf16, experts too; no memory stays behind", measure="generation"),
    Line("oom", 1, "rows that do not fit: the step is retried in halves",
         "the losses of smaller micro-batches; no byte stays behind", measure="oom"),
    Line("compile", 1, "each mode of loop.compile trains and evaluates; CUDA graphs of the full model too",
         "losses of the eager model, within 1 %; no part is eager", test="test_kernels.py -k compiled", on_cpu=False,
         minutes=8),
    Line("one-deterministic", 1, "loop.deterministic: two runs are equal bit by bit", "equal losses, all digits",
         job={"loop.deterministic": True}, equals="one"),
    Line("one-auto", 1, "what the start measures: precision, micro-batch, overlap", "done; decisions are in the report",
         job={"precision.dtype": "auto", "loop.micro_batch_size": "auto"}),
    Line("one-memory", 1, "a worker runs out of memory once: the step is retried in smaller micro-batches",
         f"an event `out_of_memory`; {SAME}", job={"model.builder": "hungry:moe_gpt"}, equals="one", on_cpu=False),
    Line("shared-ddp", 1, "two workers on one GPU: gloo sums the gradients through the host", SAME, equals="one",
         job={"scale.workers": 2, **HALF}),
    Line("shared-colocated", 1, "two workers on one GPU with half of the experts each", SAME, equals="one",
         job={"scale.workers": 2, "experts.hosts": "colocated", **HALF}),
    Line("shared-host", 1, "a worker and an expert host on one GPU", SAME, equals="one",
         job={"scale.workers": 1, "experts.hosts": 1, **HALF}),
    Line("shared-hosts", 1, "a worker and two expert hosts on one GPU", SAME, equals="one",
         job={"scale.workers": 1, "experts.hosts": 2, "scale.gpus_per_worker": 0.33}),
    Line("grouped", 1, "the grouped product of experts equals the loop, experts without rows included",
         "\"used\"; where the GPU has no kernel (9 and 10 have), or a wrong one, why not",
         test="test_kernels.py -k grouped"),
    Line("lifecycle", 1, "experts are born while it trains; it sleeps, replays rows and checks its memory",
         "an event `expert_born`; sleep cycles end; the loss falls", job={"experts.lifecycle": LIFECYCLE}),
    Line("lifecycle-hosts", 1, "experts are born on two hosts that share the GPU with the worker",
         "an event `expert_born`; the loss falls",
         job={"scale.workers": 1, "experts.hosts": 2, "scale.gpus_per_worker": 0.33,
              "experts.lifecycle": {name: LIFECYCLE[name] for name in ("max_experts", "every", "birth")}}),
    Line("expert-host", 1, "an expert host runs out of memory: the step is dropped there, and it goes on",
         "the shortage is recorded, and the next rows are computed as before", test="test_kernels.py -k expert_host",
         on_cpu=False),
    Line("tune", 1, "trials of `tune` in processes of their own", "done; best.yaml is written", verb="tune",
         minutes=10, on_cpu=False),
    Line("nccl", 1, "a communicator of one member", "it is made, used and ended within its limits", measure="nccl",
         on_cpu=False),
    Line("ceilings", 1, "products, copies and launches at best", "figures", measure="ceilings", alone=True),
    Line("step", 1, "a step of GPT-2 124M in bf16, 16 x 1024 tokens, eager and compiled, against a plain loop",
         "at most 1.02 of the plain loop; planned memory within 10 %; MFU at least 0.45 on an H100 or H200",
         measure="step", alone=True, minutes=8, on_cpu=False),
    Line("checkpoint", 1, "how long a checkpoint of GPT-2 stops the loop", "at most 0.1 s; it holds what the step left",
         measure="checkpoint", alone=True, on_cpu=False),
    Line("infer-speed", 1, "generated tokens per second, batch 1, 16, 64", "at least those of transformers",
         measure="infer", alone=True, on_cpu=False),
    Line("launches", 1, "kernels of a step beyond the plain loop's", "at most 40", measure="launches", alone=True,
         on_cpu=False),
    Line("host", 1, "the host's time of a step beyond the plain loop's", "at most 0.8 ms", measure="host", alone=True,
         on_cpu=False),
    Line("scaler", 1, "fp16: an overflow is skipped on the device", "weights unchanged; the scale halved",
         measure="scaler", alone=True, on_cpu=False),
    Line("storage", 1, "a step whose rows are large: resident, pinned, streamed", "figures", measure="storage",
         alone=True, on_cpu=False),
    Line("memory", 1, "memory that runs out is recognised: the allocator, the CUDA runtime, cuBLAS",
         "each counts as out of memory, and the process goes on", test="test_kernels.py -k memory", alone=True),
    Line("subset", 2, "CUDA_VISIBLE_DEVICES shows the second GPU only", f"the plan says so; {SAME}", equals="one",
         environ={"CUDA_VISIBLE_DEVICES": "1"}, on_cpu=False),
    Line("fsdp-overlap", 2, "all-gathers of FSDP run while blocks compute",
         "a part of the gathering time is hidden", test="test_kernels.py -k overlap", on_cpu=False),
    *_layouts(2, "two"),
    Line("two-deterministic", 2, "loop.deterministic over NCCL: two runs are equal bit by bit",
         "equal losses, all digits", job={"scale.workers": 2, "loop.deterministic": True}, equals="one"),
    Line("two-export", 2, "the worker's GPU has no room for the experts of the host when training ends",
         f"{SAME}; the weights are those of the checkpoint", equals="one", on_cpu=False,
         job={"scale.workers": 1, "experts.hosts": 1, "cluster.memory_limit": 2**30}),
    Line("two-infer", 2, "rows divided over two workers with a GPU each",
         "the answers of one worker; nine of ten are those of the CPU", job={"scale.workers": 2}, verb="infer"),
    Line("two-memory", 2, "a worker with experts on a host runs out of memory once",
         f"an event `out_of_memory`; {SAME}", equals="one", on_cpu=False,
         job={"scale.workers": 1, "experts.hosts": 1, "model.builder": "hungry:moe_gpt"}),
    Line("two-host-killed", 2, "a host dies in the middle and is replaced", f"done; {SAME}", equals="one",
         job={"scale.workers": 1, "experts.hosts": 1}, kills="ExpertHost", minutes=6),
    Line("two-worker-killed", 2, "a worker dies in the middle; all resume from the last checkpoint", f"done; {SAME}",
         job={"scale.workers": 2}, equals="one", kills="TrainWorker", minutes=6),
    Line("two-hosts-worker-killed", 2, "the worker dies while a host holds the experts", f"done; {SAME}", equals="one",
         job={"scale.workers": 1, "experts.hosts": 1}, kills="TrainWorker", minutes=6),
    *_layouts(8, "eight"),
    Line("eight-replicas", 8, "copies of busy experts on several hosts, and experts that move", "done; the loss falls",
         job={"scale.workers": 4, "experts.hosts": 4, "experts.replicas": 2, "experts.rebalance_every": 10}),
    Line("eight-inflight", 8, "two micro-batches in flight to the hosts", SAME, equals="one",
         job={"scale.workers": 4, "experts.hosts": 4, "experts.inflight": 2, "loop.micro_batch_size": 1}),
    Line("eight-host-killed", 8, "one of four hosts dies and is replaced", f"done; {SAME}", equals="one",
         job={"scale.workers": 4, "experts.hosts": 4}, kills="ExpertHost", minutes=6),
    *_layouts(2, "nodes", nodes=2, across=True),
    Line("nodes-worker-killed", 2, "a worker on this node dies; those of both nodes resume",
         f"done; {SAME}; the events name two nodes", job={"scale.workers": 2}, nodes=2, across=True, equals="one",
         kills="TrainWorker", minutes=6),
    *_layouts(16, "all", nodes=2),
]  # fmt: skip
"""In the order in which they run: what would hurt most if it were not known comes first."""


def markdown() -> str:
    """The table of the README."""
    rows = ["| line | GPUs | nodes | shows | expected |", "|---|---|---|---|---|"]
    rows += [f"| `{one.name}` | {one.gpus} | {one.nodes} | {one.shows} | {one.expected} |" for one in LINES]
    return "\n".join(rows) + "\n"
