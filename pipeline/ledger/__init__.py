"""The run's books: which groups were admitted, what their members did, which batches were closed and trained.

A pure state machine over journaled events; no I/O, no clock, no tasks.
"""
