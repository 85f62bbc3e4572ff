"""From a job to the session that a worker of it would hold, without Ray: for benches and tests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from cluster.devices.inventory import Inventory
from jobs.driver.check_job import check_on_driver, train_job
from jobs.driver.planning import plan_job
from jobs.job.spec import LoadedSpec, load_spec
from raytrain.data.rows.contract import Source
from raytrain.runs.folder import RunFolder
from raytrain.train.job import TrainJob
from raytrain.train.parallel.collectives import Workers
from raytrain.train.session import Session


def worker_job(
    job: Mapping[str, Any] | LoadedSpec, *, inventory: Inventory | None = None, connection: Any = None
) -> tuple[TrainJob, Source]:
    """What a worker of this job gets, which is checked as on the driver, and the job's opened data. Its run folder is
    only named, and never written. `connection` leads to the processes that hold the experts
    (`experts.exchange.membership.Connection`), if others do."""
    loaded = job if isinstance(job, LoadedSpec) else load_spec(mapping=job)
    spec = loaded.spec
    checked = check_on_driver(spec, run_batch=False)
    source = checked.source
    plan = plan_job(loaded, inventory=inventory, model_facts=checked.model_facts, data_facts=source.facts)
    run = RunFolder(os.path.join(spec.save.dir, spec.name))
    return train_job(spec, plan, run, attempt=1, connection=connection), source


def session_of(job: Mapping[str, Any] | LoadedSpec, *, connection: Any = None) -> Session:
    """The session of a single worker of this job, in this process and on this machine; nothing is prepared yet. Its
    plan is `session.job.plan`. See `worker_job`."""
    made, source = worker_job(job, connection=connection)
    return Session(made, workers=Workers(), source=source)
