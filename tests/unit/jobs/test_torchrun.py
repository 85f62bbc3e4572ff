"""The commands for torchrun, and what a process that it started knows and refuses."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.network import address_towards
from jobs import torchrun
from jobs.__main__ import main
from jobs.driver.runtime import cluster_address
from jobs.job.spec import load_spec
from jobs.torchrun import SIGNALS, check_launched, own_workers
from raytrain.errors import InputError, RunError

SET = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`plan(*arguments)`: exit code, output and errors of `plan --print torchrun`."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(["plan", "default", "--print", "torchrun", *arguments])
        said = capsys.readouterr()
        return int(str(stop.value.code)), said.out, said.err

    return run


@pytest.mark.covers("NODE-01", "CLI-23")
def test_the_recipe_has_the_command_of_each_node(plan: Callable[..., tuple[int, str, str]]) -> None:
    given = ("--nproc_per_node", "4", "--nnodes=4", "--master-addr", "10.0.0.4", "--master_port", "29500")
    code, out, err = plan(*given, "save.dir=my runs")
    assert code == 0 and "get-auth-token" in err
    assert out.splitlines() == [
        f"torchrun --nproc_per_node=4 --nnodes=4 --node_rank={rank} --master_addr=10.0.0.4 --master_port=29500 "
        "-m jobs train default 'save.dir=my runs'"
        for rank in range(4)
    ]
    assert plan(*given, "save.dir=my runs", "--node_rank=2")[1].splitlines() == out.splitlines()[2:3]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--nnodes=4"], "--master_addr: got no value, expected the address at which the other nodes reach node 0"),
        (["--nnodes=2", "--master_addr=a", "--node_rank=2"], "--node_rank: got 2, expected 0 to 1"),
        (["--nnodes=0"], "Invalid value for '--nnodes': 0 is not in the range x>=1"),
        (["--nproc_per_node=2", "scale.workers=3"], "scale.workers: got 3, expected 2, the number of torchrun's"),
        (["cluster.address=10.0.0.4:6379"], "cluster.address: got 10.0.0.4:6379, expected null"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(
    plan: Callable[..., tuple[int, str, str]], given: list[str], expected: str
) -> None:
    code, out, err = plan(*given)
    assert (code, out) == (2, "") and expected in err


def test_the_options_of_torchrun_are_named_where_they_do_not_belong(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, option, expected in (
        ("train", "--master_addr=10.0.0.4", "raytrain plan job.yaml --print torchrun"),
        ("train", "--nproc_per_node=4", "did you mean scale.workers=4?"),
        ("plan", "--nnodes=4", "expected --print torchrun with it"),
    ):
        with pytest.raises(SystemExit) as stop:
            main([verb, "default", option])
        assert stop.value.code == 2 and expected in capsys.readouterr().err


POPEN = subprocess.Popen


class FakeStore:
    """torchrun's store: what the nodes tell each other; each of `plays` is called at one look of a node,
    which is one at the key `looks`."""

    def __init__(self, *plays: Callable[[FakeStore], Any], looks: str) -> None:
        self.plays, self.looks, self.said = list(plays), looks, dict[str, Any]()

    def set(self, key: str, value: str) -> None:
        self.said[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.said[key]

    def add(self, key: str, amount: int) -> int:
        self.said[key] = self.said.get(key, 0) + amount
        return self.said[key]

    def check(self, keys: list[str]) -> bool:
        if self.plays and keys == [self.looks]:
            self.plays.pop(0)(self)
        return all(key in self.said for key in keys)


@pytest.fixture
def torchruns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeStore]]:
    """`torchruns(*plays, node=0, process=0)`: this is a process of torchrun, with such a store."""
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    monkeypatch.setattr(torchrun, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(torchrun, "LEAVE_LIMIT_S", 0.05)
    monkeypatch.setattr("torch.distributed.TCPStore", lambda *place, **options: None)

    def begin(*plays: Callable[[FakeStore], Any], node: int = 0, process: int = 0, nodes: int = 1) -> FakeStore:
        restore()  # an earlier one has left its signals ignored
        store = FakeStore(*plays, looks="result" if node else "stop")
        place = {"GROUP_RANK": str(node), "LOCAL_RANK": str(process), "GROUP_WORLD_SIZE": str(nodes)}
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            monkeypatch.delenv(name)
        for name, value in {**SET, **place, "ROLE_ARN": "mine"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("torch.distributed.PrefixStore", lambda keys, inner: store)
        return store

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    yield begin
    restore()


@pytest.fixture
def run_main(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`run_main(*arguments)`: exit code and errors of a command."""

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            main([*arguments])
        return int(str(end.value.code)), capsys.readouterr().err

    return run


def fake_command(monkeypatch: pytest.MonkeyPatch, code: str) -> list[list[str]]:
    """In place of the command this Python code runs; the arguments of each start."""
    started: list[list[str]] = []

    def begin(command: list[str], **options: Any) -> Any:
        started.append(command)
        return POPEN([sys.executable, "-c", code], **options)

    monkeypatch.setattr(torchrun.subprocess, "Popen", begin)
    return started


def test_the_first_process_of_node_0_runs_the_command_with_a_worker_for_each_process(
    torchruns: Callable[..., FakeStore], run_main: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = torchruns()
    ours = "import os, sys; sys.exit(7 if not {'RANK', 'TORCHELASTIC_RUN_ID'} & {*os.environ} else 1)"
    started = fake_command(monkeypatch, ours)
    assert run_main("train", "default", "seed=1") == (7, "")
    assert started[0][-6:] == ["-m", "jobs", "train", "default", "seed=1", "scale.workers=16"]
    assert store.said == {"result": b"7", "left": 0}
    assert os.environ["ROLE_ARN"] == "mine" and not any(name in os.environ for name in SET)
    torchruns(process=1)
    assert run_main("train", "default") == (0, "") and len(started) == 1, "the others end at once"


SLEEPER = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(130)); time.sleep(60)"


def test_a_command_is_told_to_save_when_any_node_is_and_a_killed_one_gives_its_signal(
    torchruns: Callable[..., FakeStore], run_main: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = lambda store: time.sleep(1.0)  # noqa: E731  (until it handles SIGTERM)
    stop_key = lambda store: store.set("stop", "1")  # noqa: E731
    own_signal = lambda store: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731

    def gone(store: FakeStore) -> None:
        raise RuntimeError("the store is gone")

    for play in (stop_key, own_signal, gone):
        store = torchruns(wait, play)
        fake_command(monkeypatch, SLEEPER)
        assert run_main("train", "default")[0] == 130 and store.said["result"] == b"130"
    torchruns()
    fake_command(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    assert run_main("train", "default")[0] == 137


def test_another_node_leaves_with_the_exit_code_and_passes_a_stop_on(
    torchruns: Callable[..., FakeStore], run_main: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[str] = []

    @contextlib.contextmanager
    def node_of(processes: int, address: str) -> Iterator[None]:
        joined.append(address)
        yield
        joined.append("left")

    monkeypatch.setattr(torchrun, "ray_node", node_of)
    store = torchruns(
        lambda store: store.set("head", "10.0.0.4:6379"), lambda store: os.kill(os.getpid(), signal.SIGTERM),
        lambda store: store.set("result", "130"), node=1, nodes=2,
    )  # fmt: skip
    assert run_main("train", "default") == (130, "")
    assert joined == ["--address=10.0.0.4:6379", "left"]
    assert (store.said["joined"], store.said["stop"], store.said["left"]) == (1, b"1", 1)


def test_a_node_that_cannot_join_ends_all(
    torchruns: Callable[..., FakeStore], run_main: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(processes: int, *arguments: str) -> Any:
        raise RunError("`ray start`: the head refused this node")

    monkeypatch.setattr(torchrun, "ray_node", refused)
    store = torchruns(lambda store: store.set("head", "10.0.0.4:6379"), node=1, nodes=2)
    assert run_main("train", "default") == (1, "error: `ray start`: the head refused this node\n")
    assert store.said["stop"] == b"1"
    monkeypatch.setattr(torchrun, "ray_node", lambda processes, *arguments: contextlib.nullcontext())
    monkeypatch.setattr("cluster.network.address_towards", lambda host, port: "10.0.0.4")
    leading = torchruns(lambda store: store.set("stop", "1"), nodes=2)
    code, said = run_main("train", "default")
    assert code == 1 and "a node was stopped or could not join the head at 10.0.0.4:" in said
    assert leading.said["result"] == b"1"


def test_without_the_store_of_torchrun_a_process_ends_with_one_message(
    torchruns: Callable[..., FakeStore], run_main: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed import DistNetworkError  # pyright: ignore[reportPrivateImportUsage]

    def gone(*place: object, **options: object) -> None:
        raise DistNetworkError("refused\nmore")

    for node in (0, 1):
        torchruns(node=node)
        monkeypatch.setattr("torch.distributed.TCPStore", gone)
        assert run_main("train", "default") == (1, "error: torchrun's store, which ends with node 0: refused\n")


def test_workers_are_those_of_torchrun_unless_the_job_says_otherwise(
    torchruns: Callable[..., FakeStore], run_main: Callable[..., tuple[int, str]]
) -> None:
    def own(*arguments: str) -> list[str]:
        return own_workers(["train", *arguments], main.commands["train"], processes=16)

    assert own("seed=1") == ["scale.workers=16"]
    assert own("scale.workers=[2, 16]") == []
    assert own("--resume", "runs/x") == own("--from-tune", "runs/x") == ["scale.workers=16"]
    assert own("--resume", "runs/x", "scale.workers=8") == []
    with pytest.raises(InputError, match=r"scale\.workers: got 8, expected 16"):
        own("scale.workers=8")
    with pytest.raises(InputError, match=r"--debug: got under torchrun"):
        own("--debug")
    with pytest.raises(InputError, match=r"scale\.workers"):
        check_launched(load_spec(None, ["scale.workers=[17, 20]"]).spec, processes=16)
    store = torchruns(nodes=2)
    code, said = run_main("tune", "default")
    assert code == 2 and "got -m jobs tune in 16 processes" in said
    assert store.said["result"] == b"2", "the other nodes end with the same code"


def test_the_cluster_of_the_nodes_is_the_one_that_a_command_trains_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(torchrun.CLUSTER, "10.0.0.4:6379")
    assert cluster_address(None) == cluster_address("10.0.0.9:6379") == "10.0.0.4:6379"


def test_the_own_address_is_that_on_the_way_to_another_machine() -> None:
    assert address_towards("127.0.0.1", 80) == "127.0.0.1"
