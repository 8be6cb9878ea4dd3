"""Drafts of the model's own MTP layer: its logits are those of the formula, and answers are those without it,
bit for bit.  BATON_DRAFTS=1000 tries so many groups of requests with each backend."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.executor.torch_executor import TorchExecutor
from baton.executor.weights.forms import ExecutorError
from baton.grammar.vocabulary import Vocabulary
from baton.launch.instances.image_server import image_server
from baton.model.attention import AttentionStep
from baton.model.checkpoint.files import LoadError
from baton.model.layers.int8 import why_not_int8
from baton.protocol.codec import pack_int32
from baton.protocol.config import Speculation
from baton.protocol.messages.commands import Admit
from baton.protocol.params.sampling import Sampling, Stopping
from tests.executor.drafts.test_draft_model import LONGEST, SLOTS, SPECIAL, greedy, play, wishes
from tests.executor.serving import Request, Serving
from tests.executor.test_torch_parity import config_for
from tests.model.checkpoints import VOCAB, make_checkpoint
from tests.model.cuts import BACKENDS, backend
from tests.model.mtp_checkpoints import (
    BLOCK,
    HEADS,
    HIDDEN,
    KV_HEADS,
    make_agreeing,
    make_mtp_checkpoint,
    mtp_tensors,
    save,
)

MOST = 4
ROUNDS = int(os.environ.get("BATON_DRAFTS", "1"))
FORMS = (
    ("float32", None),
    ("bfloat16", None),
    ("bfloat16", "int8"),
    ("bfloat16", "int4"),
    ("bfloat16", "kv int8"),
)
CASES = [
    (name, form)
    for at, name in enumerate(BACKENDS)
    for number, form in enumerate(FORMS)
    if ROUNDS > 1 or at == 0 or (at + number) % len(FORMS) == 0
]
"""The fastest kernels in every form of numbers, the others in one."""
MTP = Speculation(method="mtp", num_speculative_tokens=MOST)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random layer; one that agrees; none at all, in config.json too; one that config.json alone has."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("random", "agrees", "none", "promised")}
    make_mtp_checkpoint(found["random"])
    make_agreeing(found["agrees"])
    make_checkpoint(found["none"], "qwen3-moe")
    make_checkpoint(found["promised"], "ernie4_5-moe")
    tokens = [bytes([number]) for number in range(VOCAB)]
    for name in ("random", "agrees"):
        (found[name] / "vocabulary").write_bytes(Vocabulary(tokens, SPECIAL).encode())
    return found


def executor_of(directory: Path, **changes) -> TorchExecutor:
    settings = {
        "max_num_seqs": SLOTS,
        "max_model_len": LONGEST,
        "vocabulary": str(directory / "vocabulary"),
        "speculation": MTP,
    }
    return TorchExecutor.from_config(config_for(directory, **{**settings, **changes}), 0, "")


def reference(directory: Path, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """[T] tokens that follow, [T, hidden] states before the model's last norm, in float64: as
    `model/decoder/mtp.py` has the formula.  → the layer's states and logits."""
    tensors = {name: tensor.double() for name, tensor in load_file(directory / "model.safetensors").items()}
    eps, dim = 1e-5, HIDDEN // HEADS

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * tensors[f"{name}.weight"]

    def times(x: Tensor, name: str) -> Tensor:
        return x @ tensors[f"{BLOCK}{name}.weight"].T

    embedding = tensors["model.embed_tokens.weight"]
    head = tensors.get("lm_head.weight", embedding)
    embedded = norm(embedding[tokens], "model.mtp_emb_norm.0")
    states = norm(norm(hidden.double(), "model.norm"), "model.mtp_hidden_norm.0")
    x = torch.cat((embedded, states), -1) @ tensors["model.mtp_linear_proj.0.weight"].T

    count = len(tokens)
    angles = torch.arange(count).double()[:, None] / 500_000.0 ** (torch.arange(0, dim, 2) / dim)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotated(heads: Tensor) -> Tensor:
        """Neighbours are a pair."""
        pairs = torch.view_as_complex(heads.reshape(count, -1, dim // 2, 2))
        return torch.view_as_real(pairs * turn).flatten(2)

    normed = norm(x, f"{BLOCK}input_layernorm")
    queries = rotated(times(normed, "self_attn.q_proj").view(count, HEADS, dim)).transpose(0, 1)
    keys = rotated(times(normed, "self_attn.k_proj").view(count, KV_HEADS, dim)).transpose(0, 1)
    values = times(normed, "self_attn.v_proj").view(count, KV_HEADS, dim).transpose(0, 1)
    keys, values = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in (keys, values))
    scores = queries @ keys.transpose(1, 2) / dim**0.5
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
    x = x + times((scores.softmax(-1) @ values).transpose(0, 1).flatten(1), "self_attn.o_proj")
    normed = norm(x, f"{BLOCK}post_attention_layernorm")
    x = x + times(F.silu(times(normed, "mlp.gate_proj")) * times(normed, "mlp.up_proj"), "mlp.down_proj")
    return x, norm(x, "model.norm") @ head.T


@pytest.mark.parametrize("name", [BACKENDS[0], "numba", "torch"])
def test_the_layer_computes_its_formula(name: str, checkpoints: dict[str, Path]) -> None:
    """A text in pieces, beside another one; then a step further, from its own state."""
    directory = checkpoints["random"]
    chance = np.random.default_rng(5)
    tokens = chance.integers(0, VOCAB, 45).astype(np.int32)
    hidden = torch.randn(45, HIDDEN, generator=torch.Generator().manual_seed(1)) * 3
    with backend(name), torch.inference_mode():
        executor = executor_of(directory)
        try:
            mtp, done = executor._model.mtp, 0
            assert mtp is not None
            table = np.array([[7, 3, 9, 0]], np.int32)
            states, logits = [], []
            for count in (20, 1, 23):
                both = np.concatenate((table, table + 20))
                starts, counts = np.array([done, 0], np.int32), np.array([count, 5], np.int32)
                rows = slice(done, done + count)
                step = AttentionStep(starts, counts, both, int(count == 1))
                found, scores = mtp(
                    np.concatenate((tokens[rows], tokens[:5])),
                    torch.cat((hidden[rows], hidden[:5])),
                    step,
                    np.arange(count),
                )
                states.append(found.clone())
                logits.append(scores.clone())
                done += count
            # The last token is taken for a draft: its hidden state is the layer's own, of the one before.
            step = AttentionStep(np.array([done], np.int32), np.ones(1, np.int32), table, 1)
            found, scores = mtp(tokens[done:], states[-1][-1:], step, np.zeros(1, np.int64))
            found, scores = torch.cat((*states, found)), torch.cat((*logits, scores))
        finally:
            executor.close()
    hidden[done] = found[done - 1].clone()
    expected, expected_scores = reference(directory, torch.from_numpy(tokens).long(), hidden)
    assert torch.allclose(found.double(), expected, atol=1e-4, rtol=1e-4)
    assert torch.allclose(scores.double(), expected_scores, atol=1e-4, rtol=1e-4)
    assert float(expected_scores.std()) > 0.1


@pytest.mark.parametrize(("name", "form"), CASES, ids=str)
def test_answers_are_those_without_drafts(
    name: str, form: tuple[str, str | None], checkpoints: dict[str, Path]
) -> None:
    """Greedy, drawn, penalized, bound to a grammar, preempted, in company, with few blocks."""
    dtype, kind = form
    if kind == "int8" and why_not_int8():
        pytest.skip(why_not_int8())
    case = CASES.index((name, form))
    which = ("random", "agrees")[case % 2]
    drafts = right = 0
    with backend(name):
        executor = executor_of(
            checkpoints[which],
            dtype=dtype,
            quantization=kind if kind in ("int8", "int4") else None,
            quantization_group_size=32 if kind == "int4" else None,
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
    print(f"{name} {form}, {which}: {right} of {drafts} drafts are right")
    assert 0 <= right < drafts
    assert right > 0 or which == "random"


def test_a_layer_that_agrees_is_always_right(checkpoints: dict[str, Path]) -> None:
    """Whatever is preempted and however prompts are cut: with each draft, also those from its own states."""
    executor = executor_of(checkpoints["agrees"])
    own = executor.speculator.drafter
    try:
        plain, drafted = greedy(random.Random(1)), greedy(random.Random(1))
        play(executor, plain, None, 1)
        serving = play(executor, drafted, own, 1)
        assert [one.answer for one in drafted] == [one.answer for one in plain]
        assert serving.right == serving.drafts > 50
        assert "MTP layer" in executor.info.detail
    finally:
        executor.close()


def test_drafts_are_what_the_formula_says(checkpoints: dict[str, Path]) -> None:
    """Of one request: each draft is the likeliest token of the reference, over the whole text before it."""
    directory = checkpoints["random"]
    executor = executor_of(directory, speculation=Speculation(method="mtp", num_speculative_tokens=2))
    own = executor.speculator.drafter
    hidden: list[Tensor] = []
    proposed: list[tuple[int, list[int]]] = []
    read, propose = own.read, own.propose

    def reading(slots, starts, counts, tables, states):
        del hidden[int(starts[0]) :]
        hidden.extend(states[: int(counts[0])].clone().unbind())
        read(slots, starts, counts, tables, states)

    def proposing(slots):
        found = propose(slots)
        if found:
            proposed.append((own._texts[0].length, found[0].tolist()))
            length = own._texts[0].length
            text = torch.from_numpy(own._texts[0].between(0, length).copy()).long()
            states, logits = reference(directory, text[1:], torch.stack(hidden[: length - 1]))
            assert found[0][0] == logits[-1].argmax()
            if len(found[0]) > 1:
                further = torch.cat((torch.stack(hidden[: length - 1]), states[-1:].float()))
                text = torch.cat((text[1:], torch.tensor(found[0][:1]).long()))
                assert found[0][1] == reference(directory, text, further)[1][-1].argmax()
        return found

    own.read, own.propose = reading, proposing
    try:
        request = Request(
            [int(n) for n in np.random.default_rng(2).integers(3, VOCAB, 50)], Sampling(0, 0.0), Stopping(25)
        )
        play(executor, [request], own, 1, preempts=0.0)
        assert len(request.tokens) == 25
        assert len(proposed) > 10
    finally:
        executor.close()


def test_the_number_of_drafts_follows_what_they_cost(checkpoints: dict[str, Path]) -> None:
    """With `by_cost` the answers are the same, whatever this machine is busy with."""
    speculation = Speculation(method="mtp", num_speculative_tokens=MOST, by_cost=True)
    executor = executor_of(checkpoints["agrees"], speculation=speculation)
    own = executor.speculator.drafter
    try:
        for number in range(4):
            plain, drafted = wishes(random.Random(number)), wishes(random.Random(number))
            play(executor, plain, None, number)
            play(executor, drafted, own, number)
            assert [one.answer for one in drafted] == [one.answer for one in plain]
    finally:
        executor.close()


def played(executor: TorchExecutor, prompt: list[int], blocks: list[int], found: int) -> Request:
    """A request alone, whose first `found` tokens are in its blocks already."""
    serving = Serving(executor, slots=SLOTS, budget=128, longest=LONGEST, seed=1, preempts=0.0)
    request = Request(list(prompt), Sampling(0, 0.0), Stopping(20), slot=0, epoch=1, blocks=blocks)
    effect = serving.slots.apply(
        Admit(
            0,
            1,
            pack_int32(prompt),
            len(prompt),
            found,
            pack_int32(blocks),
            request.sampling,
            request.stopping,
        )
    )
    executor.admit(*effect)
    serving.on[0] = request
    while serving.on:
        serving.step()
    request.reason = f"{serving.right} of {serving.drafts}"
    return request


@pytest.mark.parametrize("which", ["random", "agrees"])
def test_prefixes_that_are_found_and_blocks_that_came_from_elsewhere(
    which: str, checkpoints: dict[str, Path]
) -> None:
    """In blocks that an earlier request left, the layer's KV is used if it is there.  If not (the first
    request ran without drafts, as one of another instance), the text begins later for the layer."""
    executor = executor_of(checkpoints[which], num_blocks=64)
    own = executor.speculator.drafter
    size = executor.info.block_size
    prompt = np.random.default_rng(3).integers(0, VOCAB, 5 * size + 3).tolist()
    bases, rights, answers = [], [], []
    try:
        executor.speculator.drafter = None
        answers.append(played(executor, prompt, list(range(7)), 0).tokens)
        executor.speculator.drafter = own
        for blocks, found in (
            ([0, 1, 2, 3, 4, 10, 11], 5 * size),  # of the first, without the layer's
            (list(range(20, 27)), 0),  # computed here
            ([20, 21, 22, 23, 24, 30, 31], 5 * size),  # of that one
            ([40, 41, 42, 43, 44, 45, 46], 5 * size + 2),  # handed over
        ):
            if found % size:
                executor._pool.tensor[blocks] = executor._pool.tensor[list(range(20, 27))]
            admit, texts = own.admit, []

            def admitting(*args, admit=admit, texts=texts):
                admit(*args)
                texts.append(own._texts[0])

            own.admit = admitting
            request = played(executor, prompt, blocks, found)
            own.admit = admit
            answers.append(request.tokens)
            bases.append(texts[0].base)
            rights.append([int(number) for number in request.reason.split(" of ")])
    finally:
        executor.close()
    assert all(answer == answers[0] for answer in answers)
    assert bases == [5 * size, 0, 0, 6 * size]
    for right, drafts in rights:
        assert drafts > 0
        assert right == drafts or which == "random"
    assert rights[1][1] > rights[3][1], "there are none up to the next block"


def test_weights_change_with_the_model(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The layer's too: one that agrees takes the place of one that does not; and one must be there."""
    executor = executor_of(checkpoints["agrees"])
    own = executor.speculator.drafter
    wrong = tmp_path / "wrong"
    make_agreeing(wrong)
    tensors = load_file(wrong / "model.safetensors")
    tensors["model.mtp_linear_proj.0.weight"].neg_()
    save_file(tensors, wrong / "model.safetensors", {"format": "pt"})
    try:
        rights = []
        for directory in (wrong, checkpoints["agrees"]):
            executor.check_weights(str(directory))
            executor.update_weights(str(directory))
            assert not own._kv._content
            plain, drafted = greedy(random.Random(4)), greedy(random.Random(4))
            play(executor, plain, None, 1)
            serving = play(executor, drafted, own, 1)
            assert [one.answer for one in drafted] == [one.answer for one in plain]
            rights.append((serving.right, serving.drafts))
        assert rights[0][0] < rights[0][1]
        assert rights[1][0] == rights[1][1] > 50
        without = tmp_path / "without"
        make_checkpoint(without, "ernie4_5-moe", tie_word_embeddings=False)
        with pytest.raises(ValueError, match=r"no tensor 'model\.mtp_.*method mtp"):
            executor.check_weights(str(without))
    finally:
        executor.close()


def test_an_image_of_the_weights_has_the_layer_too(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """One worker makes it, another one maps it, and new weights are made beside it; who drafts otherwise has
    another image."""
    wrong = tmp_path / "wrong"
    make_agreeing(wrong)
    tensors = load_file(wrong / "model.safetensors")
    tensors["model.mtp_linear_proj.0.weight"].neg_()
    save_file(tensors, wrong / "model.safetensors", {"format": "pt"})
    with image_server() as server:
        executors = [
            executor_of(checkpoints["agrees"], weight_images=server, speculation=speculation)
            for speculation in (MTP, MTP, None)
        ]
        assert [one._memory.origin for one in executors] == ["filled", "mapped", "filled"]
        rights = []
        try:
            for directory in (None, wrong, checkpoints["agrees"]):
                for executor in executors[:2]:
                    if directory is not None:
                        executor.check_weights(str(directory))
                        executor.update_weights(str(directory))
                    requests = greedy(random.Random(4), 3)
                    serving = play(executor, requests, executor.speculator.drafter, 1)
                    rights.append((serving.right, serving.drafts))
        finally:
            for executor in executors:
                executor.close()
    assert rights[0] == rights[1] == rights[4] == rights[5]
    assert rights[2] == rights[3]
    assert rights[0][0] == rights[0][1] > 20
    assert rights[2][0] < rights[2][1]


def test_the_layer_is_not_loaded_unless_it_is_asked_for(checkpoints: dict[str, Path]) -> None:
    budget = 4 << 20
    sizes = {"num_blocks": None, "kv_cache_memory_bytes": budget}
    plain = executor_of(checkpoints["random"], speculation=None, **sizes)
    assert plain._model.mtp is None
    plain_bytes = plain._model.weight_bytes()
    plain.close()
    with_mtp = executor_of(checkpoints["random"], **sizes)
    try:
        elements = sum(tensor.numel() for tensor in mtp_tensors().values())
        assert with_mtp._model.weight_bytes() - plain_bytes == 4 * elements
        # Its KV is that of one layer beside three, and there are blocks for drafts ahead.
        ahead = with_mtp._draft._pool.num_blocks - with_mtp.info.num_blocks
        layer = with_mtp._draft._pool.block_bytes
        assert with_mtp.info.block_bytes == 3 * layer
        assert with_mtp.info.num_blocks == (budget - ahead * layer) // (4 * layer)
    finally:
        with_mtp.close()


def test_who_has_no_layer_is_refused_by_name(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ExecutorError, match=r"Qwen3MoeForCausalLM.*has no layer that predicts more"):
        executor_of(checkpoints["none"])
    with pytest.raises(LoadError, match=r"no tensor 'model\.mtp_block\.0\..*method mtp"):
        executor_of(checkpoints["promised"])
    make_checkpoint(tmp_path, "ernie4_5-moe")
    tensors = mtp_tensors()
    tensors["model.mtp_linear_proj.0.weight"] = tensors["model.mtp_linear_proj.0.weight"][:, :HIDDEN]
    save(tmp_path, {name: tensor.contiguous() for name, tensor in tensors.items()})
    with pytest.raises(LoadError, match=r"model\.mtp_linear_proj\.0\.weight"):
        executor_of(tmp_path)


def test_what_ends_with_its_first_token_never_runs_the_layer(checkpoints: dict[str, Path]) -> None:
    """As an instance that hands its requests over."""
    executor = executor_of(checkpoints["random"])
    try:
        executor._draft._mtp = None
        requests = [Request([5] * 40, Sampling(0, 0.0), Stopping(1)) for _ in range(6)]
        serving = play(executor, requests, executor.speculator.drafter, 1, preempts=0.0)
        assert all(len(request.tokens) == 1 for request in requests)
        assert serving.drafts == 0
    finally:
        executor.close()
