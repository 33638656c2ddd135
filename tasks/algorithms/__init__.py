"""Losses and advantages: pure functions."""
