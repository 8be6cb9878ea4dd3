import time

import zmq

from baton.ipc.sockets.zeromq import terminate
from tests.conftest import GENEROUS_S


def test_a_context_ends_with_its_sockets():
    context = zmq.Context()
    context.socket(zmq.DEALER).close(0)
    open_one = context.socket(zmq.DEALER)
    assert terminate(context, 10.0)
    assert context.closed
    assert open_one.closed


def test_a_socket_that_does_not_go_is_not_waited_for():
    """(One that the context's owner does not know of, in place of the one that libzmq forgets.)"""
    context = zmq.Context()
    socket = zmq.Context.shadow(context.underlying).socket(zmq.DEALER)
    began = time.monotonic()
    assert not terminate(context, 0.05)
    assert time.monotonic() - began < GENEROUS_S
    socket.close(0)
