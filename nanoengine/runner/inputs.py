"""From a Step to the flat arrays that a forward pass takes, and their way to the device: one copy a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanoengine.scheduling.step import IntArray, Step

_ALIGN = 4  # words: 16 bytes, the widest load of a GPU


@dataclass(frozen=True, slots=True)
class FlatInputs:
    """Tokens of all rows, one after the other. T is their number. Everything is int32, so that one buffer takes all."""

    positions: IntArray  # [T] index of each token in its sequence
    kv_slots: IntArray  # [T] where its K and V go: block * block_size + offset
    query_start: IntArray  # [rows + 1] offsets of the rows in the T axis
    seq_lens: IntArray  # [rows] context lengths, this step's tokens included
    sampled_rows: IntArray  # [n] rows that sample
    sampled_at: IntArray  # [n] their last token's index in the T axis


def flatten(step: Step, block_size: int) -> FlatInputs:
    """Lay out a step's tokens; vectorised over all of them."""
    rows = len(step.slots)
    query_start = np.zeros(rows + 1, np.int32)
    np.cumsum(step.counts, out=query_start[1:])
    row: IntArray = np.arange(rows, dtype=np.int32)
    if step.num_decodes == rows:
        positions = step.starts
    else:
        row = np.repeat(row, step.counts)
        positions = np.arange(len(row), dtype=np.int32) + (step.starts - query_start[:-1])[row]
    blocks = step.block_table[row, positions // block_size]
    sampled_rows = np.flatnonzero(step.samples).astype(np.int32)
    return FlatInputs(
        positions=positions,
        kv_slots=blocks * block_size + positions % block_size,
        query_start=query_start,
        seq_lens=step.starts + step.counts,
        sampled_rows=sampled_rows,
        sampled_at=query_start[1:][sampled_rows] - 1,
    )


class Staging:
    """int32 arrays, written one after the other on the host and moved to the device by one copy.

    A step's arrays stay as they are until the step ``buffers`` later: as long as no more than that are in flight, none
    is overwritten before the device has read it. On a CPU host and device are the same memory and nothing is copied.
    """

    def __init__(self, words: int, buffers: int, device: torch.device) -> None:
        pinned = device.type == "cuda"  # else the copy would wait for the device
        hosts = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(buffers)]
        self._hosts = [(host, host.numpy()) for host in hosts]
        self._next = 0
        self._device = torch.zeros(words, dtype=torch.int32, device=device) if pinned else None

    def fixed(self, lengths: Sequence[int]) -> list[Tensor]:
        """Where on the device arrays that are sent first, each padded to its length, always come to lie."""
        assert self._device is not None, "on a CPU nothing has a fixed place"
        return [self._device[at : at + n] for at, n in zip(places(lengths), lengths, strict=False)]

    def send(self, arrays: Sequence[IntArray], pads: Sequence[int] = ()) -> list[Tensor]:
        """Move ``arrays`` to the device; array i of the first ``len(pads)`` takes ``pads[i]`` words or more.

        What is beyond an array within its pad is left from earlier steps. Returns views in the arrays' shapes.
        """
        offsets = self.move(arrays, pads)
        return [self.view(at, array.shape) for at, array in zip(offsets, arrays, strict=False)]

    def move(self, arrays: Sequence[IntArray], pads: Sequence[int] = ()) -> list[int]:
        """``send``, for who needs few of the views: where each array begins, and where the last one ends."""
        self._next = (self._next + 1) % len(self._hosts)
        host, view = self._hosts[self._next]
        lengths = [max(array.size, pad) for array, pad in zip(arrays, pads, strict=False)]
        lengths += [array.size for array in arrays[len(pads) :]]
        offsets = places(lengths)
        for at, array in zip(offsets, arrays, strict=False):
            view[at : at + array.size] = array.reshape(-1)
        if self._device is not None:
            end = offsets[-1]
            self._device[:end].copy_(host[:end], non_blocking=True)
        return offsets

    def view(self, at: int, shape: tuple[int, ...]) -> Tensor:
        """What was sent last, from word ``at`` on."""
        sent = self._hosts[self._next][0] if self._device is None else self._device
        return sent[at : at + math.prod(shape)].view(shape)


def padded(array: IntArray, size: int, value: int) -> IntArray:
    """``array`` and as many ``value`` as make ``size``."""
    result = np.full(size, value, np.int32)
    result[: len(array)] = array
    return result


def words(lengths: Sequence[int]) -> int:
    """Size of a ``Staging`` that takes arrays of these lengths."""
    return places(lengths)[-1]


def places(lengths: Sequence[int]) -> list[int]:
    """Where each array begins, and where the last one ends."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] - (-length // _ALIGN) * _ALIGN)
    return offsets
