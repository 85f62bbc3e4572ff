"""Runs all lines that this machine (or a Ray cluster) has the GPUs for, and prints one table.

    python tests/gpu/run.py                    # this machine
    python tests/gpu/run.py --address auto     # the Ray cluster that this machine is a node of
    python tests/gpu/run.py --only one,two-ddp # some lines
    python tests/gpu/run.py --seconds 560      # as many as end in that time
    python tests/gpu/run.py --list             # what the lines are; runs nothing

Lines that take no times run side by side. After each line, `--out` holds table.txt, results.jsonl (every figure) and
logs.tar.gz, so that whatever ends this program loses only the lines that were running. The exit status is 0 if no line
failed or hung. Without a GPU the bodies run on the CPU where they can; the table then says "cpu", which shows nothing
about GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

from lines import LINES, Line, markdown  # noqa: E402

COUNT = """
import json, sys
from cluster.devices.inventory import inventory_from_ray, local_inventory
address = sys.argv[1]
if address:
    import ray
    ray.init(address=address, log_to_driver=False, logging_level="error")
    found = inventory_from_ray()
else:
    found = local_inventory()
with_gpus = [node for node in found.nodes if node.devices]
largest = max((len(node.devices) for node in with_gpus), default=0)
counts = [len(found.devices()), len(with_gpus), largest]
print(json.dumps([*counts, found.describe(), list(found.notes), list(found.unusable)]))
"""


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="", help="of a running Ray cluster; without it, this machine alone")
    parser.add_argument("--only", default="", help="names of lines, with commas between them")
    parser.add_argument("--list", action="store_true", help="print the table of lines as Markdown")
    parser.add_argument(
        "--seconds", type=float, default=7200.0, help="when to stop; lines that have no time left do not run"
    )
    parser.add_argument(
        "--out", default="", help="where table.txt, results.jsonl and logs.tar.gz go; by default --folder"
    )
    parser.add_argument("--folder", default="", help="where the runs and logs stay; by default a temporary folder")
    given = parser.parse_args()
    if given.list:
        print(markdown(), end="")
        return 0
    unknown = {name for name in given.only.split(",") if name} - {line.name for line in LINES}
    if unknown:
        parser.error(f"no such line: {', '.join(sorted(unknown))}")
    folder = Path(given.folder or tempfile.mkdtemp(prefix="raytrain-gpu-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    counted = subprocess.run(
        [sys.executable, "-c", COUNT, given.address], capture_output=True, text=True, cwd=ROOT, env=_environment(),
        check=False,
    )  # fmt: skip
    if counted.returncode:
        print(counted.stderr.strip().splitlines()[-1])
        return 1
    gpus, nodes, largest, summary, notes, unusable = json.loads(counted.stdout.splitlines()[-1])
    os.environ["RAYTRAIN_GPU_LARGEST"] = str(largest)
    print(f"{summary}\nlogs and runs: {folder}")
    print(
        "".join(f"  note: {line}\n" for line in notes) + "".join(f"  UNUSABLE: {line}\n" for line in unusable), end=""
    )
    names = given.only.split(",") if given.only else [line.name for line in LINES]
    lines = [line for line in LINES if line.name in names]
    board = Board(folder, Path(given.out or folder).absolute(), until=time.monotonic() + given.seconds)
    print(f"\n{'line':20} {'result':8} {'s':>6}  detail", flush=True)
    done = {line.name: threading.Event() for line in lines}

    def run(line: Line) -> bool:
        try:
            if line.equals in done and line.equals != line.name:
                done[line.equals].wait()  # its losses are the reference
            began = time.monotonic()
            result, detail = _run(line, gpus, nodes, board, given.address)
            board.note(line, result, time.monotonic() - began, detail)
            return result in ("FAILED", "HUNG")
        finally:
            done[line.name].set()

    failed = 0
    for group in _side_by_side(lines, given.address):
        with ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 1) // 2))) as pool:
            failed += sum(pool.map(run, group))
    print(f"\n{failed} failed" if failed else "\nnothing failed")
    if not gpus:
        print("There is no GPU here: nothing above shows anything about GPUs.")
    return int(failed > 0)


def _side_by_side(lines: list[Line], address: str) -> list[list[Line]]:
    """The lines in groups that run at the same time: those of one GPU that take no times and do not fill its memory."""
    groups: list[list[Line]] = []
    open_group = False
    for line in lines:
        shares = not (line.alone or line.gpus > 1 or line.kills or address)
        if not (shares and open_group):
            groups.append([])
        groups[-1].append(line)
        open_group = shares
    return groups


class Board:
    """The results so far.

    Args:
        folder: runs and logs.
        out: where the table, the figures and the packed logs are written after each line.
        until: when this program ends, in seconds of `time.monotonic`.
    """

    def __init__(self, folder: Path, out: Path, *, until: float) -> None:
        self.folder, self.out, self.until, self._lock = folder, out, until, threading.Lock()
        out.mkdir(parents=True, exist_ok=True)

    def note(self, line: Line, result: str, seconds: float, detail: str) -> None:
        """Keep the result of a line."""
        row = f"{line.name:20} {result:8} {seconds:6.0f}  {detail}"
        with self._lock:
            print(row, flush=True)
            with open(self.out / "table.txt", "a", encoding="utf-8") as table:
                table.write(row + "\n")
            log = self.folder / f"{line.name}.log"
            texts = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
            with open(self.out / "results.jsonl", "a", encoding="utf-8") as results:
                results.writelines(
                    json.dumps({"line": line.name} | json.loads(text)) + "\n"
                    for text in texts
                    if text.startswith('{"name"')
                )
            packed = self.out / ".logs"
            with tarfile.open(packed, "w:gz") as tar:
                for one in sorted(self.folder.rglob("*.log")):
                    tar.add(one, arcname=str(one.relative_to(self.folder)))
            os.replace(packed, self.out / "logs.tar.gz")


def _run(line: Line, gpus: int, nodes: int, board: Board, address: str) -> tuple[str, str]:
    """(result, what to look at) of one line: ok, cpu, FAILED, HUNG, or "-" where it did not run."""
    if gpus and (gpus < line.gpus or nodes < line.nodes):
        where = f" on {line.nodes} nodes (--address)" if line.nodes > 1 else ""
        return "-", f"needs {line.gpus} GPUs{where}; there are {gpus} on {nodes}"
    if line.kills and address and not line.across:
        return "-", "kills a process of a Ray that it started itself; run it without --address"
    if not gpus and (not line.on_cpu or line.nodes > 1 or line.gpus > 2):
        return "-", "needs GPUs; its body does not run on this CPU"
    limit = min(60 * line.minutes, board.until - time.monotonic() - 3)
    if limit < 5:
        return "-", "no time left (--seconds)"
    environ = _environment() | {"RAYTRAIN_GPU_FOLDER": str(board.folder), "RAYTRAIN_GPU_ADDRESS": address}
    test = line.test or f"test_runs.py -k 'line-{line.name}-end'"
    name, _, chosen = test.partition(" -k ")
    command = [sys.executable, "-m", "pytest", str(HERE / name), "-n", "0", "-q", "-rs", "--timeout", "0", "-p",
               "no:cacheprovider", "--rootdir", str(ROOT), *(["-k", chosen.strip("'")] if chosen else [])]  # fmt: skip
    if line.measure:
        command = [sys.executable, "-W", "ignore", str(HERE / "measure.py"), *line.measure.split()]
        command += [] if gpus else ["--tiny"]
    log = board.folder / f"{line.name}.log"
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environ, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "HUNG", f"after {limit:.0f} s; {log}"
    text = log.read_text(encoding="utf-8").splitlines()
    if code:
        errors = [row.removeprefix("E   ").strip() for row in text if row.startswith("E   ")]
        return "FAILED", f"{errors[0] if errors else next(reversed(text), 'no test ran')}; {log}"
    skipped = [row for row in text if row.startswith("SKIPPED")]
    if skipped and text and " passed" not in text[-1]:
        return "-", skipped[0].partition(": ")[2]
    return ("ok" if gpus else "cpu"), line.expected


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


if __name__ == "__main__":
    sys.exit(main())
