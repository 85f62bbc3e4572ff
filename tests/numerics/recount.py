"""Counts routed tokens one by one, to check the counts of a run. Imported by test processes."""

from __future__ import annotations

from typing import Any

import numpy as np
from exchange import Scene, serve, session_of
from lab import train

from experts.router import TopKRouter
from raytrain.train.session import Session


class Recount:
    """An observer of a model's routers: the experts of every token that counts, step by step."""

    def __init__(self, session: Session) -> None:
        module = session.trainable.module
        self.routers = [part for part in module.modules() if isinstance(part, TopKRouter)]
        self.steps: list[list[list[int]]] = [[[0] * router.num_experts for router in self.routers]]
        for layer, router in enumerate(self.routers):
            router.register_forward_hook(lambda _, given, made, layer=layer: self._note(layer, given, made))
        commit = session.trainable.commit
        assert commit is not None

        def committed(agreed: Any) -> None:
            commit(agreed)
            self.steps.append([[0] * router.num_experts for router in self.routers])

        session.trainable.commit = committed

    def _note(self, layer: int, given: Any, made: Any) -> None:
        if not self.routers[layer].training:
            return
        _, valid, weight = given
        counted = weight > 0 if valid is None else valid & (weight > 0)
        for token, counts in zip(made.indices_TK.tolist(), counted.flatten().tolist(), strict=True):
            for expert in token if counts else ():
                self.steps[-1][layer][expert] += 1

    def rows_of(self, first: int, last: int) -> list[list[int]]:
        """Summed over the steps from `first` to `last`, both from 1."""
        return np.array(self.steps[first - 1 : last]).sum(0).tolist()

    def idle(self, step: int) -> list[list[int | None]]:
        """Steps since each expert's last row."""
        used = [np.array(self.steps[:step])[:, layer] for layer in range(len(self.routers))]
        return [
            [next((n for n in range(step) if one[step - 1 - n, expert]), None) for expert in range(one.shape[1])]
            for one in used
        ]


def recounted(rank: int, world_size: int, scene: Scene) -> Any:
    """One scene in which every worker also counts for itself."""
    if rank >= scene.workers:
        return serve(rank, scene)
    session = session_of(scene, rank)
    recount = Recount(session)
    reporter, _ = train(session)
    intervals = [(row["step"] - row["steps"] + 1, row["step"]) for row in reporter.intervals]
    session.full_module()
    return {
        "intervals": reporter.intervals,
        "metrics": reporter.rows,
        "own": [recount.rows_of(*interval) for interval in intervals],
        "busy_s": session.trainable.interval_log.client.busy_s,
        "idle": [recount.idle(last) for _, last in intervals],
    }
