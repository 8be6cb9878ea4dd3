"""A grammar of patches as agents send them with their tool, and who reads such patches."""

from __future__ import annotations

import re

GRAMMAR = r"""
start: opening change+ closing
opening: "*** Begin Patch" LF
closing: "*** End Patch" LF?

change: added | deleted | updated
added: "*** Add File: " path LF added_line+
deleted: "*** Delete File: " path LF
updated: "*** Update File: " path LF moved? lines?

path: /(.+)/
added_line: "+" /(.*)/ LF -> line
moved: "*** Move to: " path LF
lines: (place | changed_line)+ last?
place: ("@@" | "@@ " /(.+)/) LF
changed_line: ("+" | "-" | " ") /(.*)/ LF
last: "*** End of File" LF

%import common.LF
"""
_FILE = re.compile(r"\*\*\* (Add|Delete|Update) File: .+")
_LINE = re.compile(r"[+\- ].*|@@( .+)?|\*\*\* End of File")


def is_patch(text: str) -> bool:
    """Reads it line by line, as those do who apply it."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    if len(lines) < 3 or lines[0] != "*** Begin Patch" or lines[-1] != "*** End Patch":
        return False
    at, last = 1, len(lines) - 1
    while at < last:
        head = _FILE.fullmatch(lines[at])
        if head is None:
            return False
        kind, first, at = head[1], at + 1, at + 1
        if kind == "Update" and at < last and re.fullmatch(r"\*\*\* Move to: .+", lines[at]):
            at += 1
        allowed = {"Add": re.compile(r"\+.*"), "Update": _LINE}.get(kind)
        while at < last and allowed is not None and allowed.fullmatch(lines[at]):
            at += 1
        if kind == "Add" and at == first:
            return False
    return True
