"""Seconds from the command to the first healthy answer of a server.   bench_start.py [--starts N] MODEL [FLAGS]

The first start may have to compile kernels; the others find them. "cpu" is what the process has spent by then, of all
its threads. The server is asked once it says that it is ready: questions while it loads would take its time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path


def start(args: list[str]) -> tuple[float, float]:
    """Seconds, and seconds of processors, of one start; the server is ended after it."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "ninfer.cli.serve", *args, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = list[str]()
        for line in process.stderr:
            lines.append(line)
            if line.startswith("ready "):
                break
        else:
            raise SystemExit(f"the server did not come up:\n{''.join(lines)}")
        with urllib.request.urlopen(f"{lines[-1].split()[1]}/health", timeout=60) as answer:
            assert answer.status == 200
        took = time.perf_counter() - began
        stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        spent = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
        process.terminate()
        process.stderr.read()
        return took, spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=4)
    ours, theirs = parser.parse_known_args()
    for _ in range(ours.starts):
        took, spent = start(theirs)
        print(f"{took:.2f} s  cpu {spent:.2f} s", flush=True)


if __name__ == "__main__":
    main()
