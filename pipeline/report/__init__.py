"""The report of a run: one self-contained ``report.html``, built from the run folder's files alone.

Invariants: the page loads nothing (no script, no external resource) and opens offline; every text that a model, a tool
or a config wrote is escaped and its control characters are made visible; an unfinished or killed run has a report too.
"""

from libra.pipeline.report.page import write_report

__all__ = ["write_report"]
