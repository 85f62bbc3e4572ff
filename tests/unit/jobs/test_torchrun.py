"""The commands for torchrun, and what a process that it started knows and refuses."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.network import address_towards
from jobs import torchrun
from jobs.__main__ import main
from jobs.driver.signals import StopSignals, request_stop
from jobs.job.spec import load_spec
from jobs.torchrun import SIGNALS, Launch, Leader, carried_out, check_launched, ray_node
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


def test_a_process_knows_its_place() -> None:
    launch = Launch(SET)
    assert (launch.node, launch.nodes, launch.processes, launch.here) == (1, 4, 16, 4)
    assert launch.master == ("10.0.0.4", 29500)
    again = Launch({**SET, "TORCHELASTIC_RESTART_COUNT": "3"})
    assert again.keys != launch.keys, "keys of an earlier start must not count"


def test_without_the_store_of_torchrun_a_process_ends_with_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(launch: Launch) -> None:
        raise RunError("torchrun's store at 10.0.0.4:29500: refused")

    monkeypatch.setattr(Launch, "store", gone)
    for node, process in (("0", "0"), ("1", "0"), ("1", "1")):
        place = {"GROUP_RANK": node, "LOCAL_RANK": process, "ROLE_NAME": "default", "ROLE_ARN": "mine"}
        monkeypatch.setattr(os, "environ", {**SET, **place})
        previous = {number: signal.getsignal(number) for number in SIGNALS}
        try:
            with pytest.raises(SystemExit) as end:
                carried_out(lambda: pytest.fail("nothing is carried out"), request_stop=lambda: True)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        said = "" if process == "1" else "error: torchrun's store at 10.0.0.4:29500: refused\n"
        assert (end.value.code, capsys.readouterr().err) == (int(process == "0"), said)
        assert list(os.environ) == ["ROLE_ARN"], "Ray's workers must not take themselves for torchrun's"


def test_workers_are_those_of_torchrun_unless_the_job_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    leader = Leader.__new__(Leader)
    leader.launch = Launch(SET)
    assert leader.overrides(None, ["seed=1"], None, resumes=False) == ["seed=1", "scale.workers=16"]
    elastic = ["scale.workers=[2, 16]"]
    assert leader.overrides(None, elastic, None, resumes=False) == elastic
    assert leader.overrides(None, [], None, resumes=True) == ["scale.workers=16"]
    assert leader.overrides(None, ["scale.workers=8"], None, resumes=True) == ["scale.workers=8"]
    with pytest.raises(InputError, match=r"scale\.workers: got 8, expected 16"):
        leader.overrides(None, ["scale.workers=8"], None, resumes=False)
    with pytest.raises(InputError, match=r"scale\.workers"):
        check_launched(load_spec(None, ["scale.workers=[17, 20]"]).spec, processes=16)
    monkeypatch.setattr(torchrun, "_leaders", [leader])
    with pytest.raises(SystemExit) as stop:
        main(["tune", "default"])
    assert stop.value.code == 2 and "got -m jobs tune in 16 processes" in capsys.readouterr().err


def test_nodes_need_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    launch = Launch(SET)
    with pytest.raises(InputError, match=r"RAY_AUTH_TOKEN_PATH: got \S+/\.ray/auth_token, which is no file"):
        ray_node(launch, "--head").__enter__()
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(InputError, match="none, which is no file"):
        ray_node(launch, "--head").__enter__()


def test_the_own_address_is_that_on_the_way_to_another_machine() -> None:
    assert address_towards("127.0.0.1", 80) == "127.0.0.1"


def test_a_stop_of_another_node_and_a_signal_are_one_request() -> None:
    assert not request_stop(), "no command handles signals"
    signals = StopSignals()
    signals.install()
    try:
        assert request_stop() and signals.asked.is_set()
        assert signals.times == 0, "the first signal of this process is not a second one"
    finally:
        signals.restore()
    assert not request_stop()
