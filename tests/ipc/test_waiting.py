"""Who gives way when too many connections wait that nobody has authenticated."""

from baton.ipc.sockets.waiting import Waiting, _network


def filled(most=4, talking=()):
    waiting = Waiting(lambda one: one in talking, most)
    for number in range(most):
        assert waiting.come(number, "10.0.0.1") is None
    return waiting


def test_the_oldest_of_the_address_that_has_most_gives_way():
    waiting = filled()
    assert waiting.come("other", "10.0.0.2") == 0
    assert [waiting.come(number, "10.0.0.1") for number in range(4, 40)] == list(range(1, 37))
    assert "other" in waiting
    assert len(waiting) == 4


def test_who_has_said_something_stays_while_others_say_nothing():
    waiting = filled(talking={0, 1, "member"})
    assert waiting.come("member", "10.0.0.1") == 2
    assert [waiting.come(number, "10.0.0.1") for number in range(4, 9)] == [3, 4, 5, 6, 7]
    assert set(waiting) == {0, 1, "member", 8}


def test_of_those_who_all_talk_the_oldest_gives_way():
    waiting = filled(talking=set(range(100)))
    assert [waiting.come(number, "10.0.0.1") for number in range(4, 9)] == [0, 1, 2, 3, 4]


def test_addresses_of_members_come_last():
    """Also if they have most, and if each stranger has an address of its own."""
    waiting = filled()
    waiting.proved(0, "10.0.0.1")
    assert 0 not in waiting
    assert waiting.come("a", "10.0.0.8") is None
    for number in range(20):
        assert waiting.come(number + 10, f"10.0.1.{number}") == ("a" if number == 0 else number + 9)
    assert {1, 2, 3} < set(waiting)
    waiting.leave(29)
    assert waiting.come("more", "10.0.0.1") is None
    assert waiting.come("again", "10.0.0.1") == 1, "where only members are, the oldest of theirs"
    waiting.leave(1)


def test_addresses_of_members_are_not_remembered_without_end():
    waiting = Waiting(lambda one: False, 2)
    for number in range(5000):
        address = f"10.{number // 250}.0.{number % 250}"
        waiting.come(number, address)
        waiting.proved(number, address)
    assert len(waiting._members) == 1024
    assert not waiting._talking


def test_a_network_of_ipv6_counts_as_one_address():
    assert _network("2001:db8:0:7:1:2:3:4") == _network("2001:db8:0:7::9")
    assert _network("2001:db8::9") == _network("2001:db8:0:0:5::1")
    assert _network("fe80::1%eth0") == _network("fe80::2")
    assert _network("2001:db8:0:8::9") != _network("2001:db8:0:7::9")
    assert _network("::ffff:10.0.0.1") != _network("::ffff:10.0.0.2")
    assert _network("10.0.0.1") == "10.0.0.1"
