"""The Python API as a guest in a program: its arguments, its end, its manners."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from baton import LLM, SamplingParams
from baton.gateway.errors import InstanceUnavailable
from baton.gateway.text.chat_template import ChatTemplate
from tests.e2e.server import alive, is_engine
from tests.observe.timings import check_timings

FEW = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
HELLO = [{"role": "user", "content": "Hello!"}]


def small(**options) -> LLM:
    return LLM(executor="simulated", **{"num_gpu_blocks_override": 64, "max_model_len": 256, **options})


def engines() -> set[int]:
    pids = {pid for task in os.listdir("/proc/self/task") for pid in child_pids_of_thread(task)}
    return set(filter(is_engine, pids))


def child_pids_of_thread(task: str) -> list[int]:
    try:
        with open(f"/proc/self/task/{task}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def wait_until(condition, deadline_s: float = 60.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.02)


def lost_so_often(llm: LLM, times: int) -> bool:
    """Also true if the instance is back already: a test that was paused sees only that."""
    member = llm._background._client.cluster.members["instance-0"]
    return member.restarts + (member.state == "restarting") >= times


def run_program(text: str, *, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    """A program of its own, as logging and fork() are the business of whole processes."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with small() as running:
        yield running


# -- arguments


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": "100"}, "max_model_len='100': give tokens, .*, an integer"),
        ({"max_num_seqs": True}, "max_num_seqs=True: give sequences from 1"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no': give true or false"),
        ({"executor": "magic"}, "executor=magic: give one of torch, simulated"),
        ({"served_model_name": 3}, "served_model_name=3: give texts"),
        ({"max_model_length": 4}, r"max_model_length: no such argument; did you mean max_model_len\?"),
        ({"kv_cache_memory_bytes": "lots"}, "^kv_cache_memory_bytes=lots: "),
        ({"kv_cache_memory_bytes": -1}, "^kv_cache_memory_bytes=-1: "),
        ({"num_gpu_blocks_override": 0}, "^num_gpu_blocks_override=0: "),
        ({"log_level": 3}, "log_level=3: give one of debug"),
        ({"log_level": "loud"}, "log_level=loud: give one of debug"),
        ({"simulated_cost": "much"}, "simulated_cost"),
    ],
)
def test_a_wrong_argument_is_named(options, words) -> None:
    with pytest.raises(ValueError, match=words):
        LLM(**options)


def test_arguments_have_the_flags_names() -> None:
    with LLM(
        executor="simulated",
        kv_cache_memory_bytes=4_000_000,
        served_model_name="abc",
        enable_prefix_caching=False,
        max_model_len=128,
        step_timeout=60,
        simulated_cost="0.001",
    ) as llm:
        assert (llm.model_name, llm.max_model_len) == ("abc", 128)
        assert llm.generate([5, 6], FEW, use_tqdm=False)[0].num_cached_tokens == 0


def test_arrays_are_ids(llm) -> None:
    expected = [5, 6, 7]
    for prompts in (
        np.array(expected),
        [np.int64(5), np.int64(6), np.int64(7)],
        [np.array(expected, np.int32)],
        {"prompt_token_ids": np.array(expected)},
    ):
        (result,) = llm.generate(prompts, FEW, use_tqdm=False)
        assert result.prompt_token_ids == expected
    rows = llm.generate(np.array([[5, 6, 7], [8, 9, 10]]), FEW, use_tqdm=False)
    assert [row.prompt_token_ids for row in rows] == [[5, 6, 7], [8, 9, 10]]


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([], "prompts: the list is empty"),
        (None, "prompts: None must be"),
        ([None], r"prompts\[0\]: None must be"),
        (np.array([0.5, 1.5]), r"prompts\[0\]: 0.5 must be"),
        ([[5, True]], r"prompts\[0\]: True must be a token id"),
        ({"text": "x"}, r"prompts\[0\]: a mapping needs"),
        ([[]], "empty"),
        (b"Once", "prompts: b'Once' must be a text"),
        ([b"Once"], r"prompts\[0\]: b'Once' must be a text"),
        (["Once", "half \ud800"], r"prompts\[1\]: .* half of a surrogate pair"),
    ],
)
def test_a_wrong_prompt_is_named(llm, prompts, words) -> None:
    with pytest.raises(ValueError, match=words):
        llm.generate(prompts, FEW, use_tqdm=False)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages: "),
        ("Hello", "messages: "),
        ([{"content": "Hello"}], r"messages\[0\].role"),
        ([{"role": "user"}], r"messages\[0\].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content\[0\].text"),
        ([*HELLO, "and"], r"messages\[1\]"),
        ([HELLO, [{"role": "", "content": ""}]], r"conversation 1: messages\[0\].role"),
        ([{"role": "user", "content": "half \ud800"}], "messages: .* half of a surrogate pair"),
    ],
)
def test_wrong_messages_are_named(llm, messages, words) -> None:
    with pytest.raises(ValueError, match=words):
        llm.chat(messages, FEW, use_tqdm=False)
    if not isinstance(messages, list) or not messages or isinstance(messages[0], dict):
        with pytest.raises(ValueError, match=words):
            next(llm.chat_stream(messages))


def test_text_parts_and_tuples_are_messages(llm) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}]
    ids = [
        llm.chat(messages, FEW, use_tqdm=False)[0].prompt_token_ids
        for messages in (HELLO, tuple(HELLO), parts, [HELLO])
    ]
    assert ids[0] == ids[1] == ids[2] == ids[3]


def test_wrong_sampling_params_are_named(llm) -> None:
    with pytest.raises(ValueError, match="sampling_params"):
        llm.generate("x", {"temperature": 0}, use_tqdm=False)
    with pytest.raises(ValueError, match="2 for 1 prompts"):
        llm.generate("x", [FEW, FEW], use_tqdm=False)
    for priority in (1 << 31, "high"):
        with pytest.raises(ValueError, match=r"priority: .* must be an integer"):
            llm.generate("x", FEW, use_tqdm=False, priority=priority)


def test_the_progress_bar_is_not_in_a_program_s_output(llm, capfd) -> None:
    llm.generate(["x", "y"], FEW)
    out, err = capfd.readouterr()
    assert out == ""
    assert "Generating" in err
    assert "2/2" in err


# -- restarts


def test_outputs_say_where_their_time_went(llm) -> None:
    begun = time.monotonic()
    outputs = llm.generate([[5, 6, 7], [8, 9]], FEW, use_tqdm=False)
    took_ms = (time.monotonic() - begun) * 1000
    for output in outputs:
        check_timings(output.timings, "prefill")
        assert output.timings["total_ms"] <= took_ms


def test_many_prompts_with_different_ends(llm) -> None:
    """Some end in the worker, some at a stop string, some are several sequences."""
    ends = [
        FEW,
        FEW.replace(max_tokens=30),
        FEW.replace(max_tokens=200, stop="e"),
        FEW.replace(n=3, temperature=1.0, seed=1),
    ] * 20
    results = llm.generate([[5, 6, number] for number in range(80)], ends, use_tqdm=False)
    for number, (result, params) in enumerate(zip(results, ends, strict=True)):
        assert result.prompt_token_ids == [5, 6, number]
        assert [output.index for output in result.outputs] == list(range(params.n))
        for output in result.outputs:
            if output.stop_reason is None:
                assert (output.finish_reason, len(output.token_ids)) == ("length", params.max_tokens)
            else:
                assert (output.stop_reason, "e" in output.text) == ("e", False)


def test_an_error_of_one_prompt_ends_the_call(llm) -> None:
    with pytest.raises(ValueError, match="leaves no room"):
        llm.generate([[5, 6], [7] * 256], FEW, use_tqdm=False)
    assert llm.generate([5, 6], FEW, use_tqdm=False)[0].finished


def test_generate_waits_for_a_restart() -> None:
    before = engines()
    with small() as llm:
        (engine,) = engines() - before
        first = llm.generate([5, 6], FEW, use_tqdm=False)
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: lost_so_often(llm, 1))
        again = llm.generate([5, 6], FEW, use_tqdm=False)
        assert again[0].outputs[0].token_ids == first[0].outputs[0].token_ids
        os.kill((engines() - before).pop(), signal.SIGKILL)
        wait_until(lambda: lost_so_often(llm, 2))
        assert next(llm.chat_stream(HELLO, FEW)) is not None


def test_a_stream_goes_on_after_the_loss_of_its_instance(llm) -> None:
    """With the same text as without a loss."""
    before = engines()
    many = FEW.replace(max_tokens=180, ignore_eos=True)
    undisturbed = "".join(llm.chat_stream(HELLO, many))
    with small(simulated_cost="0.05") as llm:
        stream = llm.chat_stream(HELLO, many)
        text = next(stream)
        os.kill((engines() - before).pop(), signal.SIGKILL)
        text += "".join(stream)
        assert text == undisturbed
        assert llm._background._client.cluster.table.continued.times == 1
        assert llm.generate([5, 6], FEW, use_tqdm=False)[0].finished


# -- the end


def test_a_forgotten_llm_ends_even_in_its_own_thread() -> None:
    before = engines()
    llm = small()
    (engine,) = engines() - before
    background = llm._background
    llm.me = llm
    del llm
    background.post(gc.collect)
    background._thread.join(60)
    assert not background._thread.is_alive()
    assert not alive(engine)


def test_a_forgotten_llm_does_not_hold_up_another() -> None:
    one, other = small(), small()
    background = one._background
    one.me = one
    del one
    release = threading.Event()
    collected: list[bool] = []

    def collect() -> None:
        gc.collect()
        collected.append(background._thread.is_alive())

    background.post(lambda: release.wait(120))  # it cannot end before
    other._background.post(collect)
    wait_until(lambda: bool(collected))
    assert collected == [True], "the other loop waited for the end of the forgotten one"
    release.set()
    background._thread.join(60)
    assert not background._thread.is_alive()
    assert other.generate([5], FEW, use_tqdm=False)[0].finished
    other.close()
    other.close()


def test_close_ends_a_call_in_another_thread() -> None:
    llm = small(simulated_cost="0.1")
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            llm.generate([5], FEW.replace(max_tokens=250), use_tqdm=False)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: llm._background._client.in_flight == 1)
    llm.close()
    thread.join(60)
    assert not thread.is_alive()
    assert isinstance(errors[0], InstanceUnavailable | RuntimeError)
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([5], FEW, use_tqdm=False)


def test_the_loop_cannot_wait_for_itself(llm) -> None:
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            llm.generate([5], FEW, use_tqdm=False)
        except RuntimeError as error:
            errors.append(error)

    llm._background.post(ask)
    wait_until(lambda: bool(errors))
    assert "background thread" in str(errors[0])


def test_a_forked_child_leaves_the_llm_alone() -> None:
    result = run_program("""
        import os, sys
        from baton import LLM, SamplingParams
        llm = LLM(executor="simulated", num_gpu_blocks_override=64, max_model_len=256)
        pid = os.fork()
        if pid == 0:
            try:
                llm.generate([5], use_tqdm=False)
            except RuntimeError as error:
                print(error, flush=True)
            sys.exit(7)
        print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        print(len(llm.generate([5, 6], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)))
        llm.close()
    """)
    assert result.returncode == 0, result.stderr
    assert [line for line in result.stderr.splitlines() if "DeprecationWarning" not in line] == []
    lines = result.stdout.splitlines()
    assert "process that made it" in lines[0]
    assert lines[1:] == ["child 7", "1"]


# -- manners


def test_logging_of_the_program_is_left_alone() -> None:
    result = run_program("""
        import io, logging
        stream = io.StringIO()
        logging.basicConfig(level=logging.INFO, stream=stream, format="%(message)s")
        root = logging.getLogger()
        before = (list(root.handlers), root.level)
        from baton import LLM
        LLM(executor="simulated", num_gpu_blocks_override=64, max_model_len=256).close()
        assert (list(root.handlers), root.level) == before
        assert not logging.getLogger("baton").handlers
        logging.info("mine")
        print(stream.getvalue(), end="")
    """)
    assert result.returncode == 0, result.stderr
    assert "mine" in result.stdout


def test_a_program_without_logging_gets_warnings_once() -> None:
    result = run_program("""
        import logging
        from baton import LLM
        for _ in range(2):
            LLM(executor="simulated", num_gpu_blocks_override=64, max_model_len=256).close()
        assert not logging.getLogger().handlers
        logging.getLogger("baton.x").warning("careful")
        logging.getLogger("baton.x").info("chatter")
    """)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("careful") == 1
    assert "chatter" not in result.stderr
    assert logging.getLogger("baton").handlers == []  # nor did this process get one: pytest has its own


# -- tools


def test_tools_come_to_the_chat_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(ValueError, match=r"tools\[0\].function.name"):
        llm.chat(messages, tools=[{"type": "function", "function": {}}])
    tokenizer = llm.get_tokenizer()
    monkeypatch.setattr(tokenizer, "template_source", "{{ messages[0].content }}")
    monkeypatch.setattr(tokenizer, "chat_template", ChatTemplate("{{ messages[0].content }}"))
    with pytest.raises(ValueError, match="tools: the model's chat template has no place for tools"):
        llm.chat(messages, tools=[tool])
    source = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}"
    monkeypatch.setattr(tokenizer, "template_source", source)
    monkeypatch.setattr(tokenizer, "chat_template", ChatTemplate(source))
    params = SamplingParams(max_tokens=1)
    (with_tools,) = llm.chat(messages, params, tools=[tool], use_tqdm=False)
    assert with_tools.prompt == json.dumps([tool]) + "hello"
    (without,) = llm.chat(messages, params, tools=[], use_tqdm=False)
    assert without.prompt == "hello"
