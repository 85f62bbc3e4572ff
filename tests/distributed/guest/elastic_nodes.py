"""An elastic job that loses a node and gets another one; what it did as one JSON line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lost_nodes import Story

from jobs.train import train


def job_in(folder: Path, address: str) -> dict[str, Any]:
    """One or two workers, of which one fits on the head."""
    return {
        "name": "nodes",
        "model": {"builder": "raytrain.models.gpt:gpt", "layers": 1, "heads": 2, "width": 16, "context": 16},
        "data": {"source": "text", "path": str(folder / "text.txt")},
        "precision": {"dtype": "fp32"},
        "loop": {"max_steps": 90, "log_every": 1, "global_batch_size": 4},
        "scale": {"workers": [1, 2], "threads": 1},
        "save": {"dir": str(folder), "every": 5},
        "cluster": {"address": address},
        "telemetry": {"tensorboard": False, "observers": ["guest_code:Paces"]},
    }


class ElasticStory(Story):
    def tell(self) -> None:
        """Remove the second node, add a third one."""
        self.wait_for('"step": 20,', "metrics.jsonl")
        self.cluster.remove_node(self.second, allow_graceful=False)
        self.go(50)
        self.wait_for("continues with 1 worker instead of 2")
        self.wait_for('"step": 50,', "metrics.jsonl")
        self.node(3)
        self.go(60)
        self.wait_for("continues with 2 workers instead of 1")
        self.finish()
        self.answer["alone"] = list(rows_alone(self.folder))
        print("ANSWER", json.dumps(self.answer), flush=True)


def rows_alone(folder: Path) -> list[dict[str, Any]]:
    """The training steps of the same job with one worker and without a cluster."""
    job = job_in(folder / "alone", "local") | {"telemetry": {"tensorboard": False}}
    job["data"]["path"] = str(folder / "text.txt")
    del job["cluster"]
    job["scale"]["workers"] = 1
    result = train(job, quiet=True)
    return [row for row in result.history if row["kind"] == "train"]


if __name__ == "__main__":
    ElasticStory(Path(sys.argv[2]), job_in).tell()
