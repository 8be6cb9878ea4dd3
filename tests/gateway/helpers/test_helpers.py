"""Long bodies and chat templates are read in other processes, with limits, and nobody else is delayed."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from baton.gateway.api import schemas
from baton.gateway.errors import InstanceUnavailable, InternalError, Overloaded
from baton.gateway.helpers import child, link, main, pool
from baton.gateway.helpers.pool import LONG_BODY, Helpers
from baton.gateway.helpers.wire import ANSWER, GOES_ON, JOB
from baton.gateway.helpers.wire import HELLO as HELLO_HEAD
from baton.gateway.reading import reader as reading
from baton.gateway.reading.jobs import APART, Job
from baton.gateway.reading.reader import Reader, decode_answer
from baton.gateway.reading.settings import Settings
from baton.gateway.text.encoding import Encoding
from tests.gateway.conftest import END
from tests.gateway.harness import GatewayServer

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% if loops is defined %}{% for i in range(loops) %}{% for j in range(10000) %}{% endfor %}{% endfor %}"
    "{% endif %}{% if size is defined %}{{ 'x' * size }}{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)
HELLO = b'{"messages": [{"role": "user", "content": "hello"}]}'


def descendants(pid: int) -> list[int]:
    """The parent of the helpers and the helpers."""
    children = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        children += [int(child) for child in path.read_text().split()]
    return children + [grandchild for child in children for grandchild in descendants(child)]


def helpers_of(helpers: Helpers) -> list[int]:
    assert helpers._parent is not None
    return descendants(helpers._parent.pid)


@pytest.fixture
def settings() -> Settings:
    return Settings(max_model_len=10_000, vocab_size=1000, template=TEMPLATE, cpu_s=0.3, nice=0)


def run(settings: Settings, work: Callable[[Helpers], Any]) -> Any:
    async def main() -> Any:
        helpers = Helpers(settings)
        try:
            return await work(helpers)
        finally:
            helpers.close()

    return asyncio.run(main())


def text_of(answer: bytes) -> str:
    _, found, _ = decode_answer("chat", answer)
    found.check()
    return str(found.texts[0])


def test_a_helper_reads_as_this_process_does(settings: Settings):
    bodies: list[tuple[Job, bytes]] = [
        ("chat", HELLO),
        ("chat", b'{"messages": [], "temperature": 0.5, "wibble": 1}'),
        ("chat", b'{"messages": 5}'),
        ("chat", b"{"),
        ("completion", b'{"prompt": ["a", "b"], "priority": 1180591620717411303424, "logit_bias": {"5": 1}}'),
        (
            "completion",
            b'{"prompt": [[1, 2], [3]], "stop": ["x"], "stream_options": {}}',
        ),
        ("completion", b'{"prompt": [1, -2]}'),
        ("completion", b'{"prompt": [5, 1000]}'),
        ("completion", b'{"prompt": [' + b"5," * 20_000 + b"5]}"),
        ("completion", b'{"metadata": {"a": 1}}'),
        ("tokenize", b'{"prompt": "a", "messages": []}'),
        ("tokenize", b'{"prompt": "a", "return_token_strs": true}'),
        ("detokenize", b'{"tokens": [1, 2, 3]}'),
    ]
    reader = Reader(settings)

    async def all_of(helpers: Helpers) -> list[Any]:
        return [await helpers.answer(job, body) for job, body in bodies]

    def outcome(read: Callable[[], tuple[Any, Any, Any]]) -> Any:
        try:
            request, found, unknown = read()
        except schemas.BadRequest as error:
            return error.body()
        fields = {
            name: getattr(request, name)
            for name in request.__struct_fields__
            if name not in APART and not isinstance(getattr(request, name), msgspec.Raw)
        }
        return fields, found, unknown

    for (job, body), answer in zip(bodies, run(settings, all_of), strict=True):
        there = outcome(lambda j=job, a=answer: decode_answer(j, a))
        assert there == outcome(lambda j=job, b=body: reader.read(j, b)), body


@pytest.mark.parametrize(
    ("template", "body", "reason"),
    [
        (TEMPLATE, HELLO[:-1] + b', "chat_template_kwargs": {"loops": 90000}}', r"more than 0\.3 s of CPU"),
        (TEMPLATE, HELLO[:-1] + b', "chat_template_kwargs": {"size": 900000000}}', "MiB of memory"),
        (TEMPLATE, HELLO[:-1] + b', "chat_template_kwargs": {"size": 90000000}}', "maximum context length"),
        ("{{ 'x' * 10**9 }}", HELLO, "MiB of memory"),
        ("{% set x = 7 ** (7 ** 11) %}{{ x }}", HELLO, "CPU time"),
        ("{{ messages[0].nothing.at.all }}", HELLO, "rejects these messages"),
        ("{% for m in messages %}{{ m | wibble }}{% endfor %}", HELLO, "does not compile"),
    ],
)
def test_what_a_template_may_cost_is_limited(settings: Settings, template: str, body: bytes, reason: str):
    """Each is refused with its reason, and the next conversation is read."""

    async def work(helpers: Helpers) -> bytes:
        refused = await helpers.answer("chat", body)
        with pytest.raises(schemas.BadRequest, match=reason):
            text_of(refused)
        return await helpers.answer("tokenize", b'{"prompt": "next"}')

    assert text_of(run(msgspec.structs.replace(settings, template=template), work)) == "next"


def test_helpers_begin_with_a_compiled_template(settings: Settings):
    """Compiled once, in their parent, unless a child finds that the template exceeds a job's limits."""
    reader = Reader(settings)
    main.warm_up(reader)
    assert reader._template is not None
    reader = Reader(msgspec.structs.replace(settings, template="{{ 'x' * 10**9 }}"))
    main.warm_up(reader)
    assert reader._template is None


def test_a_costly_template_delays_nobody(settings: Settings):
    """While one conversation takes all of its time, others are read by another helper."""

    async def work(helpers: Helpers) -> int:
        slow = asyncio.create_task(
            helpers.answer("chat", HELLO[:-1] + b', "chat_template_kwargs": {"loops": 90000}}')
        )
        served = 0
        while not slow.done():
            assert text_of(await helpers.answer("chat", HELLO)) == "hello"
            served += 1
        with pytest.raises(schemas.BadRequest, match="CPU time"):
            text_of(await slow)
        return served

    assert run(settings, work) >= 1


def test_the_dead_are_replaced_and_their_jobs_answered(settings: Settings):
    async def work(helpers: Helpers) -> None:
        assert text_of(await helpers.answer("chat", HELLO)) == "hello"
        for victim in ("child", "parent"):
            parent = helpers._parent
            assert parent is not None
            for pid in helpers_of(helpers) if victim == "child" else [parent.pid]:
                os.kill(pid, signal.SIGKILL)
            assert text_of(await helpers.answer("chat", HELLO)) == "hello", victim
        assert helpers.num_jobs == 3

    run(settings, work)


def test_a_helper_that_is_killed_at_work_has_its_job_done_by_another(settings: Settings, caplog):
    """Once; a job that nobody survives is an error of its own."""
    costly = HELLO[:-1] + b', "chat_template_kwargs": {"loops": 90000}}'

    async def killed(helpers: Helpers, times: int) -> bytes:
        await helpers.answer("chat", HELLO)  # (their parent tries the template in a child of its own first)
        task = asyncio.create_task(helpers.answer("chat", costly))
        seen: set[int] = set()
        while len(seen) < times:
            await asyncio.sleep(0.01)
            for pid in set(helpers_of(helpers)) - seen:
                seen.add(pid)
                os.kill(pid, signal.SIGKILL)
        return await task

    async def once(helpers: Helpers) -> None:
        with pytest.raises(schemas.BadRequest, match="CPU time"):
            text_of(await killed(helpers, 1))

    async def twice(helpers: Helpers) -> None:
        with pytest.raises(InternalError, match="died, twice"):
            await killed(helpers, 2)
        assert text_of(await helpers.answer("chat", HELLO)) == "hello"

    run(settings, once)
    run(settings, twice)


def test_the_queue_is_bounded(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "_MAX_WAITING", 3)
    monkeypatch.setattr(pool, "_SHORT_S", 600.0)
    costly = HELLO[:-1] + b', "chat_template_kwargs": {"loops": 90000}}'

    async def work(helpers: Helpers) -> list[Any]:
        jobs = [helpers.answer("chat", costly) for _ in range(9)]
        return await asyncio.gather(*jobs, return_exceptions=True)

    answers = run(settings, work)
    refused = [answer for answer in answers if isinstance(answer, Overloaded)]
    assert len(refused) == 9 - 4 - 3
    assert all(isinstance(answer, bytes) for answer in answers if answer not in refused)


def test_who_waits_and_goes_away_takes_no_place(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    """Also one whose turn has just come."""
    monkeypatch.setattr(pool, "_SHORT_HELPERS", 1)
    monkeypatch.setattr(pool, "_SHORT_S", 600.0)

    async def work(helpers: Helpers) -> None:
        lane = helpers._short
        for _ in range(20):
            jobs = [asyncio.create_task(helpers.answer("chat", HELLO)) for _ in range(6)]
            give = lane._give

            def gone(link: Any, *, jobs: Any = jobs, give: Any = give) -> None:
                give(link)
                jobs[2].cancel()  # its turn, or that of one behind it
                jobs[1].cancel()

            lane._give = gone  # type: ignore[method-assign]
            answers = await asyncio.gather(*jobs, return_exceptions=True)
            lane._give = give  # type: ignore[method-assign]
            assert sum(isinstance(answer, bytes) for answer in answers) >= 4
            assert (lane._count, len(lane._idle), lane.num_waiting) == (1, 1, 0)

    run(settings, work)


def test_slow_jobs_do_not_take_the_places_of_others(settings: Settings):
    """However many come: so many may go on, the others are refused and their helpers killed, and all the
    while conversations are read."""
    settings = msgspec.structs.replace(settings, cpu_s=600.0)
    costly = HELLO[:-1] + b', "chat_template_kwargs": {"loops": 90000}}'

    async def work(helpers: Helpers) -> None:
        jobs = [asyncio.create_task(helpers.answer("chat", costly)) for _ in range(12)]
        while sum(job.done() for job in jobs) < 8:
            await asyncio.sleep(0.01)
        assert all(isinstance(job.exception(), Overloaded) for job in jobs if job.done())
        assert (helpers.num_refused, helpers._short._slow) == (8, 4)
        helpers._short._slow_s = 600.0  # (the machine may be slow for those that follow)
        for _ in range(5):
            assert text_of(await helpers.answer("chat", HELLO)) == "hello"
        assert sum(job.done() for job in jobs) == 8, "the four go on"
        while len(helpers_of(helpers)) > 4 + 4:
            await asyncio.sleep(0.01)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        assert helpers._short._slow == 0
        while len(helpers_of(helpers)) > 4:
            await asyncio.sleep(0.01)
        assert text_of(await helpers.answer("chat", HELLO)) == "hello"

    run(settings, work)


def test_nothing_is_left_behind(settings: Settings):
    async def work(helpers: Helpers) -> list[int]:
        await asyncio.gather(*(helpers.answer("chat", HELLO) for _ in range(8)))
        assert helpers._parent is not None
        return [helpers._parent.pid, *helpers_of(helpers)]

    pids = run(settings, work)
    assert 2 <= len(pids) <= 5
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "they die with their parent"
        time.sleep(0.01)


def test_closing_ends_what_is_being_read(settings: Settings):
    """A server that stops does not wait for a template."""
    costly = HELLO[:-1] + b', "chat_template_kwargs": {"loops": 90000}}'

    async def main() -> list[Any]:
        helpers = Helpers(msgspec.structs.replace(settings, cpu_s=600.0))
        jobs = [asyncio.create_task(helpers.answer("chat", costly)) for _ in range(4)]
        while helpers._short._slow < 4:
            await asyncio.sleep(0.01)
        helpers.close()
        return await asyncio.gather(*jobs, return_exceptions=True)

    assert [type(answer) for answer in asyncio.run(main())] == [InstanceUnavailable] * 4


def test_metrics(roomy: GatewayServer):
    def value(name: str) -> float:
        with roomy.http() as http:
            text = http.get("/metrics").text
        (line,) = (line for line in text.splitlines() if line.startswith(f"baton:{name}{{"))
        return float(line.rsplit(" ", 1)[1])

    before = value("helper_jobs_total")
    with roomy.http() as http:
        http.post(CHAT, content=HELLO).raise_for_status()
    assert value("helper_jobs_total") == before + 1
    assert (value("helper_losses_total"), value("helper_refusals_total")) == (0, 0)
    assert value("helper_jobs_waiting") == 0


def priorities(pids: Iterable[int]) -> list[tuple[int, int, int]]:
    """Policy, niceness and session of each."""
    return [
        (os.sched_getscheduler(pid), os.getpriority(os.PRIO_PROCESS, pid), os.getsid(pid)) for pid in pids
    ]


def test_helpers_for_long_bodies_give_way_to_everything_else(settings: Settings):
    """From the beginning, and not only when they have worked for a while; others have this one's priority.
    And in this one's session: priorities count inside of a session only."""
    settings = msgspec.structs.replace(settings, nice=3)
    ((policy, nice, session),) = priorities([0])

    async def work(helpers: Helpers) -> None:
        found: list[set[int]] = []
        for body in (HELLO, HELLO[:-1] + b" " * LONG_BODY + b"}"):
            before = set(descendants(os.getpid()))
            await helpers.answer("chat", body)
            found.append(set(helpers_of(helpers)) - before)
            await helpers.answer("chat", body)
            # (On a busy machine the one that has a share may have come to help it.)
            assert set(helpers_of(helpers)) - before >= found[-1], "it serves more than one job"
        short, patient = found
        assert priorities(short) == [(policy, nice, session)]
        assert priorities(patient) == [(os.SCHED_IDLE, nice, session)]

    run(settings, work)


def test_a_helper_whose_job_takes_long_gives_way(settings: Settings):
    settings = msgspec.structs.replace(settings, nice=3, cpu_s=600.0)
    costly = HELLO[:-1] + b', "chat_template_kwargs": {"loops": 99999}}'
    ((_, nice, session),) = priorities([0])

    async def work(helpers: Helpers) -> None:
        helpers.start()
        job = asyncio.ensure_future(helpers.answer("chat", costly))
        async with asyncio.timeout(60):
            while (os.SCHED_IDLE, nice, session) not in priorities(helpers_of(helpers)):
                assert not job.done()
                await asyncio.sleep(0.01)
        job.cancel()

    run(settings, work)


def test_jobs_that_starve_are_done_again_by_one_helper_that_shares(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    """One at a time, the others in order behind it; it is nice, and gives way to nobody."""
    settings = msgspec.structs.replace(settings, nice=3, cpu_s=600.0)
    monkeypatch.setattr(link, "STARVES_S", 0.001)
    monkeypatch.setattr(link, "cpu_s", lambda pid: 0.0)
    ((policy, nice, session),) = priorities([0])

    async def work(helpers: Helpers) -> None:
        chosen: list[int] = []
        real = helpers._sharing.answer

        async def answer(job: Job, body: Any, size: int) -> bytes:
            chosen.append(size)
            return await real(job, body, size)

        monkeypatch.setattr(helpers._sharing, "answer", answer)

        async def until(done: Callable[[], bool]) -> None:
            async with asyncio.timeout(60):
                while not done():
                    await asyncio.sleep(0.005)

        def costly(loops: int, more: int) -> bytes:
            return HELLO[:-1] + b', "chat_template_kwargs": {"loops": %d}%s}' % (loops, b" " * more)

        bodies = [costly(99999, 0), costly(99999, LONG_BODY), costly(99999, 10)]
        jobs = {len(body): asyncio.create_task(helpers.answer("chat", body)) for body in bodies}
        await until(lambda: len(helpers._starving) == 2 and len(chosen) == 1)
        await until(lambda: (policy, min(19, nice + 3), session) in priorities(helpers_of(helpers)))
        for number in (1, 2):
            jobs[chosen[-1]].cancel()
            await until(lambda n=number: len(chosen) == n + 1)
        assert sorted(chosen) == sorted(jobs)
        jobs[chosen[-1]].cancel()
        await asyncio.gather(*jobs.values(), return_exceptions=True)
        assert not helpers._shared
        assert text_of(await helpers.answer("chat", costly(1000, 0))) == "hello"
        assert (helpers.num_starved, len(chosen)) == (4, 4)

    run(settings, work)


def test_jobs_that_get_on_are_left_alone(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link, "STARVES_S", 0.001)
    ticking = itertools.count()
    monkeypatch.setattr(link, "cpu_s", lambda pid: float(next(ticking)))
    costly = HELLO[:-1] + b', "chat_template_kwargs": {"loops": 150}}'

    async def work(helpers: Helpers) -> None:
        assert text_of(await helpers.answer("chat", costly)) == "hello"
        assert helpers.num_starved == 0

    run(msgspec.structs.replace(settings, nice=3), work)
    assert next(ticking) > 1, "it was looked after"


def test_a_job_that_starves_and_goes_away_leaves_the_share_to_others(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    """Also at the moment at which it was chosen."""
    monkeypatch.setattr(link, "STARVES_S", 0.01)
    monkeypatch.setattr(link, "cpu_s", lambda pid: 0.0)
    settings = msgspec.structs.replace(settings, nice=3, cpu_s=600.0)
    endless = HELLO[:-1] + b', "chat_template_kwargs": {"loops": 99999}}'

    async def work(helpers: Helpers) -> None:
        real = helpers._share

        def share() -> None:
            real()
            if helpers.num_starved == 1:
                first.cancel()

        monkeypatch.setattr(helpers, "_share", share)
        first = asyncio.create_task(helpers.answer("chat", endless))
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not helpers._shared
        costly = HELLO[:-1] + b', "chat_template_kwargs": {"loops": 150}}'
        assert text_of(await helpers.answer("chat", costly)) == "hello"

    run(settings, work)


def test_what_a_process_has_used():
    began = link.cpu_s(os.getpid())
    assert 0 < began <= time.process_time() <= link.cpu_s(os.getpid())
    assert link.cpu_s(2**22 + 1) == 0.0


@pytest.fixture(scope="module")
def roomy(byte_level: Path, vocab: int) -> Iterator[GatewayServer]:
    with GatewayServer(byte_level, eos=END, vocab=vocab) as server:
        yield server


def test_long_bodies_are_decoded_elsewhere(roomy: GatewayServer, monkeypatch: pytest.MonkeyPatch):
    """The gateway's process decodes no long body nor puts it together, and serves others while a helper
    does."""
    decoded: list[int] = []
    pieces: list[int] = []
    real_body, real_prompt = reading.decode_body, reading.decode_prompt

    def decode_body(body: bytes, kind: Any) -> Any:
        decoded.append(len(body))
        return real_body(body, kind)

    def decode_prompt(raw: msgspec.Raw) -> Any:
        decoded.append(len(bytes(raw)))
        return real_prompt(raw)

    monkeypatch.setattr(reading, "decode_body", decode_body)
    monkeypatch.setattr(reading, "decode_prompt", decode_prompt)
    bodies = [
        ("/v1/completions", b'{"prompt": [' + b",".join([b"5"] * 1_900_000) + b"]}", 400),
        ("/v1/completions", b'{"prompt": [' + b",".join([b"[5]"] * 1_000_000) + b"]}", 400),
        ("/v1/completions", b'{"prompt": [' + b",".join([b'""'] * 1_300_000) + b"]}", 400),
        ("/v1/completions", b'{"prompt": [' + b",".join([b"[5]"] * 4096) + b'], "max_tokens": 1, "x": "'
         + b"y" * LONG_BODY + b'"}', 200),
        ("/v1/completions", b'{"prompt": "x", "max_tokens": 1, "metadata": ['
         + b",".join([b'""'] * 1_300_000) + b"]}", 200),
        (CHAT, b'{"messages": [' + b",".join([b"{}"] * 1_300_000) + b"]}", 400),
        (CHAT, b'{"messages": [{"role": "user", "content": "' + b"x" * 4_000_000 + b'"}]}', 400),
        ("/detokenize", b'{"tokens": [' + b",".join([b"5"] * 100_000) + b"]}", 200),
        ("/tokenize", b'{"prompt": "' + b"x y " * 25_000 + b'"}', 400),
    ]  # fmt: skip
    helpers = roomy.app.state.gateway.helpers
    real_answer = helpers.answer

    async def answer(job: Job, *body: bytes) -> bytes:
        pieces.extend(map(len, body))
        found: bytes = await real_answer(job, *body)
        return found

    monkeypatch.setattr(helpers, "answer", answer)
    codes: list[int] = []
    served: list[int] = []

    def send() -> None:
        with roomy.http() as http:
            for path, body, _ in bodies:
                codes.append(http.post(path, content=body).status_code)

    before = helpers.num_jobs
    sender = threading.Thread(target=send)
    sender.start()
    with roomy.http() as http:
        while sender.is_alive():
            done = helpers.num_jobs
            http.get("/health").raise_for_status()
            served.append(done)
    sender.join()
    assert codes == [code for _, _, code in bodies]
    assert helpers.num_jobs - before == len(bodies)
    assert decoded == []
    assert sum(pieces) == sum(len(body) for _, body, _ in bodies)
    assert max(pieces) < 1 << 19, "as they were received"
    assert len(served) > len(bodies)


def test_short_bodies_without_a_template_are_read_at_once(roomy: GatewayServer):
    helpers = roomy.app.state.gateway.helpers
    before = helpers.num_jobs
    with roomy.http() as http:
        answers: list[httpx.Response] = [
            http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}),
            http.post("/detokenize", json={"tokens": [5]}),
        ]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert helpers.num_jobs == before


def test_long_texts_are_encoded_and_many_ids_decoded_elsewhere(
    roomy: GatewayServer, monkeypatch: pytest.MonkeyPatch
):
    """And with the same result as here."""
    tokenizer = roomy.app.state.gateway.tokenizer
    text = "the cat sat on the mat " * 200
    with_bos, without = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)
    short = tokenizer.encode("the cat")
    here: list[int] = []
    for name in ("encode", "decode"):
        real = getattr(Encoding, name)

        def counted(self: Encoding, what: Any, real: Any = real, **options: Any) -> Any:
            here.append(len(what))
            return real(self, what, **options)

        monkeypatch.setattr(Encoding, name, counted)
    helpers = roomy.app.state.gateway.helpers
    before = helpers.num_jobs
    with roomy.http() as http:

        def post(path: str, body: dict[str, Any]) -> Any:
            return http.post(path, json=body).json()

        many = {"prompt": ["the cat"] * 600, "max_tokens": 1, "return_token_ids": True, "echo": True}
        choices = post("/v1/completions", many)["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == [short] * 600
        assert all(choice["text"].startswith("the cat") for choice in choices)
        assert post("/tokenize", {"prompt": text})["tokens"] == with_bos
        assert post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"] == without
        conversation = {"messages": [{"role": "user", "content": text}]}
        tokens = post("/tokenize", conversation)["tokens"]
        assert len(tokens) >= len(without) > 1024
        assert post("/detokenize", {"tokens": without * 4})["prompt"] == text * 4
        for path, body in (("/v1/completions", {"prompt": text}), (CHAT, conversation)):
            error = post(path, {**body, "max_tokens": 1})["error"]
            assert "maximum context length is 256 tokens" in error["message"]
            assert str(len(with_bos if path != CHAT else tokens)) in error["message"]
        dense = post("/v1/completions", {"prompt": "é?" * 20_000})["error"]
        assert "40000 characters" in dense["message"]
    assert here == []
    assert helpers.num_jobs == before + 8


class Connection:
    """A gateway that has sent these bytes and then closes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.sent: list[bytes] = []

    def recv_into(self, room: memoryview) -> int:
        part, self._data = self._data[: len(room)], self._data[len(room) :]
        room[: len(part)] = part
        return len(part)

    def sendall(self, data: bytes) -> None:
        self.sent.append(data)


def test_an_answer_wakes_the_gateway_once(settings, monkeypatch):
    monkeypatch.setattr(child.signal, "signal", lambda *_: None)
    connection = Connection(JOB.pack(0, 3) + b"abc" + JOB.pack(0, 2) + b"de")
    helper = child.Helper(connection, Reader(settings))
    monkeypatch.setattr(helper, "answer", lambda job, body: (body.upper(), True))
    helper.run()
    assert connection.sent == [
        HELLO_HEAD.pack(os.getpid()),
        ANSWER.pack(GOES_ON, 3) + b"ABC",
        ANSWER.pack(GOES_ON, 2) + b"DE",
    ]
