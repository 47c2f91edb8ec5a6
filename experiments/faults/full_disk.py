"""Runs on a disk that is full, gives it a little more room, and runs again, until there is enough.

Each attempt must end with one message that says that the disk is full and where, and must leave
nothing half-written; what the earlier ones have finished stays. What the last one leaves must equal
what a run leaves that never lacked room. The disk is a tmpfs, so this needs root on Linux.

    python experiments/faults/full_disk.py --output experiments/faults/full_disk.csv
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kills import (
    REFUSED,
    complete,
    configuration,
    differing,
    ended,
    outcome,
    preload,
    start,
    write_text,
)

from tc.artifacts import ROOMS, code_version

FULL = ("no space left on the device", "are free")
"""What a message says of a disk that is full, or about to be."""

Row = tuple[int, int, str, str]
"""Attempt, size in kB, the message's first line, what is wrong."""


def attempts(place: Path, step_kb: int) -> Iterator[Row]:
    """Runs in ever more room."""
    text, disk = place / "text", place / "here"
    text.mkdir()
    write_text(text)
    for room in ROOMS:  # which is kept: the source may be edited while this goes on
        code_version(room)
    cfg = configuration(disk, text)
    complete(cfg, place)
    plain = outcome(disk)
    preload(place / "modules.json")
    shutil.rmtree(disk)
    disk.mkdir()
    size = step_kb
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "none", disk], check=True)
    try:
        number = 1
        while (status := ended(start(cfg, place))) != 0:
            yield number, size, *_looked_at(status, (place / "output.txt").read_text(), disk)
            number, size = number + 1, size + step_kb
            subprocess.run(["mount", "-o", f"remount,size={size}k", disk], check=True)
        wrong = "; ".join(differing(plain, outcome(disk)))
        yield number, size, "complete", f"differs: {wrong}" if wrong else ""
    finally:
        subprocess.run(["umount", disk], check=True)


def _looked_at(status: int, output: str, disk: Path) -> tuple[str, str]:
    """The message of a run that has ended for want of room, and what is wrong with that."""
    problems = []
    if status != REFUSED or "Traceback" in output or output.count("error: ") != 1:
        problems.append(f"status {status}: {output[-2000:]}")
    message = output.rpartition("error: ")[2].strip().replace(str(disk), "DISK")
    if not any(word in message for word in FULL) or "DISK" not in message:
        problems.append("the message does not say what is full")
    problems += [f"unfinished: {p}" for p in disk.rglob(".*.*") if p.is_dir()]
    return message.splitlines()[0] if message else "", "; ".join(problems)


def main() -> int:
    """Runs until there is room; the exit status is 0 where every attempt was as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step-kb", type=int, default=64)
    parser.add_argument("--output", type=Path, help="a CSV file with a row an attempt")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for row in attempts(Path(name), args.step_kb):
            rows.append(row)
            print(*row, sep="  ", flush=True)
    if args.output:
        with open(args.output, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([("attempt", "kilobytes", "message", "wrong"), *rows])
    good = sum(not row[3] for row in rows)
    print(f"\n{good} of {len(rows)} attempts ended as they should")
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
