"""Environments: one base, one file a kind."""
