"""Which tokens each sequence has seen, and the penalties on them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanoengine.scheduling.step import IntArray


class Penalties:
    """Token counts of the slots that use penalties, and the penalties applied to logits.

    A slot's counts are one int32 row over the vocabulary: twice the occurrences in the output, plus 1 for a token of
    the prompt. One array thus answers both questions, "seen at all?" (> 0) and "how often in the output?" (>> 1).
    Rows are made only for slots that ask (0.6 MB each at a vocabulary of 152k) and are kept for the slot's next user;
    the pool doubles when it is full.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._row = np.full(num_slots, -1, dtype=np.int64)  # slot -> row of _counts
        self._num_rows = 0
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)

    def admit(self, slot: int, prompt: IntArray, output: IntArray) -> None:
        """Set the slot's counts from scratch: whatever its last user, or this sequence's last stay, left is gone."""
        if self._row[slot] < 0:
            if self._num_rows == len(self._counts):
                grown = self._counts.new_zeros(max(8, 2 * self._num_rows), self._vocab_size)
                grown[: self._num_rows] = self._counts
                self._counts = grown
            self._row[slot] = self._num_rows
            self._num_rows += 1
        counts = 2 * np.bincount(output, minlength=self._vocab_size)
        # Buffered indexing: once per distinct token. A prompt may hold ids of the padding, which are never sampled.
        counts[prompt[prompt < self._vocab_size]] += 1
        self._counts[int(self._row[slot])] = torch.from_numpy(counts.astype(np.int32))

    def apply(self, logits: Tensor, slots: IntArray, repetition: Tensor, presence: Tensor, frequency: Tensor) -> None:
        """Penalise ``logits`` [n, vocab] float32 in place; the penalties are float32 [n].

        Repetition (CTRL, arXiv 1909.05858, section 4.1) looks at prompt and output: a positive logit is divided by it,
        a negative one multiplied. Presence and frequency (OpenAI's definition) look at the output only.
        """
        # Arithmetic in place, instead of torch.where and boolean masks: on CPU that is several times faster.
        counts = self._counts[self._rows(slots)]
        buffer = counts.to(torch.float32).clamp_(max=1)  # 1 where seen
        torch.lerp(torch.ones_like(repetition).unsqueeze(1), repetition.unsqueeze(1), buffer, out=buffer)
        positive = logits.clamp(min=0).div_(buffer)
        logits.clamp_(max=0).mul_(buffer).add_(positive)
        buffer.copy_(counts.bitwise_right_shift_(1))  # occurrences in the output
        logits.addcmul_(buffer, frequency.unsqueeze(1), value=-1)
        logits.addcmul_(buffer.clamp_(max=1), presence.unsqueeze(1), value=-1)

    def record(self, slots: IntArray, tokens: Tensor) -> None:
        """Count the token int64 [n] that each slot has just sampled."""
        self._counts.view(-1).index_add_(
            0, self._rows(slots) * self._vocab_size + tokens, torch.full_like(tokens, 2, dtype=torch.int32)
        )

    def _rows(self, slots: npt.NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(self._row[slots]).to(self._device, non_blocking=True)
