"""The plan as a pure function of sections, machines and facts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from plans import CPU, DATA, GIB, MODEL, machines, plan, reason, refused, value

from cluster.devices.inventory import Device, Inventory, Node
from cluster.wording import counted
from jobs.driver.runtime import cluster_size
from raytrain.errors import InputError
from raytrain.execution.trainer import worker_resources
from raytrain.plan.choice import Deferred, Resolved, size_text
from raytrain.plan.expert_hosts import separate_hosts
from raytrain.plan.facts import DataFacts, ExpertFacts, ModelFacts
from raytrain.plan.memory import HOST_PROCESS_BYTES, LEAST_PROCESS_BYTES, PROCESS_BYTES
from raytrain.plan.plan import Plan


def gpu(index: int, name: str = "NVIDIA A100-SXM4-80GB", capability: tuple[int, int] | None = (8, 0)) -> Device:
    return Device("cuda", name, 80 * GIB, capability, f"GPU-{index}", index)


def node(host: str = "a", *, cpus: int = 8, gpus: list[Device] | None = None, memory: int = 64 * GIB) -> Node:
    return Node(host, cpus, memory, tuple(gpus or ()))


ONE_GPU = machines(node(gpus=[gpu(0)]))
FOUR_GPUS = machines(node(gpus=[gpu(0), gpu(1)]), node("b", gpus=[gpu(0), gpu(1)]))

# ---------------------------------------------------------------- mode, device, accelerator


@pytest.mark.parametrize(
    ("inventory", "mode", "found"),
    [
        (CPU, "auto", "cpu"), (ONE_GPU, "auto", "single_gpu"), (FOUR_GPUS, "auto", "multi_gpu"),
        (FOUR_GPUS, "cpu", "cpu"), (FOUR_GPUS, "single_gpu", "single_gpu"),
        (FOUR_GPUS, "multi_gpu", "multi_gpu"),
    ],
)  # fmt: skip
def test_modes_that_can_be_had(inventory: Inventory, mode: str, found: str) -> None:
    made = plan(inventory, scale={"mode": mode})
    assert value(made, "mode") == found
    assert value(made, "device") == ("cpu" if found == "cpu" else "cuda")
    assert value(made, "backend") == ("gloo" if found == "cpu" else "nccl")
    assert made.warnings == []


@pytest.mark.parametrize(
    ("inventory", "mode", "found"),
    [(CPU, "multi_gpu", "cpu"), (ONE_GPU, "multi_gpu", "single_gpu"), (CPU, "single_gpu", "cpu")],
)
def test_a_mode_that_cannot_be_had_falls_back_in_writing(inventory: Inventory, mode: str, found: str) -> None:
    made = plan(inventory, scale={"mode": mode})
    assert value(made, "mode") == found
    assert reason(made, "mode").startswith(f"fell back: {mode} was asked for, but there is")
    assert any(mode in warning and f"fell back to {found}" in warning for warning in made.warnings)


def test_the_reason_for_no_gpu_is_the_inventorys() -> None:
    note = "no NVIDIA GPU: driver not loaded"
    inventory = Inventory((node(),), source="x", cpu_model="c", cpu_flags={}, notes=("8 cores", note))
    assert note in reason(plan(inventory), "mode")


def test_a_gpu_that_exists_and_cannot_be_used_is_a_loud_warning_unless_cpus_are_asked_for() -> None:
    lost = "GPU 0 cannot be read: GPU is lost"
    none = replace(CPU, unusable=(lost,))
    (warning,) = plan(none).warnings
    assert warning.startswith("THIS RUN IS ON THE CPU") and lost in warning and "scale.mode cpu" in warning
    assert plan(none, scale={"mode": "cpu"}).warnings == plan(none, scale={"accelerator": "cpu"}).warnings == []
    assert plan(CPU).warnings == [], "a machine without GPUs is no surprise"
    assert plan(replace(ONE_GPU, unusable=(lost,))).warnings == [f"GPUs that cannot be used: {lost}"]


@pytest.mark.covers("DEV-03")
@pytest.mark.parametrize(
    ("text", "inventory", "device", "workers"),
    [
        (None, ONE_GPU, "cuda", 1), ("auto", ONE_GPU, "cuda", 1), ("auto", CPU, "cpu", 1),
        ("cpu", FOUR_GPUS, "cpu", 2), ("cuda", FOUR_GPUS, "cuda", 4),
        ("cuda:1", machines(node(gpus=[gpu(0), gpu(1)])), "cuda", 1),
        ("A100", FOUR_GPUS, "cuda", 4), ("nvidia a100-sxm4-80gb", FOUR_GPUS, "cuda", 4),
    ],
)  # fmt: skip
def test_device_strings(text: str | None, inventory: Inventory, device: str, workers: int) -> None:
    made = plan(inventory, scale={"accelerator": text})
    assert (value(made, "device"), value(made, "workers")) == (device, workers)


@pytest.mark.parametrize(
    ("text", "inventory", "said"),
    [
        ("cuda:7", ONE_GPU, "cuda:0 NVIDIA A100-SXM4-80GB"), ("cuda", CPU, "8 CPU cores, no GPU"),
        ("H100", FOUR_GPUS, "A100"), ("A10", ONE_GPU, "A100"), ("gpu", CPU, "no GPU"),
        ("cuda:0", FOUR_GPUS, "a device type, since there are"),
    ],
)  # fmt: skip
def test_a_missing_device_is_refused_with_the_existing_ones(text: str, inventory: Inventory, said: str) -> None:
    assert said in refused("scale.accelerator", inventory=inventory, scale={"accelerator": text})


@pytest.mark.parametrize(("text", "mode"), [("cpu", "single_gpu"), ("cuda", "cpu"), ("cuda:0", "multi_gpu")])
def test_device_string_and_mode_must_agree(text: str, mode: str) -> None:
    assert mode in refused("scale.accelerator", inventory=ONE_GPU, scale={"accelerator": text, "mode": mode})


def test_an_accelerator_type_uses_only_its_own_gpus() -> None:
    mixed = machines(node(gpus=[gpu(0, "NVIDIA T4", (7, 5)), gpu(1)]))
    made = plan(mixed, scale={"accelerator": "T4"})
    assert value(made, "workers") == 1
    assert made.warnings == []


def test_unequal_gpus_are_a_warning() -> None:
    mixed = machines(node(gpus=[gpu(0, "NVIDIA T4", (7, 5)), gpu(1)]))
    (warning,) = plan(mixed).warnings
    assert "NVIDIA T4" in warning and "A100" in warning and "scale.accelerator" in warning
    assert plan(FOUR_GPUS).warnings == []


# ---------------------------------------------------------------- workers, placement, threads


@pytest.mark.parametrize(
    ("inventory", "workers", "threads", "placement"),
    [
        (CPU, 1, 8, "1 on a"),
        (machines(node(), node("b", cpus=4)), 2, 4, "1 on a, 1 on b"),
        (FOUR_GPUS, 4, 4, "2 on a, 2 on b"),
        (machines(node(cpus=64, gpus=[gpu(0), gpu(1)])), 2, 8, "2 on a"),
    ],
)
def test_auto_workers_and_threads(inventory: Inventory, workers: int, threads: int, placement: str) -> None:
    made = plan(inventory)
    assert (value(made, "workers"), value(made, "threads")) == (workers, threads)
    assert reason(made, "placement") == placement


def test_nodes_without_cores_take_no_cpu_worker() -> None:
    made = plan(machines(node("head", cpus=0), node("b"), node("c")))
    assert value(made, "workers") == 2
    assert reason(made, "placement") == "1 on b, 1 on c"


@pytest.mark.parametrize(("workers", "threads", "warned"), [(2, 4, False), (3, 2, False), (9, 1, True)])
def test_explicit_workers_share_the_cores(workers: int, threads: int, warned: bool) -> None:
    made = plan(scale={"workers": workers})
    assert (value(made, "workers"), value(made, "threads")) == (workers, threads)
    assert any("share 8 CPU cores" in warning for warning in made.warnings) is warned


@pytest.mark.parametrize(
    ("inventory", "scale", "said"),
    [
        (ONE_GPU, {"workers": 2}, "at most 1, one per GPU"),
        (FOUR_GPUS, {"workers": 5}, "at most 4, one per GPU"),
        (FOUR_GPUS, {"workers": 2, "mode": "single_gpu"}, "1 with scale.mode single_gpu"),
        (CPU, {"workers": 2, "mode": "single_gpu"}, "1 with scale.mode single_gpu"),
        (FOUR_GPUS, {"workers": 1, "mode": "multi_gpu"}, "2 or more"),
        (CPU, {"workers": 33}, "at most 32, 4 per CPU core"),
    ],
)
def test_impossible_worker_counts_are_refused(inventory: Inventory, scale: dict[str, Any], said: str) -> None:
    assert said in refused("scale.workers", inventory=inventory, scale=scale)


@pytest.mark.parametrize(
    ("inventory", "bounds", "workers"),
    [
        (FOUR_GPUS, [1, 8], 4),
        (FOUR_GPUS, [2, 3], 3),
        (CPU, [1, 4], 4),
        (CPU, [1, 40], 8),
        (machines(node(cpus=1), node("b", cpus=1), node("c", cpus=1)), [1, 2], 2),
        (CPU, [10, 12], 10),
    ],
)
def test_elastic_workers_are_as_many_of_the_range_as_there_are_devices(
    inventory: Inventory, bounds: list[int], workers: int
) -> None:
    assert value(plan(inventory, scale={"workers": bounds}), "workers") == workers


def test_elastic_workers_have_the_threads_that_were_asked_for_on_one_node() -> None:
    nodes = machines(node(cpus=2), node("b", cpus=3))
    for threads, workers in ((1, 4), (2, 2), (3, 1), (4, 1), ("auto", 4)):
        made = plan(nodes, scale={"workers": [1, 4], "threads": threads})
        assert value(made, "workers") == workers, threads
        assert threads in (3, 4) or not any("scale.threads" in warning for warning in made.warnings), made.warnings
    assert value(plan(FOUR_GPUS, scale={"workers": [1, 4], "threads": 8}), "workers") == 4


@pytest.mark.parametrize(("inventory", "bounds"), [(ONE_GPU, [2, 4]), (FOUR_GPUS, [5, 6]), (CPU, [33, 64])])
def test_a_range_above_the_devices_is_refused_as_it_was_given(inventory: Inventory, bounds: list[int]) -> None:
    assert f"got {bounds}" in refused("scale.workers", inventory=inventory, scale={"workers": bounds})


def test_elastic_workers_are_never_more_than_rows_and_leave_gpus_to_hosts() -> None:
    assert value(plan(FOUR_GPUS, scale={"workers": [1, 4]}, loop={"global_batch_size": 3}), "workers") == 3
    assert value(plan(FOUR_GPUS, scale={"workers": [1, 4]}, experts_hosts=2), "workers") == 2


def test_each_worker_needs_a_row_of_the_global_batch() -> None:
    text = refused("scale.workers", scale={"workers": 5}, loop={"global_batch_size": 4})
    assert "loop.global_batch_size, 4 rows" in text
    made = plan(FOUR_GPUS, loop={"global_batch_size": 3})
    assert value(made, "workers") == 3
    assert any("loop.global_batch_size" in warning for warning in made.warnings)


def test_explicit_threads_stand_and_too_many_are_a_warning() -> None:
    made = plan(scale={"workers": 2, "threads": 4})
    assert value(made, "threads") == 4 and made.warnings == []
    assert any("scale.threads 5" in warning for warning in plan(scale={"workers": 2, "threads": 5}).warnings)


# ---------------------------------------------------------------- precision


def with_capability(capability: tuple[int, int] | None) -> Inventory:
    return machines(node(gpus=[gpu(0, capability=capability)]))


@pytest.mark.covers("PREC-05", "BP-09")
@pytest.mark.parametrize(
    ("inventory", "expected"),
    [
        (with_capability((9, 0)), ("bf16", "fp32")),
        (with_capability((8, 0)), ("bf16", "fp32")),
        (with_capability((7, 5)), ("fp16", "fp32")),
        (with_capability((7, 0)), ("fp16", "fp32")),
        (with_capability((6, 1)), "fp32"),
        (with_capability(None), ("bf16", "fp32")),
        (machines(node(gpus=[gpu(0), gpu(1, capability=(7, 5))])), ("fp16", "fp32")),
        (machines(node(), flags={"amx_bf16": True}), ("bf16", "fp32")),
        (machines(node(), flags={"avx512_bf16": True}), ("bf16", "fp32")),
        (CPU, "fp32"),
    ],
)
def test_auto_precision_by_capability_and_measurement(inventory: Inventory, expected: Any) -> None:
    choice = plan(inventory).precision
    if isinstance(expected, tuple):
        assert isinstance(choice, Deferred)
        assert choice.bounds == expected
        assert "measured on the real model" in choice.how
    else:
        assert isinstance(choice, Resolved) and choice.value == expected
    assert choice.reason


@pytest.mark.covers("PREC-08")
@pytest.mark.parametrize(
    ("inventory", "asked", "instead"),
    [
        (with_capability((7, 5)), "bf16", "fp16"),
        (with_capability((6, 1)), "bf16", "fp32"),
        (with_capability((6, 1)), "fp16", "fp32"),
        (with_capability((7, 5)), "tf32", "fp32"),
        (CPU, "tf32", "fp32"),
    ],
)
def test_a_format_the_device_lacks_is_recorded_or_refused(inventory: Inventory, asked: str, instead: str) -> None:
    made = plan(inventory, precision={"dtype": asked})
    assert value(made, "precision") == instead
    assert reason(made, "precision").startswith(f"fell back: {asked} was asked for")
    assert any(asked in warning and instead in warning for warning in made.warnings)
    strict = {"dtype": asked, "fallback": False}
    assert instead in refused("precision.dtype", inventory=inventory, precision=strict)


@pytest.mark.parametrize(
    ("inventory", "asked"),
    [(CPU, "fp64"), (CPU, "fp32"), (CPU, "fp16"), (ONE_GPU, "bf16"), (ONE_GPU, "tf32"),
     (with_capability((7, 0)), "fp16"), (with_capability(None), "bf16")],
)  # fmt: skip
def test_a_format_the_device_has_is_kept(inventory: Inventory, asked: str) -> None:
    made = plan(inventory, precision={"dtype": asked})
    assert value(made, "precision") == asked
    assert made.warnings == []


def test_bf16_on_a_plain_cpu_is_kept_with_a_warning() -> None:
    made = plan(precision={"dtype": "bf16"})
    assert value(made, "precision") == "bf16"
    assert any("emulated" in warning for warning in made.warnings)


# ---------------------------------------------------------------- batches and length


@pytest.mark.covers("PERF-09")
@pytest.mark.parametrize(
    ("total", "workers", "micro", "expected"),
    [
        (32, 1, "auto", (32, 1)), (32, 2, "auto", (16, 1)), (32, 3, "auto", (11, 1)),
        (32, 1, 8, (8, 4)), (32, 2, 8, (8, 2)), (32, 4, 8, (8, 1)), (24, 2, 8, (8, 2)),
    ],
)  # fmt: skip
def test_micro_times_accumulation_times_world_is_the_global_batch(
    total: int, workers: int, micro: Any, expected: tuple[int, int]
) -> None:
    made = plan(scale={"workers": workers}, loop={"global_batch_size": total, "micro_batch_size": micro})
    size, times = value(made, "micro_batch_size"), value(made, "accumulation")
    assert (size, times) == expected
    assert value(made, "effective_batch") == total
    if total % (size * workers) == 0:
        assert size * times * workers == total
        assert reason(made, "effective_batch") == f"micro {size} x accumulation {times} x {counted(workers, 'worker')}"
    else:
        filled = f"{size * times * workers}, of which {total} are filled"
        assert filled in reason(made, "effective_batch")


def test_a_worker_without_rows_is_a_warning() -> None:
    made = plan(scale={"workers": 4}, loop={"global_batch_size": 32, "micro_batch_size": 16})
    assert any("2 of 4 workers have none" in warning for warning in made.warnings)


def test_batches_larger_than_their_data_are_refused() -> None:
    said = refused("loop.global_batch_size", loop={"global_batch_size": 1001})
    assert "1000, the number of training rows" in said and "set loop.global_batch_size=1000 or less" in said
    refused("loop.micro_batch_size", loop={"global_batch_size": 4, "micro_batch_size": 8})
    refused("loop.global_batch_size", loop={"global_batch_size": "auto"})


def test_no_rows_are_refused() -> None:
    empty = DataFacts(0, 0, 1, None, 0, None, "an empty file")
    assert "an empty file" in refused("data", data_facts=empty)


@pytest.mark.parametrize(
    ("loop", "steps"),
    [
        ({}, 32), ({"epochs": 3}, 96), ({"max_steps": 7}, 7), ({"max_steps": 500}, 500),
        ({"max_steps": 50, "epochs": 3}, 50), ({"max_steps": 500, "epochs": 3}, 96),
    ],
)  # fmt: skip
def test_length_of_the_run(loop: dict[str, int], steps: int) -> None:
    made = plan(loop=loop)
    assert value(made, "steps_per_epoch") == 32
    assert value(made, "max_steps") == steps


@pytest.mark.parametrize(("steps", "warmup"), [(10, 0), (200, 10), (5000, 100)])
def test_warm_up_is_five_percent_and_at_most_a_hundred(steps: int, warmup: int) -> None:
    assert value(plan(loop={"max_steps": steps}), "warmup_steps") == warmup


def test_a_given_warm_up_is_kept_and_one_as_long_as_the_run_is_a_warning() -> None:
    made = plan(loop={"max_steps": 10}, optim={"warmup_steps": 10})
    assert value(made, "warmup_steps") == 10
    assert any("optim.warmup_steps" in warning for warning in made.warnings)


@pytest.mark.covers("TUNE-12")
@pytest.mark.parametrize(("rule", "lr"), [("none", 0.5), ("linear", 2.0), ("sqrt", 1.0)])
def test_learning_rate_with_the_global_batch(rule: str, lr: float) -> None:
    made = plan(optim={"lr": 0.5, "scale_lr": rule}, loop={"global_batch_size": 128})
    assert value(made, "lr") == lr
    recorded = made.to_json()["choices"]["lr"]
    assert recorded["value"] == lr and (rule == "none" or f"{rule} in 128 / 32 rows" in recorded["reason"])


@pytest.mark.parametrize(
    ("loop", "every"),
    [
        ({"epochs": 2}, 32),  # each epoch
        ({"epochs": 1}, 32),  # shorter than 50 steps: at the end
        ({"eval_every": 5}, 5),
        ({"max_steps": 1000, "global_batch_size": 1, "eval_batches": 10}, 100),  # a tenth of the run
        ({"max_steps": 300, "global_batch_size": 1, "eval_batches": 1}, 50),  # never nearer than 50 steps
        ({"max_steps": 1000, "global_batch_size": 1}, 334),  # 100 rows three times: a tenth of the time
    ],
)
def test_rhythm_of_evaluation(loop: dict[str, int], every: int) -> None:
    assert value(plan(loop=loop), "eval_every") == every


def test_a_long_evaluation_runs_less_often_within_an_epoch() -> None:
    facts = DataFacts(100_000, 10_000, 4, None, 400_000, None, "a test")
    made = plan(loop={"max_steps": 50_000, "global_batch_size": 1}, data_facts=facts)
    assert value(made, "eval_every") == 50_000
    fewer = plan(loop={"max_steps": 50_000, "global_batch_size": 1, "eval_batches": 1000}, data_facts=facts)
    assert value(fewer, "eval_every") == 5000


def test_without_evaluation_rows_there_is_no_evaluation() -> None:
    facts = DataFacts(1000, 0, 4, None, 4000, None, "a test")
    assert value(plan(data_facts=facts, loop={"eval_every": 5}), "eval_every") == 0


def test_checkpoint_interval() -> None:
    assert value(plan(save={"every": 7}), "checkpoint_every") == 7
    choice = plan().checkpoint_every
    assert isinstance(choice, Deferred) and choice.bounds == (1, 32)
    assert "measured cost" in choice.how and "3 %" in choice.reason


# ---------------------------------------------------------------- storage and memory


def test_storage_by_bytes_of_device_and_data() -> None:
    def facts(size: int) -> DataFacts:
        return DataFacts(1000, 0, size // 1000, None, size, None, "a test")

    small = machines(node(memory=10 * GIB))
    assert value(plan(small, data_facts=facts(6 * GIB)), "storage") == "resident"
    assert value(plan(small, data_facts=facts(8 * GIB)), "storage") == "stream"
    assert value(plan(small, data_facts=facts(6 * GIB), scale={"workers": 2}), "storage") == "stream"
    assert value(plan(ONE_GPU, data_facts=facts(55 * GIB)), "storage") == "resident"
    made = plan(small, data_facts=facts(8 * GIB))
    taken = value(plan(small, data={"storage": "stream"}), "memory")
    room = f"{size_text(0.9 * (9 * GIB - taken))}: 90 % of what is left of 9 GiB after {size_text(taken)}"
    assert f"8.8 GiB of data, room for {room}" in reason(made, "storage")
    unknown = plan(small, data_facts=facts(5 * GIB), model_facts=None)
    assert value(unknown, "storage") == "stream"
    assert "4.5 GiB, half of the memory of a worker, since the size of the model is not known yet" in reason(
        unknown, "storage"
    )
    large = replace(MODEL, parameters=15 * GIB // 4, trainable_bytes=15 * GIB)  # 60 GiB of the 72 with its state
    assert value(plan(ONE_GPU, data_facts=facts(11 * GIB), model_facts=large), "storage") == "partial"


def test_items_that_vary_are_read_in_every_epoch_and_slow_ones_only_as_far_as_the_run_needs_them() -> None:
    items = DataFacts(1000, 100, 4, None, 4400, None, "a test", kind="items", item_s=0.01)
    kept = plan(CPU, data_facts=items, loop={"epochs": 1})
    assert value(kept, "storage") == "resident" and value(kept, "loader_workers") == 0
    random = replace(items, varies=True)
    made = plan(CPU, data_facts=random, loop={"epochs": 1})
    assert value(made, "storage") == "stream" and value(made, "loader_workers") == 4
    assert reason(made, "storage") == "items differ from one reading to the next, as with random transforms"
    assert value(plan(ONE_GPU, data_facts=random), "storage") == "pinned"
    asked = plan(CPU, data_facts=random, data={"storage": "resident"})
    (warning,) = [one for one in asked.warnings if "differ" in one]
    assert "keeps the first reading of each item" in warning and "data.storage=stream" in warning
    short = {"max_steps": 31, "global_batch_size": 32}
    assert reason(plan(CPU, data_facts=items, loop=short), "storage") == (
        "the run trains on 992 of 1,000 rows, and to read all takes about 11 s"
    )
    assert value(plan(CPU, data_facts=items, loop={**short, "max_steps": 32}), "storage") == "resident"
    all_once = {"max_steps": 125, "global_batch_size": 8}
    assert value(plan(CPU, data_facts=items, loop=all_once), "storage") == "resident", "each row is needed once"
    assert value(plan(CPU, data_facts=replace(items, item_s=0.001), loop=short), "storage") == "resident"
    assert value(plan(CPU, data_facts=replace(items, item_s=None), loop=short), "storage") == "resident"


@pytest.mark.covers("DATA-07")
def test_data_too_large_for_a_gpu_is_partly_resident_and_the_rest_streamed() -> None:
    facts = DataFacts(1000, 0, GIB // 10, None, 100 * GIB, None, "a test")
    made = plan(ONE_GPU, data_facts=facts)
    assert value(made, "storage") == "partial" and 0.55 < value(made, "resident_rows") / 1000 < 0.65
    assert "of 1,000 rows fit; the others are streamed" in reason(made, "resident_rows")
    taken = value(made, "memory") - value(plan(ONE_GPU, data={"storage": "stream"}), "memory")
    assert taken == value(made, "resident_rows") * facts.row_bytes
    few = replace(facts, total_bytes=10_000 * GIB, row_bytes=10 * GIB)
    assert value(plan(ONE_GPU, data_facts=few), "storage") == "pinned", "a part below 5 % is not worth it"
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.covers("CFG-10")
def test_batches_for_a_gpu_go_through_pinned_memory_unless_the_job_says_otherwise() -> None:
    """`--pin_memory false` is data.storage=stream."""
    facts = DataFacts(1000, 0, 10 * GIB, None, 10_000 * GIB, None, "a test")
    assert value(plan(ONE_GPU, data_facts=facts), "storage") == "pinned"
    assert value(plan(ONE_GPU, data={"storage": "stream"}, data_facts=facts), "storage") == "stream"


def test_a_given_storage_is_kept_and_rows_that_cannot_fit_are_refused() -> None:
    facts = DataFacts(1000, 0, 1, None, 9 * GIB, None, "a test")
    with pytest.raises(InputError, match=r"data\.storage: got resident for 9\.9 GiB of data, expected at most 8\.5"):
        plan(machines(node(memory=10 * GIB)), data={"storage": "resident"}, data_facts=facts)
    larger = plan(machines(node(memory=16 * GIB)), data={"storage": "resident"}, data_facts=facts)
    assert value(larger, "storage") == "resident"
    assert value(plan(data={"storage": "stream"}), "storage") == "stream"
    assert value(plan(ONE_GPU, data={"storage": "pinned"}), "storage") == "pinned"


@pytest.mark.covers("DATA-01")
def test_pinned_memory_is_for_gpus_only_and_the_plan_states_it() -> None:
    made = plan(data={"storage": "pinned"})
    assert value(made, "storage") == "resident"
    assert "data.storage pinned needs a GPU, and there is none" in reason(made, "storage")
    assert any("pinned" in warning and "resident instead" in warning for warning in made.warnings)
    assert value(plan(ONE_GPU, data={"storage": "pinned"}), "storage") == "pinned"


@pytest.mark.covers("CFG-17", "DATA-03")
def test_loader_processes_keep_a_core_of_each_node_free_for_training() -> None:
    items = replace(DATA, kind="items", total_bytes=1000 * GIB)
    for cores, workers, expected in ((1, 1, 0), (2, 1, 1), (2, 2, 0), (3, 1, 2), (16, 1, 4), (16, 8, 1), (8, 2, 3)):
        made = plan(machines(node(cpus=cores)), data_facts=items, scale={"workers": workers})
        assert value(made, "loader_workers") == expected, (cores, workers)
        assert value(made, "loader_workers") * workers <= max(0, cores - 1)
        assert value(made, "storage") == ("stream" if expected else "partial")
    assert value(plan(data_facts=DATA), "loader_workers") == 0
    asked = plan(machines(node(cpus=2)), data_facts=items, data={"loader_workers": 3})
    assert value(asked, "loader_workers") == 3 and any("3 loader processes on the 2 cores" in w for w in asked.warnings)
    for cores, warned in ((6, False), (5, False), (4, True)):
        made = plan(machines(node(cpus=cores)), data_facts=items, data={"loader_workers": 4})
        assert value(made, "loader_workers") == 4
        assert any(f"4 loader processes on the {cores} cores" in one for one in made.warnings) is warned
    fits = plan(data_facts=replace(DATA, kind="items"))
    assert (value(fits, "storage"), value(fits, "loader_workers")) == ("resident", 0)


@pytest.mark.parametrize(
    ("optim", "dtype", "memory", "checkpoint"),
    [
        ({}, "fp32", 4000 * 4 + 320, 12_000),
        ({}, "bf16", 4000 * 4 + 32 * 6 + 2000, 12_000),  # 5/8 of a row's 10 bytes
        ({}, "fp64", 8000 * 4 + 2 * 320, 24_000),
        ({"name": "sgd"}, "fp32", 4000 * 3 + 320, 8000),
        ({"name": "sgd", "momentum": 0.0}, "fp32", 4000 * 2 + 320, 4000),
    ],
)
def test_memory_and_checkpoint_by_formula(optim: dict[str, Any], dtype: str, memory: int, checkpoint: int) -> None:
    inventory = machines(node(), flags={"amx_bf16": True})
    made = plan(inventory, optim=optim, precision={"dtype": dtype}, data={"storage": "stream"})
    assert value(made, "memory") == memory + PROCESS_BYTES
    assert value(made, "checkpoint_bytes") == checkpoint
    assert value(made, "parameters") == 1000


def test_frozen_weights_have_no_gradient_and_no_moments() -> None:
    frozen = ModelFacts(1000, 400, 0, None, "a test")
    made = plan(model_facts=frozen, data={"storage": "stream"}, precision={"dtype": "fp32"})
    assert value(made, "memory") == 4000 + 3 * 400 + PROCESS_BYTES
    assert "activations unknown" in reason(made, "memory")


def test_more_than_the_memory_is_a_warning() -> None:
    large = ModelFacts(GIB, 4 * GIB, 0, None, "a test")
    hopeless = plan(machines(node(memory=10 * GIB)), model_facts=large)
    assert any(
        "with one row at a time, but it may use 9 GiB: it will probably not fit" in one for one in hopeless.warnings
    )
    large = ModelFacts(1000, 4000, 2 * GIB, None, "a test")
    made = plan(machines(node(memory=10 * GIB)), model_facts=large, loop={"micro_batch_size": 8})
    assert any("lower loop.micro_batch_size" in warning for warning in made.warnings)
    left_open = plan(machines(node(memory=10 * GIB)), model_facts=large)
    assert any("what fits is measured at start" in warning for warning in left_open.warnings)


KNOWN = ModelFacts(1_000_000, 4_000_000, 1 << 20, 1e9, "a test")


def test_a_memory_limit_below_one_row_is_refused() -> None:
    """The process, 16 MB of weights, gradients and moments, and half of the row's 1 MiB: 417 + 15.3 + 0.5 MiB."""
    needed = LEAST_PROCESS_BYTES + 16_000_000 + (1 << 19)
    told = (
        r"cluster.memory_limit: got 300 MiB for each process, expected more than 433 MiB, the least that a worker "
        r"needs: the process 418 MiB \+ weights 3.81 MiB \+ gradients 3.81 MiB \+ optimizer 7.63 MiB \+ one row 512"
        r" KiB; 480 MiB are estimated for one row; null uses"
    )
    with pytest.raises(InputError, match=told):
        plan(model_facts=KNOWN, cluster={"memory_limit": 300 << 20})
    with pytest.raises(InputError, match=r"cluster\.memory_limit"):
        plan(model_facts=KNOWN, cluster={"memory_limit": needed - 1})
    assert plan(model_facts=KNOWN, cluster={"memory_limit": needed}).memory.value
    # between what is certain and what is estimated the start decides, and the plan says so
    between = plan(model_facts=KNOWN, cluster={"memory_limit": 470 << 20})
    assert any("480 MiB are estimated for a worker with one row" in one for one in between.warnings)
    above = plan(model_facts=KNOWN, cluster={"memory_limit": 481 << 20})
    assert not any("are estimated for a worker with one row" in one for one in above.warnings)
    recomputed = plan(
        model_facts=KNOWN, cluster={"memory_limit": needed - (1 << 19)}, loop={"activation_checkpointing": True}
    )
    assert recomputed.memory.value
    with pytest.raises(InputError, match="the process 418 MiB; null"):  # of a model that nobody knows before a start
        plan(model_facts=None, cluster={"memory_limit": 300 << 20})
    held = replace(KNOWN, parameters=1000, trainable_bytes=4000)
    on_gpu = plan(machines(node(gpus=[gpu(0)])), model_facts=held, cluster={"memory_limit": 2 << 20})
    assert on_gpu.memory.value, "what CUDA itself takes is not counted"


def test_on_cpus_the_micro_batch_is_measured_if_the_estimate_is_above_half_of_memory() -> None:
    """32 rows of 1 MiB, 16 MB of state, the process: about 511 MiB."""
    made = plan(model_facts=KNOWN, cluster={"memory_limit": 900 << 20})
    assert made.micro_batch_size == Deferred(
        "the largest that fits, measured with real steps at start", (1, 32), made.micro_batch_size.reason
    )
    assert "a worker may use 900 MiB" in made.micro_batch_size.reason
    assert made.accumulation == Deferred("with the micro-batch", (1, 32))
    assert value(made, "effective_batch") == 32
    enough = plan(model_facts=KNOWN, cluster={"memory_limit": 1200 << 20})
    assert (value(enough, "micro_batch_size"), value(enough, "accumulation")) == (32, 1)
    given = plan(model_facts=KNOWN, cluster={"memory_limit": 900 << 20}, loop={"micro_batch_size": 16})
    assert value(given, "micro_batch_size") == 16


@pytest.mark.covers("BP-06")
def test_recomputing_is_advised_above_seven_tenths_of_the_memory_where_it_helps_and_is_off() -> None:
    """32 rows of 8 MiB, 16 MB of state and the process are about 735 MiB."""
    facts = replace(KNOWN, activation_bytes_per_sample=8 << 20, blocks=(400_000, 400_000))
    full = {"model_facts": facts, "loop": {"micro_batch_size": 32}}

    def advice(limit_mib: int, **arguments: Any) -> list[str]:
        made = plan(**{**full, "cluster": {"memory_limit": limit_mib << 20}, **arguments})
        return [warning for warning in made.warnings if "loop.activation_checkpointing true" in warning]

    (told,) = advice(1000)
    assert "256 MiB of it activations" in told and "each of the 2 blocks" in told and "1000 MiB" in told
    assert advice(1100) == [], "67 %"
    assert advice(1000, loop={"micro_batch_size": 32, "activation_checkpointing": True}) == []
    assert advice(1000, model_facts=replace(facts, blocks=None)) == [], "no blocks to compute again"
    assert advice(600, model_facts=replace(facts, activation_bytes_per_sample=1 << 20)) == [], "not what fills it"


def test_on_gpus_it_always_is_and_of_unknown_activations_where_the_model_is_not_tiny() -> None:
    on_gpu = plan(machines(node(gpus=[gpu(0)])), model_facts=KNOWN)
    assert isinstance(on_gpu.micro_batch_size, Deferred) and "allocator" in on_gpu.micro_batch_size.reason
    alone = plan(machines(node(gpus=[gpu(0)])), model_facts=KNOWN, loop={"global_batch_size": 1})
    assert value(alone, "micro_batch_size") == 1
    unknown = replace(KNOWN, activation_bytes_per_sample=None)
    assert isinstance(plan(model_facts=unknown).micro_batch_size, Deferred)
    assert value(plan(model_facts=replace(unknown, parameters=999_999)), "micro_batch_size") == 32


# ---------------------------------------------------------------- experts: where, how much, how fast

EXPERTS = ExpertFacts(
    parameters=((1000, 1000, 1000, 1000),) * 2, gate_bytes=64, rows_per_sample=4, kept_bytes_per_row=100
)
MIXTURE = ModelFacts(
    parameters=10_000, trainable_bytes=40_000, activation_bytes_per_sample=1000, flops_per_sample=1e9, reason="a test",
    experts=EXPERTS,
)  # fmt: skip


def mixture(hosts: Any, inventory: Inventory = CPU, **arguments: Any) -> Plan:
    loop = {"global_batch_size": 8, **arguments.pop("loop", {})}
    fixed = {"precision": {"dtype": "fp32"}, "data": {"storage": "stream"}, "model_facts": MIXTURE}
    return plan(inventory, experts_hosts=hosts, loop=loop, **{**fixed, **arguments})


def test_a_worker_does_not_hold_the_experts_of_hosts() -> None:
    everywhere, hosts = mixture(0), mixture(2)
    assert value(everywhere, "memory") == 16 * 10_000 + 8 * 1000 + PROCESS_BYTES
    assert value(everywhere, "host_memory") is None and value(everywhere, "experts") == "8 in every worker"
    kept = 4 * 2 * 100 * 8  # rows of a sample x layers x bytes of a row x samples
    assert value(hosts, "memory") == 16 * 2000 + 8 * 1000 - kept + PROCESS_BYTES
    assert value(hosts, "host_memory") == 16 * 4000 + kept // 2 + HOST_PROCESS_BYTES
    assert value(hosts, "experts") == "8 on 2 hosts"
    assert "host 0: 4, 62.5 KiB; host 1: 4, 62.5 KiB; each 15.6 KiB (weights 3.91 KiB" in reason(hosts, "experts")
    shared = mixture("colocated", scale={"workers": 2})
    assert value(shared, "memory") == 16 * 2000 + 16 * 4000 + 4 * 1000 + PROCESS_BYTES
    assert value(shared, "experts") == "8 on 2 workers" and value(shared, "host_memory") is None
    assert value(hosts, "checkpoint_bytes") == value(everywhere, "checkpoint_bytes") == 12 * 10_000
    assert "64 hosts" in value(mixture(64, machines(node(cpus=64))), "experts")
    assert "0 to 1 on each" in reason(mixture(64, machines(node(cpus=64))), "experts")


@pytest.mark.covers("PAR-15", "TRB-26")
def test_mixed_gpus_are_warned_of_and_one_kind_is_not() -> None:
    mixed = machines(node(gpus=[gpu(0), gpu(1, "Tesla T4", (7, 5))]))
    (warning,) = [text for text in plan(mixed).warnings if "kinds" in text]
    assert "2 kinds (NVIDIA A100-SXM4-80GB, Tesla T4)" in warning and "scale.accelerator picks one kind" in warning
    assert plan(FOUR_GPUS).warnings == [] and plan(mixed, scale={"accelerator": "T4"}).warnings == []


# ---------------------------------------------------------------- what is not known yet, and the record


def test_choices_that_need_the_opened_data_or_model_are_deferred() -> None:
    made = plan(data_facts=None, model_facts=None)
    waiting = {name for name, choice in made.choices().items() if isinstance(choice, Deferred)}
    assert waiting == {
        "steps_per_epoch", "max_steps", "warmup_steps", "eval_every", "checkpoint_every", "storage", "loader_workers",
        "parameters", "memory", "checkpoint_bytes", "micro_batch_size", "accumulation", "compile",
    }  # fmt: skip
    assert "plan --build" in {name: why for name, _, why in made.rows()}["parameters"]
    assert value(plan(data_facts=None, loop={"max_steps": 9}), "max_steps") == 9


@pytest.mark.covers("PAR-05")
def test_auto_keeps_experts_in_process_unless_that_does_not_fit() -> None:
    assert value(plan(), "hosts") == "none" and value(plan(), "strategy") == "data_parallel"
    on_cpu = mixture("auto")
    assert (value(on_cpu, "hosts"), value(on_cpu, "strategy")) == (0, "data_parallel")
    assert reason(on_cpu, "hosts") == "every worker has room for all experts"
    large = replace(EXPERTS, parameters=((60_000_000,) * 4,) * 2)  # 7.2 GiB in every worker, half on each of two nodes
    facts = replace(MIXTURE, parameters=large.total + 2000, trainable_bytes=4 * (large.total + 2000), experts=large)
    small = machines(node(memory=7 * GIB), node("b", memory=7 * GIB))
    shared = mixture("auto", small, model_facts=facts)
    assert (value(shared, "hosts"), value(shared, "strategy")) == ("colocated", "expert_parallel")
    told = "the experts fit in shares of the workers; too little memory in every worker"
    assert reason(shared, "hosts") == told
    forced = plan(experts_hosts="auto", model_facts=MIXTURE, scale={"strategy": "expert_parallel"})
    assert value(forced, "hosts") == 2 and "3 processes" in reason(forced, "threads"), "hosts have threads too"
    unknown = plan(FOUR_GPUS, experts_hosts="auto")
    assert value(unknown, "hosts") == 0 and "not known before the start" in reason(unknown, "hosts")
    assert value(plan(experts_hosts=0), "strategy") == "data_parallel"
    kept = plan(experts_hosts="auto", scale={"strategy": "data_parallel"})
    assert value(kept, "hosts") == 0 and "scale.strategy" in reason(kept, "hosts")


def test_the_memory_of_a_worker_follows_recomputation_format_and_optimizer() -> None:
    facts = replace(
        MODEL, parameters=1_000_000, trainable_bytes=4_000_000, blocks=(300_000,) * 3,
        activation_bytes_per_sample=1 << 20, recomputed_bytes_per_sample=300 << 10,
    )  # fmt: skip

    def above(dtype: str, optim: str = "adamw", **loop: Any) -> int:
        made = plan(
            model_facts=facts, precision={"dtype": dtype}, optim={"name": optim}, data={"storage": "stream"},
            loop={"global_batch_size": 8, **loop},
        )  # fmt: skip
        return value(made, "memory") - PROCESS_BYTES

    assert above("fp32") == 16_000_000 + 8 * (1 << 20)
    assert above("bf16") == 18_000_000 + 8 * (640 << 10), "with a copy of the weights"
    assert above("fp64") == 2 * above("fp32")
    assert above("fp32", activation_checkpointing=True) == 16_000_000 + 8 * (300 << 10)
    assert above("fp32", micro_batch_size=2) == 16_000_000 + 2 * (1 << 20)
    assert above("fp32", "sgd") == 12_000_000 + 8 * (1 << 20)
    assert above("fp32", "muon") == 12_000_000 + 400_000 + 8 * (1 << 20), "AdamW outside the blocks"
    facts = replace(facts, recomputed_bytes_per_sample=None)
    recomputed = plan(model_facts=facts, loop={"activation_checkpointing": True})
    assert "activations unknown" in reason(recomputed, "memory")


def test_hosts_that_cannot_be_had_are_refused_with_both_keys() -> None:
    with pytest.raises(InputError, match=r"experts\.hosts: got 2 with 4 workers") as caught:
        plan(FOUR_GPUS, experts_hosts=2, scale={"workers": 4})
    assert "scale.workers" in str(caught.value) and "colocated" in str(caught.value)
    with pytest.raises(InputError, match=r"scale\.strategy"):
        plan(experts_hosts=2, scale={"strategy": "data_parallel"})
    with pytest.raises(InputError, match=r"scale\.strategy: got expert_parallel with a model without experts"):
        plan(scale={"strategy": "expert_parallel"})


@pytest.mark.parametrize(
    ("inventory", "share", "hosts", "workers", "per_gpu", "reserved"),
    [
        (ONE_GPU, 0.5, 0, 2, 2, 0.5), (ONE_GPU, 0.5, 1, 1, 2, 0.5), (ONE_GPU, 0.33, 2, 1, 3, 0.3333),
        (FOUR_GPUS, 0.5, 3, 5, 2, 0.5), (FOUR_GPUS, 0.25, "colocated", 16, 4, 0.25), (FOUR_GPUS, 1.0, 1, 3, 1, 1),
    ],
)  # fmt: skip
def test_processes_share_gpus_over_gloo(
    inventory: Inventory, share: float, hosts: Any, workers: int, per_gpu: int, reserved: float
) -> None:
    made = plan(inventory, experts_hosts=hosts, scale={"workers": workers, "gpus_per_worker": share})
    assert (value(made, "workers"), value(made, "hosts")) == (workers, hosts)
    assert (made.per_gpu, made.gpu_share, worker_resources(made, local=False)["GPU"]) == (per_gpu, reserved, reserved)
    assert cluster_size(made)[1] == len(inventory.devices())
    shared = per_gpu > 1
    assert value(made, "backend") == ("gloo" if shared else "nccl")
    assert (f"{per_gpu} processes share each GPU, for development" in str(made.rows())) == shared
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made
    with pytest.raises(InputError, match=f"experts.hosts|at most {per_gpu * len(inventory.devices())}, one per GPU"):
        plan(inventory, experts_hosts=hosts, scale={"workers": workers + 1, "gpus_per_worker": share})


def test_workers_and_hosts_that_share_a_gpu_have_their_part_of_its_memory() -> None:
    """The batch that fits a whole A100 does not fit half of one."""
    large = replace(MODEL, activation_bytes_per_sample=GIB)
    loop = {"global_batch_size": 60, "micro_batch_size": 60}

    def too_large(share: float) -> bool:
        made = plan(ONE_GPU, model_facts=large, loop=loop, scale={"workers": 1, "gpus_per_worker": share})
        return any("lower loop.micro_batch_size" in line for line in made.warnings)

    assert not too_large(1.0) and too_large(0.5)


def test_gpus_are_shared_by_whole_processes_and_where_rows_can_go_through_the_host() -> None:
    halves = {"gpus_per_worker": 0.5}
    assert "fsdp" in refused("scale.gpus_per_worker", inventory=TWO_KINDS, scale={**halves, "strategy": "fsdp"})
    assert "T4" in refused("scale.gpus_per_worker", inventory=TWO_KINDS, experts_hosts={"T4": 1}, scale=halves)
    made = plan(scale={**halves, "workers": 2})
    assert "processes_per_gpu" not in made.choices() and value(made, "backend") == "gloo"
    assert any("scale.gpus_per_worker 0.5 changes nothing" in line for line in made.warnings)
    said = refused("experts.hosts", inventory=ONE_GPU, experts_hosts=2, scale=halves)
    assert "there are 2 GPU shares" in said


TWO_KINDS = machines(
    node(gpus=[gpu(index, "A100") for index in range(4)]), node("b", gpus=[gpu(index, "T4") for index in range(8)])
)


def test_hosts_of_an_accelerator_type_keep_the_other_gpus_free_for_workers() -> None:
    made = plan(TWO_KINDS, experts_hosts={"T4": 8})
    assert value(made, "hosts") == {"T4": 8} and value(made, "strategy") == "expert_parallel"
    assert value(made, "workers") == 4 and "8 go to the expert hosts" in reason(made, "workers")
    assert separate_hosts(made.hosts) == 8
    assert value(plan(TWO_KINDS, experts_hosts={"A100": 1, "T4": 2}), "workers") == 9
    named = plan(TWO_KINDS, experts_hosts={"T4": 8}, scale={"accelerator": "A100"})
    assert value(named, "workers") == 4, "the hosts may be of another kind than the workers"
    assert value(plan(FOUR_GPUS, experts_hosts=1), "workers") == 3


@pytest.mark.parametrize(
    ("inventory", "asked", "scale", "says"),
    [
        (TWO_KINDS, {"H100": 1}, {}, ("got 1 H100", "an accelerator type of these machines", "T4")),
        (TWO_KINDS, {"T4": 9}, {}, ("got 9 T4", "at most 8")),
        (TWO_KINDS, {"A100": 4, "T4": 8}, {}, ("12 GPUs, each expert host needs one, and a worker needs one",)),
        (TWO_KINDS, {"T4": 6}, {"workers": 7}, ("6 T4 with 7 workers", "the workers need 7", "scale.workers")),
        (machines(node(gpus=[gpu(0, "A100"), gpu(1, "T4")])), {"T4": 1}, {}, ("GPUs of several kinds", "a number")),
        (CPU, {"A100": 2}, {}, ("got 2 A100", "on CPUs")),
    ],
)
def test_hosts_by_accelerator_that_cannot_be_had_are_refused(
    inventory: Any, asked: Any, scale: dict[str, Any], says: tuple[str, ...]
) -> None:
    with pytest.raises(InputError) as caught:
        plan(inventory, experts_hosts=asked, scale=scale)
    assert caught.value.key == "experts.hosts"
    assert [words for words in says if words not in str(caught.value)] == []


FOUR_AND_FOUR = machines(
    node(gpus=[gpu(index, "A100") for index in range(4)]), node("b", gpus=[gpu(index, "T4") for index in range(4)])
)


@pytest.mark.parametrize(
    ("asked", "placed", "lives"),
    [
        ({"A100": 2}, "4 on b, 2 on a", "2 on a"),
        ({"T4": 4}, "4 on a", "4 on b"),
        ({"A100": 1, "T4": 2}, "3 on a, 2 on b", "1 on a, 2 on b"),
        (3, "3 on b, 2 on a", "2 on a, 1 on b"),
    ],
)
def test_workers_are_placed_on_resources_that_hosts_do_not_use(asked: Any, placed: str, lives: str) -> None:
    made = plan(FOUR_AND_FOUR, experts_hosts=asked)
    assert reason(made, "placement") == placed and reason(made, "hosts") == f"experts.hosts: {lives}"


def test_hosts_by_accelerator_are_shown_in_words_and_kept_as_a_mapping() -> None:
    made = plan(FOUR_AND_FOUR, experts_hosts={"A100": 2, "T4": 1})
    assert {name: shown for name, shown, _ in made.rows()}["hosts"] == "2 A100, 1 T4"
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))).hosts == made.hosts


def test_threads_count_the_workers_and_hosts_that_are_on_a_node() -> None:
    uneven = machines(node(cpus=4, gpus=[gpu(index, "A100") for index in range(4)]),
                      node("b", cpus=16, gpus=[gpu(index, "T4") for index in range(4)]))  # fmt: skip
    made = plan(uneven, experts_hosts={"A100": 2}, scale={"workers": 3})
    assert reason(made, "placement") == "3 on b" and value(made, "threads") == 2
    assert reason(made, "threads") == "4 usable cores / 2 processes on a (workers 0, expert hosts 2)"
    on_cpu = plan(machines(node(cpus=16), node("b", cpus=8)), experts_hosts=1)
    assert reason(on_cpu, "threads") == "8 usable cores / 2 processes on b (workers 1, expert hosts 1)"
    assert value(on_cpu, "threads") == 4


def test_workers_alone_decide_the_memory_and_the_warning_of_unlike_gpus() -> None:
    slow, fast = ([replace(gpu(index, name), memory_bytes=room * GIB) for index in range(4)]
                         for name, room in (("T4", 1), ("A100", 80)))  # fmt: skip
    both = machines(node(gpus=fast), node("b", gpus=slow))
    large = ModelFacts(GIB, 4 * GIB, 0, None, "a test")
    assert len(plan(both, model_facts=large).warnings) == 2, "16 GiB, and two kinds of GPU"
    assert plan(both, model_facts=large, experts_hosts={"T4": 4}).warnings == []


@pytest.mark.parametrize(
    ("asked", "scale", "says"),
    [
        (100, {}, "got 100, expected at most 7: there are 8 GPUs, each expert host needs one, and a worker needs one"),
        (8, {"workers": 4}, "got 8 with 4 workers, expected at most 4: there are 8 GPUs, each expert host"),
        (1, {"workers": 8}, "got 1 with 8 workers, expected 0 or colocated: there are 8 GPUs, each expert host"),
        ({"A100": 10**9}, {}, "got 1000000000 A100, expected at most 4"),
    ],
)
def test_the_error_for_too_many_hosts_lists_their_resources(asked: Any, scale: dict[str, Any], says: str) -> None:
    assert says in refused("experts.hosts", inventory=FOUR_AND_FOUR, experts_hosts=asked, scale=scale)


@pytest.mark.parametrize("inventory", [CPU, FOUR_GPUS, with_capability(None)])
def test_the_record_survives_a_round_trip_through_json(inventory: Inventory) -> None:
    made = plan(inventory, scale={"mode": "multi_gpu"})
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made
    unknown = plan(inventory, data_facts=None, model_facts=None)
    assert Plan.from_json(json.loads(json.dumps(unknown.to_json()))) == unknown


def test_a_record_of_an_earlier_version_is_read_without_what_is_no_longer_planned() -> None:
    made = plan()
    record = json.loads(json.dumps(made.to_json()))
    record["choices"]["step_time"] = {"value": 0.1, "reason": "estimated"}
    record |= {"strategies": [{"name": "1 process"}], "model_facts": {**record["model_facts"], "passes": {"width": 8}}}
    del record["model_facts"]["recomputed_bytes_per_sample"]
    assert Plan.from_json(record) == made


def test_every_row_has_a_value_and_a_reason() -> None:
    made = plan()
    shared = {"experts", "host_memory"}
    assert [name for name, _, _ in made.rows()] == [name for name in made.choices() if name not in shared]
    assert all(shown and why for _, shown, why in made.rows())
    shown = {name: text for name, text, _ in made.rows()}
    assert shown["checkpoint_every"] == "1 to 32"
    assert shown["deterministic"] == "false"
    assert shown["lr"] == "0.001"
    assert shown["memory"].endswith("MiB")


def test_the_same_arguments_give_the_same_plan() -> None:
    assert plan(FOUR_GPUS, scale={"workers": 3}) == plan(FOUR_GPUS, scale={"workers": 3})


SPLIT = {"micro_batch_size": 4}
RECOMPUTED = {"activation_checkpointing": True}


def test_micro_batches_in_flight_are_planned_for_remote_experts() -> None:
    for dense in (plan(experts_inflight=2), plan(experts_hosts=0)):
        assert "inflight" not in dense.choices() and dense.warnings == []
    asked = plan(experts_hosts=1, experts_inflight=2, loop=SPLIT)
    assert value(asked, "inflight") == 2 and "two micro-batches are kept" in reason(asked, "inflight")
    single = plan(experts_hosts=1, experts_inflight=1, loop=SPLIT)
    assert value(asked, "memory") == value(single, "memory") + 4 * 10
    assert [name for name, _, _ in asked.rows()].index("inflight") == list(asked.choices()).index("hosts") + 1
    assert Plan.from_json(asked.to_json()) == asked
    for idle in (plan(experts_hosts=0, experts_inflight=2), plan(experts_hosts=1, experts_inflight=2)):
        (warning,) = [text for text in idle.warnings if "inflight" in text]
        assert "experts.inflight 2 changes nothing" in warning
    whole = plan(experts_hosts=1, experts_inflight=2)
    assert "a step is one micro-batch" in reason(whole, "inflight") and "kept" not in reason(whole, "inflight")


def test_auto_has_one_micro_batch_in_flight() -> None:
    for made in (plan(experts_hosts=1, loop=SPLIT), plan(FOUR_GPUS, experts_hosts="colocated", loop=SPLIT)):
        assert value(made, "inflight") == 1 and "activations of two micro-batches" in reason(made, "inflight")


def test_two_in_flight_are_refused_with_activation_checkpointing_naming_both_keys() -> None:
    arguments = {"experts_hosts": 1, "experts_inflight": 2, "loop": RECOMPUTED}
    assert "loop.activation_checkpointing" in refused("experts.inflight", **arguments)
    assert value(plan(**arguments | {"experts_inflight": 1}), "inflight") == 1


def test_overlap_is_for_several_workers_that_sum_by_nccl_after_their_passes() -> None:
    two = {"workers": 2}
    assert value(plan(scale=two), "overlap") is False
    assert value(plan(FOUR_GPUS, scale=two), "overlap") is True
    assert value(plan(ONE_GPU, scale={**two, "gpus_per_worker": 0.5}), "overlap") is False, "by gloo"
    assert value(plan(scale={**two, "overlap": True}), "overlap") is True
    assert value(plan(scale={**two, "overlap": False}, experts_hosts=0), "overlap") is False
    for scale in ({"workers": 1}, {**two, "strategy": "fsdp"}):
        assert "overlap" not in plan(scale=scale).choices()
        made = plan(scale={**scale, "overlap": True})
        assert "overlap" not in made.choices()
        assert any("scale.overlap true changes nothing" in text for text in made.warnings)
    assert "overlap" not in plan(scale=two, experts_hosts=1).choices()
    assert "experts.hosts 1" in refused("scale.overlap", scale={**two, "overlap": True}, experts_hosts=1)


def test_batch_norms_of_several_workers_share_their_statistics_only_where_every_pass_is_theirs() -> None:
    two = {"workers": 2, "sync_batchnorm": True}
    made = plan(scale=two)
    assert value(made, "sync_batchnorm") is True and "overlap" not in made.choices()
    assert "half of it" in made.choices()["micro_batch_size"].reason
    alone = plan(scale={**two, "workers": 1})
    assert "sync_batchnorm" not in alone.choices()
    assert any("scale.sync_batchnorm true changes nothing" in text for text in alone.warnings)
    assert "experts.hosts 1" in refused("scale.sync_batchnorm", scale=two, experts_hosts=1)
    assert "sync_batchnorm" not in plan(scale={"workers": 2}).choices()


def test_the_best_weights_are_exported_where_the_run_stops_after_its_best_evaluation() -> None:
    rows = {"loop": {"patience": 3, "max_steps": 100}}
    assert value(plan(), "export") == "last" and value(plan(**rows), "export") == "best"
    assert value(plan(**rows, save={"export": "last"}), "export") == "last"
    assert value(plan(save={"export": "best"}), "export") == "best"
    blind = replace(DATA, eval_rows=0)
    assert value(plan(**rows, data_facts=blind), "export") == "last"
    assert "best_saves" not in plan(data_facts=blind).choices()
    assert "eval split" in refused("save.export", save={"export": "best"}, data_facts=blind)


def test_best_evaluations_are_saved_at_once_where_nothing_could_hold_them() -> None:
    for arguments in (
        {"save": {"keep": "all"}}, {"save": {"asynchronous": False}}, {"experts_hosts": 1},
        {"scale": {"workers": 2, "strategy": "fsdp"}},
    ):  # fmt: skip
        assert value(plan(**arguments), "best_saves") == "at once", arguments
    assert value(plan(), "best_saves") == "at once, or from a copy"
