"""`baton run-batch`: the files' formats, and that a run that is killed anywhere is gone on with."""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from baton.batch.client import Address
from baton.batch.lines import BadLine, Request, done_line, line_id, read_line
from baton.batch.output import Output, OutputError
from baton.batch.run import Batch, BatchFailed, count_lines, lines_of
from baton.gateway.http.rights import RIGHTS
from tests.conftest import GENEROUS_S
from tests.e2e.server import Server, child_pids, is_engine

SIMULATED = ("--executor", "simulated", "--num-gpu-blocks-override", "256", "--max-model-len", "256")
NUM = 40


def line(custom_id: str, prompt: str, url: str = "/v1/completions", **fields: Any) -> str:
    body = {"max_tokens": 24, "seed": 7, "ignore_eos": True, **fields}
    body |= {"messages": [{"role": "user", "content": prompt}]} if "chat" in url else {"prompt": prompt}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def command(source: Path, target: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "baton", "run-batch", "-i", str(source), "-o", str(target), *flags]


def run(source: Path, target: Path, *flags: str, code: int = 0) -> str:
    """What it says."""
    done = subprocess.run(
        command(source, target, *flags), capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == code, done.stderr
    assert not done.stdout
    return done.stderr


def answers(path: Path) -> dict[int, dict[str, Any]]:
    """By the input's line; each is there once, and the last line is whole."""
    text = path.read_bytes()
    assert text.endswith(b"\n")
    lines = [json.loads(one) for one in text.splitlines()]
    assert set(Counter(one["id"] for one in lines).values()) <= {1}
    return {int(one["id"].split("_")[2]): one for one in lines}


def says(answer: dict[str, Any]) -> Any:
    """What matters of a line."""
    body = answer["response"]["body"]
    if "choices" in body:
        body = [
            (one.get("text") or one["message"]["content"], one["finish_reason"]) for one in body["choices"]
        ]
    return answer["custom_id"], answer["response"]["status_code"], body, answer["error"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Requests of two kinds, an empty line, wrong ones, and two of one name."""
    path = tmp_path_factory.mktemp("batch") / "requests.jsonl"
    urls = ("/v1/completions", "/v1/chat/completions")
    lines = [line(f"request-{i}", f"Story {i}", urls[i % 2]) for i in range(NUM)]
    lines[5:5] = ["", "not JSON", line("request-1", "again"), line("wrong", "x", max_tokens=-1)]
    path.write_text("\n".join(lines))  # (the last one without a line break)
    return path


@pytest.fixture(scope="module")
def whole(source: Path) -> dict[int, Any]:
    """What an uninterrupted run answers."""
    target = source.with_name("whole.jsonl")
    said = run(source, target, *SIMULATED, "--prefill", "1", "--decode", "1")
    assert f"{NUM + 3} lines: {NUM + 1} answered, 2 errors in" in said
    assert "warning: 1 custom_ids were there before" in said
    return {number: says(one) for number, one in answers(target).items()}


# -- the format


def test_each_line_is_answered_once(whole: dict[int, Any]) -> None:
    assert sorted(whole) == [1, 2, 3, 4, 5, *range(7, NUM + 5)]
    assert whole[1][:2] == ("request-0", 200)
    assert whole[2][1] == whole[8][1] == 200
    assert whole[2][0] == whole[8][0] == "request-1"
    assert whole[2][2] != whole[8][2]
    assert whole[7][:2] == (None, 400)
    assert "line 7: is not JSON" in whole[7][3]["message"]
    assert whole[9][:2] == ("wrong", 400)
    assert whole[9][3]["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"custom_id": 3}', "custom_id: give a text"),
        ('{"custom_id": ""}', "custom_id: give a text"),
        ("[1]", "must be an object"),
        ('{"custom_id": "a", "method": "GET", "url": "/v1/completions"}', "method: 'GET'"),
        ('{"custom_id": "a", "url": "/v1/models"}', "url: '/v1/models' is not possible"),
        ('{"custom_id": "a", "body": {}}', "url: it is missing"),
        ('{"custom_id": "a", "url": "/v1/completions"}', "body: give an object"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": [1]}', "body: give an object"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}', "body.stream"),
        ('{"custom_id": "\udc80"}'.encode("utf-8", "surrogatepass").decode("latin-1"), "custom_id|JSON"),
    ],
)
def test_a_wrong_line_is_named(text: str, words: str) -> None:
    found = read_line(3, text.encode("latin-1"))
    assert isinstance(found, BadLine)
    assert found.message.startswith("line 3: ")
    assert re.search(words, found.message)


def test_a_line_is_known_again() -> None:
    text = line("a", "b").encode()
    found = read_line(12, text + b"\r\n")
    assert isinstance(found, Request)
    assert found.id == line_id(12, text)
    assert done_line(json.dumps({"id": found.id}).encode()) == (12, found.id)
    assert done_line(b'{"id": "batch_req_1"}') is None
    assert done_line(b"{") is None


def test_every_url_of_a_batch_is_served_to_users() -> None:
    from baton.batch.lines import URLS

    assert {RIGHTS.get(url) for url in URLS} == {"user"}


def test_other_apis_are_asked_too(server: Server, tmp_path: Path) -> None:
    bodies = {
        "/v1/responses": {"input": "Hi", "max_output_tokens": 5, "store": False},
        "/v1/messages": {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 5,
            "model": "baton-tiny",
        },
        "/v1/embeddings": {"input": "Hi"},
    }
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in bodies.items()]
    source.write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert "3 lines: 2 answered, 1 errors" in run(source, target, "--url", server.url)
    found = {one["custom_id"]: one for one in answers(target).values()}
    assert found["/v1/responses"]["response"]["body"]["object"] == "response"
    assert found["/v1/messages"]["response"]["body"]["type"] == "message"
    assert found["/v1/embeddings"]["error"]["code"] == "unsupported_task"


# -- going on


def test_an_output_of_something_else_is_refused(source: Path, whole: Any, tmp_path: Path) -> None:
    target = tmp_path / "notes.txt"
    target.write_text("hello\n")
    assert "line 1 is no answer of run-batch" in run(source, target, code=2)
    assert target.read_text() == "hello\n"
    other = tmp_path / "other.jsonl"
    other.write_text(line("z", "z"))
    done = source.with_name("whole.jsonl")
    before = done.read_bytes()
    assert "of another input" in run(other, done, code=2)
    assert done.read_bytes() == before
    assert "-i /nowhere: cannot be read" in run(Path("/nowhere"), target, code=2)
    held = Output(str(done))
    with pytest.raises(OutputError, match="another run writes it"):
        Output(str(done))
    held.close()
    assert f"{NUM + 3} before" in run(source, done)


@pytest.mark.parametrize("who", ["run-batch", "worker", "engine"])
def test_a_batch_survives_a_kill(source: Path, whole: dict[int, Any], tmp_path: Path, who: str) -> None:
    """Of the command itself too, at several places, with a line torn in its middle."""
    target = tmp_path / "answers.jsonl"
    cost, places = ("0.01", (1, 8, 16)) if who == "run-batch" else ("0.005", (2,))
    flags = (*SIMULATED, "--simulated-cost", cost, "--max-concurrency", "3")
    for enough in places:
        process = subprocess.Popen(command(source, target, *flags), stderr=subprocess.PIPE, text=True)
        end = time.monotonic() + 2 * GENEROUS_S
        while not target.exists() or target.read_bytes().count(b"\n") < enough:
            assert time.monotonic() < end, "nothing was answered in time"
            time.sleep(0.01)
        if who != "run-batch" and process.poll() is None:
            found = [pid for pid in child_pids(process.pid) if is_engine(pid)]
            if who == "worker":
                found = [pid for engine in found for pid in child_pids(engine)]
            for pid in found:  # (none, if the run has ended meanwhile)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if who != "run-batch":
            _, said = process.communicate(timeout=180)
            assert process.returncode == 0, said
            break
        process.kill()
        process.communicate(timeout=60)
        with target.open("ab") as file:
            file.write(b'{"id":"batch_req_31_0123')
    said = run(source, target, *SIMULATED)
    if who == "run-batch":
        assert "the beginning of a line, of a run that was killed, is cut off" in said
    assert {number: says(one) for number, one in answers(target).items()} == whole


def test_ctrl_c_lets_what_runs_end(source: Path, whole: dict[int, Any], tmp_path: Path) -> None:
    target = tmp_path / "answers.jsonl"
    flags = (*SIMULATED, "--simulated-cost", "0.05", "--max-concurrency", "2")
    process = subprocess.Popen(command(source, target, *flags), stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 2 * GENEROUS_S
    while not target.exists() or not target.read_bytes():
        assert time.monotonic() < end, "nothing was answered in time"
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    found = {number: says(one) for number, one in answers(target).items()}
    assert (process.returncode, len(found) < len(whole)) in ((130, True), (0, False)), said
    assert ("the same command goes on" in said) == (len(found) < len(whole))
    assert all(whole[number] == one for number, one in found.items())
    run(source, target, *SIMULATED)
    assert {number: says(one) for number, one in answers(target).items()} == whole


# -- a server that runs already


def test_a_running_server_is_asked(source: Path, whole: dict[int, Any], tmp_path: Path) -> None:
    target = tmp_path / "answers.jsonl"
    with Server(*SIMULATED, "--max-waiting", "2", "--max-num-seqs", "2", "--api-key", "k") as server:
        said = run(source, target, "--url", server.url, code=1)
        assert "the server answers 401" in said
        assert "the same command goes on" in said
        said = run(source, target, "--url", server.url + "/v1", "--openai-api-key", "k")
        assert server.metric("baton:num_requests_waiting") == 0
    assert f"{NUM + 1} answered, 1 errors, 1 before" in said
    assert {number: says(one) for number, one in answers(target).items()} == whole
    for flags, words in (
        (("--url", "ftp://x"), "--url ftp://x: give http://HOST:PORT"),
        (("--url", server.url, "--max-num-seqs", "3"), "--max-num-seqs: .* not with --url"),
    ):
        assert re.search(words, run(source, tmp_path / "x.jsonl", *flags, code=2))


async def test_a_server_that_is_gone_ends_the_run_without_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.batch.run.PATIENCE_S", 0.0)
    source = io.BytesIO((line("a", "b") + "\n").encode())
    output = Output(str(tmp_path / "out.jsonl"))
    counts = count_lines(source, output)
    batch = Batch(source, output, Address(path=str(tmp_path / "nobody")), max_concurrency=1, counts=counts)
    with pytest.raises(BatchFailed, match="nothing was answered"):
        await batch.run()
    output.close()
    assert (counts.total, counts.done) == (1, 0)
    assert not Path(output.path).read_bytes()


def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    """What some editors write at a file's head; the line is the same without it."""
    first, second = line("a", "b").encode(), line("c", "d").encode()
    for head in (b"", codecs.BOM_UTF8):
        found = list(lines_of(io.BytesIO(head + first + b"\r\n" + second + b"\n")))
        assert [number for number, _ in found] == [1, 2]
        assert isinstance(read_line(*found[0]), Request)
        assert line_id(*found[0]) == line_id(1, first)
    assert list(lines_of(io.BytesIO(codecs.BOM_UTF8))) == []


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = Output(str(tmp_path / "out.jsonl"))
    output.append(b"one\n")
    write, calls = os.write, []

    def full(file: int, data: Any) -> int:
        calls.append(1)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(file, data[:2])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OutputError, match="cannot be written: No space left"):
        output.append(b"two\n")
    monkeypatch.undo()
    assert Path(output.path).read_bytes() == b"one\n"
    output.close()
