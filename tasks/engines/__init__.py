"""Rollout engines: one base, one file a kind."""
