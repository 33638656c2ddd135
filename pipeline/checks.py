"""Checks that end in a table: what was looked at, what was found, and the command or key that mends it.

Invariant: a check states a fact and never raises for a fact that it checks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from libra.pipeline.view.text import visible

Status = Literal["ok", "warn", "missing"]
_STYLES: dict[Status, str] = {"ok": "green", "warn": "yellow", "missing": "bold red"}


@dataclass(frozen=True, slots=True)
class Check:
    """``missing`` stops a run; ``warn`` does not. ``mend`` is the command or the key that mends it."""

    name: str
    status: Status
    detail: str
    mend: str = ""


def passed(checks: Iterable[Check]) -> bool:
    """Whether nothing is missing."""
    return all(check.status != "missing" for check in checks)


def show(checks: Iterable[Check], console: Console) -> None:
    """Print the table, and what mends each row that is not ok below it."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    mends = []
    for check in checks:
        table.add_row(Text(check.status, style=_STYLES[check.status]), check.name, Text(visible(check.detail)))
        if check.mend:
            mends.append(f"{check.name}: {check.mend}")
    console.print(table)
    if mends:
        console.print("\nto mend:")
        for mend in mends:
            console.print(Text(f"  {visible(mend)}"), soft_wrap=True, highlight=False)
