"""Sweeps without their runs: the record, who runs what, what an end means, the summary."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from composing import CONF
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig

from tc.config import register
from tc.errors import TCError
from tc.report.status import State, read_sweep
from tc.run_folder import describe, read_failure, write_failure
from tc.sweep.command import command_of, last_words, problem_of
from tc.sweep.local import _share, run_here
from tc.sweep.record import Sweep, SweepJob, plan

EXPERIMENTS = {"many": "hydra: {launcher: {at_a_time: 7}}", "plain": "seed: 3"}


@pytest.fixture
def hydra(tmp_path: Path):
    """Composes a sweep's configuration as `run.py -m` does, with two experiments of its own."""
    register()
    for name, text in EXPERIMENTS.items():
        path = tmp_path / "conf" / "experiment" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# @package _global_\n{text}\n")
    extra = f"hydra.searchpath=[file://{tmp_path}/conf]"

    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()

        def compose(*overrides: str) -> DictConfig:
            words = [extra, "experiment=smoke", *overrides]
            return loader.load_configuration("config", words, RunMode.MULTIRUN)

        yield loader, compose


def jobs_of(hydra, whole: list[str], *overrides: list[str]) -> list[SweepJob]:
    loader, compose = hydra
    return plan(loader, compose(*whole), overrides, 0)[0]


def test_each_job_is_planned_as_it_will_run(hydra) -> None:
    jobs = jobs_of(hydra, [], ["seed=0"], ["seed=1"])
    assert [job.number for job in jobs] == [0, 1]
    assert jobs[0].run_dir != jobs[1].run_dir
    assert jobs[0].name == Path(jobs[0].run_dir).name
    loader, compose = hydra
    assert plan(loader, compose(), [["seed=0", "dry_run=true"]], 0)[1]


def test_launcher_fields_of_an_experiment_count_or_are_refused(hydra) -> None:
    _, compose = hydra
    assert compose("experiment=many").hydra.launcher.at_a_time == 7
    assert compose("experiment=plain").hydra.launcher.at_a_time == 1  # the control
    jobs_of(hydra, ["experiment=many"], ["experiment=many", "seed=1"])
    with pytest.raises(TCError, match=r"experiment=many: sets hydra\.launcher\.at_a_time"):
        jobs_of(hydra, ["experiment=plain"], ["experiment=plain"], ["experiment=many"])


def test_jobs_with_one_run_folder_are_refused(hydra) -> None:
    with pytest.raises(TCError, match=r"jobs 0 .* and 1 .* have one run_dir: here"):
        jobs_of(hydra, [], ["seed=0", "run_dir=here"], ["seed=1", "run_dir=here"])
    jobs_of(hydra, [], ["run_dir=here"], ["run_dir=there"])


def test_the_command_of_a_job_has_its_overrides_and_none_of_the_sweeps(hydra) -> None:
    _, compose = hydra
    sweep = compose("hydra.launcher.at_a_time=2", "hydra.verbose=true")
    sweep.hydra.job.config_name = "config"
    sweep.hydra.runtime.config_sources = []
    words = command_of(sweep, ["seed=1"])
    assert words[0] == sys.executable and words[-1] == "seed=1"
    assert "hydra.verbose=true" in words
    assert not any("launcher" in word for word in words)


def swept(folder: Path, *codes: str, only: tuple[int, ...] = (), at_a_time: int = 2) -> Sweep:
    """A sweep whose jobs are lines of Python."""
    sweep = Sweep(folder / "sweep", "local", only)
    jobs = [
        SweepJob(i, [f"job={i}"], str(folder / f"run{i}"), f"run{i}") for i in range(len(codes))
    ]
    chosen = sweep.add(jobs)
    run_here(sweep, chosen, lambda job: [sys.executable, "-c", codes[job.number]], at_a_time, 0)
    sweep.finish(chosen)
    return sweep


FAILS = "import sys; print('\\nerror: no such thing\\n', file=sys.stderr); sys.exit(1)"
DIES = "import os, signal; print('busy', flush=True); os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize("at_a_time", [1, 2])
def test_jobs_that_fail_or_die_are_summed_up_and_the_others_run(
    at_a_time: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    codes = (FAILS, DIES, "open('done', 'w')".replace("done", str(tmp_path / "done")))
    with pytest.raises(TCError) as error:
        swept(tmp_path, *codes, at_a_time=at_a_time)
    assert "2 of 3 jobs failed." in str(error.value)
    assert "job 0: no such thing" in str(error.value)
    assert "job 1: killed by SIGKILL" in str(error.value)
    assert "hydra.launcher.only=[0,1]" in str(error.value)
    assert (tmp_path / "done").exists()
    found = read_sweep(tmp_path / "sweep")
    assert [job.status.state for job in found.jobs] == [State.failed, State.failed, State.missing]
    assert found.jobs[0].status.why == "no such thing"


def test_only_some_jobs_are_run_and_what_they_left_word_of_is_forgotten(tmp_path: Path) -> None:
    mark = "open(r'%s', 'w')"
    codes = [mark % (tmp_path / f"ran{i}") for i in range(3)]
    write_failure(tmp_path / "run1", describe(TCError("of old"), "align"))
    swept(tmp_path, *codes, only=(1,))
    assert sorted(path.name for path in tmp_path.glob("ran*")) == ["ran1"]
    assert read_failure(tmp_path / "run1") is None
    assert len(json.loads((tmp_path / "sweep" / "sweep.json").read_text())["jobs"]) == 3


def test_what_a_run_has_left_word_of_says_more_than_its_log(tmp_path: Path) -> None:
    path = tmp_path / "run0"
    failure = describe(TCError("the disk is full"), "align")
    body = f"import sys, pathlib; p = pathlib.Path(r'{path}'); p.mkdir(); "
    body += f"(p / 'failed.json').write_text(r'''{json.dumps(failure)}'''); sys.exit(1)"
    with pytest.raises(TCError, match="job 0: the disk is full"):
        swept(tmp_path, body)
    assert read_failure(path) == failure


def test_what_an_end_means(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert problem_of(0, log) is None
    assert problem_of(3, log) == "it ended with status 3 and said nothing"
    assert "memory" in (problem_of(-signal.SIGKILL, log) or "")
    assert "memory" not in (problem_of(-signal.SIGTERM, log) or "")
    log.write_text(
        "step 1\n\nerror: two things:\n  - one\n  - two\n\nError executing job with []\n"
    )
    assert last_words(log) == "two things:\n  - one\n  - two"
    log.write_text("Traceback (most recent call last):\n  ...\nValueError: odd\n")
    assert last_words(log) == "ValueError: odd"


@pytest.mark.parametrize(
    ("slots", "gpus", "shares"),
    [(2, 4, ["0,2", "1,3"]), (3, 2, ["0", "1", "0"]), (2, 0, [None, None])],
)
def test_gpus_are_dealt(slots: int, gpus: int, shares: list[str | None]) -> None:
    assert [_share(slot, slots, gpus) for slot in range(slots)] == shares
