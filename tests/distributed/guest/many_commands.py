"""Runs many commands that start nothing in one process: argv names a JSON list of them; a line out for each."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys

from jobs.__main__ import main


def outcome(arguments: list[str]) -> dict[str, object]:
    """Exit code and output, as in a shell."""
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code
    return {"code": code, "out": out.getvalue(), "err": err.getvalue(), "ray": "ray" in sys.modules}


if __name__ == "__main__":
    os._exit = sys.exit  # how the verb `train` ends
    with open(sys.argv[1]) as file:
        listed = json.load(file)
    for arguments in listed:
        print(json.dumps(outcome(arguments)), flush=True)
