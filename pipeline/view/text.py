"""Text of models and tools made safe to show.

Invariant: what `visible` returns holds no control, format or lone surrogate character except newline and tab, so it can
neither move a terminal's cursor nor reorder a page; it is still to be escaped for HTML, and shown in rich as ``Text``.
"""

from __future__ import annotations

import unicodedata

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
_KEPT = frozenset("\n\t")


def visible(text: str) -> str:
    """``text`` with every hidden character replaced by a visible one: ``ESC`` becomes ``␛``, U+202E ``\\u202e``."""
    return "".join(character if character in _KEPT else _shown(character) for character in text)


def one_line(text: str, width: int = 200) -> str:
    """`visible` text on one line of at most ``width`` characters."""
    line = visible(" ".join(text.split()))
    return line if len(line) <= width else line[: width - 1] + "…"


def _shown(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) not in _HIDDEN:
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
