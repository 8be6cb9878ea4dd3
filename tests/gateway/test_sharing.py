"""How users share a server: flows, their weights, salts by key, and what a full queue answers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from baton.gateway.access import Access, key_id
from baton.gateway.sharing import (
    MAX_RETRY_AFTER_S,
    Sharing,
    SharingOptions,
    WeightsError,
    read_weights,
    retry_after,
)
from baton.launch.limits import OptionError
from baton.launch.options import UserOptions
from baton.launch.server import make_sharing
from baton.protocol.messages.requests import Finished
from baton.protocol.rules.fair_queue import EVERYBODY, MAX_NAME, check_flow
from tests.gateway.conftest import END
from tests.gateway.harness import GatewayServer

ACCESS = Access(api_keys=("alice", "bob.2"), admin_keys=("root",))
ALICE, BOB = key_id("alice"), key_id("bob.2")


def weights(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "weights.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def test_a_flow_is_a_key_and_a_user_of_it():
    sharing = Sharing(ACCESS)
    assert sharing.flow("", None) == EVERYBODY
    assert sharing.flow(ALICE, "") == sharing.flow(ALICE, None)
    one, two = sharing.flow(ALICE, "one"), sharing.flow(ALICE, "two")
    assert (one.key, two.key) == (ALICE, ALICE)
    assert one.user != two.user
    assert one == Sharing(ACCESS).flow(ALICE, "one"), "several gateways agree, and a restarted one"
    long = sharing.flow(ALICE, "x" * 1_000_000 + "\ud800")
    assert check_flow(long) is None
    assert len(long.user) <= MAX_NAME
    off = Sharing(ACCESS, SharingOptions(fair_queuing=False))
    assert off.flow(ALICE, "one") == EVERYBODY


def test_weights_are_those_of_the_file(tmp_path: Path):
    path = weights(tmp_path, f'default = 2\n[weights]\nalice = 4.5\n"{BOB}" = 0.5\n')
    sharing = Sharing(ACCESS, SharingOptions(fair_weights=path))
    assert [sharing.flow(key, None).weight for key in (ALICE, BOB, key_id("root"), "")] == [4.5, 0.5, 2, 2]
    weights(tmp_path, '[weights]\n"bob.2" = 3\n')
    sharing.reload()
    assert [sharing.flow(key, "u").weight for key in (ALICE, BOB)] == [1.0, 3.0]
    weights(tmp_path, "oh no")
    with pytest.raises(WeightsError):
        sharing.reload()
    assert sharing.flow(BOB, None).weight == 3.0, "what was read before stays"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("default = ", "is not TOML"),
        (b"\xff", "is not TOML"),
        ("default = 0", "default: give a number from 0.001 to 1000"),
        ("default = true", "default: give a number"),
        ("[weights]\nalice = nan", "entry 1: give a number"),
        ("[weights]\nalice = 1\nsecret = 1", "entry 2 is neither an API key"),
        ("weights = 3", "give a table"),
        ("wieghts = 3", "wieghts: unknown"),
        ("#" * (1 << 21), "larger than"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path, text: str | bytes, words: str):
    with pytest.raises(WeightsError, match=words) as caught:
        read_weights(weights(tmp_path, text), ACCESS)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value), "it may be a key of somebody"


def test_wrong_flags_are_told_before_anything_starts(tmp_path: Path):
    missing = str(tmp_path / "none.toml")
    for options, access, words in (
        (UserOptions(salt_by_key=True), Access(), "--salt-by-key: without --api-key"),
        (UserOptions(fair_weights=missing), ACCESS, f"--fair-weights {missing}: cannot be read"),
        (UserOptions(fair_weights=missing, fair_queuing=False), ACCESS, "not with --no-fair-queuing"),
    ):
        with pytest.raises(OptionError, match=words):
            make_sharing(options, access)
    assert make_sharing(UserOptions(salt_by_key=True), ACCESS).salt_by_key


def test_a_salt_is_of_one_key_alone():
    sharing = Sharing(ACCESS, SharingOptions(salt_by_key=True))
    salts = {sharing.salt(key, given) for key in (ALICE, BOB, key_id("root")) for given in ("", "x", "y")}
    assert len(salts) == 9
    # A client cannot name the salt of another one.
    assert sharing.salt(BOB, sharing.salt(ALICE, "")) not in salts
    assert sharing.salt(ALICE, "x") == Sharing(ACCESS, SharingOptions(salt_by_key=True)).salt(ALICE, "x")
    assert Sharing(ACCESS).salt(ALICE, "x") == "x"


def test_retry_after_is_whole_seconds_within_bounds():
    assert [retry_after(s) for s in (0.0, 0.2, 1.0, 12.1)] == [1, 1, 1, 13]
    assert [retry_after(s) for s in (1e9, math.inf, math.nan)] == [MAX_RETRY_AFTER_S] * 3


# -- over HTTP


@pytest.fixture(scope="module")
def server(byte_level: Path, vocab: int) -> Iterator[GatewayServer]:
    sharing = SharingOptions(salt_by_key=True)
    with GatewayServer(byte_level, eos=END, vocab=vocab, access=ACCESS, sharing=sharing) as server:
        yield server


def complete(server: GatewayServer, key: str, **body: object) -> httpx.Response:
    with server.http() as http:
        return http.post(
            "/v1/completions",
            json={"prompt": [1, 2, 3], "max_tokens": 2, **body},
            headers={"authorization": f"Bearer {key}"},
        )


def test_the_engine_hears_whose_a_request_is_and_its_salt(server: GatewayServer):
    server.reset()
    for key, user in (("alice", None), ("alice", "u"), ("bob.2", "u")):
        assert complete(server, key, user=user, cache_salt="mine").status_code == 200
    one, two, three = server.engine.submits
    assert [submit.flow.key for submit in (one, two, three)] == [ALICE, ALICE, BOB]
    assert one.flow.user == ""
    assert two.flow.user == three.flow.user != ""
    assert one.cache_salt == two.cache_salt != three.cache_salt
    assert "alice" not in one.cache_salt
    assert all(len(submit.cache_salt) == 64 for submit in (one, two, three))


def test_a_full_queue_says_when_to_come_back(server: GatewayServer):
    server.reset()
    reject = Finished(0, "rejected", "queue_full", "it is full", retry_after_s=41.2)
    server.engine.behaviour.reject = reject
    answer = complete(server, "alice")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "42")
    assert answer.json()["error"]["code"] == "queue_full"


@pytest.mark.parametrize("stream", [False, True])
def test_a_sequence_that_makes_place_is_submitted_again_where_others_of_its_request_have_begun(
    server: GatewayServer, stream: bool
):
    """Also where nobody hears of tokens before the end."""
    server.reset()
    engine, behaviour = server.engine, server.engine.behaviour
    behaviour.room, behaviour.hold_after = 2, 1
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, server, "alice", prompt=[5, 6, 7], n=4, max_tokens=5, stream=stream)
        engine.wait_for(lambda: len(engine.submits) == 4, "the submission of all four")
        behaviour.hold_after = None
        response = answer.result()
    assert response.status_code == 200
    reasons = response.text.count('"finish_reason":"length"')
    assert reasons == 4, response.text
    assert len(engine.submits) >= 6, "two were refused"
    assert behaviour.max_running == 2


def test_metrics_tell_keys_apart(server: GatewayServer):
    server.reset()
    server.engine.behaviour.stats = {"displaced": 3, "waiting_by_key": {ALICE: 4, "*": 7}}

    def tokens() -> float:
        with server.http() as http:
            text = http.get("/metrics").text
        prefix = f'baton:key_tokens_total{{key="{BOB}",kind="generation",'
        lines = [line for line in text.splitlines() if line.startswith(prefix)]
        assert f'key="{ALICE}",model_name="tiny"}} 4.0' in text
        assert 'key="*",model_name="tiny"} 7.0' in text
        assert "baton:requests_displaced_total" in text
        return float(lines[0].split()[-1]) if lines else 0.0

    before = tokens()
    assert complete(server, "bob.2").status_code == 200
    assert tokens() == before + 2
