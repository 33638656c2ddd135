"""Which trajectories share a prompt."""

from __future__ import annotations


def prompt_of(trajectory: str) -> str:
    """What the members of a group have in common: the trajectory's name without its member (``g12m3`` → ``g12``)."""
    group, found, _ = trajectory.rpartition("m")
    return group if found else trajectory
