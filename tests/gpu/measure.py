"""Measures the product on one GPU, one subject per process; prints a JSON row for each figure as soon as it is known.

    python tests/gpu/measure.py SUBJECT [ARM ...] [--tiny]     # in the root of the repository

`ARM` keeps the arms of `step` whose name contains it. `--tiny` runs the same code with small sizes, on a CPU too, to
try the script. The exit status is 1 where a figure misses its goal; each of those is a row that begins with "E   ".
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from operator import eq, ne
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from jobs.bench.harness.sessions import SessionArm
from raytrain.models.gpt import gpt
from raytrain.train.optim import parameter_groups

TINY = "--tiny" in sys.argv
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
PEAK = 989e12
"""FLOP/s of an H100 or H200 (SXM) in bf16, dense, by NVIDIA's data sheet."""
SIZE = {"layers": 2, "heads": 2, "width": 64, "context": 64} if TINY else {
    "layers": 12, "heads": 12, "width": 768, "context": 1024}  # fmt: skip
VOCAB = 512 if TINY else 50304
BATCH = 4 if TINY else 16
STEPS, BLOCKS = (3, 2) if TINY else (20, 3)
MISSED: list[str] = []
CUDNN, FLASH, MATH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH


def tell(name: str, **values: Any) -> None:
    """Print one row."""
    short = {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in values.items()}
    print(json.dumps({"name": name, **short}), flush=True)


def goal(what: str, value: float, *, at_most: float = math.inf, at_least: float = -math.inf) -> None:
    """Judge a figure; tiny sizes are not judged."""
    bound = f"at most {at_most:g}" if at_most < math.inf else f"at least {at_least:g}"
    tell("goal", what=what, value=float(value), goal=bound, met=bool(at_least <= value <= at_most))
    if not at_least <= value <= at_most and not TINY:
        MISSED.append(what)
        print(f"E   {what}: {value:.4g}, goal {bound}", flush=True)


def wait() -> None:
    """Wait for the device."""
    if GPU:
        torch.cuda.synchronize()


def free() -> None:
    """Give back what nothing refers to, and begin a new peak."""
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def rows(number: int, *, context: int, vocab: int) -> dict[str, torch.Tensor]:
    """Tokens that can be learned: each follows from the one before, with noise."""
    g = torch.Generator().manual_seed(0)
    step = torch.randint(1, 7, (number, context + 1), generator=g).cumsum(1)
    ids = ((step + torch.randint(vocab, (number, 1), generator=g)) % vocab).to(torch.int64)
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def job(size: dict[str, int], *, vocab: int, batch: int, micro: int | None = None, precision: str = "bf16",
        number: int = 512, **keys: Any) -> dict[str, Any]:  # fmt: skip
    """A job of the built-in GPT in this process; `section__name=value` sets more keys."""
    train = rows(number, context=size["context"], vocab=vocab)
    made: dict[str, Any] = {
        "model": {"builder": "raytrain.models.gpt:gpt", **size, "vocab_size": vocab},
        "data": {"train": train, "eval_fraction": 0.0, "storage": "resident"},
        "optim": {"lr": 3e-4, "warmup_steps": 0, "schedule": "constant"},
        "precision": {"dtype": precision},
        "loop": {"max_steps": 100_000, "global_batch_size": batch, "micro_batch_size": micro or batch, "log_every": 0,
                 "compile": "off"},
        "save": {"dir": tempfile.gettempdir(), "every": 1_000_000},
        "scale": {"workers": 1} | ({} if GPU else {"mode": "cpu", "threads": 2}),
        "telemetry": {"tensorboard": False},
    }  # fmt: skip
    for key, value in keys.items():
        section, name = key.split("__")
        made.setdefault(section, {})[name] = value
    return made


def arm(mapping: dict[str, Any], precision: str) -> Any:
    """A prepared session on the device."""
    made = SessionArm(mapping, precision=precision)
    assert made.session.device.type == DEVICE.type, made.session.device
    return made


def end(made: Any) -> None:
    """Free a session."""
    made.session.close()
    made.session.release()


class Plain:
    """What a person writes: autocast, clip_grad_norm_, fused AdamW, set_to_none; nanoGPT's train.py without DDP."""

    def __init__(self, size: dict[str, int], *, vocab: int, batch: int, compiled: bool, number: int = 512,
                 amp: torch.dtype | None = torch.bfloat16) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.module = gpt(**size, vocab_size=vocab).module.to(DEVICE)
        groups = parameter_groups(self.module.named_parameters(), weight_decay=0.1)
        self.optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.99), fused=True)
        self.called = torch.compile(self.module, dynamic=False) if compiled else self.module
        self.data = {key: value.to(DEVICE) for key, value in rows(number, context=size["context"], vocab=vocab).items()}
        self.batch, self.amp, self.number = batch, amp, number
        self.losses: list[float] = []
        self.generator = torch.Generator().manual_seed(1)

    def run(self, steps: int) -> float:
        """Train; returns the seconds."""
        wait()
        began, loss = time.perf_counter(), torch.zeros(())
        for _ in range(steps):
            at = torch.randint(self.number, (self.batch,), generator=self.generator).to(DEVICE, non_blocking=True)
            with torch.autocast(DEVICE.type, dtype=self.amp, enabled=self.amp is not None):
                loss = self.called(input_ids=self.data["input_ids"][at], labels=self.data["labels"][at])["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.item())
        return time.perf_counter() - began


def timed(made: Any, *, blocks: int = BLOCKS, steps: int = STEPS) -> dict[str, float]:
    """Milliseconds of a step: the median of blocks, after five steps of warm-up."""
    began = time.perf_counter()
    made.run(2)
    first = time.perf_counter() - began
    made.run(3)
    seconds = [1e3 * made.run(steps) / steps for _ in range(blocks)]
    return {"first_2_s": first, "ms": statistics.median(seconds), "ms_min": min(seconds), "ms_max": max(seconds)}


def best(work: Callable[[], Any], times: int = 8) -> float:
    """The shortest of several times, in seconds."""
    work(), wait()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work(), wait()
        found.append(time.perf_counter() - began)
    return min(found)


def ceilings() -> None:
    """What the card can do at best, and what the head of a language model costs on it."""
    name = torch.cuda.get_device_name() if GPU else "cpu"
    tell("machine", torch=torch.__version__, gpu=name, total=torch.cuda.mem_get_info()[1] if GPU else 0)
    n = 512 if TINY else 8192
    a, b = (torch.randn(n, n, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    tell("matmul_bf16", tflops=2 * n**3 / best(lambda: a @ b) / 1e12)
    big = torch.randn((1 << 20) if TINY else (1 << 29), device=DEVICE)
    other = torch.empty_like(big)
    tell("copy", gb_s=2 * big.nbytes / best(lambda: other.copy_(big)) / 1e9)
    host_rows = torch.empty((1 << 20) if TINY else (1 << 27), pin_memory=GPU)
    part = other[: len(host_rows)]
    tell("pinned", to_device_gb_s=host_rows.nbytes / best(lambda: part.copy_(host_rows, non_blocking=True)) / 1e9,
         to_host_gb_s=host_rows.nbytes / best(lambda: host_rows.copy_(part, non_blocking=True)) / 1e9)  # fmt: skip
    m, d = (64, 64) if TINY else (16384, 768)
    for vocab in (VOCAB, VOCAB - 47):  # GPT-2's 50,257 words are no multiple of 8
        x, w = (torch.randn(k, d, device=DEVICE, dtype=torch.bfloat16) for k in (m, vocab))
        y = x @ w.T
        tell("head", vocab=vocab, forward_ms=1e3 * best(lambda x=x, w=w: x @ w.T),
             backward_ms=1e3 * best(lambda x=x, w=w, y=y: (y @ w, y.T @ x)))  # fmt: skip
    small = torch.ones(16, device=DEVICE)
    tell("launch", us=1e3 * best(lambda: [small.add_(1) for _ in range(1000)]))


def numerics() -> None:
    """Losses of 12 steps in each format against float64 on the CPU; layouts of rows must agree to the bit."""
    size, vocab = {"layers": 4, "heads": 4, "width": 128, "context": 64}, 256

    def losses(precision: str, device: str = DEVICE.type, **keys: Any) -> list[float]:
        mapping = job(size, vocab=vocab, batch=8, number=256, precision=precision, loop__log_every=1, **keys)
        if device == "cpu":
            mapping["scale"] = {"workers": 1, "mode": "cpu", "threads": 4}
        made = SessionArm(mapping, precision=precision)
        made.run(12)
        made.session.close()
        return made.losses

    def apart(found: list[float], expected: list[float]) -> float:
        return max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))

    reference = losses("fp64", "cpu")
    tell("reference", first=reference[0], last=reference[-1])
    for precision, limit in {"fp64": 1e-9, "fp32": 1e-4, "tf32": 5e-3, "bf16": 3e-2, "fp16": 1e-2}.items():
        if precision != "tf32" or GPU:
            goal(f"{precision} over float64 on the CPU", apart(losses(precision), reference), at_most=limit)
    whole = losses("fp32")
    for storage in ("pinned", "stream"):
        goal(f"{storage} rows over resident ones", apart(losses("fp32", data__storage=storage), whole), at_most=0.0)
    goal("4 micro-batches over 1", apart(losses("fp32", loop__micro_batch_size=2), whole), at_most=1e-4)
    again = losses("bf16", loop__activation_checkpointing=True)
    goal("recomputed activations, bf16", apart(again, losses("bf16")), at_most=1e-6)
    # GPT-2's vocabulary is no multiple of 64
    odd = {"size": {**size, "context": 32}, "vocab": 257, "batch": 8, "number": 64, "loop__log_every": 1}
    on_device = SessionArm(job(**odd, precision="fp32"), precision="fp32")
    on_device.run(6)
    on_cpu = SessionArm({**job(**odd, precision="fp64"), "scale": {"workers": 1, "mode": "cpu"}}, precision="fp64")
    on_cpu.run(6)
    goal("257 words, fp32", apart(on_device.losses, on_cpu.losses), at_most=1e-4)


def step() -> None:
    """A step of GPT-2 124M, 16 x 1024 tokens, against a plain loop: one process, one card, one arm after the other."""
    tokens, found = BATCH * SIZE["context"], {}

    def ours(vocab: int = VOCAB, **keys: Any) -> Any:
        return arm(job(SIZE, vocab=vocab, batch=BATCH, **keys), "bf16")

    arms: dict[str, Callable[[], Any]] = {
        "plain eager": lambda: Plain(SIZE, vocab=VOCAB, batch=BATCH, compiled=False),
        "ours eager": ours,
        "ours eager, 50,257 words": lambda: ours(VOCAB - 47),
        "plain compiled": lambda: Plain(SIZE, vocab=VOCAB, batch=BATCH, compiled=True),
        "ours compiled, all": lambda: ours(loop__compile="default", loop__compile_parts="all"),
        "ours compiled, blocks": lambda: ours(loop__compile="default", loop__compile_parts="blocks"),
        "ours reduce-overhead": lambda: ours(loop__compile="reduce-overhead"),
        "ours compiled, cuDNN": lambda: ours(loop__compile="default", loop__compile_parts="all"),
    }
    wanted = [one for one in sys.argv[2:] if not one.startswith("--")]
    for name, make in arms.items():
        if wanted and not any(one in name for one in wanted):
            continue
        free()
        kernels = contextlib.ExitStack()
        try:
            if name.endswith("cuDNN"):  # the compiler's caches do not know by which kernel attention was traced
                kernels.enter_context(torch.compiler.config.patch(force_disable_caches=True))
                kernels.enter_context(sdpa_kernel([CUDNN, FLASH, MATH], set_priority=True))
            made = make()
            module = made.module if isinstance(made, Plain) else made.session.trainable.module
            flops = 6 * sum(p.numel() for p in module.parameters())
            flops += 12 * SIZE["layers"] * SIZE["width"] * SIZE["context"]  # for each token, as nanoGPT counts
            found[name] = times = timed(made)
            rate = 1e3 * tokens / times["ms"]
            held = torch.cuda.max_memory_reserved() / 2**30 if GPU else 0.0
            facts: dict[str, Any] = {}
            if not isinstance(made, Plain):
                compiled, plan = made.session.switches.compiled, made.session.job.plan
                planned = plan.value("memory", 0) / 2**30
                facts = {"compiled": compiled and compiled.status()["achieved"], "plan_gib": planned}
                if name == "ours eager":
                    goal("planned memory over reserved", planned / max(held, 1e-9), at_most=1.1, at_least=0.9)
            tell("step", arm=name, tokens_s=rate, mfu=rate * flops / PEAK, reserved_gib=held, loss=made.losses[-1:],
                 **facts, **times)  # fmt: skip
            if not isinstance(made, Plain):
                end(made)
        except Exception as error:
            MISSED.append(name)
            print(f"E   {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        made = module = None
        kernels.close()
        torch._dynamo.reset()
    for one, other in (("ours eager", "plain eager"), ("ours compiled, all", "plain compiled")):
        if {one, other} <= found.keys():
            goal(f"a step, {one} over {other}", found[one]["ms"] / found[other]["ms"], at_most=1.02)
    if "ours compiled, all" in found and GPU and "H" in torch.cuda.get_device_name():
        flops = 6 * 124.4e6 + 12 * SIZE["layers"] * SIZE["width"] * SIZE["context"]
        goal("MFU", 1e3 * tokens / found["ours compiled, all"]["ms"] * flops / PEAK, at_least=0.45)


def host() -> None:
    """A step with as many parameter tensors as GPT-2, but so little work that the host decides."""
    size = {**SIZE, "width": 48, "heads": 4, "context": 32, "layers": 12}
    for precision, amp in (("bf16", torch.bfloat16), ("fp32", None)):
        arms = {
            "plain": Plain(size, vocab=256, batch=1, compiled=False, number=64, amp=amp),
            "ours": arm(job(size, vocab=256, batch=1, number=64, precision=precision), precision),
        }
        found: dict[str, list[float]] = {name: [] for name in arms}
        for block in range(2 if TINY else 8):  # alternately: a machine's other guests come and go
            for name, made in arms.items():
                seconds = made.run(5 if TINY else 50) / (5 if TINY else 50)
                found[name] += [1e3 * seconds] * (block > 0)
        medians = {name: statistics.median(values) for name, values in found.items()}
        tell("host", precision=precision, **{f"{name}_ms": value for name, value in medians.items()})
        goal(
            f"milliseconds of the host beyond a plain loop, {precision}",
            medians["ours"] - medians["plain"],
            at_most=0.8,
        )


def launches() -> None:
    """Kernels of a step, and where the device's time goes, from torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if GPU else [])]
    arms = {
        "plain": Plain(SIZE, vocab=VOCAB, batch=BATCH, compiled=False),
        "ours": arm(job(SIZE, vocab=VOCAB, batch=BATCH), "bf16"),
    }
    counts = {}
    for name, made in arms.items():
        made.run(4)
        with profile(activities=kinds, acc_events=True) as found:
            made.run(5)
        table = found.key_averages()
        words = ("LaunchKernel", "Memcpy", "Memset", "Synchronize")
        calls = {each.key: each.count / 5 for each in table if any(word in each.key for word in words)}
        counts[name] = sum(count for key, count in calls.items() if "LaunchKernel" in key or key == "cudaMemsetAsync")
        slow = sorted(table, key=lambda each: -getattr(each, "self_device_time_total", 0.0))[:12]
        times = {each.key[:60]: round(getattr(each, "self_device_time_total", 0.0) / 5e3, 3) for each in slow}
        tell("launches", arm=name, per_step=calls, device_ms=times)
    goal("kernels of a step beyond a plain one", counts["ours"] - counts["plain"], at_most=40)


def requested() -> int:
    """Bytes that live tensors asked for: the allocator may give a larger block than it was asked for."""
    return torch.cuda.memory_stats().get("requested_bytes.all.current", 0) if GPU else 0


def oom() -> None:
    """Rows that do not fit: the step is retried in halves, nothing stays behind, and the next steps are as before."""
    size = {"layers": 4, "heads": 4, "width": 256, "context": 128} if TINY else {
        "layers": 8, "heads": 8, "width": 512, "context": 512}  # fmt: skip
    batch = 8 if TINY else 64
    empty = requested()
    fine = arm(job(size, vocab=2048, batch=batch, micro=batch // 4, loop__log_every=1), "bf16")
    fine.run(6)
    small = torch.cuda.max_memory_reserved() if GPU else 0
    expected, fitting = list(fine.losses), requested() - empty
    end(fine)
    del fine
    free()
    empty = requested()
    made = arm(job(size, vocab=2048, batch=batch, loop__log_every=1, loop__grow_after=None), "bf16")
    if GPU:  # so much that a quarter of the rows fits, and all of them do not
        torch.cuda.set_per_process_memory_fraction(1.15 * small / torch.cuda.get_device_properties(0).total_memory)
    made.run(6)
    kept = requested() - empty
    losses = list(made.losses)
    made.run(5)
    grown = requested() - empty - kept
    retries = [fields for kind, fields in made.log.events if kind == "out_of_memory"]
    found = [(each["micro_batch_size_before"], each["micro_batch_size"]) for each in retries]
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    goal("bytes held after a retry, over a run that fits", kept - fitting, at_most=0)
    tell("oom", retries=found, micro=made.session.loader.batches.micro_batch)
    goal("bytes that further steps add", grown, at_most=0)
    goal("losses after a retry", worst, at_most=1e-4)
    goal("retries", len(found), at_least=1)


def storage() -> None:
    """Where rows are kept: the time of a step whose rows are large for what is computed."""
    features, batch = (256, 64) if TINY else (16384, 4096)
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(8 * batch, features, generator=g), torch.randint(10, (8 * batch,), generator=g)
    model = {"hidden": [64 if TINY else 2048] * 2, "num_features": features, "num_classes": 10}
    for where in ("resident", "pinned", "stream"):
        mapping = job({"context": 1}, vocab=8, batch=batch, data__train={"x": x, "labels": y}, data__storage=where)
        made = arm({**mapping, "model": {"builder": "raytrain.models.mlp:mlp", **model}}, "bf16")
        tell("storage", where=where, mib=batch * features * 4 / 2**20, **timed(made, steps=5 if TINY else 30))
        end(made)
        del made
        free()


def scaler() -> None:
    """fp16: a step with an overflow is skipped and halves the scale, on the device; its time against that of bf16."""
    size = {"layers": 4, "heads": 4, "width": 128, "context": 64}
    made = arm(job(size, vocab=256, batch=8, number=256, precision="fp16", loop__log_every=1), "fp16")
    made.run(3)
    step, weight = made.session.step, next(made.session.trainable.module.parameters())
    kept = weight.detach().clone()
    step.scale.value.fill_(3e38)  # every gradient overflows
    made.run(1)
    goal("a skipped step changes weights", float(not torch.equal(weight, kept)), at_most=0)
    goal("the scale after an overflow", float(step.scale.value) / 3e38, at_most=0.51, at_least=0.49)
    step.scale.value.fill_(2.0**16)
    made.run(5)
    goal("the steps after it change weights", float(not torch.equal(weight, kept)), at_least=1)
    found = {}
    for precision in ("bf16", "fp16"):
        free()
        one = arm(job(SIZE, vocab=VOCAB, batch=BATCH, precision=precision), precision)
        found[precision] = timed(one, blocks=2)
        tell("scaler", precision=precision, **found[precision])
        end(one)
        del one
    tell("scaler", fp16_over_bf16=found["fp16"]["ms"] / found["bf16"]["ms"])


@contextlib.contextmanager
def collections_timed() -> Iterator[list[float]]:
    """The seconds of each garbage collection: a full one of a process with torch and Ray takes 0.1 s, anywhere."""
    seconds, began = list[float](), 0.0

    def note(phase: str, _about: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        else:
            seconds.append(time.perf_counter() - began)

    gc.callbacks.append(note)
    try:
        yield seconds
    finally:
        gc.callbacks.remove(note)


def checkpoint() -> None:
    """How long a checkpoint stops the loop, and whether what it holds is what the step left."""
    from raytrain.checkpoint.safetensors import read_tensors
    from raytrain.checkpoint.snapshot import take_snapshot
    from raytrain.checkpoint.writer import CheckpointWriter
    from raytrain.runs.folder import RunFolder

    made = arm(job(SIZE, vocab=VOCAB, batch=BATCH), "bf16")
    made.run(5)
    run = RunFolder.create(tempfile.mkdtemp(), "save")

    def same(number: int, expected: torch.Tensor) -> bool:
        folder = Path(run.checkpoint_dir(number))
        stored = [tensor for file in folder.glob("model*.safetensors") for tensor in read_tensors(str(file)).values()]
        return any(tensor.shape == expected.shape and torch.equal(tensor, expected) for tensor in stored)

    for asynchronous in (True, False):
        with CheckpointWriter(run, keep=4, asynchronous=asynchronous) as writer:
            writer.rehearse(made.session.parts())
            began = time.perf_counter()
            if asynchronous:
                take_snapshot(made.session.parts(), {}, step=0, staging=writer._staging)
            rehearsed = time.perf_counter() - began
            for number in (1, 2):
                at = number + 10 * (not asynchronous)
                made.run(3)
                expected = next(made.session.trainable.module.parameters()).detach().cpu().clone()
                with collections_timed() as collecting:
                    began = time.perf_counter()
                    writer.save(made.session.parts(), {}, step=at)
                    stall = time.perf_counter() - began
                busy = made.run(STEPS) / STEPS  # trains on while it is written
                writer.wait()
                quiet = made.run(STEPS) / STEPS
                tell("checkpoint", asynchronous=asynchronous, stall_s=stall, of_it_garbage_s=sum(collecting),
                     write_s=writer.last_write_s, copy_s=rehearsed, gb=(writer.last_bytes or 0) / 1e9,
                     step_ms_while_writing=1e3 * busy, step_ms=1e3 * quiet)  # fmt: skip
                goal("the checkpoint differs from the step", float(not same(at, expected)), at_most=0)
                if asynchronous:
                    goal("seconds that a checkpoint stops the loop", stall + STEPS * (busy - quiet), at_most=0.1)


@contextlib.contextmanager
def answered(name: str) -> Iterator[None]:
    """An arm that may fail without the others."""
    try:
        yield
    except Exception as error:
        tell("infer", arm=name, error=f"{type(error).__name__}: {str(error)[:300]}")
    free()


def infer() -> None:
    """Generated tokens per second, with transformers' GPT-2 of the same size beside it; greedy, 128 new tokens."""
    from raytrain.infer.generate import Sampling, generate
    from raytrain.infer.quantize import halve, quantize

    new, length = (8, 16) if TINY else (128, 64)
    rates: dict[tuple[str, int], float] = {}

    def measure(name: str, prompts: torch.Tensor, work: Callable[[], Any]) -> None:
        with answered(name):
            work()
            rates[name, len(prompts)] = len(prompts) * new / best(work, times=2)
            tell("infer", arm=name, batch=len(prompts), tokens_s=rates[name, len(prompts)])

    for batch in (1, 4) if TINY else (1, 16, 64):
        prompts = torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(0))
        for name in ("ours bf16", "ours int8"):
            module = gpt(**SIZE, vocab_size=VOCAB).module.to(DEVICE).eval().requires_grad_(False)
            if "int8" in name:
                quantize(module)
            halve(module, torch.bfloat16)

            def ours(module: Any = module, prompts: Any = prompts) -> None:
                with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
                    generate(module, prompts.tolist(), sampling=Sampling(new), context=SIZE["context"])

            measure(name, prompts, ours)
        with answered("transformers"):
            measure("transformers", prompts, peer(prompts.to(DEVICE), new))
            goal(f"tokens over transformers', batch {batch}",
                 rates["ours bf16", batch] / rates["transformers", batch], at_least=1.0)  # fmt: skip


def peer(ids: torch.Tensor, new: int) -> Callable[[], Any]:
    """transformers' own generation with a GPT-2 of `SIZE` in bf16."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=SIZE["context"], n_embd=SIZE["width"], n_layer=SIZE["layers"],
        n_head=SIZE["heads"], eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model: Any = GPT2LMHeadModel(config)
    model = model.to(DEVICE, torch.bfloat16).eval()
    keys = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "min_new_tokens": new}
    return lambda: model.generate(ids, **keys, do_sample=False, pad_token_id=0)


def generation() -> None:
    """Tokens of the captured pass of one token against those of the plain one, in fp32; what cannot be captured."""
    from experts.config import ExpertsConfig
    from experts.models import moe_gpt
    from raytrain.infer import generate as text
    from raytrain.infer.quantize import halve

    new = 24 if TINY else 300
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(256, (length,), generator=g).tolist() for length in (3, 40, 17, 9, 30, 1, 25, 12)]
    sizes = {"layers": 2, "heads": 4, "width": 128, "context": 512, "vocab_size": 256}
    sampling = text.Sampling(new, temperature=0.8, top_k=20, end_ids=frozenset(range(3)))
    experts = ExpertsConfig(num_experts=4, top_k=2, noise=0.0)
    made = {"gpt": gpt(**sizes), "moe_gpt": moe_gpt(**sizes, experts=experts)}

    def both(module: Any, how: text.Sampling, rows: list[list[int]]) -> list[Any]:
        found = []
        for static in (True, False):
            text.BLOCKS = {"cuda": 16} if static else {}
            found.append(text.generate(module, rows, sampling=how, context=512))
        return found

    for name, trainable in made.items():
        module = trainable.module.to(DEVICE).eval().requires_grad_(False)
        for how in (text.Sampling(new), sampling):
            for rows in (prompts[:1], prompts):
                captured, plain = both(module, how, rows)
                goal(f"{name}: other answers when captured, {len(rows)} rows", sum(map(ne, captured, plain)), at_most=0)
        tell("generation", model=name, precision="fp32", captured=GPU and module not in text.REFUSED)
        halve(module, torch.bfloat16)
        text.REFUSED.discard(module)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            captured, plain = both(module, text.Sampling(new), prompts)
            same = statistics.mean(sum(map(eq, *pair)) / new for pair in zip(captured, plain, strict=True))
            tell(
                "generation",
                model=name,
                precision="bf16",
                captured=GPU and module not in text.REFUSED,
                same_tokens=same,
            )
            goal(f"{name} in bf16 is captured", float(not GPU or module not in text.REFUSED), at_least=1)
            text.BLOCKS = {"cuda": 16}
            for number in range(12):
                text.generate(module, prompts, sampling=text.Sampling(24), context=512)
                if number == 2:
                    held = torch.cuda.memory_reserved() if GPU else 0
            goal("bytes that generations leave", (torch.cuda.memory_reserved() if GPU else 0) - held, at_most=0)


def nccl() -> None:
    """What of NCCL one GPU can show: a communicator of one member is made, used and ended within its limits."""
    import torch.distributed as dist

    from experts.transport import abort_nccl
    from experts.transport import nccl as connect

    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    began = time.perf_counter()
    group = connect(store, "one", 0, 1, device=DEVICE, interface="lo", timeout_s=30, limit_s=60, collectives=True)
    connected = time.perf_counter() - began
    began = time.perf_counter()
    abort_nccl([group])
    tell("nccl", connect_s=connected, abort_s=time.perf_counter() - began)
    own = dist.TCPStore("127.0.0.1", 0, 1, True)
    dist.init_process_group("nccl", store=own, rank=0, world_size=1, device_id=DEVICE)
    x = torch.ones(4, device=DEVICE)
    dist.all_reduce(x)
    goal("the sum over one member", float(x.sum()), at_most=4, at_least=4)
    dist.destroy_process_group()


SUBJECTS = (ceilings, numerics, step, host, launches, oom, storage, scaler, checkpoint, infer, generation, nccl)

if __name__ == "__main__":
    {subject.__name__: subject for subject in SUBJECTS}[sys.argv[1]]()
    sys.exit(bool(MISSED))
