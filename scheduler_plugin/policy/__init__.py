"""Bucket policies: which bucket and which instance the next segment of a trajectory runs on. Pure: no I/O, no clock."""

from libra.scheduler_plugin.policy.base import (
    BucketPolicy,
    FinishedTrajectory,
    Placement,
    PlacementRequest,
    load_policy,
)

__all__ = ["BucketPolicy", "FinishedTrajectory", "Placement", "PlacementRequest", "load_policy"]
