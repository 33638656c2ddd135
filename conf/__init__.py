"""Run configs, hardware and model specs, measured profiles with provenance, shipped as package data.

May hold data files only; no code.
"""
