"""`kill -9` of prefilling and decoding instances and of their workers, at random moments under load.

`BATON_KILLS=50` kills so often; `BATON_SEED` repeats a run as far as the machine does.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.e2e.killing import Killing
from tests.e2e.mixed_requests import Ask, make_asks
from tests.e2e.server import Server
from tests.e2e.test_disaggregation import CLUSTER, clean_ledgers, learn_from

KILLS = int(os.environ.get("BATON_KILLS", "3"))
_A_SERVER = 10
"""So many kills of one server, then a fresh one: what dies often is restarted ever more slowly."""


@pytest.fixture(scope="module")
def asks(server: Server) -> list[Ask]:
    """With the answers of a single mixed instance."""
    asks = make_asks(30 if KILLS <= 3 else 100, seed=9, longest_prompt=400, longest_output=120)
    learn_from(server, asks)
    return asks


@pytest.mark.slow
@pytest.mark.timeout(300 + 60 * KILLS)
def test_every_request_is_answered_once_and_right(asks: list[Ask]) -> None:
    seed = int(os.environ.get("BATON_SEED", random.SystemRandom().randrange(10**6)))
    print(f"seed {seed}")
    rng = random.Random(seed)
    kills = answers = continued = 0
    while kills < KILLS:
        flags = ("--prefill", "1", "--decode", "2", "--max-restarts", "1000", *CLUSTER)
        with Server(*flags) as server:
            killing = Killing(server, asks, rng, min(_A_SERVER, KILLS - kills))
            killing.run()
            for kill in killing.done:
                print(kill.line(), flush=True)
            kills += len(killing.done)
            answers += killing.answers
            continued += int(server.metric("baton:requests_continued_total"))
            assert not killing.wrong, "\n".join(killing.wrong[:5])
            clean_ledgers(server)
            answers_of = server.http.get("/stats").json()["instances"].values()
            assert [answer["violations"] for answer in answers_of] == [0, 0, 0], server.log()
            assert "Traceback" not in server.log(), server.log()
    print(f"{kills} kills, {answers} right answers, {continued} continuations after a loss")
    assert answers > kills
