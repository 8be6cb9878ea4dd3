"""Formats of strings, as expressions: those that llguidance takes more, or less, for than the
specifications do.

What is left out: names of hosts in Punycode (`xn--…`), whose validity no expression says; in addresses of
mail names of hosts of many long parts; leap seconds with an offset from UTC other than none; in `iri` and its
kin, `idn-email` and `idn-hostname` what is not ASCII; in `regex` what looks around, nests, or refers.
"""

from __future__ import annotations

from typing import Any

_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[048]|[2468][048]|[13579][26])00)"  # years
_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_OFFSET = r"(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_FRACTION = r"(?:\.[0-9]+)?"
_TIME = (
    rf"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_FRACTION}{_OFFSET}"
    rf"|23:59:60{_FRACTION}(?:[Zz]|[+-]00:00))"
)
_ALNUM, _INNER = "[A-Za-z0-9]", "[A-Za-z0-9-]"


def _label(most: int) -> str:
    """Of a name, of so many characters at most."""
    return (
        rf"(?:{_ALNUM}(?:{_INNER}{{0,2}}{_ALNUM})?"
        rf"|{_ALNUM}{_INNER}(?:{_ALNUM}{_INNER}|-{_ALNUM}){_INNER}{{0,{most - 5}}}{_ALNUM})"
    )


_HOST = rf"{_label(63)}(?:\.{_label(63)})*"
_SHORT_HOST = (
    rf"(?:{_label(63)}(?:\.{_label(63)}){{0,2}}|{_label(24)}(?:\.{_label(24)}){{0,9}}"
    rf"|{_label(63)}(?:\.{_label(63)})?(?:\.{_label(15)}){{0,7}})"
)
"""Of 249 characters at most."""
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H16 = r"[0-9A-Fa-f]{1,4}"
_LS32 = rf"(?:{_H16}:{_H16}|{_IPV4})"


def _ipv6() -> str:
    """RFC 3986's."""
    forms = [rf"(?:{_H16}:){{6}}{_LS32}", rf"::(?:{_H16}:){{5}}{_LS32}"]
    for before in range(1, 8):
        head = rf"(?:{_H16}(?::{_H16}){{0,{before - 1}}})?::"
        after = 5 - before
        tail = rf"(?:{_H16}:){{{after}}}{_LS32}" if after >= 0 else _H16 if before == 6 else ""
        forms.append(head + tail)
    return "(?:" + "|".join(forms) + ")"


_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_QUOTED = r"\"(?:[ !#-\[\]-~]|\\[ -~])*\""
_EMAIL = (
    rf"(?:{_ATOM}(?:\.{_ATOM})*|{_QUOTED})@"
    rf"(?:{_SHORT_HOST}|\[(?:{_IPV4}|IPv6:{_ipv6()})\])"
)

_PERCENT = "%[0-9A-Fa-f]{2}"
_PLAIN = r"[A-Za-z0-9._~!$&'()*+,;=-]"
_SEGMENT = rf"(?:{_PLAIN}|[:@]|{_PERCENT})*"
_AUTHORITY = rf"(?:(?:{_PLAIN}|:|{_PERCENT})*@)?(?:{_PLAIN}|{_PERCENT})*(?::[0-9]*)?"
_RELATIVE = (
    rf"(?://{_AUTHORITY}(?:/{_SEGMENT})*|/(?:(?:{_PLAIN}|[:@]|{_PERCENT})+(?:/{_SEGMENT})*)?"
    rf"|(?:{_PLAIN}|@|{_PERCENT})+(?:/{_SEGMENT})*)?"
)
_REFERENCE = (
    rf"(?:[A-Za-z][A-Za-z0-9+.-]*:)?{_RELATIVE}"
    rf"(?:\?(?:{_PLAIN}|[:@/?]|{_PERCENT})*)?(?:#(?:{_PLAIN}|[:@/?]|{_PERCENT})*)?"
)
_NAME = rf"(?:[A-Za-z0-9_]|{_PERCENT})+(?:\.(?:[A-Za-z0-9_]|{_PERCENT})+)*"
_VARIABLE = rf"{_NAME}(?:\*|:[1-9][0-9]{{0,3}})?"
_LITERAL = "[A-Za-z0-9._~!$&()*+,;=:/?#@-]"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_ATOM_OF_REGEX = (
    r"(?:[A-Za-z0-9 _,:;<>@#%&=~!/\"'`-]|\\[dDwWsStnrfv.*+?^$|(){}\[\]\\/]"
    r"|\[\^?(?:[A-Za-z0-9_ .]|[a-y]-z|[A-Y]-Z|[0-8]-9)+\]|\.)(?:[*+?]|\{[1-9][0-9]?\})?"
)
_BRANCH_OF_REGEX = (
    rf"\^?(?:{_ATOM_OF_REGEX}|\((?:\?:)?(?:{_ATOM_OF_REGEX})*(?:\|(?:{_ATOM_OF_REGEX})*)*\)[*+?]?)*\$?"
)

FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "hostname": f"^{_HOST}$",
    "idn-hostname": f"^{_HOST}$",
    "email": f"^{_EMAIL}$",
    "idn-email": f"^{_EMAIL}$",
    "ipv6": f"^{_ipv6()}$",
    "uri-reference": f"^{_REFERENCE}$",
    "iri-reference": f"^{_REFERENCE}$",
    "uri-template": rf"^(?:{_LITERAL}|{_PERCENT}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
    "regex": rf"^{_BRANCH_OF_REGEX}(?:\|{_BRANCH_OF_REGEX})*$",
}
"""Name → an expression for the whole string, in Rust's notation.  Those of internationalized names allow what
is valid in the narrower format as well, `regex` what every dialect has."""
LENGTHS: dict[str, dict[str, Any]] = {
    "hostname": {"maxLength": 253},
    "idn-hostname": {"maxLength": 253},
    "email": {"allOf": [{"pattern": "^.{1,64}@[^@]*$"}]},
    "idn-email": {"allOf": [{"pattern": "^.{1,64}@[^@]*$"}]},
}
"""Name → what says how long its texts may be (RFC 1035), or what stands before the @ (RFC 5321, 4.5.3.1).
(Where the domain is counted as well the library does not find out whether there is a text.)"""
KEPT_FORMATS = {"duration": "duration", "ipv4": "ipv4", "uri": "uri", "iri": "uri", "uuid": "uuid"}
"""Name → the format of llguidance's own that is it."""
NAMES = {name: one for name, one in FORMATS.items() if name not in LENGTHS} | {
    "ipv4": f"^{_IPV4}$",
    "uuid": "^[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$",
}
"""Those that names of an object can have."""
BINDING = frozenset({*FORMATS, *KEPT_FORMATS})
"""Those that the specification defines.  Any other is an annotation."""
