"""StoredTensor: one tensor of a checkpoint, still on disk, whatever the format it is stored in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor by the name that transformers gives it. ``read_into`` fills a tensor of the same shape, whatever its
    dtype and device, and may be called more than once: a tied weight goes to two places."""

    name: str
    shape: tuple[int, ...]
    read_into: Callable[[Tensor], None]
