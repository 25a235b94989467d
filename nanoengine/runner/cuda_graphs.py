"""CUDA graphs of decode steps, from the token embedding to the sampled token: one launch instead of hundreds.

A graph replays fixed kernels on fixed addresses, so there is one for each of a grid of batch sizes; a step runs in the
smallest that holds it, its missing rows padded with rows of length 0, which read and write nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def batch_sizes(most: int) -> list[int]:
    """The grid: every size up to 8, then steps of about an eighth, so that padding costs at most that much."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += max(1, 1 << max(0, size.bit_length() - 4))
    return [*sizes, most]


class DecodeGraphs:
    """Graphs of ``forward(rows)``, one for each of ``sizes`` (ascending).

    They share one memory pool, as only one runs at a time: what ``forward`` is to leave behind goes into tensors made
    before.
    """

    def __init__(self, forward: Callable[[int], None], sizes: Sequence[int], device: torch.device) -> None:
        self._forward = forward
        self._sizes = list(sizes)
        self._device = device
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self) -> None:
        """Record all graphs; the buffers that ``forward`` reads must hold something that it can compute with."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)
        # The largest first: the smaller ones then fit into the memory that it has taken.
        for rows in reversed(self._sizes):
            with torch.cuda.stream(stream):
                self._forward(rows)  # compiles kernels and lets libraries choose theirs: not allowed while recording
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self._forward(rows)
            self._graphs[rows] = graph
        torch.cuda.synchronize(self._device)

    def size(self, rows: int) -> int | None:
        """The smallest batch size with a graph that holds so many rows; None: there is none."""
        return next((size for size in self._sizes if size >= rows), None)

    def replay(self, size: int) -> None:
        """Run the graph of a batch size."""
        self._graphs[size].replay()
