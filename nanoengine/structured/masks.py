"""Masks: which tokens a row may sample, one bit for each.

Int32 [rows, words]; token t is allowed if bit t % 32 of word t // 32 is set. That is llguidance's form. Bits beyond the
last token mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nanoengine.scheduling.step import BoolArray, IntArray


def words(num_tokens: int) -> int:
    """How many a mask has."""
    return -(-num_tokens // 32)


def empty(rows: int, num_tokens: int) -> IntArray:
    """Memory for masks."""
    return np.empty((rows, words(num_tokens)), np.int32)


def only(ids: Iterable[int], num_tokens: int) -> IntArray:
    """The mask, int32 [words], that allows these tokens and no others."""
    bits = np.zeros(words(num_tokens) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def allowed(masks: IntArray, num_tokens: int) -> BoolArray:
    """Masks, int32 [..., words], as bool [..., num_tokens]."""
    return np.unpackbits(masks.view(np.uint8), axis=-1, bitorder="little")[..., :num_tokens].view(np.bool_)
