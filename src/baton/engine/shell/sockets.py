"""Listening ZeroMQ sockets of the engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import zmq

from baton.ipc.sockets.curve import HANDSHAKE_S, Doorkeeper

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


def listen(
    context: Context,
    endpoint: str,
    max_bytes: int,
    receive_hwm: int = 0,
    *,
    door: Doorkeeper | None = None,
    prepare: Callable[[Socket], None] | None = None,
) -> Socket:
    """A ROUTER that is bound.  A message larger than `max_bytes` costs its sender the connection; of each
    sender at most `receive_hwm` messages wait here unread (0: any number), further ones wait at the sender.
    `door`: lets in who connects by TCP; `prepare` is called before the socket is bound.

    Raises `OSError` that names the endpoint.
    """
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.SNDHWM, 0)
    router.setsockopt(zmq.RCVHWM, receive_hwm)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    router.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    router.setsockopt(zmq.HANDSHAKE_IVL, math.ceil(HANDSHAKE_S * 1000))
    set_tcp_options(router, endpoint)
    if door is not None and endpoint.startswith("tcp:"):
        door.guard(router)
    if prepare is not None:
        prepare(router)
    try:
        router.bind(endpoint)
    except zmq.ZMQError as error:
        router.close(0)
        raise OSError(error.errno, f"cannot listen on {endpoint}: {error.strerror}") from None
    return router


def bound_endpoint(socket: Socket, door: Doorkeeper | None = None) -> str:
    """Where it listens, for others: with `tcp://…:0` the port is known only after binding."""
    address = cast(bytes, socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
    return address if door is None else door.announced(address)


def set_tcp_options(socket: Socket, endpoint: str) -> None:
    """A peer whose host vanished says nothing: the kernel finds out, without waking us."""
    if endpoint.startswith("tcp:"):
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
