"""Deliberate defects in how steps are composed; see `mutations.py`."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.slots.composition import Composition, Prompt
from baton.worker.slots.slots import Slots
from tests.simulation.mutations import Patch, mutation


@mutation("a prompt is passed as long as shorter ones come", "passed", start=225)
def passed_for_ever(patch: Patch) -> None:
    patch.setattr(
        Prompt, "rank", property(lambda self: (self.priority, not self.resumed, self.left, self.number))
    )


@mutation("a step beside streams takes what fits", "streams")
def streams_wait(patch: Patch) -> None:
    patch.setattr(Composition, "_tokens", lambda self, queue, rows, context, streaming: (1 << 30, 1.0))


@mutation("while prompts are computed nobody decodes", "streams", "liveness")
def prompts_alone(patch: Patch) -> None:
    with_prompts = Slots._with_prompts

    def wrong(self, batch, chosen):
        none = slice(0, 0)
        alone = replace(
            batch,
            slots=batch.slots[none],
            starts=batch.starts[none],
            counts=batch.counts[none],
            tokens=batch.tokens[none],
            samples=batch.samples[none],
            num_decodes=0,
            drafts=None,
            plain=False,
        )
        return with_prompts(self, alone, chosen)

    patch.setattr(Slots, "_with_prompts", wrong)


@mutation("each rank composes by a measure of its own", "agreement", start=12)
def own_measures(patch: Patch) -> None:
    choose = Composition.choose

    def wrong(self, rows, context, streaming, room):
        self.measures = getattr(self, "measures", id(self) // 64 % 7) + 1
        return choose(self, rows, context, streaming, max(room - self.measures % 3, 1))

    patch.setattr(Composition, "choose", wrong)
