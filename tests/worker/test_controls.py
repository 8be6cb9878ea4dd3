"""Orders to a whole group of real worker processes: every rank answers, in the round where it is applied."""

import os

from baton.protocol.codec import pack_int32
from baton.protocol.messages.commands import Control, Grow, Preempt
from baton.protocol.messages.reports import ControlDone

from .group import Group, make_config, oracle
from .model import admit


def test_every_rank_answers_and_the_group_goes_on(tmp_path):
    with Group(make_config(tensor_parallel_size=2)) as group:
        group.ready()

        def order(*commands):
            group.send(*commands)
            number = commands[-1].id
            answers = []
            for rank in range(2):
                group.wait(
                    lambda rank=rank: any(r.id == number for r in group.of_kind(ControlDone, rank)),
                    f"answer of rank {rank}",
                )
                answers += [r for r in group.of_kind(ControlDone, rank) if r.id == number]
            assert [answer.rank for answer in answers] == [0, 1]
            return {answer.error for answer in answers}

        group.send(admit(0, 0, [1, 2, 3], list(range(30)), max_tokens=200))
        assert order(Preempt(0, 0), Control("update_weights", str(tmp_path), 1)) == {""}
        group.wait_closed((0, 0))
        missing = str(tmp_path / "missing")
        assert order(Control("check_weights", str(tmp_path), 6)) == {""}
        assert order(Control("check_weights", missing, 7)) == {f"{missing!r} is no directory"}
        assert order(Control("update_weights", missing, 2)) == {f"{missing!r} is no directory"}
        assert "is no directory" in order(Control("update_weights", "/" + "x" * 300, 3)).pop()
        assert "not supported by the simulated" in order(Control("start_profile", str(tmp_path), 4)).pop()
        assert "not supported by the simulated" in order(Control("stop_profile", "", 5)).pop()
        group.send(admit(0, 1, [5, 6], [0], max_tokens=20), Grow(0, 1, pack_int32([1, 2])))
        group.wait_closed((0, 1))
        assert group.tokens()[0, 1] == oracle([5, 6], 20)
        assert group.shutdown() == [0, 0]
    assert os.listdir(tmp_path) == []


def test_weights_under_an_open_slot_are_a_violation_and_fatal(tmp_path):
    with Group(make_config()) as group:
        group.ready()
        group.send(Control("pause"), admit(0, 0, [1], [0], max_tokens=2))
        group.send(Control("update_weights", str(tmp_path), 1))
        assert group.workers[0].wait(60) == 1
        group.poll()
        assert "slots [0] are open" in group.failures()[0]
