"""A run whose folder is on an object store: a local S3 server, addressed by a URI with a query."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from moto.moto_server.threaded_moto_server import ThreadedMotoServer

from raytrain.runs.folder import RunFolder

KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_EC2_METADATA_DISABLED": "true"}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URI of a folder in an empty bucket."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"{host}:{port}"
    boto3.client("s3", endpoint_url=f"http://{endpoint}", region_name="us-east-1").create_bucket(Bucket="bucket")
    yield f"s3://bucket/team/runs?endpoint_override={endpoint}&scheme=http&region=us-east-1"
    server.stop()


@pytest.mark.timeout(300)
def test_a_run_on_an_object_store_is_complete_and_resumes(
    run_cli: Callable[..., Any], guest_job: Callable[..., dict[str, Any]], place: Any, bucket: str
) -> None:
    job = guest_job(
        name="stored",
        model={"fault": "lives_hard", "at": -1, "note": str(place.folder)},  # prints a line in each process
        loop={"max_steps": 6},
        save={"dir": bucket, "every": 4},
        scale={"workers": 2},
        telemetry={"tensorboard": True},
    )
    trained = run_cli("train", str(place.write(job)), cwd=place.folder, env=place.env | KEYS)
    assert trained.code == 0, trained.text
    latest = bucket.replace("/runs?", "/runs/latest?")
    run = RunFolder.open(latest)
    assert run.path.startswith("s3://bucket/team/runs/stored-") and run.path.endswith("&region=us-east-1")
    assert f"run     {run.path}" in trained.out.replace("\n", "")
    check_files(run, steps=6)
    resumed = run_cli("train", "--resume", latest, "loop.max_steps=8", cwd=place.folder, env=place.env | KEYS)
    assert resumed.code == 0, resumed.text
    check_files(run, steps=8)
    for rank in (0, 1):
        log = run.read_text(f"logs/rank_{rank:05d}.log")
        assert log.count(f"rank {rank} came to this life") == 2, "the log of the first command is kept"
    assert len(run.store.entries("tensorboard")) == 2


def check_files(run: RunFolder, *, steps: int) -> None:
    """The same files as in a local folder, each readable."""
    from safetensors.torch import load

    names = {entry.name for entry in run.store.entries("")}
    assert {"job.yaml", "plan.json", "metrics.jsonl", "events.jsonl", "checkpoints", "result.json"} <= names
    assert {"report", "logs", "tensorboard", "weights"} <= names
    assert run.read_json(run.result)["status"] == "done" and run.read_json(run.result)["steps"] == steps
    assert [row["step"] for row in run.read_rows(run.metrics) if row["kind"] == "train"] == list(range(1, steps + 1))
    assert load(run.store.read_bytes("weights/model.safetensors"))
    assert b"</html>" in run.store.read_bytes("report/report.html")
    board = run.store.entries("tensorboard")[-1]
    assert board.size > 100 and io.BytesIO(run.store.read_bytes(f"tensorboard/{board.name}")).read(1)
