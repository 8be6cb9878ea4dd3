"""Which addresses a registration may name: the gateway connects to no others.

An instance registers over HTTP and names the address of its engine.  If the gateway connected to any address,
a sender could reach hosts through it that it cannot reach itself: the loopback of the gateway's machine, and
what is behind its firewall (server-side request forgery).  So the gateway takes only:

* `tcp://ADDRESS:PORT`, in numbers, as names may mean something else a moment later; `?curve=KEY` says that
  it is encrypted (`ipc/sockets/curve.py`).  Loopback only for a peer on this machine; other addresses for
  members that have the cluster's secret, as everybody on the network reaches what listens there.  With
  `--insecure-cluster` no secret is needed: then a peer with an admin key may name any address, another one
  those of this machine.
* `ipc:///PATH`, of a peer on this machine, of a socket that this server's user owns in a directory where
  nobody else can write.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat

from baton.gateway.errors import BadRequest
from baton.ipc.sockets.curve import Place

_TCP = re.compile(r"tcp://(?:\[([0-9a-fA-F:.]{2,45})\]|([0-9.]{7,15})):([0-9]{1,5})\Z")
_IPC = re.compile(r"ipc://(/[\x21-\x7e]{1,106})\Z")


def check_endpoint(endpoint: str | None, *, local: bool, proven: bool, far: bool = True) -> str:
    """Returns it.  `local`: the peer is on this machine; `proven`: it has signed as a member, or sent an
    admin key; `far`: it may name addresses that others reach.  Looks at the file system and at the addresses
    of this machine.  Raises `BadRequest`."""
    place = Place.parse(endpoint or "")
    tcp, ipc = _TCP.match(place.address), _IPC.match(place.address)
    if endpoint is not None and tcp is not None and 0 < int(tcp[3]) < 65536:
        _check_address(tcp[1] or tcp[2], local=local, proven=proven, far=far)
    elif endpoint is not None and ipc is not None and not place.key:
        _check_path(ipc[1], local=local)
    else:
        raise _wrong(
            "give where this server reaches the engine, tcp://ADDRESS:PORT with the address in numbers, or "
            "ipc:///PATH"
        )
    return endpoint


def _check_address(text: str, *, local: bool, proven: bool, far: bool) -> None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise _wrong(f"{text} is no address") from None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        if not local:
            raise _wrong(f"{text} is this server's own machine, not yours; start the instance with --host")
        return
    if address.is_unspecified or address.is_multicast or address.is_link_local or address.is_reserved:
        raise _wrong(f"{text} is no address of one machine; give one under which this server reaches it")
    if not far:
        raise _wrong(
            f"{text} is an address that others reach: for instances there give this server and them the "
            "cluster's secret, --cluster-secret FILE (`baton cluster secret > FILE` makes one)"
        )
    if not proven and not _is_mine(str(address)):
        raise _wrong(
            f"{text} is another machine; for its instances start this server with --admin-key, and give it "
            "to them"
        )


def _check_path(path: str, *, local: bool) -> None:
    if not local:
        raise _wrong("a path is on this server's own machine, and you are not; give tcp://ADDRESS:PORT")
    try:
        at = os.lstat(path)
        directory = os.lstat(os.path.dirname(path))
    except OSError as error:
        raise _wrong(f"{path[:200]}: {error.strerror}") from None
    if not stat.S_ISSOCK(at.st_mode) or at.st_uid != os.geteuid():
        raise _wrong(f"{path[:200]} is no socket of the user that this server runs as")
    shared = directory.st_uid not in (os.geteuid(), 0) or bool(directory.st_mode & 0o022)
    if shared or not stat.S_ISDIR(directory.st_mode):
        raise _wrong(f"others may write in {os.path.dirname(path)[:200]}; use a directory of mode 0700")


def _is_mine(address: str) -> bool:
    """Whether something on this machine can listen there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _wrong(why: str) -> BadRequest:
    return BadRequest(f"endpoint: {why}", param="endpoint")
