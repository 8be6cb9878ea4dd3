"""Answers with drafts are those without, to the last bit, as clients of real servers get them.

`make soak-speculation` asks 10,000 requests in all: of models of several shapes, one of them with an MTP
layer that drafts, in float32, bf16 and int8, by one and two ranks; alone and batched, preempted, handed over,
and beside `kill -9`. Without BATON_SOAK_SPECULATION some dozens of two models are asked. Everything is a
function of BATON_SEED; what differs is printed as the request and its section, and
BATON_SOAK_SECTION="mixture int8 1" asks those of one section again.

Each part must have computed drafts that were right and drafts that were wrong, else it shows nothing. That it
would find a difference is shown by a server that accepts a draft too many.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from baton.model.layers.int8 import why_not_int8
from tests.e2e.server import Server
from tests.e2e.speculating.answers import Answer
from tests.e2e.speculating.parts import (
    FORMS,
    MODELS,
    PARTS,
    ROOM,
    Part,
    Running,
    Section,
    learn,
    model_of,
)
from tests.e2e.speculating.requests import Request

MANY = int(os.environ.get("BATON_SOAK_SPECULATION", "0"))
SEED = os.environ.get("BATON_SEED", "16")
ALL = [
    *(Section(model, form) for form in FORMS for model in MODELS),
    *(Section(model, "float32", 2) for model in ("embedded", "windows", "mixture", "mtp")),
    Section("groups", "bfloat16", 2),
]
SECTIONS = [section for section in ALL if str(section) == os.environ.get("BATON_SOAK_SECTION", str(section))]
assert SECTIONS, f"BATON_SOAK_SECTION: give one of {', '.join(map(str, ALL))}"
if not MANY:
    SECTIONS = [Section("embedded", "float32"), Section("mtp", "float32")]
SMALL = ("preempted", "killed")
"""Parts of the small form."""
PARTS_HERE = [part for part in PARTS if MANY or part.name in SMALL]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 + MANY)]
COUNT = -(-MANY // (len(ALL) * len(PARTS)))
"""Requests of a part; 0: the small form has some dozens, and fewer of the MTP layer."""


@pytest.fixture(scope="module", params=SECTIONS, ids=str)
def section(request: pytest.FixtureRequest) -> Section:
    found: Section = request.param
    if found.form == "int8" and why_not_int8():
        pytest.skip(why_not_int8())
    return found


@pytest.fixture(scope="module")
def model(section: Section, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str | None]:
    with model_of(section, tmp_path_factory.mktemp("model")) as directory:
        yield directory


@pytest.fixture(scope="module")
def known(section: Section, model: str | None) -> list[tuple[Request, Answer]]:
    """Requests, and what a server without drafts answers."""
    with Server(*section.flags, "--speculation", "off", *ROOM, model=model) as server:
        found = learn(server, section, COUNT or (12 if section.model == "mtp" else 36), SEED)
        assert server.metric("baton:spec_decode_num_draft_tokens_total") == 0
    failed = [(answer.body, str(request)) for request, answer in found if answer.status != 200]
    ends = Counter(choice.get("finish_reason") for _, answer in found for choice in answer.choices)
    print(f"{section}: {len(found)} requests, {len(failed)} of them fail; choices end by {dict(ends)}")
    assert len(failed) <= len(found) // 20, failed[:3]
    return found


@pytest.mark.parametrize("part", PARTS_HERE, ids=lambda part: part.name)
def test_answers_are_those_without_drafts(
    section: Section, model: str | None, part: Part, known: list[tuple[Request, Answer]]
) -> None:
    with Server(*section.flags, *section.drafts(part.by_cost), *part.flags, model=model) as server:
        outcome = Running(server, part, known, random.Random(f"{SEED} {section} {part.name}")).run()
        log = server.log()
    print(f"{section}, {part.name}: {outcome.line()}", *outcome.wrong[:5], sep="\n", flush=True)
    assert not outcome.wrong, f"{len(outcome.wrong)} of {outcome.asked}:\n" + "\n".join(outcome.wrong[:5])
    if not (part.kills and section.ranks > 1):  # (there a rank tells where it was when it lost the other one)
        assert "Traceback" not in log, log
    assert outcome.asked == len(known)
    if part.sure or MANY:
        assert 0 < outcome.right < outcome.drafted
        assert outcome.met > 0


def test_a_draft_too_many_is_found(
    section: Section,
    model: str | None,
    known: list[tuple[Request, Answer]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "faults"))
    part = Part("with a fault", ROOM, (8,))
    with Server(*section.flags, *section.drafts(False), *part.flags, model=model) as server:
        running = Running(server, part, known, random.Random(1))
        with contextlib.suppress(httpx.HTTPError):  # (its worker may notice, until the server gives up)
            running.run()
    outcome = running.outcome
    print(f"{section}, a draft too many: {outcome.line()}")
    assert any(": .choices" in what for what in outcome.wrong), outcome.wrong[:3]
