"""Measured costs: robust fits of what engines and trainers took, profile files with provenance, corrections at run
time.

Invariants: a profile says where its figures come from (measured or published, machine, versions, date, grid) and how
wrong it is on points that it did not see; no fit has a negative cost.
"""

from libra.resources.calibration.points import DecodePoint, PrefillPoint, TrainPoint, fit_rollout, fit_training
from libra.resources.calibration.profile import Profile, Provenance, load_profile, save_profile
from libra.resources.calibration.regression import Fit, fit_relative
from libra.resources.calibration.runtime import Correction

__all__ = [
    "Correction",
    "DecodePoint",
    "Fit",
    "PrefillPoint",
    "Profile",
    "Provenance",
    "TrainPoint",
    "fit_relative",
    "fit_rollout",
    "fit_training",
    "load_profile",
    "save_profile",
]
