"""ZeroMQ's sockets: their keys, how long they last, and who gives way among those that nobody knows yet."""
