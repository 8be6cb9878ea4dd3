import time

import zmq

from baton.ipc.zeromq import terminate


def test_a_context_whose_sockets_are_closed_ends():
    context = zmq.Context()
    context.socket(zmq.DEALER).close(0)
    assert terminate(context, 10.0)
    assert context.closed


def test_a_socket_that_does_not_go_is_not_waited_for():
    """(One that is open, in place of the one that libzmq forgets.)"""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    began = time.monotonic()
    assert not terminate(context, 0.05)
    assert time.monotonic() - began < 5.0
    socket.close(0)
