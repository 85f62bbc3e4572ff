"""A job under which one of three nodes ends the workers each time; what it did as one JSON line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lost_nodes import Story


def job_in(folder: Path, address: str) -> dict[str, Any]:
    """Two workers, of which one fits on the head."""
    return {
        "name": "nodes",
        "model": {"builder": "guest_code:net", "fault": "dies_there", "at": 24, "note": str(folder)},
        "data": {"source": "guest_code:rows"},
        "precision": {"dtype": "fp32"},
        "loop": {"max_steps": 40, "log_every": 1, "global_batch_size": 12},
        "scale": {"workers": 2, "threads": 1},
        "save": {"dir": str(folder), "every": 5},
        "cluster": {"address": address},
        "retry": {"host_silence_s": 8.0},
        "telemetry": {"tensorboard": False, "observers": ["guest_code:Paces"]},
    }


class FaultyStory(Story):
    def tell(self) -> None:
        """Add a third node while the second one, the only choice of the second attempt, seems to work."""
        self.wait_for('"step": 20,', "metrics.jsonl")
        self.go(24)
        self.wait_for("restarting the workers")
        self.go(22)  # the second attempt waits before the step in which its node fails again
        self.wait_for('"attempt": 2,', "events.jsonl")
        self.node(3)
        self.finish()
        self.answer["places"] = {path.name: path.read_text() for path in self.folder.glob("rank?-*")}
        print("ANSWER", json.dumps(self.answer), flush=True)


if __name__ == "__main__":
    FaultyStory(Path(sys.argv[2]), job_in).tell()
