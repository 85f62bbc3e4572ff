"""Objects of a process that forks: its children do not delete them."""

from __future__ import annotations

import json
import subprocess
import sys

CODE = """
import gc, json, os
from cluster.ray_runtime import keep_parents_objects

{first}
deleted, answer = os.pipe()


class Circle:
    def __init__(self):
        self.me = self

    def __del__(self):
        os.write(answer, str(os.getpid()).encode() + b" ")


gc.disable()
Circle()
{enabled}
child = os.fork()
if not child:
    gc.enable()
    gc.collect()
    Circle()
    gc.collect()
    os._exit(0 if gc.isenabled() else 1)
_, status = os.waitpid(child, 0)
gc.collect()
os.close(answer)
print(json.dumps([os.getpid(), child, os.read(deleted, 1000).decode().split(), gc.isenabled(), status]))
"""


def forked(*, first: str, enabled: str) -> tuple[int, int, list[int], bool]:
    code = CODE.format(first=first, enabled=enabled)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    parent, child, deleted, collects, status = json.loads(done.stdout)
    assert status == 0
    return parent, child, [int(pid) for pid in deleted], collects


def test_a_child_deletes_its_own_objects_and_none_of_its_parent() -> None:
    for first in ("keep_parents_objects()", "keep_parents_objects(); keep_parents_objects()"):
        parent, child, deleted, collects = forked(first=first, enabled="gc.enable()")
        assert deleted == [child, parent] and collects
    _, child, deleted, _ = forked(first="", enabled="gc.enable()")
    assert deleted[0] == child and len(deleted) == 3, "without it, the child deletes the object of its parent as well"


def test_a_collector_that_is_off_stays_off() -> None:
    assert not forked(first="keep_parents_objects()", enabled="")[3]
