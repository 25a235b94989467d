"""Detokenizer: the text of one answer while its tokens come in, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nanoengine.sampling.params import SamplingParams
from nanoengine.scheduling.step import IntArray
from nanoengine.text.tokenizer import Tokenizer


class Piece(NamedTuple):
    """What a push gave."""

    text: str  # whole characters that are certain to belong to the answer
    stop: str | None  # the stop string that ended the answer
    kept_tokens: int  # how many of the pushed tokens belong to the answer: fewer only where a stop string ended it


class Detokenizer:
    """Text of one sequence. The pieces do not depend on how the tokens were cut into pushes, only their borders do.

    Of several stop strings the one that is complete first acts, and of those complete with the same character the
    longest: so the answer is the one that a character-by-character reader would give, whatever the tokens' borders. A
    stop string that is spelled like a special token ("<|im_end|>") acts on that token, although its text is hidden.

    Text that may be the beginning of a stop string is held back until it is decided, and given out at the end.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int] | IntArray = ()) -> None:
        """``prompt_ids``: what the answer continues. A SentencePiece tokenizer drops a leading space at the start of a
        text, and there only; a prompt that ends in the middle of a character is continued.
        """
        self._decoder = tokenizer.decoder(
            prompt_ids, skip_special_tokens=params.skip_special_tokens, visible=params.visible_special_tokens
        )
        self._with_text = params.detokenize
        self._stops = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._stop_tokens: dict[int, str] = {}
        if params.skip_special_tokens:
            ids = ((tokenizer.token_id(stop), stop) for stop in params.stop)
            self._stop_tokens = {i: stop for i, stop in ids if i in tokenizer.special_ids and i is not None}
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=1)
        self._num_tokens = 0
        self._held = ""  # the longest end of the text so far that begins a stop string, not given out yet
        self._ended = False

    def push(self, token_ids: Sequence[int], finished: bool, ended_by_token: bool = False) -> Piece:
        """Take the next tokens. ``finished``: they are the last, so everything held is given out.

        ``ended_by_token``: the last one is the end-of-sequence or stop token that ended the answer. It counts, but its
        text shows only with ``include_stop_str_in_output``. After a piece with a stop, nothing is taken any more.
        """
        if self._ended:
            return Piece("", None, 0)
        self._ended = finished
        num_tokens = len(token_ids)
        if not self._with_text:
            return Piece("", None, num_tokens)
        if ended_by_token and not self._include_stop:
            token_ids = token_ids[:-1]
        if not self._stops:
            return Piece(self._decoder.push(token_ids, finished), None, num_tokens)
        text = ""
        for kept, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            if token_id in self._stop_tokens and self._num_tokens >= self._min_tokens:
                stop = self._stop_tokens[token_id]
                return self._end(text + self._rest() + (stop if self._include_stop else ""), stop, kept)
            new = self._decoder.push((token_id,), False)
            if not self._held and self._first_chars.isdisjoint(new):  # most tokens: no stop string begins here
                text += new
                continue
            certain, hit = self._search(new)
            text += certain
            if hit is not None:
                return self._end(text, hit, kept)
        if not finished:
            return Piece(text, None, num_tokens)
        certain, hit = self._search(self._decoder.push((), True))
        return self._end(text + certain + ("" if hit else self._held), hit, num_tokens)

    def _end(self, text: str, stop: str | None, kept_tokens: int) -> Piece:
        self._ended = True
        return Piece(text, stop, kept_tokens)

    def _rest(self) -> str:
        return self._held + self._decoder.push((), True)

    def _search(self, new: str) -> tuple[str, str | None]:
        """(text that may go out now that ``new`` was added, the stop string that ends the answer)."""
        window = self._held + new
        if new and self._num_tokens >= self._min_tokens:
            hits = []
            for stop in self._stops:
                # It must end in the new text: one that ended before, while min_tokens kept it from acting, is past.
                start = window.find(stop, max(0, len(self._held) - len(stop) + 1))
                if start >= 0:
                    hits.append((start + len(stop), start, stop))
            if hits:
                end, start, stop = min(hits)
                return window[: end if self._include_stop else start], stop
        certain = self._certain(window)
        self._held = window[certain:]
        return window[:certain], None

    def _certain(self, window: str) -> int:
        """Length of ``window`` without the longest end that is a beginning of a stop string."""
        for start in range(max(0, len(window) - self._longest + 1), len(window)):
            if window[start] in self._first_chars:
                end = window[start:]
                if any(stop.startswith(end) and len(stop) > len(end) for stop in self._stops):
                    return start
        return len(window)
