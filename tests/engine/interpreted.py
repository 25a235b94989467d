"""What tests share that run the GPU's way of a step on a CPU, its kernels interpreted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.engine.triton_device import DEVICE  # isort: skip  # first: it says where kernels run
from nanoengine.kernels import sample

ONLY = pytest.mark.skipif(DEVICE != "cpu", reason="kernels are compiled here, and take no memory of a CPU")


def small_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of a kernel's loop costs the interpreter 10 ms: as many as a small vocabulary needs."""
    for name, size in (("_CHUNK", 128), ("_GROUP", 2), ("_FEW", 64)):
        monkeypatch.setattr(sample, name, size)


class Graphs:
    """For these sizes (ascending), as ``StepGraphs``: what a graph holds is done when it is replayed."""

    def __init__(self, forward: Callable[[int, bool], None], sizes: Sequence[int]) -> None:
        self._forward, self._sizes = forward, sizes
        self.replayed: list[int] = []

    def size(self, rows: int) -> int | None:
        return next((size for size in self._sizes if size >= rows), None)

    def replay(self, size: int) -> None:
        self.replayed.append(size)
        self._forward(size, False)
