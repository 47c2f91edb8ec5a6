"""The launchers `local` and `slurm`, where Hydra looks for plugins; what they do is in `tc.sweep`.

Hydra executes this file at every start, so it imports little itself; and not as a module of its
name, so that annotations must be objects and not texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from omegaconf import OmegaConf

if TYPE_CHECKING:
    from tc.sweep import Launch


class _Launcher(BasicLauncher):
    """Hands its jobs to `tc.sweep`; those that are only priced run here, as Hydra's own do.

    Args:
        options: as `conf/hydra/launcher/` documents them.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = {
            key: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            for key, value in options.items()
        }
        self._launch: Launch | None = None

    def _make(self) -> "type[Launch]":
        raise NotImplementedError

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Runs a batch of jobs."""
        assert self.hydra_context is not None and self.config is not None
        if self._launch is None:
            loader = self.hydra_context.config_loader
            self._launch = self._make()(loader, self.config, self._options)
        returned = self._launch.batch(job_overrides, initial_job_idx)
        return super().launch(job_overrides, initial_job_idx) if returned is None else returned


class LocalLauncher(_Launcher):
    """Jobs on this machine, each a process of its own."""

    def _make(self) -> "type[Launch]":
        from tc.sweep import LocalLaunch

        return LocalLaunch


class SlurmLauncher(_Launcher):
    """Jobs as one Slurm array."""

    def _make(self) -> "type[Launch]":
        from tc.sweep import SlurmLaunch

        return SlurmLaunch


TARGET = f"{__name__}.SlurmLauncher"

try:
    from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf
except ImportError:  # said when a sweep begins, and not at every start
    OPTIONS: Any = {"_target_": TARGET}
else:

    @dataclass
    class SlurmConf(SlurmQueueConf):
        """The fields of `submitit_slurm`, and those that `conf/hydra/launcher/slurm.yaml` adds."""

        _target_: str = TARGET
        max_num_kills: int = 2
        only: list[int] = field(default_factory=list)

    OPTIONS = SlurmConf

ConfigStore.instance().store(group="hydra/launcher", name="slurm_options", node=OPTIONS)
