"""MaskedRows: the rows of a step that are sampled with masks, on their way to the device: one copy, to fixed addresses.

So a CUDA graph can hold the sampling, and the copy, on a stream of its own, runs beside the forward pass: 64 rows of
152,000 tokens are 1.2 MB, 40 us.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanoengine.runner.inputs import places
from nanoengine.scheduling.step import IntArray


class MaskedRows:
    """Up to ``most`` rows: where in the logits each is, its slot and the position that it samples, and its mask.

    One block of int32 on the host, [most] rows, [most] slots, [most] positions, [most, words] masks, and the same on a
    device. One is enough, however many steps are in flight: a step's masks are made when the one before has retired,
    and so after the device has read that one's. On a CPU host and device are the same memory and nothing is copied.
    """

    def __init__(self, most: int, words: int, device: torch.device) -> None:
        """``words`` of a mask."""
        self._most, self._words, self._pinned = most, words, device.type == "cuda"
        self._places = places((most, most, most, most * words))
        self._device = torch.zeros(self._places[-1], dtype=torch.int32, device=device) if self._pinned else None
        self._stream = torch.cuda.Stream(device) if self._pinned else None

    @cached_property
    def _host(self) -> Tensor:
        # For 1,024 rows of 152,000 tokens 19 MB, of which torch's pinned memory makes 32: not before it is needed. What
        # is not pinned, no row touches that is not there.
        return torch.empty(self._places[-1], dtype=torch.int32, pin_memory=self._pinned)

    @cached_property
    def _views(self) -> list[IntArray]:
        host = self._host.numpy()
        return [host[begin : begin + self._most] for begin in self._places[:3]]

    @property
    def masks(self) -> IntArray:
        """Where masks are written, int32 [most, words]."""
        begin = self._places[3]
        return self._host.numpy()[begin : begin + self._most * self._words].reshape(self._most, self._words)

    def write(self, at: npt.NDArray[np.integer], slots: IntArray, positions: IntArray, size: int) -> None:
        """Whose the first masks are, as [n] each; those from there on to ``size`` are nobody's.

        Nobody's row has slot -1, for which nothing is read, and whose token goes to the row after the last.
        """
        count = len(at)
        for view, array, pad in zip(self._views, (at, slots, positions), (self._most, -1, 0), strict=True):
            view[:count] = array
            view[count:size] = pad

    def send(self, count: int) -> None:
        """Copy the first rows to the device; what is launched from here on reads them."""
        if self._device is not None and self._stream is not None:
            end = self._places[3] + count * self._words
            # Nothing that is under way reads what is there: see above.
            with torch.cuda.stream(self._stream):
                self._device[:end].copy_(self._host[:end], non_blocking=True)
            torch.cuda.current_stream(self._device.device).wait_stream(self._stream)

    def views(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of what was sent: (rows [count], slots [count], positions [count], masks [count, words])."""
        block = self._host if self._device is None else self._device
        rows, slots, positions = (block[begin : begin + count] for begin in self._places[:3])
        begin = self._places[3]
        return rows, slots, positions, block[begin : begin + count * self._words].view(count, self._words)
