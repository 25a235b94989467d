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
        counts[prompt] += 1  # buffered indexing: once per distinct token
        self._counts[int(self._row[slot])] = torch.from_numpy(counts.astype(np.int32))

    def apply(self, logits: Tensor, slots: IntArray, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
        """Penalised copy of ``logits`` [n, vocab] float32; the penalties are float32 [n].

        Repetition (CTRL, arXiv 1909.05858, section 4.1) looks at prompt and output: a positive logit is divided by it,
        a negative one multiplied. Presence and frequency (OpenAI's definition) look at the output only.
        """
        counts = self._counts[self._rows(slots)]
        repetition = repetition.unsqueeze(1)
        penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(counts > 0, penalised, logits)
        occurrences = counts >> 1
        logits -= frequency.unsqueeze(1) * occurrences
        logits -= presence.unsqueeze(1) * (occurrences > 0)
        return logits

    def record(self, slots: IntArray, tokens: Tensor) -> None:
        """Count the token int64 [n] that each slot has just sampled."""
        self._counts.view(-1).index_add_(
            0, self._rows(slots) * self._vocab_size + tokens, torch.full_like(tokens, 2, dtype=torch.int32)
        )

    def _rows(self, slots: npt.NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(self._row[slots]).to(self._device, non_blocking=True)
