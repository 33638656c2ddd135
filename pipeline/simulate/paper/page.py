"""The published experiments as one offline HTML file: pictures, then every figure in groups.

Invariants: no script, font or address outside the file; all text is escaped.
"""

from __future__ import annotations

from html import escape
from itertools import groupby

from libra.pipeline.report.style import style_sheet
from libra.pipeline.simulate.paper.experiments import Paper
from libra.pipeline.simulate.paper.judged import ROUNDING, TOLERANCE, Figure

_STYLE = ".derived{color:var(--good)}.tuned{color:var(--c2)}.not{color:var(--bad)}td{vertical-align:top}"


def paper_page(paper: Paper) -> str:
    """The whole document."""
    counts = " · ".join(f"{paper.count(status)} {status}" for status in ("derived", "tuned", "not reproduced"))
    tables = "".join(
        f"<section><h2>{escape(group)}</h2>{_table(list(figures))}</section>"
        for group, figures in groupby(paper.figures, key=lambda figure: figure.published.group)
    )
    plots = "".join(f"<section><h2>{escape(plot.title)}</h2>{plot.drawn()}</section>" for plot in paper.plots)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>published and simulated</title><style>{style_sheet()}{_STYLE}</style></head><body><main>"
        f"<header><h1>Published figures beside simulated ones</h1><span class='soft'>{counts}</span></header>"
        f"<p class=lead><b>derived</b>: within {TOLERANCE:.0%} (bounds: held, but for {ROUNDING:.0%}), from shipped "
        "specs and defaults alone. <b>tuned</b>: so too, but by a free parameter, which is named. <b>not "
        "reproduced</b>: neither, and why. Nothing here was measured on a GPU.</p>"
        f"{plots}{tables}</main></body></html>\n"
    )


def _table(figures: list[Figure]) -> str:
    head = "<tr><th>figure<th>published<th>simulated<th>status<th>remark<th>source</tr>"
    rows = "".join(
        f"<tr><td>{escape(f.name)}</td><td class=n>{f.published.value:,g} {escape(f.published.unit)}</td>"
        f"<td class=n>{simulated_text(f)}</td><td class={f.status.split()[0]}>{escape(f.status)}</td>"
        f"<td class=soft>{escape(f.remark)}</td><td class=soft>{escape(f.published.source)}</td></tr>"
        for f in figures
    )
    return f"<table>{head}{rows}</table>"


def simulated_text(figure: Figure) -> str:
    """The simulated value with its spread, as text; a dash where there is none."""
    if figure.simulated is None:
        return "–"
    return f"{figure.simulated:,.4g}" + (f" ± {figure.spread:.2g}" if figure.spread else "")
