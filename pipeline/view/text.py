"""Text of models and tools made safe to show.

Invariant: what `visible` returns holds no control, format or lone surrogate character except newline and tab, so it can
neither move a terminal's cursor nor reorder a page; it is still to be escaped for HTML, and shown in rich as ``Text``.
"""

from __future__ import annotations

import errno
import unicodedata

from libra.resources.errors import LibraError

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
_KEPT = frozenset("\n\t")
_MEND = "check the path and the disk, or name another place (run_dir=<folder>)"
_MENDS = {
    errno.ENOSPC: "free some space there, or name a folder on another disk (run_dir=<folder>)",
    errno.EDQUOT: "free some of your quota, or name a folder on another disk (run_dir=<folder>)",
    errno.EACCES: "allow this user to use it, or name another place (run_dir=<folder>)",
    errno.EPERM: "allow this user to use it, or name another place (run_dir=<folder>)",
    errno.EROFS: "name a folder that can be written (run_dir=<folder>)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}
"""What to do about an ``OSError``, by its number."""


def visible(text: str) -> str:
    """``text`` with every hidden character replaced by a visible one: ``ESC`` becomes ``␛``, U+202E ``\\u202e``."""
    return "".join(character if character in _KEPT else _shown(character) for character in text)


def one_line(text: str, width: int = 200) -> str:
    """`visible` text on one line of at most ``width`` characters."""
    line = visible(" ".join(text.split()))
    return line if len(line) <= width else line[: width - 1] + "…"


def explained(error: BaseException) -> str:
    """What a person is told of ``error`` instead of a traceback: a `LibraError` says all itself; an ``OSError`` is told
    with its file and what to do; anything else says where more is to be had. Not yet `visible`."""
    if isinstance(error, LibraError):
        return str(error)
    if isinstance(error, OSError):
        files = [str(name) for name in (error.filename, error.filename2) if name is not None]
        where = f"{' → '.join(files)}: " if files else ""
        said = error.strerror or " ".join(str(error).split()) or type(error).__name__
        return f"{where}{said}; {_MENDS.get(error.errno or 0, _MEND)}"
    said = " ".join(str(error).split())
    said = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return f"unexpected {said}; --debug shows the traceback; please report it"


def _shown(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) not in _HIDDEN:
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
