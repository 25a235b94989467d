"""Logit bias: what a request adds to the logits of a few tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Biases:
    """The biases of the slots that have some, on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of: dict[int, tuple[Tensor, Tensor]] = {}  # slot -> (ids int64 [m], values float32 [m])

    def admit(self, slot: int, bias: Mapping[int, float]) -> None:
        """Set the slot's biases, by token id; whatever its last user left is gone."""
        ids = torch.tensor(list(bias), dtype=torch.int64, device=self._device)
        values = torch.tensor(list(bias.values()), dtype=torch.float32, device=self._device)
        self._of[slot] = ids, values

    def apply(self, logits: Tensor, at: npt.NDArray[np.intp], slots: npt.NDArray[np.integer]) -> None:
        """Add to rows ``at`` of ``logits`` [n, vocab] float32, in place, what their ``slots`` ask for."""
        ids, values = zip(*(self._of[slot] for slot in slots.tolist()), strict=True)
        counts = [len(one) for one in ids]
        rows = torch.from_numpy(np.repeat(at, counts)).to(self._device, non_blocking=True)
        logits.index_put_((rows, torch.cat(ids)), torch.cat(values), accumulate=True)
