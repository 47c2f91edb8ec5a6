"""Kills runs by SIGKILL, runs them again, and asks whether anything came out otherwise.

A kill hits either a write (just before or after a file or an artifact is put in its place, in the
middle of a file, at a sync, at a hash) or any moment of a stage. The stages take turns, so that
each of them is hit. The run that follows must complete, and what it leaves must equal, bit for bit,
what a run leaves that nobody disturbed: every tensor file, every manifest's key, every metric but
times and memory, and results.csv.

All runs are forks of one process that has its imports behind it.

    python experiments/faults/kills.py --kills 50 --output experiments/faults/kills.csv
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

import tc.artifacts
from tc.artifacts import ROOMS, code_version, hash_file
from tc.config import STAGES, register
from tc.errors import TCError
from tc.pipeline import run

ROOT = Path(__file__).parents[2]
TIMES = ("seconds", "peak_rss_bytes", "reused", "per_second")
"""How the metrics end that differ from run to run, killed or not."""

SMALL = (
    *("experiment=smoke", "trainer=cpu", "data=files", "policy=greedy"),
    *("policy.share=null", "policy.count=1", "policy.tokens=64", "data.min_characters=50"),
    *("data.sequence_length=64", "data.calibration_tokens=128", "data.selection_tokens=64"),
    *("align.steps=2", "align.check_every=1", "align.block_steps=2"),
    *("recovery.stage1.tokens=128", "recovery.stage1.sequence_length=32"),
    *("recovery.stage2.tokens=128", "recovery.stage2.sequence_length=32"),
    *("recovery.checkpoint_tokens=64", "recovery.validation_tokens=64", "recovery.validations=1"),
    *("eval.tokens=64", "eval.context=32", "eval.stride=32"),
)
"""All stages, in a second or two."""


def configuration(folder: Path, text: Path) -> DictConfig:
    """The run that is killed, all of whose files lie in `folder`; its text lies outside."""
    register()
    places = [f"run_dir={folder}/run", f"paths.cache_dir={folder}/cache"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", overrides=[*SMALL, *places, f"data.path=[{text}/*.txt]"])


def write_text(folder: Path) -> None:
    """Forty documents of made-up words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 7))) for _ in range(300)]
    for n in range(40):
        (folder / f"{n:02d}.txt").write_text(" ".join(rng.choices(words, k=120)))


@dataclass
class Kill:
    """Where a run is killed.

    Attributes:
        stage: the stage that is hit.
        event: the number of the write, or None for a moment between writes.
        what: the write, or the share of the stage's time that has gone by.
        share: of the stage's time.
    """

    stage: str
    event: int | None
    what: str
    share: float = 0.0


class Events(logging.Handler):
    """Counts the writes of this process, stage by stage, and kills it at one of them.

    Args:
        record: a file that gets a line for each write and each stage.
        kill_at: the number of the write at which the process ends, or None.
    """

    def __init__(self, record: Path, kill_at: int | None) -> None:
        super().__init__()
        self.number, self.kill_at, self.stage = 0, kill_at, "start"
        self.file = open(record, "w", buffering=1)  # noqa: SIM115 - for as long as the process

    def emit(self, message: logging.LogRecord) -> None:
        """Takes note of a stage that begins."""
        if message.msg == "stage %s":
            self.stage = str(message.args[0])  # type: ignore[index]
            self.file.write(json.dumps(["stage", self.stage, time.monotonic()]) + "\n")

    def tick(self, what: str, spoil: Callable[[], Any] = lambda: None) -> None:
        """One write; `spoil` makes what a process leaves that ends in the middle of it."""
        self.file.write(json.dumps([what, self.stage, self.number]) + "\n")
        if self.number == self.kill_at:
            spoil()
            os.kill(os.getpid(), signal.SIGKILL)
        self.number += 1

    def around(self, module: Any, name: str, before: bool = True, after: bool = True) -> None:
        """Counts the calls of a function of a module."""
        function = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if before:
                self.tick(f"before {name}")
            result = function(*args, **kwargs)
            if after:
                self.tick(f"after {name}")
            return result

        setattr(module, name, counted)

    def watch(self) -> None:
        """Begins to count in this process."""
        logging.getLogger("tc").addHandler(self)
        self.around(os, "replace")
        self.around(os, "fsync", after=False)
        self.around(tempfile, "mkdtemp", before=False)
        self.around(shutil, "rmtree")
        self.around(tc.artifacts, "hash_file", after=False)
        save = tc.artifacts.save_file

        def half(tensors: Any, path: Path) -> None:
            save(tensors, path)
            self.tick("half of a file", lambda: os.truncate(path, os.path.getsize(path) // 2))

        tc.artifacts.save_file = half  # type: ignore[assignment]


REFUSED = 3
"""The exit status of a run that ends with a message for its user."""


def start(cfg: DictConfig, log: Path, kill_at: int | None = None) -> int:
    """Forks a run, whose output and writes are told in a folder; returns its process."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        output = os.open(log / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        Events(log / "events.jsonl", kill_at).watch()
        run(cfg)
        (log / "modules.json").write_text(json.dumps(sorted(sys.modules)))
        status = 0
    except TCError as error:
        print(f"error: {error}")
        status = REFUSED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ended(process: int) -> int:
    """Waits for a run; its exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def complete(cfg: DictConfig, log: Path) -> None:
    """A run that nobody disturbs.

    Raises:
        RuntimeError: with the end of its output, if it fails.
    """
    if ended(start(cfg, log)) != 0:
        raise RuntimeError((log / "output.txt").read_text()[-3000:])


def preload(names: Path) -> None:
    """Imports what a run has imported, so that the forks to come need not."""
    for name in json.loads(names.read_text()):
        with suppress(Exception):
            importlib.import_module(name)


def outcome(folder: Path) -> dict[str, Any]:
    """What a finished run has left that must not depend on how often it was killed."""
    left: dict[str, Any] = {}
    # Not what a kill has left unfinished in the cache, where it goes after a day; and not the
    # checkpoints on the way: how many of them stay hangs on where the kill was.
    for path in sorted(folder.rglob("*.safetensors")):
        if "step_" not in str(path) and "/." not in str(path):
            left[str(path.relative_to(folder))] = hash_file(path)
    for path in sorted(folder.rglob("manifest.json")):
        if "step_" not in str(path) and "/." not in str(path):
            manifest = tc.artifacts.read_manifest(path.parent)
            assert manifest is not None
            left[str(path.relative_to(folder))] = [manifest.key, sorted(manifest.files)]
    metrics = json.loads((folder / "run" / "metrics.json").read_text())
    left |= {f"metric {k}": v for k, v in metrics.items() if not k.endswith(TIMES)}
    left["results.csv"] = (folder / "run" / "results.csv").read_text()
    left["unfinished"] = [str(p) for p in (folder / "run").rglob(".*.*") if p.is_dir()]
    return left


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of what two runs have left otherwise."""
    return sorted(k for k in {*one, *other} if one.get(k, "none") != other.get(k, "none"))


def plan(record: Path, kills: int, seed: int) -> Iterator[Kill]:
    """Where to kill: stage after stage in turn, writes and moments of them in turn."""
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    events = [(what, stage, number) for what, stage, number in lines if what != "stage"]
    rng = random.Random(seed)
    names = ["start", *STAGES]
    for n in range(kills):
        stage = names[n % len(names)]
        writes = [event for event in events if event[1] == stage]
        # Every other turn of a stage is a moment; before the first stage there are only writes.
        if (n // len(names) + n) % 2 == 0 or stage == "start":
            what, _, number = rng.choice(writes or events)
            yield Kill(stage, number, what)
        else:
            share = rng.random()
            yield Kill(stage, None, f"after {share:.0%} of its time", share)


def stage_times(record: Path, end: float) -> dict[str, float]:
    """Seconds of each stage of a run."""
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    begins = [(stage, at) for what, stage, at in lines if what == "stage"]
    ends = [*(at for _, at in begins[1:]), end]
    return {stage: until - at for (stage, at), until in zip(begins, ends, strict=True)}


def kill(cfg: DictConfig, log: Path, where: Kill, seconds: dict[str, float]) -> bool:
    """Runs until the kill; whether there was still a run to be killed."""
    record = log / "events.jsonl"
    record.unlink(missing_ok=True)
    process = start(cfg, log, where.event)
    if where.event is None:
        mark = json.dumps(["stage", where.stage])[:-1]
        while mark not in (record.read_text() if record.exists() else ""):
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                raise RuntimeError(f"ended with {status} before {where.stage}")
            time.sleep(0.005)
        time.sleep(where.share * seconds[where.stage])
        os.kill(process, signal.SIGKILL)
    return ended(process) == -signal.SIGKILL


def main() -> int:
    """Kills, reruns, compares; the exit status is 0 where every run came out the same."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=1, help="begin at this kill of the plan")
    parser.add_argument("--output", type=Path, help="a CSV file with a row a kill")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = list(killed(Path(name), args.kills, args.seed, args.first))
    if args.output:
        with open(args.output, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([("kill", "stage", "at", "killed", "differs"), *rows])
    good = sum(row[3] and not row[4] for row in rows)
    print(f"\n{good} of {len(rows)} runs were killed, completed when started again, and equal")
    return 0 if good == len(rows) else 1


def killed(
    place: Path, kills: int, seed: int, first: int = 1
) -> Iterator[tuple[int, str, str, bool, str]]:
    """Rows of the table: number, stage, where, whether it was killed, what differs."""
    text = place / "text"
    text.mkdir()
    write_text(text)
    for room in ROOMS:  # which is kept: the source may be edited while this goes on
        code_version(room)
    # One folder for all, so that no path is another one: each run is moved away when it is done.
    folder = place / "here"
    cfg = configuration(folder, text)
    complete(cfg, place)
    seconds = stage_times(place / "events.jsonl", time.monotonic())
    where_to = list(plan(place / "events.jsonl", kills, seed))
    plain = outcome(folder)
    preload(place / "modules.json")
    shutil.rmtree(folder)
    for number, where in list(enumerate(where_to, start=1))[first - 1 :]:
        was_killed = kill(cfg, place, where, seconds)
        if ended(start(cfg, place)) == 0:
            differs = differing(plain, outcome(folder))
        else:
            differs = ["did not complete: " + (place / "output.txt").read_text()[-2000:]]
        shutil.rmtree(folder)
        row = (number, where.stage, where.what, was_killed, "; ".join(differs))
        print(*row, sep="  ", flush=True)
        yield row


if __name__ == "__main__":
    sys.exit(main())
