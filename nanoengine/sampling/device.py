"""DeviceSampler: the rows that need no more than temperature and filters, sampled by one fused kernel.

Settings live on the device, in a table indexed by slot, so that a step names slots and a CUDA graph can hold the
sampling too. Penalties, biases, min_tokens and log-probabilities are ``Sampler``'s: rows with those are few.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoengine.kernels.sample import pack_settings, sample

_SETTINGS = pack_settings(1.0, 0, 1.0, 0.0, 0).shape[1]


class DeviceSampler:
    """For ``num_slots`` sequences and one slot more, ``num_slots``, that rows of padding name."""

    pack = staticmethod(pack_settings)

    def __init__(self, num_slots: int, fallback: int, device: torch.device) -> None:
        self._fallback = fallback
        self._settings = torch.zeros(num_slots + 1, _SETTINGS, dtype=torch.int32, device=device)

    def update(self, slots: Tensor, settings: Tensor) -> None:
        """Set the slots int32 [n] to ``settings`` int32 [n, 8], as ``pack_settings`` makes them."""
        self._settings.index_copy_(0, slots.long(), settings)

    def __call__(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        tokens: Tensor,
        last_token: Tensor,
        rows: Tensor | None = None,
        masks: Tensor | None = None,
    ) -> None:
        """Sample each row of ``logits`` [n, vocab] into ``tokens`` int32 [n] and ``last_token`` int32 [num_slots + 1].

        ``slots`` and ``positions`` are int32 [n], as ``Sampler`` takes them. With ``masks`` int32 [m, words], those m
        ``rows`` int32 [m] only, whose slots and positions are then given.
        """
        sample(
            logits,
            self._settings,
            slots,
            positions,
            tokens,
            last_token,
            fallback=self._fallback,
            rows=rows,
            masks=masks,
        )
