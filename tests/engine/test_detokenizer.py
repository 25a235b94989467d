"""The incremental detokeniser: pieces must add up to the decoded whole, whatever the pushes and the stop strings."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.sampling.params import SamplingParams
from nanoengine.text.detokenizer import Detokenizer
from nanoengine.text.tokenizer import Tokenizer
from tests.engine.trained_tokenizers import AWKWARD, BACKENDS, trained

KINDS = sorted(BACKENDS)
HAS_BYTE_FALLBACK = ("llama", "llama5", "gemma")


@st.composite
def token_ids(draw, kind: str, min_size: int = 0) -> list[int]:
    """Any ids: arbitrary ones, encoded text, single bytes, ids without a token."""
    tokenizer = trained(kind)
    piece = st.one_of(
        st.lists(st.integers(0, tokenizer.vocab_size + 3), min_size=1, max_size=6),
        st.sampled_from(AWKWARD).map(lambda text: tokenizer.encode(text[:20], add_special_tokens=False)),
        st.text(max_size=8).map(lambda text: tokenizer.encode(text, add_special_tokens=False)),
        st.integers(5, 260).map(lambda i: [i]),  # the bytes of the SentencePiece kinds
    )
    ids = list(itertools.chain(*draw(st.lists(piece, max_size=6))))
    return ids if len(ids) >= min_size else ids + [7] * min_size


def chunks(ids: list[int], cuts: list[int]) -> list[list[int]]:
    borders = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(borders)] or [[]]


def stream(detokenizer: Detokenizer, pushes: list[list[int]]) -> tuple[str, str | None, int, list[str]]:
    """(whole text, stop, tokens kept, pieces)."""
    pieces, kept = [], 0
    for index, push in enumerate(pushes):
        piece = detokenizer.push(push, index == len(pushes) - 1)
        pieces.append(piece.text)
        kept += piece.kept_tokens
        if piece.stop is not None:
            return "".join(pieces), piece.stop, kept, pieces
    return "".join(pieces), None, kept, pieces


cuts_strategy = st.lists(st.integers(0, 1000), max_size=12)


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
@settings(max_examples=120, deadline=None)
def test_pieces_add_up_to_the_whole(kind, data):
    tokenizer = trained(kind)
    ids, cuts, skip = data.draw(token_ids(kind)), data.draw(cuts_strategy), data.draw(st.booleans())
    params = SamplingParams(skip_special_tokens=skip)
    text, stop, kept, _ = stream(Detokenizer(tokenizer, params), chunks(ids, cuts))
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert (stop, kept) == (None, len(ids))
    theirs = tokenizer._backend.decode(ids, skip_special_tokens=skip)
    if kind in HAS_BYTE_FALLBACK and "\ufffd" in theirs:
        # The library turns all of a run of byte tokens into U+FFFD if any of it is invalid; we keep its characters.
        assert "\ufffd" in text
    else:
        assert text == theirs


@pytest.mark.parametrize("kind", HAS_BYTE_FALLBACK)
def test_invalid_byte_runs(kind):
    tokenizer = trained(kind)

    def decode(*pieces: int | str) -> str:
        return tokenizer.decode([tokenizer.token_id(p if isinstance(p, str) else f"<0x{p:02X}>") for p in pieces])

    assert decode("e", 0xE4, 0xBD, 0xA0, "a") == "e你a"
    assert decode("e", 0xE4, 0xBD, "a") == "e\ufffd\ufffda"  # as the library: one for each byte
    assert decode("e", 0xFF, 0xFE) == "e\ufffd\ufffd"
    assert decode("e", 0xE4, 0xBD, 0xA0, 0xFF, "a") == "e你\ufffda"  # the library: four U+FFFD
    assert decode("e", 0xE4, 0xBD) == "e\ufffd\ufffd"


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_text_continues_the_prompt(kind, data):
    """A space at the start of an answer is part of it, unless there is no text before."""
    tokenizer = trained(kind)
    prompt = tokenizer.encode(data.draw(st.sampled_from(AWKWARD)))
    ids, cuts = data.draw(token_ids(kind)), data.draw(cuts_strategy)
    text, *_ = stream(Detokenizer(tokenizer, SamplingParams(), prompt), chunks(ids, cuts))
    assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + ids)


def test_a_prompt_that_ends_inside_a_character_is_continued():
    tokenizer = trained("byte_level")
    ids = tokenizer.encode("x𝄞y", add_special_tokens=False)
    assert len(ids) == 6  # four bytes of one character
    for cut in range(1, 5):
        detokenizer = Detokenizer(tokenizer, SamplingParams(), ids[:cut])
        assert detokenizer.push(ids[cut:], True).text == "𝄞y"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_never_half_a_character(kind, size):
    tokenizer = trained(kind)
    for text in AWKWARD:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.token_id("<unk>") in ids:
            continue  # unigram cannot spell it
        pushes = [ids[i : i + size] for i in range(0, len(ids), size)] or [[]]
        whole, _, _, pieces = stream(Detokenizer(tokenizer, SamplingParams(skip_special_tokens=False)), pushes)
        assert not any("\ufffd" in piece for piece in pieces)
        if kind == "byte_level" or (kind == "gemma" and "▁" not in text):  # which stands for a space there
            assert whole == text


@pytest.mark.parametrize("length", range(1, 12))
def test_an_answer_cut_inside_a_character_ends_in_one_replacement(length):
    tokenizer = trained("byte_level")
    ids = tokenizer.encode("ok 𝄞𝄞", add_special_tokens=False)[:length]
    text, *_ = stream(Detokenizer(tokenizer, SamplingParams()), [[i] for i in ids])
    assert text == tokenizer.decode(ids) == tokenizer._backend.decode(ids)


# -- stop strings -----------------------------------------------------------------------------------------------------


def visible(tokenizer: Tokenizer, ids: list[int], count: int) -> str:
    """Text that is certain after ``count`` tokens; all of it after the last."""
    if count == len(ids):
        return tokenizer.decode(ids)
    return tokenizer.decoder().push(ids[:count], final=False)


def reference(tokenizer: Tokenizer, ids: list[int], params: SamplingParams) -> tuple[str, str | None, int]:
    """Read character by character; a stop string acts when its last character is there, and enough tokens are."""
    text = tokenizer.decode(ids)
    for end in range(1, len(text) + 1):
        kept = next(k for k in range(len(ids) + 1) if len(visible(tokenizer, ids, k)) >= end)
        stops = [stop for stop in params.stop if text[:end].endswith(stop)]
        if stops and kept >= params.min_tokens:
            stop = max(stops, key=len)
            return text[: end if params.include_stop_str_in_output else end - len(stop)], stop, kept
    return text, None, len(ids)


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_stop_strings_equal_the_character_by_character_reader(kind, data):
    tokenizer = trained(kind)
    ids = data.draw(token_ids(kind))
    text = tokenizer.decode(ids)
    if len(text) > 1:  # mostly strings that occur
        spans = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 6)).map(lambda s: text[s[0] : s[0] + s[1]])
    else:
        spans = st.just("a")
    stops = data.draw(st.lists(spans | st.text("ab \n", min_size=1, max_size=3), min_size=1, max_size=3))
    params = SamplingParams(
        stop=tuple(stops),
        min_tokens=data.draw(st.sampled_from([0, 0, 1, 2, 5])),
        include_stop_str_in_output=data.draw(st.booleans()),
        max_tokens=None,
    )
    want = reference(tokenizer, ids, params)
    for cuts in (data.draw(cuts_strategy), list(range(len(ids))), []):
        detokenizer = Detokenizer(tokenizer, params)
        assert stream(detokenizer, chunks(ids, cuts))[:3] == want
        assert want[1] is None or detokenizer.push([5, 6], False) == ("", None, 0)


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_only_what_may_become_a_stop_string_is_held_back(kind, data):
    tokenizer = trained(kind)
    ids = data.draw(token_ids(kind, min_size=1))
    stops = tuple(data.draw(st.lists(st.text("ab e", min_size=2, max_size=4), min_size=1, max_size=2)))
    stops = tuple(stop + "\u2603" for stop in stops)  # begins often, never completes
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stops))
    out = ""
    for count, token_id in enumerate(ids, 1):
        out += detokenizer.push([token_id], False).text
        certain = tokenizer.decoder().push(ids[:count], final=False)
        held = max(k for s in stops for k in range(len(s)) if certain.endswith(s[:k]))
        assert out == certain[: len(certain) - held]
    assert out + detokenizer.push([], True).text == tokenizer.decode(ids)


def spelled(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    ids = []
    for piece in pieces:
        ids += tokenizer.encode(piece, add_special_tokens=False)
    return ids


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens(include):
    tokenizer = trained("byte_level")
    ids = spelled(tokenizer, *"ABCDEFG")
    params = SamplingParams(stop=("CDE",), include_stop_str_in_output=include)
    detokenizer = Detokenizer(tokenizer, params)
    pieces = [detokenizer.push([i], False) for i in ids]
    assert [p.text for p in pieces] == ["A", "B", "", "", "CDE" if include else "", "", ""]
    assert [p.stop for p in pieces] == [None, None, None, None, "CDE", None, None]
    assert [p.kept_tokens for p in pieces] == [1, 1, 1, 1, 1, 0, 0]


def test_a_held_beginning_comes_out_when_it_is_refuted_or_the_answer_ends():
    tokenizer = trained("byte_level")
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=("zzz",)))
    pieces = [detokenizer.push(spelled(tokenizer, c), False).text for c in "azzbzz"]
    assert pieces == ["a", "", "", "zzb", "", ""]
    assert detokenizer.push([], True).text == "zz"


def test_the_stop_that_is_complete_first_acts_and_of_two_the_longer():
    tokenizer = trained("byte_level")

    def run(text: str, *stops: str) -> tuple[str, str | None]:
        one_push = stream(Detokenizer(tokenizer, SamplingParams(stop=stops)), [spelled(tokenizer, text)])
        by_char = stream(Detokenizer(tokenizer, SamplingParams(stop=stops)), [spelled(tokenizer, c) for c in text])
        assert one_push[:2] == by_char[:2]
        return one_push[:2]

    assert run("xabcdy", "abcd", "bc") == ("xa", "bc")
    assert run("xabcdy", "cd", "abcd") == ("x", "abcd")
    assert run("xaab", "ab") == ("xa", "ab")
    assert run("xyz", "ab") == ("xyz", None)


def test_min_tokens_lets_stop_strings_pass():
    tokenizer = trained("byte_level")
    ids = spelled(tokenizer, *"aSbSc")
    for min_tokens, want in ((0, ("a", "S", 2)), (2, ("a", "S", 2)), (3, ("aSb", "S", 4)), (5, ("aSbSc", None, 5))):
        params = SamplingParams(stop=("S",), min_tokens=min_tokens)
        assert stream(Detokenizer(tokenizer, params), [ids])[:3] == want
        assert stream(Detokenizer(tokenizer, params), [[i] for i in ids])[:3] == want
    passed = Detokenizer(tokenizer, SamplingParams(stop=("S", "bS"), min_tokens=5))
    assert [passed.push([i], False).text for i in ids] == ["a", "S", "", "bS", "c"]  # what is past is not held back


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_a_stop_string_that_is_a_special_token(include, skip):
    tokenizer = trained("byte_level")
    ids = spelled(tokenizer, "hi", "<|im_end|>", "more")
    params = SamplingParams(
        stop=("<|im_end|>", "hi there"), include_stop_str_in_output=include, skip_special_tokens=skip
    )
    text, stop, kept, _ = stream(Detokenizer(tokenizer, params), [[i] for i in ids])
    assert (text, stop, kept) == ("hi<|im_end|>" if include else "hi", "<|im_end|>", ids.index(4) + 1)


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stops", [(), ("zz",)])
def test_the_token_that_ended_the_answer_counts_but_does_not_show(stops):
    tokenizer = trained("byte_level")
    ids = spelled(tokenizer, *"ab.")

    def last(**params) -> tuple[str, str | None, int]:
        detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stops, **params))
        detokenizer.push(ids[:1], False)
        return detokenizer.push(ids[1:], True, ended_by_token=True)

    assert last() == ("b", None, 2)
    assert last(include_stop_str_in_output=True) == ("b.", None, 2)
    eos = tokenizer.encode("</s>", add_special_tokens=False)
    for skip in (True, False):
        detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stops, skip_special_tokens=skip))
        assert detokenizer.push(eos, True, ended_by_token=True) == ("", None, 1)


def test_special_tokens_are_hidden_or_shown():
    tokenizer = trained("llama")
    ids = spelled(tokenizer, "a", "<|im_end|>", "b")
    assert Detokenizer(tokenizer, SamplingParams()).push(ids, True).text == tokenizer._backend.decode(ids)
    shown = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=False)).push(ids, True).text
    assert "<|im_end|>" in shown


def test_without_text():
    detokenizer = Detokenizer(trained("byte_level"), SamplingParams(detokenize=False))
    assert detokenizer.push([1, 2, 3], False) == ("", None, 3)
    assert detokenizer.push([4], True) == ("", None, 1)
