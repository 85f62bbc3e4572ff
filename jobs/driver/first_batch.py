"""Runs one micro-batch of real rows forward and backward before anything starts, to find errors in the user's code.

A forked child process of the driver does it, on the CPU, so that nothing of the run changes: no weight, random
generator, dataset or other state of this process. What the child prints is dropped; its time and memory are limited.
Where the check cannot tell, because the model is too large for it or needs a GPU, it is skipped with a reason. The same
child then counts what a pass needs (`jobs.driver.build.sizes_of_pass`), for the plan.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import Pipe
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from cluster.devices.inventory import local_inventory
from cluster.devices.limits import memory_bytes
from cluster.ray_runtime import keep_parents_objects
from cluster.telemetry.processes import limit_memory, process_memory
from cluster.wording import counted
from jobs.driver.build import PassSizes, sizes_of_pass
from jobs.driver.runtime import cluster_address
from jobs.job.spec import JobSpec
from raytrain.config.messages import abbreviated
from raytrain.config.user_code import users_error
from raytrain.data.rows.collate import UsersCollate
from raytrain.data.rows.contract import Batch, Source, Split
from raytrain.data.rows.float64 import Float64Columns
from raytrain.data.rows.map_style import NAMED_AT_MOST, gathered
from raytrain.data.rows.residency import tensors_of
from raytrain.errors import InputError, RaytrainError, first_line
from raytrain.train.device import seed_everything
from raytrain.train.job import build_trainable
from raytrain.train.loader import cast_floating
from raytrain.train.memory.device import is_out_of_memory
from raytrain.train.placing import place
from raytrain.train.precision import PrecisionPolicy, policy_for
from raytrain.train.split_check import split_changes
from raytrain.trainable import Trainable, in_eval, labels_weight

TIME_LIMIT_S = 20.0
NOTE_LIMIT_S = 20.0
"""Seconds that each may take of: counting what a pass needs, and comparing a batch with its halves."""
SPLIT_PASS_S, SPLIT_ROWS = 0.3, 4
"""A batch that is compared with its halves has rows for passes of so many seconds, at least 4."""
MOST_LAST_ROWS = 4
"""What needs several rows, such as batch statistics, fails on fewer than these or works."""
FEW_ROWS = 2
"""Rows where `loop.micro_batch_size` is auto; normalisation over a batch needs two."""
CHEAP_FLOPS = 1e9
"""Some hundredths of a second: such a pass takes the rows of a whole step, any of which may have a wrong label."""
MOST_FLOPS = 2e11
"""About five seconds of one core."""
MEMORY_SHARE = 0.5
"""Of the free memory of this machine."""
CPU = torch.device("cpu")
NEEDS_GPU = "it fails on the CPU"
GPU_WORDS = ("cuda", "gpu", "nvidia", "hip ", "triton", "'half'")

TOO_LONG = "it took longer than"
NO_ANSWER = "its process ended without an answer"
"""Why the check was skipped where the user's code ended its process or did not end, so that it must not run in this."""


@dataclass(frozen=True)
class FirstPass:
    """What the forked process found."""

    skipped: str | None = None  # why no micro-batch was run; None if one was
    sizes: PassSizes | None = None  # what a pass needs, if that is known
    split: str | None = None  # how splitting a global batch changes what is trained, if it is known to


#: What torch says of a class number that the model has no output for.
_LABEL_TOO_HIGH = re.compile(r"Target -?\d+ is out of bounds")


class Skipped(Exception):
    """The check cannot tell; the message says why."""


@dataclass
class FirstBatch:
    spec: JobSpec
    source: Source
    shapes: Mapping[str, Any]  # facts of the data for a builder
    trainable: Trainable  # built again in the child if it is on the meta device
    on_cpu: bool  # for certain: an error about a GPU is an error of the run too
    phase: tuple[str, str] = ("data", "")  # what runs at the moment, for messages; only the child changes it
    _batches: dict[tuple[str, int], Batch] = field(default_factory=dict)
    model_key: str = field(init=False)
    _tried: Trainable = field(init=False)
    _row_s: float = field(default=math.inf, init=False)

    def __post_init__(self) -> None:
        self.model_key = self.spec.model.origin
        self.float64 = Float64Columns(self.source.train, seed=self.spec.seed)

    # -- sizes ------------------------------------------------------------------------------------

    def rows(self) -> tuple[int, int]:
        """(rows of the first attempt, rows of the second if the first fails); equal where there is no second."""
        total, micro = self.spec.loop.global_batch_size, self.spec.loop.micro_batch_size
        given = micro if isinstance(micro, int) else total if isinstance(total, int) else FEW_ROWS
        many = min(given, len(self.source.train))
        small = (micro == "auto" and self._flops(many) > CHEAP_FLOPS) or self.too_large(many) is not None
        return (min(FEW_ROWS, many) if small else many), many

    def too_large(self, rows: int) -> str | None:
        """Why a pass over `rows` rows is too much for this machine; None if it is not, as far as is known."""
        parameters = sum(p.numel() for p in self.trainable.module.parameters())
        needed, free = 2 * 4 * parameters, int(MEMORY_SHARE * memory_bytes()[1])
        if needed > free:
            return (
                f"the model and its gradients take {needed >> 20:,} MiB, more than {MEMORY_SHARE:.0%} of what is free"
            )
        if self._flops(rows) > MOST_FLOPS:
            return f"a pass over {rows} rows takes about {self._flops(rows) / 1e9:,.0f} GFLOP on a CPU"
        return None

    def _flops(self, rows: int) -> float:
        """Of a pass over so many rows, forward and backward; estimated where the model does not say."""
        each = self.trainable.flops_per_sample
        if not each:
            parameters = sum(p.numel() for p in self.trainable.module.parameters())
            each = 6.0 * parameters * (self.source.train.tokens_per_row or 1)
        return rows * each

    # -- in the child -----------------------------------------------------------------------------

    def run(self) -> None:
        """Check the batches' keys, and run the passes. Errors: InputError, the run would fail, or `Skipped`."""
        seed_everything(self.spec.seed)
        few, many = self.rows()
        check: Callable[[Batch], None] | None = getattr(self.trainable.loss, "check_keys", None)
        for name, split in self._splits():  # against `forward`, which needs no weights
            batch = self._batch(name, split, few)
            if check is not None:
                check(batch)
        large = self.too_large(few)
        if large is not None:
            raise Skipped(large)
        if any(parameter.device.type not in ("cpu", "meta") for parameter in self.trainable.module.parameters()):
            raise Skipped("the module is on a GPU")
        trainable, policy = self._built()
        self._tried = trainable
        tried = few
        try:
            self._passes(trainable, policy, few)
        except InputError:
            raise
        except Exception as error:
            if many == few or is_out_of_memory(error, device=CPU):
                raise
            found = self._error(error)
            if self.too_large(many) is not None:
                raise Skipped(
                    f"{found}; a larger micro-batch, which might pass, is too large for this check"
                ) from error
            self._passes(trainable, policy, many)  # a model may need a certain number of rows
            tried = many
        self._last_rows(trainable, policy, tried)

    def _last_rows(self, trainable: Trainable, policy: PrecisionPolicy, tried: int) -> None:
        """Try as many rows as the last micro-batch of an epoch and of a global batch has, if they are few. Raises
        InputError where the model fails on them."""
        spec, rows = self.spec, len(self.source.train)
        total, workers, loop = spec.loop.global_batch_size, spec.scale.workers, spec.loop
        uneven = spec.scale.sync_batchnorm or spec.scale.shares == "auto" or spec.data.tokens_per_batch is not None
        if not isinstance(total, int) or uneven:
            return
        alone = loop.micro_batch_size == "whole" or (workers == "auto" and self.on_cpu)
        micro = loop.micro_batch_size if isinstance(loop.micro_batch_size, int) else None
        if alone and micro is None:
            micro = total
        elif micro is None and isinstance(workers, int):
            micro = math.ceil(total / workers)
        left = 0 if spec.data.drop_last or (loop.max_steps or rows) < math.ceil(rows / total) else rows % total
        tails = ("data.drop_last", left, "an epoch"), ("loop.micro_batch_size", total, "a global batch")
        for key, these, of in tails:
            last = (these - 1) % micro + 1 if micro and these else int(these == left == 1)
            if not 0 < last < min(tried, MOST_LAST_ROWS + 1):
                continue
            try:
                self._passes(trainable, policy, last, splits=1)
            except Exception as error:
                if is_out_of_memory(error, device=CPU) or (not self.on_cpu and _about_gpu(error)):
                    return
                found, drop = self._error(error), "data.drop_last=true leaves these rows out, or "
                raise InputError(
                    key, got=f"{counted(last, 'row')} in the last micro-batch of {of}; the model fails: {found.got}",
                    expected="a number of rows that it can be trained on",
                    remedy=f"{drop if these == left else ''}choose another loop.global_batch_size\n{found.remedy}",
                ) from error  # fmt: skip

    def _splits(self) -> list[tuple[str, Split]]:
        held = [] if self.source.eval is None else [("eval", self.source.eval)]
        return [("train", self.source.train), *held]

    def _batch(self, name: str, split: Split, rows: int) -> Batch:
        self.phase = ("data", f"while the first {rows} rows ({name}) were read")
        if (name, rows) not in self._batches:
            order = split.order(self.spec.seed, 0)[0:rows] if name == "train" else split.eval_order()[:rows]
            batch = gathered(split, np.asarray(order), seed=self.spec.seed, epoch=0)
            fp64 = self.spec.precision.dtype == "fp64"
            batch = cast_floating(batch, torch.float64) if fp64 else self.float64.narrowed(batch)
            self._batches[name, rows] = batch  # as training gets it
        return self._batches[name, rows]

    def _built(self) -> tuple[Trainable, PrecisionPolicy]:
        asked = self.spec.precision.dtype
        policy = policy_for(asked if asked in ("fp64", "bf16") else "fp32")
        self.phase = ("model", "while the model was built on the CPU")
        trainable = self.trainable
        if any(parameter.is_meta for parameter in trainable.module.parameters()):
            sections = {"experts": self.spec.experts}
            trainable = build_trainable(self.spec.model, sections=sections, facts=dict(self.shapes), initial=False)
        place(trainable.module, device=None, master=policy.master_dtype)
        return trainable, policy

    def _passes(self, trainable: Trainable, policy: PrecisionPolicy, rows: int, *, splits: int = 2) -> None:
        for name, split in self._splits()[:splits]:
            batch = self._batch(name, split, rows)
            self.phase = ("model", "while the batch was weighed")
            if not self._weight(batch, rows, trainable):
                continue  # training leaves out a micro-batch without labels too
            counts = self._counts(batch, rows, trainable)
            self.phase = ("model", f"in the forward pass of {rows} rows ({name})")
            if name == "eval":
                with in_eval(trainable.module), torch.no_grad(), policy.autocast(CPU):
                    trainable.loss(trainable.module, batch, **counts)
                continue
            began = time.perf_counter()
            with policy.autocast(CPU):
                output = trainable.loss(trainable.module, batch, **counts)
            self.phase = ("model", f"in the backward pass of {rows} rows")
            total = output.loss if output.aux is None else output.loss + output.aux
            self._check_finite(total, batch, rows)
            self._backward(total)
            self._row_s = min(self._row_s, (time.perf_counter() - began) / rows)

    @staticmethod
    def _weight(batch: Batch, rows: int, trainable: Trainable) -> int:
        return labels_weight(batch, rows) if trainable.weight is None else int(trainable.weight(batch))

    def _counts(self, batch: Batch, rows: int, trainable: Trainable) -> dict[str, int]:
        """What a loss gets beside its batch."""
        return {"num_items_in_batch": self._weight(batch, rows, trainable)} if trainable.takes_global_count else {}

    def _check_finite(self, total: torch.Tensor, batch: Batch, rows: int) -> None:
        """In fp16 a loss may overflow, for which training has a loss scale; elsewhere no step would be made."""
        if self.spec.precision.dtype == "fp16" or bool(torch.isfinite(total.detach()).all()):
            return
        wrong = [
            name.lstrip(".") for name, value in tensors_of(batch, "")
            if value.is_floating_point() and not torch.isfinite(value).all()
        ]  # fmt: skip
        data = "data.train" if self.spec.data.train is not None else "data.source"
        seen = f"a loss of {total.detach().float().mean().item():g} for the first {counted(rows, 'row')}"
        raise InputError(
            data if wrong else self.model_key,
            got=seen + (f", with values that are not finite in {abbreviated(wrong, 3)}" if wrong else ""),
            expected="a finite loss with the first weights",
            remedy="" if wrong else "does it divide by zero, or take the logarithm or the root of 0 or less?",
        )  # fmt: skip

    def _backward(self, total: torch.Tensor) -> None:
        if not total.requires_grad:
            trainable = any(parameter.requires_grad for parameter in self.trainable.module.parameters())
            why = "does forward call detach() or argmax(), or run under no_grad()?" if trainable else ""
            got = "a loss without a gradient" if trainable else "a model without a parameter that requires a gradient"
            expected = "a loss computed from the parameters with torch's operations"
            raise InputError(self.model_key, got=got, expected=expected, remedy=why)
        try:
            total.backward()
        except RuntimeError as error:
            if "fork-based multiprocessing" not in str(error):
                raise
            # this process ran a backward pass before the fork, as in a notebook: torch refuses another one here

    def outcome(self) -> dict[str, Any]:
        """Run, and describe what happened: {"error": ...}, {"skipped": reason} or {}."""
        try:
            self.run()
        except Skipped as reason:
            return {"skipped": str(reason)}
        except BaseException as error:  # whatever the user's code raises, SystemExit included
            if is_out_of_memory(error, device=CPU):
                return {"skipped": "it needs more memory than this check may use"}
            if not self.on_cpu and not isinstance(error, RaytrainError) and _about_gpu(error):
                return {"skipped": f"{NEEDS_GPU}, and the run may be on a GPU ({first_line(error)})"}
            found = error if isinstance(error, InputError) else self._error(error)
            return {"error": {name: getattr(found, name) for name in ("key", "got", "expected", "remedy")}}
        return {}

    # -- after passes that were made --------------------------------------------------------------

    def split_changes(self) -> str | None:
        """How splitting a global batch changes what is trained (`raytrain.train.split_check`); None if it does not,
        the run never does it, or that is unknown."""
        spec, split, micro = self.spec, self.source.train, self.spec.loop.micro_batch_size
        total = spec.loop.global_batch_size
        rows = max(SPLIT_ROWS, total if isinstance(total, int) else 0)
        rows = min(rows, len(split), int(SPLIT_PASS_S / self._row_s)) // 2 * 2
        if rows < SPLIT_ROWS or micro in ("whole", total):
            return None
        weigh = partial(self._weight, trainable=self._tried)
        synchronized = spec.scale.sync_batchnorm
        with contextlib.suppress(Exception):  # of the user's code, in passes that training does not make
            batch = self._batch("train", split, rows)
            return split_changes(self._tried, batch, rows=rows, weigh=weigh, synchronized=synchronized)
        return None

    def sizes(self) -> dict[str, Any] | None:
        """What a pass of the model needs, as plain values; None where that is unknown."""
        few, many = self.rows()
        with contextlib.suppress(Exception):  # of the user's code, in a pass that training does not make
            rows = few if ("train", few) in self._batches else many
            batch = self._batches["train", rows]
            counts = self._counts(batch, rows, self._tried)
            return asdict(sizes_of_pass(self._tried, batch, rows=rows, counts=counts))
        return None

    def _error(self, error: BaseException) -> InputError:
        part, doing = self.phase
        if part == "model" and (why := self.float64.explained(error)) is not None:
            return InputError(data_key(self.spec, error), got=why, expected="columns that the model can take")
        key = self.model_key if part == "model" else data_key(self.spec, error)
        found = users_error(error, key=key, doing=doing)
        if not _LABEL_TOO_HIGH.search(str(error)):
            return found
        expected, names = "labels from 0 to the number of outputs less one", self.source.class_names
        if names:
            expected += (
                f"; the data has {len(names)} classes ({abbreviated(names, NAMED_AT_MOST)}), those of train and "
                "eval together: the builder gets their number as num_classes"
            )
        return InputError(key, got=found.got, expected=expected, remedy=found.remedy)


def data_key(spec: JobSpec, error: BaseException) -> str:
    """The key whose code raised an error while data was read."""
    called = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    if UsersCollate.__call__.__code__ in called:
        return "data.collate"
    return "data.train" if spec.data.train is not None else "data.source"


def _about_gpu(error: BaseException) -> bool:
    text = f"{type(error).__name__} {error}".lower()
    return any(word in text for word in GPU_WORDS)


def certainly_on_cpu(spec: JobSpec) -> bool:
    """Whether the workers compute on CPUs for certain, whatever machines a cluster has."""
    if spec.scale.mode == "cpu" or spec.scale.accelerator == "cpu":
        return True
    return cluster_address(spec.cluster.address) == "local" and not local_inventory().devices()


def check_first_batch(check: FirstBatch, *, count: bool = False) -> FirstPass:
    """Run the check in a forked process, which with `count` also counts what a pass needs. Errors: InputError, the run
    would fail, with the frames of the user's own code."""
    sys.stdout.flush()
    sys.stderr.flush()
    keep_parents_objects()
    answers, sender = Pipe(duplex=False)
    with warnings.catch_warnings():  # Python warns of threads; the child uses none of them
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        answers.close()
        _in_child(check, sender, count=count)
    sender.close()
    notes: dict[str, Any] = {}
    try:
        try:
            if not answers.poll(TIME_LIMIT_S):
                return FirstPass(f"{TOO_LONG} {TIME_LIMIT_S:.0f} s")
            outcome = json.loads(answers.recv_bytes())
        except (EOFError, OSError):
            return FirstPass(NO_ANSWER)
        if "error" in outcome:
            raise InputError(**outcome["error"])
        with contextlib.suppress(EOFError, OSError):  # after the last one, or where the user's code ends the process
            while "skipped" not in outcome and answers.poll(NOTE_LIMIT_S):
                notes |= json.loads(answers.recv_bytes())
    finally:
        answers.close()
        os.kill(child, signal.SIGKILL)  # a child that has exited stays until it is waited for
        os.waitpid(child, 0)
    sizes = notes.pop("sizes", None)
    return FirstPass(outcome.get("skipped"), sizes and PassSizes(**sizes), **notes)


def _in_child(check: FirstBatch, sender: Any, *, count: bool) -> NoReturn:
    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # the command ends this process
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(TIME_LIMIT_S + 3 * NOTE_LIMIT_S))  # if the command is killed
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        sys.stdout = sys.stderr = open(nowhere, "w", closefd=False)  # noqa: SIM115  (a notebook's go elsewhere)
        os.environ["PYTHONBREAKPOINT"] = "0"
        faulthandler.disable()
        limit_memory(process_memory().rss + int(MEMORY_SHARE * memory_bytes()[1]))
        torch.set_num_threads(1)  # the threads of this process were not forked
        if dist.is_available() and not dist.is_initialized():  # a worker has a group, and a model may ask for its rank
            with contextlib.suppress(RuntimeError, ValueError):  # without gloo or a network; few models ask
                store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  (where torch documents it)
                dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        outcome = check.outcome()
        sender.send_bytes(json.dumps(outcome).encode())
        if not outcome:
            if count:
                sender.send_bytes(json.dumps({"sizes": check.sizes()}).encode())
            sender.send_bytes(json.dumps({"split": check.split_changes()}).encode())
    finally:
        os._exit(0)
