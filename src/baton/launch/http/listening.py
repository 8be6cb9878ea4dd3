"""The socket that a server listens on, and how the next server takes its port over.

Two servers on one port by mistake must be an error.  But while one stops, the next one should be able to
listen already.  So a server binds its port alone; one that has been told to stop allows its port to be
shared (`open_to_successor`), and only then somebody else can bind it, with the same option and as the same
user.  From then on the kernel gives new connections to either.  There is one successor: it holds a name of
its
own (the kernel does not look at the option of every socket again), until it has been told to stop.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import socket
import stat

from baton.launch.limits import OptionError

log = logging.getLogger(__name__)

_BACKLOG = 2048


class Listener(socket.socket):
    """A listening socket."""

    successor: socket.socket | None = None
    """Held by who took the port over: there is no second one."""
    path = ""
    """Of a Unix socket: removed when it is closed."""

    def open_to_successor(self) -> None:
        """Another server of the same user may listen on this port from now on."""
        if self.path:
            return
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if self.successor is not None:
            self.successor.close()

    def close(self) -> None:
        super().close()
        if self.path:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            self.path = ""
        if self.successor is not None:
            self.successor.close()


_TRIES = 16
"""To find a port that is free at several addresses."""


def listen_all(host: str, port: int) -> list[Listener]:
    """`listen`, at every address of a name of this machine's loopback: clients ask `localhost` by IPv6 first,
    or by IPv4 alone.  The IPv4 one comes first; addresses that the machine does not have are left out."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return [listen(host, port)]
    addresses = sorted({str(one[4][0]) for one in found}, key=lambda address: (":" in address, address))
    if len(addresses) == 1 or not all(ipaddress.ip_address(one).is_loopback for one in addresses):
        return [listen(host, port)]
    for left in reversed(range(_TRIES if port == 0 else 1)):
        listeners = [listen(addresses[0], port)]
        try:
            for address in addresses[1:]:
                with contextlib.suppress(_NoAddress):
                    listeners.append(listen(address, listeners[0].getsockname()[1]))
        except OptionError:
            for listener in listeners:
                listener.close()
            if not left:
                raise
        else:
            return listeners
    raise AssertionError("one of the tries has ended")


class _NoAddress(OptionError):
    """The machine does not have it."""


def listen(host: str, port: int) -> Listener:
    """Raises `OptionError`.  Call it before anything is loaded: a taken port is known at once, and
    connections wait until they are accepted."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        try:
            return _listen(family, address, None)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            listener = _listen(family, address, _only_successor(address))
            log.warning("a server that stops still has port %d; new connections come to both", port)
            return listener
    except OSError as error:
        if isinstance(error, socket.gaierror):
            raise OptionError(f"--host {host}: {error.strerror}; give an address of this machine") from None
        elsewhere = error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
        fix = "an address of this machine with --host" if elsewhere else "another --port"
        kind = _NoAddress if elsewhere else OptionError
        raise kind(f"cannot listen on {host}:{port}: {error.strerror}; give {fix}") from None


def listen_unix(path: str) -> Listener:
    """On a socket in the file system, which only this user may connect to.  Raises `OptionError`."""
    listener = Listener(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_behind(path):
            os.unlink(path)
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.path = path
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = "another server listens there" if error.errno == errno.EADDRINUSE else error.strerror
        raise OptionError(f"--uds {path}: {reason or error}; give another path") from None
    return listener


def _is_left_behind(path: str) -> bool:
    """A socket whose server is gone."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
    return False


def _only_successor(address: object) -> socket.socket:
    """Raises `OSError` if there is one."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0baton-listens-{address}")
    except OSError:
        name.close()
        raise
    return name


def _listen(family: int, address: object, successor: socket.socket | None) -> Listener:
    listener = Listener(family, socket.SOCK_STREAM)
    listener.successor = successor
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if successor is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)  # type: ignore[arg-type]
        listener.listen(_BACKLOG)
        with contextlib.suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
    except OSError:
        listener.close()
        raise
    return listener
