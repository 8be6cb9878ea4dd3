"""Where in a choice's text each token begins, in characters: `text_offset` of /v1/completions.

Theory.  A token begins where the text of those before it ends, so one that completes no character, or is not
shown, takes no room.  A stop string that is complete takes its text away, also from tokens that came before
its last one.  So in a stream a token waits whose text is held back, until that is decided: where a token is
does not depend on how the stream was cut into chunks, and is what the whole answer says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.gateway.text.tokenizer import Tokenizer
from baton.protocol.params.sampling import TokenLogprobs


class TextOffsets:
    """Of one choice; the renderer gives it all tokens, in order."""

    __slots__ = ("_detokenizer", "_given", "_length", "_waiting")

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], *, echoed: int, skip_special_tokens: bool
    ) -> None:
        """`prompt`: what comes before the generated tokens.  `echoed`: so many characters of the
        choice's text are its."""
        self._detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=skip_special_tokens)
        self._length = echoed
        """Of the text that the tokens so far stand for."""
        self._given = echoed
        """Of the text that the client has: less while a stop string may be coming, or after one."""
        self._waiting: list[tuple[int, TokenLogprobs, int]] = []
        """Tokens that no chunk has told, with their places."""

    def prompt(self, ids: Sequence[int], text: str, tokenizer: Tokenizer) -> Iterator[int]:
        """Those of an echoed prompt, whose text may lack special tokens (a BOS that the tokenizer added)."""
        detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
        offset = 0
        for token in ids:
            yield min(offset, len(text))
            if token not in tokenizer.special_ids or text.startswith(tokenizer.token_text(token), offset):
                offset += len(detokenizer.push((token,)))

    def generated(self, ids: Sequence[int], text: str) -> Iterator[int]:
        """`text`: all that follows the prompt."""
        self._given += len(text)
        for token in ids:
            yield min(self._place(token), self._given)

    def streamed(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text: str, *, ended: bool
    ) -> tuple[list[int], list[TokenLogprobs], list[int]]:
        """Tokens that a chunk tells, their log-probabilities and places.  `ids`: those that came; `text`:
        what the client gets with them."""
        self._given += len(text)
        waiting = self._waiting
        waiting += [(token, one, self._place(token)) for token, one in zip(ids, logprobs, strict=True)]
        told = len(waiting)
        while not ended and told and waiting[told - 1][2] > self._given:
            told -= 1
        some = waiting[:told]
        del waiting[:told]
        return (
            [token for token, _, _ in some],
            [one for _, one, _ in some],
            [min(place, self._given) for _, _, place in some],
        )

    def _place(self, token: int) -> int:
        place = self._length
        self._length += len(self._detokenizer.push((token,)))
        return place
