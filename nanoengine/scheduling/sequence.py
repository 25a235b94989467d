"""Sequence: one request on its way through the engine, and the per-slot arrays of those that run."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from nanoengine.cache.prefix_hash import PrefixChain
from nanoengine.sampling.params import SamplingParams
from nanoengine.scheduling.step import IntArray


class Status(Enum):
    """Where a sequence is. LEAVING keeps slot and blocks until the last step in flight that names them has retired."""

    WAITING = "waiting"
    RUNNING = "running"
    LEAVING = "leaving"  # preempted while in flight: takes the tokens still under way, then waits again
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """What is touched only when something happens to a sequence; what every step touches is in ``Slots``."""

    key: int
    params: SamplingParams
    tokens: IntArray  # prompt and output while it has no slot; only the prompt's length counts while it has
    prompt_len: int
    limit: int  # it ends with finish reason "length" at this many tokens, prompt included
    stop_ids: frozenset[int]
    root: bytes  # key of the empty prefix
    salt: str
    arrival: int  # order of arrival, unique
    priority: int
    status: Status = Status.WAITING
    slot: int = -1
    blocks: list[int] = field(default_factory=list)  # physical blocks in logical order
    block_keys: list[bytes] = field(default_factory=list)  # of the leading full blocks, as far as worked out
    published: int = 0  # leading blocks that are in the index
    chain: PrefixChain | None = None  # what routers are told of it; None where they are told nothing
    generation: int = 0  # of the cache, at admission
    cached_tokens: int = 0  # prompt tokens that the first admission found in the cache
    held_for: bytes | None = None  # key of a block that another sequence is computing and this one waits for
    held_plans: int = 0
    started: bool = False  # was admitted at least once
    scored: int = 0  # tokens of the prompt, from its start, after which the next one is scored, by steps in flight too

    @property
    def scores(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed."""
        return self.params.prompt_logprobs is not None and self.scored < self.prompt_len - 1


class Slots:
    """Arrays over slots: one row for each sequence that can run at once. Lengths count tokens, prompt included."""

    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        # Untouched pages of these zeros take no memory, so the worst case is only address space.
        self.token_ids = np.zeros((num_slots, max_model_len), np.int32)
        self.block_table = np.zeros((num_slots, -(-max_model_len // block_size)), np.int32)
        self.keys = np.zeros(num_slots, np.int64)  # which request
        self.known = np.zeros(num_slots, np.int32)  # tokens whose value is known here
        self.tokens = np.zeros(num_slots, np.int32)  # known, or promised by a step in flight
        self.scheduled = np.zeros(num_slots, np.int32)  # tokens whose KV is in the cache or in flight
        self.computed = np.zeros(num_slots, np.int32)  # tokens whose KV is in the cache
        self.capacity = np.zeros(num_slots, np.int32)  # tokens that the blocks can hold
        self.publish_at = np.zeros(num_slots, np.int32)  # computed length at which the next block is full
        self.limit = np.zeros(num_slots, np.int32)
        self.last_step = np.zeros(num_slots, np.int64)  # id of the last step that names the slot
        self.alive = np.zeros(num_slots, np.bool_)  # results of steps in flight still count
        self.decoding = np.zeros(num_slots, np.bool_)  # prefill is scheduled to its end
        self.constrained = np.zeros(num_slots, np.bool_)
        self.free = list(range(num_slots - 1, -1, -1))
