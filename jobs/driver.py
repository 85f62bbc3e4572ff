"""What the driver does with torch at hand: find wrong input before Ray starts, and phrase the workers' job."""

from __future__ import annotations

import os
from typing import Any

from jobs.built import build
from jobs.spec import JobSpec
from raytrain.data.sources import hand_over, handed_over, open_source
from raytrain.errors import InputError
from raytrain.models.registry import check_shadowing, make_importable
from raytrain.plan import Plan
from raytrain.run_folder import RunFolder
from raytrain.session import TrainJob, source_facts


def check_on_driver(spec: JobSpec) -> Any:
    """Open the data and build the model once, so that a mistake in either is found before anything starts.

    Returns:
        The data to hand over to the workers, or None where they open it themselves.

    Raises:
        InputError: naming the key that mends it.
    """
    make_importable(os.getcwd())
    check_shadowing()
    sent = hand_over(spec.data)
    context = spec.model.keys.get("context")
    source = handed_over(sent, spec.data, context=context) or open_source(spec.data, context=context, seed=spec.seed)
    rows = len(source.train)
    batch = spec.loop.global_batch_size
    if isinstance(batch, int) and batch > rows:
        raise InputError(
            "loop.global_batch_size", seen=str(batch), expected=f"at most the {rows} rows of the training split"
        )
    build(spec, source_facts(source))
    return sent


def train_job(spec: JobSpec, plan: Plan, run: RunFolder) -> TrainJob:
    """The workers' orders."""
    names = [name for name in type(spec).model_fields if name not in ("model", "data")]
    return TrainJob(
        seed=spec.seed,
        model=spec.model,
        data=spec.data,
        optim=spec.optim,
        precision=spec.precision,
        loop=spec.loop,
        save=spec.save,
        retry=spec.retry,
        observers=list(spec.telemetry.observers),
        tensorboard=spec.telemetry.tensorboard,
        plan=plan,
        run_path=run.path,
        import_path=os.getcwd(),
        owner=_owner(),
        first_attempt=run.current_attempt() + 1,
        builder_sections={name: getattr(spec, name) for name in names},
    )


def _owner() -> dict[str, Any]:
    from raytrain.attempts import this_process

    return this_process()
