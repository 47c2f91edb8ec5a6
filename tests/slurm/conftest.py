"""A real Slurm of one node, for as long as these tests run."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "cluster.sh"
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue")


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Starts it, and points this process and those it starts to it."""
    pytest.importorskip("submitit")
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (apt-get install slurmctld slurmd munge)")
    if os.geteuid() != 0:
        pytest.skip("starts Slurm's daemons as root")
    # A short path: a socket's name has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    try:
        subprocess.run([SCRIPT, "up", folder, str(_free_ports())], check=True, timeout=150)
        yield
    finally:
        subprocess.run([SCRIPT, "down", folder], check=False, timeout=120)
        del os.environ["SLURM_CONF"]
        shutil.rmtree(folder, ignore_errors=True)


def _free_ports() -> int:
    """The first of two ports in a row that nobody has."""
    for port in range(21000 + os.getpid() % 8000, 32000, 2):
        with socket.socket() as one, socket.socket() as two:
            try:
                one.bind(("127.0.0.1", port))
                two.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    raise RuntimeError("no two free ports in a row")
