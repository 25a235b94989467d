"""Accuracy: whether an ingress knows what a replica has cached. Kept at the replica, which sees both sides."""

from __future__ import annotations

from dataclasses import dataclass

LIMIT = 0.2  # of prompt tokens, wrong in either way
MEMORY = 20  # calls that a running mean remembers, about
PATIENCE = 50  # calls between two times that it complains of one ingress
MAX_INGRESSES = 1024


@dataclass(slots=True)
class _Error:
    wrong: float = 0.0  # running mean of wrong tokens a call
    tokens: float = 0.0  # of prompt tokens a call
    calls: int = 0  # since the last complaint


class Accuracy:
    """Expected against found cached tokens of each ingress's calls.

    One call may well be wrong: blocks are evicted while it is on its way. An error that stays says that events were
    lost, or that hashes differ.
    """

    def __init__(self) -> None:
        self._errors: dict[str, _Error] = {}

    def add(self, ingress: str, expected: int, found: int, tokens: int) -> bool:
        """One call's figures, in prompt tokens. True: its ingress has been wrong for long and needs a snapshot."""
        if ingress not in self._errors and len(self._errors) >= MAX_INGRESSES:
            self._errors.clear()
        error = self._errors.setdefault(ingress, _Error())
        error.wrong += (abs(expected - found) - error.wrong) / MEMORY
        error.tokens += (tokens - error.tokens) / MEMORY
        error.calls += 1
        if error.calls < PATIENCE or error.wrong <= LIMIT * error.tokens:
            return False
        self._errors[ingress] = _Error()
        return True
