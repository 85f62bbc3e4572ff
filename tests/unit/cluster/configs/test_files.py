"""The configurations of clusters: valid by their schemas, of the tested versions, and with authentication."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.autoscaler
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from cluster import configs

FOLDER = Path(configs.__path__[0])
ROOT = FOLDER.parents[1]


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.mark.covers("NODE-07")
def test_the_autoscaler_file_is_valid_by_rays_own_schema_and_commands() -> None:
    config = read("autoscaler.yaml")
    schema = json.loads((Path(ray.autoscaler.__path__[0]) / "ray-schema.json").read_text())
    jsonschema.validate(config, schema)
    validate_config(prepare_config(config))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(config | {"head_start_commands": []}, schema)
    head, worker = config["head_start_ray_commands"][-1], config["worker_start_ray_commands"][-1]
    for command in (head, worker):
        assert "RAY_AUTH_MODE=token" in command and "ray start" in command
        assert unknown_options(command) == [], command
    assert "--head" in head and "--dashboard-host=127.0.0.1" in head and "--address=" in worker
    assert "~/.ray/auth_token" in config["file_mounts"]


def unknown_options(command: str) -> list[str]:
    """Options of `ray start` in a command that it does not have."""
    from ray.scripts.scripts import start

    known = {name for parameter in start.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return [name for name in re.findall(r"(?<=\s)--[a-z-]+", command.partition("ray start")[2]) if name not in known]


def cluster_of(name: str) -> Any:
    """The RayClusterSpec of a manifest, and what surrounds it checked by hand against the CRD `ray.io/v1`."""
    manifest = read(name)
    assert manifest["apiVersion"] == "ray.io/v1" and manifest["metadata"]["name"]
    if manifest["kind"] == "RayCluster":
        return manifest["spec"]
    assert manifest["kind"] == "RayJob"
    spec = manifest["spec"]
    assert set(spec) <= {
        "entrypoint", "submissionMode", "backoffLimit", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished",
        "rayClusterSpec",
    }  # fmt: skip
    assert spec["submissionMode"] in ("K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode")
    assert spec["entrypoint"].startswith("python -m jobs train ") and "--resume auto" in spec["entrypoint"]
    assert spec["shutdownAfterJobFinishes"] is True
    return spec["rayClusterSpec"]


@pytest.mark.parametrize("name", ["kuberay_cluster.yaml", "kuberay_job.yaml"])
def test_the_manifests_have_what_the_operator_requires(name: str) -> None:
    spec = cluster_of(name)
    assert set(spec) == {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
    pinned = re.search(r"^ray(?:\[.*\])?==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and spec["rayVersion"] == pinned[1]
    assert spec["authOptions"] == {"mode": "token"}
    head, workers = spec["headGroupSpec"], spec["workerGroupSpecs"]
    assert all({"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"} == set(group)
               for group in workers)  # fmt: skip
    assert all(group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] for group in workers)
    for group in (head, *workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())  # the CRD's type
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        paths = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert paths["shared"] == "/shared" and paths["shm"] == "/dev/shm"
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert all(isinstance(entry["value"], str) for entry in container["env"])
        assert {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": "60"} in container["env"]
    ports = {port["name"]: port["containerPort"] for port in head["template"]["spec"]["containers"][0]["ports"]}
    assert ports == {"gcs-server": 6379, "dashboard": 8265, "client": 10001}


def test_the_slurm_script_parses_and_its_options_exist() -> None:
    script = FOLDER / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text().replace("\\\n", " ")
    starts = [line for line in text.splitlines() if line.startswith("start=(") or '"${start[@]}"' in line]
    assert len(starts) == 3
    assert (
        unknown_options("ray start " + re.sub(r"srun.*--nodelist=\S+|\"\$\{start\[@\]\}\"", "", " ".join(starts))) == []
    )
