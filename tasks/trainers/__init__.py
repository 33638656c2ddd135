"""Trainers: one base, one file a kind."""
