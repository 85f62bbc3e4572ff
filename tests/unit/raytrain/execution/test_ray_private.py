"""Each private name of Ray is used if it exists; without it, the public interface is used."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import signal
import subprocess
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import cloudpickle
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

from cluster.ray_runtime import PRELOAD
from raytrain.execution import ray_private

POLICIES = "ray.train.v2._internal.execution.scaling_policy"
TRAINERS = "ray.train.v2.api.data_parallel_trainer"
CONSTANTS = "ray.train.v2._internal.constants"


def services() -> Any:
    return importlib.import_module("ray._private.services")


def test_an_unknown_name_gives_none() -> None:
    assert ray_private.find("ray.nowhere", "name") is None and ray_private.find("ray", "nothing") is None
    assert ray_private.find("ray", "init") is ray.init


def test_the_environment_record_is_refreshed_or_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr("ray._raylet.Config", SimpleNamespace(initialize=given.append))
    ray_private.reread_environment()
    assert given == [""]
    monkeypatch.setattr("ray._raylet.Config", SimpleNamespace(initialize=lambda: None))  # other arguments
    ray_private.reread_environment()
    monkeypatch.setattr("ray._raylet.Config", SimpleNamespace())
    ray_private.reread_environment()
    monkeypatch.delattr("ray._raylet.Config")
    ray_private.reread_environment()
    assert given == [""]


def test_the_token_and_what_ray_read_at_its_import_are_read_again_or_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[bool] = []
    loader = SimpleNamespace(reset_cache=lambda: resets.append(True))
    monkeypatch.setattr("ray._raylet.AuthenticationTokenLoader", SimpleNamespace(instance=lambda: loader))
    constants = importlib.import_module("ray._private.ray_constants")
    hook = importlib.import_module("ray._private.auto_init_hook")
    monkeypatch.setattr(constants, "ENABLE_RAY_CLUSTER", "ours")
    monkeypatch.setattr(hook, "enable_auto_connect", False)
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.delenv("RAY_ENABLE_AUTO_CONNECT", raising=False)
    ray_private.reread_environment()
    assert resets == [True] and constants.ENABLE_RAY_CLUSTER is False and hook.enable_auto_connect
    monkeypatch.setenv("RAY_ENABLE_AUTO_CONNECT", "0")
    monkeypatch.setattr("ray._raylet.AuthenticationTokenLoader", SimpleNamespace())  # another Ray
    ray_private.reread_environment()
    assert resets == [True] and not hook.enable_auto_connect
    monkeypatch.delattr("ray._raylet.AuthenticationTokenLoader")
    monkeypatch.delattr(hook, "enable_auto_connect")
    monkeypatch.delattr(constants, "ENABLE_RAY_CLUSTER")
    ray_private.reread_environment()
    assert not hasattr(hook, "enable_auto_connect") and not hasattr(constants, "ENABLE_RAY_CLUSTER")


def test_daemons_start_in_separate_process_groups_or_in_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    original = services().ConsolePopen
    with ray_private.own_process_groups() as started:
        process = services().ConsolePopen(["sleep", "60"])
        assert started == [process] and os.getpgid(process.pid) == process.pid != os.getpgid(0)
        process.kill()
        process.wait()
    assert services().ConsolePopen is original and issubclass(original, subprocess.Popen)
    monkeypatch.setattr("ray._private.services.ConsolePopen", print)  # something else under the same name
    with ray_private.own_process_groups():
        assert services().ConsolePopen is print
    monkeypatch.delattr("ray._private.services.ConsolePopen")
    with ray_private.own_process_groups():
        assert not hasattr(services(), "ConsolePopen")


def test_pages_of_daemons_are_not_printed_inside_and_are_again_after_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the loop that Ray runs in a thread of the driver."""
    import ray._private.worker as module

    page = {"job_id": None, "error_message": "A worker died or was killed"}

    def printed() -> str:
        pages, over = iter([("", page), ("", page)]), threading.Event()

        def poll() -> Any:
            found = next(pages, None)
            if found is None:
                over.set()
            return found or ("", None)

        subscriber = SimpleNamespace(subscribe=lambda: None, poll=poll)
        job = SimpleNamespace(binary=lambda: b"1")
        monkeypatch.setattr(module, "_internal_kv_initialized", lambda: False)
        module.listen_error_messages(SimpleNamespace(gcs_error_subscriber=subscriber, current_job_id=job), over)  # type: ignore[arg-type]
        return "".join(capsys.readouterr())

    with ray_private.no_pages_of_daemons():
        assert printed() == ""
    assert printed().count("A worker died or was killed") >= 1, "Ray's own behaviour, which is back"
    monkeypatch.delattr(module, "print_to_stdstream")
    with ray_private.no_pages_of_daemons():
        assert not hasattr(module, "print_to_stdstream")


@pytest.mark.parametrize("logs", [True, False])
def test_daemons_that_a_private_cluster_does_not_need_are_not_started(
    monkeypatch: pytest.MonkeyPatch, logs: bool
) -> None:
    started: list[str] = []

    class Node:
        def start_monitor(self) -> None:
            started.append("monitor")

        def start_log_monitor(self) -> None:
            started.append("logs")

        def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
            started.append("server")

        def start_gcs_server(self) -> None:
            started.append("gcs")

    def start_all() -> list[str]:
        started.clear()
        for name in ("start_gcs_server", "start_monitor", "start_log_monitor"):
            getattr(Node(), name, lambda: None)()
        if hasattr(Node, "start_api_server"):
            Node().start_api_server(include_dashboard=False, raise_on_failure=False)
        return started

    monkeypatch.setattr("ray._private.node.Node", Node)
    with ray_private.only_needed_daemons(logs=logs):
        assert start_all() == (["gcs", "logs"] if logs else ["gcs"])
    assert start_all() == ["gcs", "monitor", "logs", "server"]
    del Node.start_monitor, Node.start_api_server  # names that another Ray does not have
    with ray_private.only_needed_daemons(logs=False):
        assert start_all() == ["gcs"]
    assert start_all() == ["gcs", "logs"] and not hasattr(Node, "start_monitor")
    monkeypatch.delattr("ray._private.node.Node")
    with ray_private.only_needed_daemons(logs=False):
        pass


def test_work_goes_on_while_the_daemons_start_and_one_that_ended_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def ray_looks(address: str, node_id: str) -> str:
        done.append("Ray's own")
        return f"{node_id} at {address}"

    monkeypatch.setattr("ray._private.services.get_node", ray_looks)
    running, ended = subprocess.Popen(["sleep", "60"]), subprocess.Popen(["false"])
    ended.wait()
    with ray_private.first_look(meanwhile=lambda: done.append("imports"), daemons=[running]):
        assert services().get_node("here:1", "n1") == "n1 at here:1"
    assert done == ["imports", "Ray's own"] and services().get_node is ray_looks
    with (
        ray_private.first_look(meanwhile=lambda: None, daemons=[running, ended]),
        pytest.raises(ChildProcessError, match=r"Ray's process false ended at once \(exit code 1\)") as raised,
    ):
        services().get_node("here:1", "n1")
    assert raised.value.errno == 1 and raised.value.filename == "false" and done == ["imports", "Ray's own"]
    running.send_signal(signal.SIGXFSZ)
    running.wait()
    with (
        ray_private.first_look(meanwhile=lambda: None, daemons=[running]),
        pytest.raises(ChildProcessError, match=r"Ray's process sleep ended at once \(signal 25, SIGXFSZ\)"),
    ):
        services().get_node("here:1", "n1")
    monkeypatch.delattr("ray._private.services.get_node")
    with ray_private.first_look(meanwhile=lambda: None):
        assert not hasattr(services(), "get_node")


def test_the_controller_uses_a_process_that_has_inherited_the_drivers_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An actor with variables of its own gets a new process."""
    given: list[Any] = []

    class Actor:
        def __init__(self, **named: Any) -> None:
            given.append(named)
            self.run = self.get_result = SimpleNamespace(remote=lambda: "the result")

    def remote(**options: Any) -> Any:
        given.append(options)
        return lambda kind: SimpleNamespace(remote=kind)

    context = SimpleNamespace(get_node_id=lambda: "n1")
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    monkeypatch.setattr("ray.remote", remote)
    monkeypatch.setattr("ray.get", lambda value: value)
    monkeypatch.setattr("ray.train.v2._internal.execution.controller.TrainController", Actor)
    monkeypatch.setenv(PRELOAD, "1:folder")
    assert trainer()._initialize_and_run_controller(other=1) == "the result"
    assert given == [{"num_cpus": 0, "label_selector": {"ray.io/node-id": "n1"}}, {"other": 1}]
    parent = importlib.import_module(TRAINERS).DataParallelTrainer
    monkeypatch.setattr(parent, "_initialize_and_run_controller", lambda self, **named: "Ray's")
    monkeypatch.delattr("ray.train.v2._internal.execution.controller.TrainController")
    assert trainer()._initialize_and_run_controller(other=1) == "Ray's"


def test_workers_use_processes_that_have_inherited_the_drivers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = importlib.import_module(CONSTANTS)
    monkeypatch.delenv(PRELOAD, raising=False)
    monkeypatch.setattr(workers, "ENV_VARS_TO_PROPAGATE", {"RAY_TRAIN_V2_ENABLED"})
    ray_private.propagate_nothing()  # a Ray of the program itself, whose processes have not inherited them
    assert {"RAY_TRAIN_V2_ENABLED"} == workers.ENV_VARS_TO_PROPAGATE
    monkeypatch.setenv(PRELOAD, "1:folder")
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    assert workers.get_env_vars_to_propagate() == {"RAY_TRAIN_V2_ENABLED": "1"}
    ray_private.propagate_nothing()
    assert workers.get_env_vars_to_propagate() == {}
    monkeypatch.delattr(f"{CONSTANTS}.ENV_VARS_TO_PROPAGATE")
    ray_private.propagate_nothing()


def test_only_a_worker_unpickles_its_function() -> None:
    reference = ray_private.InlineFunction(cloudpickle.dumps(lambda: 7))
    assert pickle.loads(pickle.dumps(reference)).get()() == 7
    assert isinstance(reference.pickled, bytes)


def test_a_fixed_number_of_workers_needs_no_autoscaler(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = ray_private.fixed_scaling_policy(ScalingConfig(num_workers=2))
    assert policy is not None
    calls: list[str] = []
    monkeypatch.setattr(ray_private, "propagate_nothing", lambda: calls.append("nothing"))
    policy.after_controller_start(None)
    assert calls == ["nothing"]
    assert policy.make_decision_for_non_running_worker_group().num_workers == 2
    assert policy._coordinator_client is None, "nobody was asked"

    class Other:
        def __init__(self, one: Any, two: Any) -> None: ...

    monkeypatch.setattr(f"{POLICIES}.FixedScalingPolicy", Other)  # other arguments
    assert ray_private.fixed_scaling_policy(ScalingConfig(num_workers=2)) is None
    monkeypatch.delattr(f"{POLICIES}.FixedScalingPolicy")
    assert ray_private.fixed_scaling_policy(ScalingConfig(num_workers=2)) is None


def trainer() -> Any:
    return ray_private.trainer_class(local=True)(lambda: None, scaling_config=ScalingConfig(num_workers=2))


def test_on_a_cluster_only_the_callback_that_needs_a_dashboard_is_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [type(name, (), {})() for name in (*ray_private.UNNEEDED_CALLBACKS, "Kept")]
    monkeypatch.setattr(f"{TRAINERS}.DataParallelTrainer._create_default_callbacks", lambda self: list(entries))
    trainer = ray_private.trainer_class(local=False)(lambda: None, scaling_config=ScalingConfig(num_workers=2))
    assert trainer._create_default_callbacks() == entries[1:]
    monkeypatch.delattr(f"{TRAINERS}.DataParallelTrainer._create_default_callbacks")
    assert ray_private.trainer_class(local=False) is TorchTrainer


def test_the_local_trainer_omits_two_callbacks_and_sets_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    parent = importlib.import_module(TRAINERS).DataParallelTrainer
    monkeypatch.setattr(parent, "_initialize_and_run_controller", lambda self, **given: seen.append(given))
    entries = [type(name, (), {})() for name in (*ray_private.UNNEEDED_CALLBACKS, "Kept")]
    monkeypatch.setattr(parent, "_create_default_callbacks", lambda self: entries)
    made = trainer()
    assert [type(entry).__name__ for entry in made._create_default_callbacks()] == ["Kept"]
    made._initialize_and_run_controller(scaling_policy="Ray's", other=1)
    assert seen[0]["scaling_policy"].scaling_config.num_workers == 2 and seen[0]["other"] == 1
    made._initialize_and_run_controller(other=1)  # a Ray that takes no policy there
    assert seen[1] == {"other": 1}
    monkeypatch.delattr(f"{POLICIES}.FixedScalingPolicy")
    made._initialize_and_run_controller(scaling_policy="Ray's")
    assert seen[2] == {"scaling_policy": "Ray's"}


@pytest.mark.parametrize("name", ["_create_default_callbacks", "_initialize_and_run_controller"])
def test_without_the_methods_it_is_a_plain_torch_trainer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ray_private.trainer_class(local=True) is not TorchTrainer
    monkeypatch.delattr(f"{TRAINERS}.DataParallelTrainer.{name}")
    assert ray_private.trainer_class(local=True) is TorchTrainer


class Group:
    """A worker group of two; `missing` is a name that it lacks."""

    def __init__(self, missing: str = "") -> None:
        self.ended = 0
        worker = SimpleNamespace() if missing == "actor" else SimpleNamespace(actor="an actor")
        methods = {"get_workers": lambda: [worker, worker], "shutdown": self._end}
        vars(self).update({name: method for name, method in methods.items() if name != missing})

    def _end(self) -> None:
        self.ended += 1


def test_workers_without_a_process_group_are_ended_by_us_or_by_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Any] = []
    monkeypatch.setattr("ray.kill", killed.append)
    group = Group()
    ray_private.end_workers(group)
    assert killed == ["an actor"] * 2 and group.ended == 1
    for missing in ("get_workers", "shutdown", "actor"):
        ray_private.end_workers(Group(missing))
    assert killed == ["an actor"] * 2


def test_the_agent_of_a_private_cluster_has_no_port_of_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import parameter

    original = parameter.RayParams
    with ray_private.free_agent_port():
        assert parameter.RayParams(num_cpus=3).dashboard_agent_listen_port == 0
        assert parameter.RayParams(num_cpus=3).num_cpus == 3
    assert parameter.RayParams is original and original().dashboard_agent_listen_port == 52365


@pytest.mark.parametrize(
    ("kinds", "second", "expected"),
    [
        pytest.param(["node_5b45", "node_fbbc"], False, False, id="ray start"),
        pytest.param(None, False, False, id="no monitor"),
        pytest.param(["node_5b45", "gpu.worker"], False, True, id="ray up"),
        pytest.param([], True, True, id="the second one"),
    ],
)
def test_an_autoscaler_is_known_by_the_kinds_of_its_nodes(
    monkeypatch: pytest.MonkeyPatch, kinds: list[str] | None, second: bool, expected: bool
) -> None:
    status = None if kinds is None else json.dumps({"autoscaler_report": {"active_nodes": dict.fromkeys(kinds, 1)}})
    client = SimpleNamespace(internal_kv_get=lambda key, namespace: status and status.encode())
    monkeypatch.setattr("ray._private.worker.global_worker", SimpleNamespace(gcs_client=client))
    monkeypatch.setattr("ray.autoscaler.v2.utils.is_autoscaler_v2", lambda gcs_client: second)
    assert ray_private.autoscales() is expected
    monkeypatch.setattr("ray._private.worker.global_worker", SimpleNamespace())  # another Ray: nothing is refused
    assert ray_private.autoscales()
