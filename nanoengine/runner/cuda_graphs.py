"""CUDA graphs of decode steps, from the token embedding to the sampled token: one launch instead of hundreds.

A graph replays fixed kernels on fixed addresses, so there is one for each of a grid of batch sizes; a step runs in the
smallest that holds it, its missing rows padded with rows of length 0, which read and write nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE as Pool


def batch_sizes(most: int, fineness: int = 3) -> list[int]:
    """A grid of batch sizes up to ``most``: ``2**fineness`` steps from each power of two to the next.

    By default steps of about an eighth, so that padding costs at most that much, and every size up to 8.
    """
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += max(1, 1 << max(0, size.bit_length() - 1 - fineness))
    return [*sizes, most]


class StepGraphs:
    """Graphs of ``forward(rows, variant)``, for each number of rows in ``sizes`` (ascending), by variant.

    They share their memory, as only one runs at a time: what ``forward`` is to leave behind goes into tensors made
    before.
    """

    def __init__(
        self, forward: Callable[[int, bool], None], sizes: Mapping[bool, Sequence[int]], device: torch.device
    ) -> None:
        self._forward = forward
        self._sizes = {variant: list(each) for variant, each in sizes.items()}
        self._device = device
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}

    def capture(self, pool: Pool) -> None:
        """Record all graphs; the buffers that ``forward`` reads must hold something that it can compute with. ``pool``
        is memory that other graphs may have as well."""
        stream = torch.cuda.Stream(self._device)
        # What fills the buffers may still be under way; without this the first run could read what was there before.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        keys = [(rows, variant) for variant, sizes in self._sizes.items() for rows in sizes]
        # The largest first: the smaller ones then fit into the memory that it has taken.
        for rows, variant in sorted(keys, reverse=True):
            with torch.cuda.stream(stream):
                self._forward(rows, variant)  # compiles, and lets libraries choose kernels: not while recording
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self._forward(rows, variant)
            self._graphs[rows, variant] = graph
        torch.cuda.synchronize(self._device)

    def size(self, rows: int, variant: bool = False) -> int | None:
        """The smallest batch size with a graph that holds so many rows; None: there is none."""
        return next((size for size in self._sizes.get(variant, ()) if size >= rows), None)

    def replay(self, size: int, variant: bool = False) -> None:
        """Run the graph of a batch size."""
        self._graphs[size, variant].replay()
