"""What the training process tells the C allocator."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cluster.environment import ray_environment

FAULTS = """
import resource, sys, threading
import torch
from raytrain.train.memory.device import freed_at_once, give_back_freed_memory, keep_freed_memory

set_ = keep_freed_memory() if sys.argv[1] == "keep" else give_back_freed_memory() if sys.argv[1] == "spare" else False
if set_:
    with freed_at_once():
        torch.ones(300_000)
torch.set_num_threads(1)

def step():
    kept = [torch.ones(300_000) for _ in range(8)]
    return sum(float(tensor[0]) for tensor in kept)

def train():
    for _ in range(30):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        step()
    print(int(set_), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=train)
thread.start()
thread.join()
"""


def faults(how: str, **env: str) -> tuple[int, int]:
    """(whether it was set, page faults of fifty steps that free what they take)."""
    command, env = [sys.executable, "-c", FAULTS, how], {"PATH": "/usr/bin", **env}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    set_, count = done.stdout.split()
    return int(set_), int(count)


def test_memory_that_a_step_frees_is_not_faulted_in_again() -> None:
    kept, given_back, spared = faults("keep"), faults("leave"), faults("spare")
    assert (kept[0], given_back[0], spared[0]) == (1, 0, 1)
    assert kept[1] < 0.1 * given_back[1], (kept, given_back)
    assert spared[1] > 0.5 * given_back[1], "a reading of memory in between leaves a process that keeps nothing so"


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_the_environment_has_precedence(name: str) -> None:
    value = "1" if name.startswith("MALLOC") else "glibc.malloc.arena_max=1"
    assert faults("keep", **{name: value})[0] == 0


def test_the_environment_of_raytrains_own_clusters_leaves_the_setting_to_the_process() -> None:
    kept = faults("keep", GLIBC_TUNABLES=ray_environment()["GLIBC_TUNABLES"])
    assert kept[0] == 1 and kept[1] < 100, kept
