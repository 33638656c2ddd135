"""The report's style sheet: light and dark, for screen and print, without any external resource."""

from __future__ import annotations

_LIGHT = ("#2f6fd0", "#d97a1f", "#17907a", "#8257c2", "#c2413a", "#6b7a8c", "#b5912a", "#3d9bc4")
_DARK = ("#6ea2f0", "#eda053", "#4cc3a9", "#b393ea", "#e8796f", "#98a6b6", "#d9b95c", "#74c1e3")


def style_sheet() -> str:
    """CSS; the palette's colour n is stroke class ``sn``, fill class ``fn`` and background class ``bn``."""
    classes = "".join(
        f".s{n}{{stroke:var(--c{n})}}.f{n}{{fill:var(--c{n})}}.b{n}{{background:var(--c{n})}}"
        for n in range(1, len(_LIGHT) + 1)
    )
    light, dark = _variables(_LIGHT) + _LIGHT_PAGE, _variables(_DARK) + _DARK_PAGE
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}{classes}{_RULES}"


def _variables(palette: tuple[str, ...]) -> str:
    return "".join(f"--c{n}:{color};" for n, color in enumerate(palette, 1))


_LIGHT_PAGE = (
    "--inside:#fff;--page:#f6f7f9;--card:#fff;--ink:#1b2430;--soft:#5b6776;--rule:#e3e7ec;--grid:#edf0f3;"
    "--prompt:#f2f4f7;--policy:#eaf1fc;--tool:#fdf3e7;--good:#17795f;--bad:#b3372f;"
)
_DARK_PAGE = (
    "--inside:#12161c;--page:#12161c;--card:#1a2029;--ink:#e6ebf1;--soft:#98a4b3;--rule:#2b3440;--grid:#252d38;"
    "--prompt:#202733;--policy:#1c2b44;--tool:#362a1b;--good:#5fcfae;--bad:#f08b82;"
)
_RULES = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,"Segoe UI",Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 60px}
header{display:flex;align-items:baseline;gap:14px;flex-wrap:wrap;margin-bottom:18px}
h1{font-size:26px;margin:0;letter-spacing:-.01em}
h2{font-size:17px;margin:0 0 2px}
h3{font-size:13px;margin:0 0 4px;color:var(--soft);font-weight:600}
p{margin:0 0 10px}
.soft,.lead{color:var(--soft)}.lead{margin-bottom:12px;font-size:14px}
.badge{border-radius:999px;padding:2px 11px;font-size:13px;font-weight:600;border:1px solid currentColor}
.finished{color:var(--good)}.failed,.interrupted,.unfinished{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(210px,1fr));gap:12px;margin-bottom:16px}
.tile,section{background:var(--card);border:1px solid var(--rule);border-radius:12px}
.tile{padding:12px 14px}
.tile b{display:block;font-size:22px;font-weight:650;letter-spacing:-.01em;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:13px}
section{padding:16px 18px;margin-bottom:16px}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(290px,1fr));gap:18px}
svg{width:100%;height:auto;display:block;overflow:visible}
svg text{font:11px system-ui,"Segoe UI",Roboto,sans-serif;fill:var(--soft)}
svg text.strong,svg text.row{fill:var(--ink);font-weight:600}
svg text.inside{fill:var(--inside);font-weight:600}
svg .grid{stroke:var(--grid)}svg .mark{stroke:var(--soft)}
svg .marker{stroke:var(--ink);stroke-dasharray:3 3;opacity:.55}
svg .line{fill:none;stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}
.faint{opacity:.4}svg .line.faint{stroke-width:1.3}
.legend{display:flex;gap:14px;flex-wrap:wrap;font-size:13px;color:var(--soft);margin:2px 0 4px}
.legend i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px}
.none{color:var(--soft);font-style:italic}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
td,th{text-align:left;padding:3px 18px 3px 0;border-bottom:1px solid var(--rule);font-weight:400}
th{color:var(--soft)}td.n{text-align:right}
.problems{border-color:var(--bad)}
details{border-top:1px solid var(--rule);padding:8px 0}
details:first-of-type{border-top:0}
.task{border:0;padding:4px 0;color:var(--soft);font-size:13px}
summary{cursor:pointer}
summary b{font-weight:600}
.turn{border-radius:8px;padding:7px 11px;margin:7px 0;border-left:3px solid var(--soft);background:var(--prompt)}
.turn.policy{background:var(--policy);border-color:var(--c1)}
.turn.tool{background:var(--tool);border-color:var(--c2)}
.turn small{display:block;color:var(--soft);font-size:12px;margin-bottom:2px}
.turn small b{color:var(--ink)}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.45 ui-monospace,Menlo,Consolas,monospace}
footer{color:var(--soft);font-size:13px}
@media print{body{background:#fff}section,.tile{break-inside:avoid}}
"""
