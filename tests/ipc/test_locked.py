"""A ring that two threads write: nothing torn, nothing lost, each one's records in order."""

import threading
import time

from baton.ipc.doorbell import Doorbell
from baton.ipc.locked import LockedRingWriter
from baton.ipc.ring import RingReader, create_ring


def test_two_threads_write_one_ring_that_is_much_too_small():
    fd = create_ring(512, 1)
    bell, owner = Doorbell.create(), Doorbell.create()
    writer, reader = LockedRingWriter(fd, [bell], owner), RingReader(fd, 0, owner)
    count = 1000
    done = threading.Event()

    def write(name, send):
        for index in range(count):
            send(name + index.to_bytes(4, "little") * (1 + index % 60))

    threads = [
        threading.Thread(target=write, args=(b"loop", writer.write)),
        threading.Thread(target=write, args=(b"help", writer.write_from_helper)),
    ]

    def own():  # what the thread that sleeps on the ring does
        while not done.is_set():
            owner.drain()
            writer.flush()
            time.sleep(0.0002)

    threads.append(threading.Thread(target=own))
    seen = {b"loop": 0, b"help": 0}
    for thread in threads:
        thread.start()
    give_up = time.monotonic() + 120
    while sum(seen.values()) < 2 * count:
        assert time.monotonic() < give_up, f"stuck at {seen}"
        for record in reader.records():
            name, index = record[:4], seen[record[:4]]
            assert record == name + index.to_bytes(4, "little") * (1 + index % 60)
            seen[name] += 1
    done.set()
    for thread in threads:
        thread.join(60)
    assert not writer.pending
    reader.close()
    writer.close()


def test_what_does_not_fit_wakes_the_thread_that_owns_the_ring():
    fd = create_ring(64, 1)
    owner = Doorbell.create()
    writer = LockedRingWriter(fd, [], owner)
    writer.write_from_helper(b"x")
    assert not owner.drain()
    writer.write_from_helper(b"y" * 100)
    assert writer.pending
    assert owner.drain()
    writer.close()
