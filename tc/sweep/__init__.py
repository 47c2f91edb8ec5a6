"""Sweeps: what their jobs are, how they are run here or by Slurm, and how they ended."""

from tc.sweep.launch import Launch, LocalLaunch, SlurmLaunch

__all__ = ["Launch", "LocalLaunch", "SlurmLaunch"]
