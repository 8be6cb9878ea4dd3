"""A draft model beside the one that serves: answers are those without it, bit for bit, and its drafts are
right where it says the same.  BATON_DRAFTS=1000 tries so many groups of requests with each backend."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from baton.executor.torch_executor import TorchExecutor
from baton.executor.weights.forms import ExecutorError
from baton.grammar.checking import Checker
from baton.grammar.description import Regex, Structure
from baton.grammar.vocabulary import Vocabulary
from baton.model.layers.int8 import why_not_int8
from baton.protocol.codec import pack_int32
from baton.protocol.config import Speculation
from baton.protocol.messages.commands import Admit
from baton.protocol.params.sampling import Constraint, Sampling, Stopping
from tests.executor.serving import Request, Serving
from tests.executor.test_torch_parity import config_for
from tests.model.checkpoints import VOCAB, make_checkpoint, make_classifier
from tests.model.cuts import BACKENDS, backend

SPECIAL = {"</s>": 1}
SLOTS, LONGEST, MOST = 4, 160, 5
ROUNDS = int(os.environ.get("BATON_DRAFTS", "2"))
FORMS = (("float32", None), ("bfloat16", None), ("bfloat16", "int8"), ("bfloat16", "kv int8"))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`served`; one layer of another family and other weights; another vocabulary; a head of scores."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("served", "other", "wider", "labels")}
    make_checkpoint(found["served"], "llama3", num_hidden_layers=2)
    make_checkpoint(found["other"], "qwen3", num_hidden_layers=1)
    make_checkpoint(found["wider"], "llama3", num_hidden_layers=1, vocab_size=VOCAB + 1)
    make_classifier(found["labels"], "qwen3", 3)
    tokens = [bytes([number]) for number in range(VOCAB)]
    (found["served"] / "vocabulary").write_bytes(Vocabulary(tokens, SPECIAL).encode())
    return found


def executor_with(checkpoints: dict[str, Path], draft: str, **changes) -> TorchExecutor:
    settings = {
        "max_num_seqs": SLOTS,
        "max_model_len": LONGEST,
        "vocabulary": str(checkpoints["served"] / "vocabulary"),
        "speculation": Speculation(
            method="draft", model=str(checkpoints[draft]), num_speculative_tokens=MOST
        ),
    }
    return TorchExecutor.from_config(config_for(checkpoints["served"], **{**settings, **changes}), 0, "")


def greedy(chance: random.Random, count: int = 6) -> list[Request]:
    return [
        Request(
            [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 90))],
            Sampling(number, 0.0),
            Stopping(chance.randrange(1, 60)),
        )
        for number in range(count)
    ]


def wishes(chance: random.Random) -> list[Request]:
    """Of all kinds; some begin alike, and some are long."""
    grammar = Checker(SPECIAL).check(Structure(Regex("(AB[0-3]{2}CDEF;){2,6}G")))
    common = [chance.randrange(VOCAB) for _ in range(50)]
    made = []
    for number in range(chance.randrange(2, 9)):
        prompt = common[: chance.choice((0, 20, 50))]
        prompt = prompt + [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 50))]
        extra: dict = {"temperature": chance.choice((0.0, 0.0, 0.3, 1.0))}
        if chance.random() < 0.3:
            extra["constraint"] = Constraint(grammar)
        if chance.random() < 0.3:
            extra |= {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "logprobs": 2}
        stops = (1,) if "constraint" in extra else tuple(chance.sample(range(VOCAB), 3))
        made.append(Request(prompt, Sampling(number, **extra), Stopping(chance.randrange(1, 55), 0, stops)))
    return made


def play(executor: TorchExecutor, requests: list[Request], drafter, seed: int, preempts=0.1) -> Serving:
    executor.speculator.drafter = drafter
    serving = Serving(
        executor, slots=SLOTS, budget=(24, 64)[seed % 2], longest=LONGEST, seed=seed, preempts=preempts
    )
    serving.run(requests)
    return serving


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form[1] or form[0])
@pytest.mark.parametrize("name", BACKENDS)
def test_answers_are_those_without_drafts(
    name: str, form: tuple[str, str | None], checkpoints: dict[str, Path]
) -> None:
    dtype, kind = form
    case = BACKENDS.index(name) * len(FORMS) + FORMS.index(form)
    draft = ("served", "other")[(case + BACKENDS.index(name)) % 2]
    drafts = right = 0
    with backend(name):
        if kind == "int8" and why_not_int8():
            pytest.skip(why_not_int8())
        executor = executor_with(
            checkpoints,
            draft,
            dtype=dtype,
            quantization="int8" if kind == "int8" else None,
            kv_cache_dtype="int8" if kind == "kv int8" else None,
        )
        try:
            own = executor.speculator.drafter
            for number in range(ROUNDS * case, ROUNDS * (case + 1)):
                plain, drafted = wishes(random.Random(number)), wishes(random.Random(number))
                play(executor, plain, None, number)
                serving = play(executor, drafted, own, number)
                assert [one.answer for one in drafted] == [one.answer for one in plain], number
                drafts, right = drafts + serving.drafts, right + serving.right
        finally:
            executor.close()
    print(f"{name} {form}, {draft} drafts: {right} of {drafts} are right")
    assert right < drafts
    assert right > 0 or draft == "other"


def test_a_model_drafts_for_itself_what_is_right(checkpoints: dict[str, Path]) -> None:
    """In the same numbers, and greedily: every draft, whatever is preempted and however prompts are cut."""
    executor = executor_with(checkpoints, "served")
    own = executor.speculator.drafter
    try:
        plain, drafted = greedy(random.Random(1)), greedy(random.Random(1))
        play(executor, plain, None, 1)
        serving = play(executor, drafted, own, 1)
        assert [one.answer for one in drafted] == [one.answer for one in plain]
        assert serving.right == serving.drafts > 50
    finally:
        executor.close()


def test_the_number_of_drafts_follows_what_they_cost(checkpoints: dict[str, Path]) -> None:
    """With `by_cost` the answers are the same, whatever this machine is busy with."""
    speculation = Speculation(
        method="draft", model=str(checkpoints["other"]), num_speculative_tokens=MOST, by_cost=True
    )
    executor = executor_with(checkpoints, "other", speculation=speculation)
    own = executor.speculator.drafter
    try:
        for number in range(4):
            plain, drafted = wishes(random.Random(number)), wishes(random.Random(number))
            play(executor, plain, None, number)
            play(executor, drafted, own, number)
            assert [one.answer for one in drafted] == [one.answer for one in plain]
    finally:
        executor.close()


def test_a_prefix_that_is_found_has_drafts_too(checkpoints: dict[str, Path]) -> None:
    """Of blocks that an earlier request left, the draft model's KV is used if it is there, and else computed:
    here the first request ran without drafts, the second one computes it, the third one finds it."""
    executor = executor_with(checkpoints, "served", num_blocks=64)
    own = executor.speculator.drafter
    size = executor.info.block_size
    prompt = np.random.default_rng(3).integers(0, VOCAB, 5 * size + 3).tolist()
    computed: list[int] = []
    compute = own._model.compute

    def counting(tokens, *rest):
        computed.append(len(tokens))
        return compute(tokens, *rest)

    own._model.compute = counting
    answers, caught_up, rights = [], [], []
    try:
        for number, drafter in enumerate((None, own, own)):
            executor.speculator.drafter = drafter
            serving = Serving(executor, slots=SLOTS, budget=128, longest=LONGEST, seed=1, preempts=0.0)
            request = Request(list(prompt), Sampling(0, 0.0), Stopping(20))
            shared = list(range(5)) if number else []
            request.slot, request.epoch = 0, 1
            request.blocks = [*range(5), *range(10 + 4 * number, 14 + 4 * number)]
            effect = serving.slots.apply(
                Admit(
                    0,
                    1,
                    pack_int32(prompt),
                    len(prompt),
                    len(shared) * size,
                    pack_int32(request.blocks),
                    request.sampling,
                    request.stopping,
                )
            )
            computed.clear()
            executor.admit(*effect)
            serving.on[0] = request
            while serving.on:
                serving.step()
            answers.append(request.answer)
            caught_up.append(max(computed, default=0))
            rights.append((serving.drafts, serving.right))
    finally:
        executor.close()
    assert answers[0] == answers[1] == answers[2]
    assert caught_up[0] == 0
    assert caught_up[1] > 2 * size > size > caught_up[2] > 0
    for drafts, right in rights[1:]:
        assert right == drafts > 10


def test_weights_change_under_a_draft_model(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The draft model stays; what it drafts is wrong then, and answers are those of the new weights."""
    new = tmp_path / "new"
    make_checkpoint(new, "llama3", num_hidden_layers=2)
    from safetensors.torch import load_file, save_file

    tensors = load_file(new / "model.safetensors")
    save_file(
        {name: (tensor * 1.5).contiguous() for name, tensor in tensors.items()}, new / "model.safetensors"
    )
    executor = executor_with(checkpoints, "served")
    own = executor.speculator.drafter
    try:
        executor.update_weights(str(new))
        plain, drafted = greedy(random.Random(4)), greedy(random.Random(4))
        play(executor, plain, None, 1)
        serving = play(executor, drafted, own, 1)
        assert [one.answer for one in drafted] == [one.answer for one in plain]
        assert serving.right < serving.drafts
    finally:
        executor.close()


def test_the_draft_model_counts_as_memory(checkpoints: dict[str, Path]) -> None:
    budget = 4 << 20
    sizes = {"num_blocks": None, "kv_cache_memory_bytes": budget}
    plain = executor_with(checkpoints, "served", speculation=None, **sizes)
    plain.close()
    with_draft = executor_with(checkpoints, "served", **sizes)
    try:
        ahead = with_draft._draft._pool.num_blocks - with_draft.info.num_blocks
        # The draft model is the model: half of the blocks, and those for drafts ahead.
        assert with_draft.info.num_blocks == (plain.info.num_blocks - ahead) // 2
        assert "draft model" in with_draft.info.detail
        assert "draft model" not in plain.info.detail
    finally:
        with_draft.close()


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("wider", f"has {VOCAB + 1} tokens, the model {VOCAB}: their vocabularies must be the same"),
        ("labels", "has a head of scores"),
    ],
)
def test_a_model_that_cannot_draft_is_refused(draft: str, message: str, checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ExecutorError, match=message):
        executor_with(checkpoints, draft)


def test_what_ends_with_its_first_token_never_runs_the_draft_model(checkpoints: dict[str, Path]) -> None:
    """As an instance that hands its requests over."""
    executor = executor_with(checkpoints, "served")
    try:
        own = executor.speculator.drafter
        own._model.compute = None  # type: ignore[assignment]
        requests = [Request([5] * 40, Sampling(0, 0.0), Stopping(1)) for _ in range(6)]
        serving = play(executor, requests, own, 1, preempts=0.0)
        assert all(len(request.tokens) == 1 for request in requests)
        assert serving.drafts == 0
    finally:
        executor.close()
