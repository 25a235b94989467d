"""Scheduler: decides what each step computes (``plan``) and applies what came of it (``retire``).

Pure Python and numpy, deterministic, no torch: it runs the same under a test, a simulator or a GPU. Steps retire in the
order in which they were planned, and a step can be planned while the ones before it are still running; the rules that
make this safe are in docs/architecture.md under "Contracts".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from nanoengine.cache.blocks import BlockPool
from nanoengine.cache.prefix import block_keys, root_key
from nanoengine.cache.prefix_hash import PrefixChain, prefix_root
from nanoengine.errors import InvalidRequestError
from nanoengine.outputs import FinishReason
from nanoengine.request import check_request
from nanoengine.sampling.params import SamplingParams
from nanoengine.scheduling.policies import Policy
from nanoengine.scheduling.sequence import Sequence, Slots, Status
from nanoengine.scheduling.step import Admission, IntArray, KeyArray, Scoring, Step

_NO_TOKENS: IntArray = np.empty(0, np.int32)

# A sequence whose next block another one is computing waits at most this many plans for it. The other one's prefill is
# always under way, so this only bounds how long many chunks of a very long shared prompt can delay a short one.
_MAX_HELD_PLANS = 256

# Of a step that running prefills would fill, one in so many tokens is for waiting prompts that fit into it whole. More
# would be faster for them, and slower for the long ones: these take at most 4/3 of their time.
_SHORT_SHARE = 4
_MAX_OVERTAKEN = 32  # waiting sequences that are looked at for it: each costs a look into the cache


@dataclass(frozen=True, slots=True)
class Limits:
    """What a scheduler may use. All in tokens, but for ``max_num_seqs`` and ``watermark_blocks``."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int
    max_model_len: int  # at most what the block pool holds, so that any accepted request can run alone
    block_size: int
    vocab_size: int
    watermark_blocks: int = 0
    prefix_caching: bool = True
    num_tokens: int | None = None  # of the vocabulary; its ids from there on are padding. None: it has none


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence that a step ended. ``stop_token`` is the token that did, end-of-sequence included."""

    key: int
    reason: FinishReason
    stop_token: int | None = None


@dataclass(frozen=True, slots=True)
class Retired:
    """What a step produced, dead sequences left out: tokens[i] is the new token of request keys[i]."""

    rows: IntArray  # [n] row of the step that each token came from
    keys: KeyArray  # [n]
    tokens: IntArray  # [n]
    finished: list[Finished]


@dataclass(slots=True)
class Counters:
    """Since start, in tokens and events."""

    steps: int = 0
    prompt_tokens: int = 0  # of requests admitted for the first time
    generated_tokens: int = 0
    computed_tokens: int = 0  # positions that went through the model, recomputation included
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """One token budget a step: running decodes first, then running prefills, then newly admitted prompts in chunks.

    A part of the budget that long prefills would take whole is kept for short prompts that wait: see ``_SHORT_SHARE``.
    """

    def __init__(
        self, limits: Limits, pool: BlockPool, policy: Policy, *, model: str = "", eos_token_ids: tuple[int, ...] = ()
    ) -> None:
        if limits.max_model_len > pool.num_blocks * limits.block_size:
            raise ValueError(f"max_model_len ({limits.max_model_len}) exceeds what {pool.num_blocks} blocks hold")
        if limits.max_num_batched_tokens < limits.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")
        self.limits = limits
        self.counters = Counters()
        self.waiting_tokens = 0  # tokens of waiting sequences, whether or not the cache has some of them
        self._pool = pool
        self._policy = policy
        self._model = model
        self._eos = frozenset(eos_token_ids)
        self._slots = Slots(limits.max_num_seqs, limits.max_model_len, limits.block_size)
        self._sequences: dict[int, Sequence] = {}  # unfinished, by key
        self._running: dict[int, Sequence] = {}  # by slot, in order of admission
        self._prefilling: list[Sequence] = []  # running with prefill left to schedule, in order of admission
        self._decodes: IntArray = _NO_TOKENS  # slots of running sequences with none left
        self._leaving: list[Sequence] = []  # done or preempted, but named by a step in flight
        self._replaced: deque[tuple[int, int]] = (
            deque()
        )  # (step, block): duplicate blocks that steps up to it still read
        self._computing: dict[bytes, Sequence] = {}  # keys of prompt blocks under way -> who computes them
        self._is_stop = np.zeros(limits.vocab_size, np.bool_)  # tokens that may end some sequence
        self._is_stop[[t for t in self._eos if t < limits.vocab_size]] = True
        self._arrivals = 0
        self._planned = 0
        self._retired = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def add(
        self,
        key: int,
        tokens: IntArray,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        generated: int = 0,
    ) -> None:
        """Queue a request. Raises ``InvalidRequestError`` or ``ContextLengthError`` if it could never be served.

        The last ``generated`` of ``tokens`` are the beginning of its answer: from there on it is as if it had been
        preempted here.
        """
        if key in self._sequences:
            raise InvalidRequestError(f"request {key} is already running", code="duplicate_request")
        self.check_request(tokens, params, generated)
        prompt_len = len(tokens) - generated
        room = self.limits.max_model_len - prompt_len
        # A grammar says when the answer is complete, and there is no other way to end then.
        ignore_eos = params.ignore_eos and params.structured is None
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if ignore_eos else self._eos)
        self._is_stop[list(params.stop_token_ids)] = True
        seq = Sequence(
            key=key,
            params=params,
            tokens=np.ascontiguousarray(tokens, np.int32),
            prompt_len=prompt_len,
            limit=prompt_len + (room if params.max_tokens is None else max(1, params.max_tokens)),
            stop_ids=stop_ids,
            root=root_key(self._model, salt=cache_salt),
            salt=cache_salt,
            arrival=self._arrivals,
            priority=priority,
            scored=prompt_len if generated else 0,  # scores come with the first token
        )
        self._arrivals += 1
        self._sequences[key] = seq
        self._enqueue(seq)

    def check_request(self, tokens: IntArray, params: SamplingParams, generated: int = 0) -> None:
        """Raise what ``add`` would."""
        limits = self.limits
        num_tokens = limits.num_tokens or limits.vocab_size
        check_request(tokens, params, limits.max_model_len, limits.vocab_size, num_tokens, generated)

    def abort(self, key: int) -> bool:
        """End a request in whatever state it is; False if it is not (or no longer) known. Later tokens are dropped."""
        seq = self._sequences.get(key)
        if seq is None:
            return False
        if seq.status is Status.WAITING:
            self._dequeue(seq)
            seq.status = Status.FINISHED
            del self._sequences[key]
        else:
            self._finish(seq)
            self._settle()
        return True

    @property
    def num_waiting(self) -> int:
        return len(self._policy)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._sequences)

    @property
    def prefill_tokens(self) -> int:
        """Tokens of running sequences whose prefill is still to be scheduled."""
        slots = self._slots
        return sum(int(slots.tokens[s.slot] - slots.scheduled[s.slot]) for s in self._prefilling)

    # -- plan ----------------------------------------------------------------------------------------------------

    def plan(self) -> Step | None:
        """The next step, or None if nothing can be computed now: no work, or all of it waits for a step in flight."""
        slots = self._slots
        preemptions = self.counters.preemptions
        decodes = self._ready_decodes()
        budget = self.limits.max_num_batched_tokens - len(decodes)
        chunks: list[tuple[Sequence, int]] = []
        admissions: list[Admission] = []
        # Blocks that a preemption frees are for those who run: admitting into them would preempt again at once.
        admits = preemptions == self.counters.preemptions and all(s.status is Status.FINISHED for s in self._leaving)
        running = self._continue_prefills(budget)
        if admits and running and sum(count for _, count in running) == budget:
            self._admit(budget // _SHORT_SHARE, chunks, admissions, whole=True)
            if chunks:
                budget -= sum(count for _, count in chunks)
                running = self._continue_prefills(budget, admitted=len(chunks))
        chunks += running
        budget -= sum(count for _, count in running)
        if admits:
            self._admit(budget, chunks, admissions)
        if not len(decodes) and not chunks:
            return None

        self._planned += 1
        num_decodes, rows = len(decodes), len(decodes) + len(chunks)
        row_slots = np.empty(rows, np.int32)
        row_slots[:num_decodes] = decodes
        row_slots[num_decodes:] = [seq.slot for seq, _ in chunks]
        counts = np.ones(rows, np.int32)
        counts[num_decodes:] = [count for _, count in chunks]
        starts = slots.scheduled[row_slots]
        ends = starts + counts
        samples = ends == slots.tokens[row_slots]
        keys = slots.keys[row_slots]
        token_ids = [
            slots.token_ids[seq.slot, start : start + count]
            for (seq, count), start in zip(chunks, starts[num_decodes:].tolist(), strict=True)
        ]
        width = -(-int(ends.max()) // self.limits.block_size)
        step = Step(
            id=self._planned,
            num_decodes=num_decodes,
            keys=keys,
            slots=row_slots,
            starts=starts,
            counts=counts,
            samples=samples,
            tokens=np.concatenate(token_ids) if token_ids else _NO_TOKENS,
            block_table=slots.block_table[row_slots, :width],
            admissions=tuple(admissions),
            constrained=np.flatnonzero(samples & slots.constrained[row_slots]).astype(np.int32),
            scorings=self._scorings(chunks, num_decodes),
        )
        slots.scheduled[row_slots] = ends
        slots.tokens[row_slots] += samples
        slots.last_step[row_slots] = self._planned
        if chunks:
            self._start_decodes(
                [seq for (seq, _), done in zip(chunks, samples[num_decodes:].tolist(), strict=True) if done]
            )
        return step

    def _scorings(self, chunks: list[tuple[Sequence, int]], first_row: int) -> tuple[Scoring, ...]:
        """What these chunks let be scored. After a preemption that is what no step has scored before."""
        scorings = []
        for row, (seq, count) in enumerate(chunks, first_row):
            if seq.scores:
                begin = seq.scored
                end = min(int(self._slots.scheduled[seq.slot]) + count, seq.prompt_len - 1)
                if end > begin:
                    targets = self._slots.token_ids[seq.slot, begin + 1 : end + 1].copy()
                    scorings.append(Scoring(row, begin + 1, targets, seq.params.prompt_logprobs or 0))
                    seq.scored = end
        return tuple(scorings)

    def _ready_decodes(self) -> IntArray:
        """Slots that decode one token in this step, each with a block to write it to."""
        slots, decodes = self._slots, self._decodes
        # With a step in flight, the last token of a sequence may be under way already.
        decodes = decodes[slots.tokens[decodes] < slots.limit[decodes]]
        full = slots.scheduled[decodes] >= slots.capacity[decodes]
        if not full.any():
            return decodes
        stalled = set()
        for slot in decodes[full].tolist():
            seq = self._running.get(slot)
            if seq is None:
                continue  # preempted for one before it
            # Blocks of those who are leaving come back when the step in flight retires: wait for them.
            while not self._pool.available and not self._leaving and seq.status is Status.RUNNING:
                self._preempt(self._policy.victim(list(self._running.values())))
            if seq.status is not Status.RUNNING:
                continue
            if self._pool.available:
                self._give_blocks(seq, self._pool.allocate(1))
            else:
                stalled.add(slot)
        ready = slots.decoding[decodes]
        if stalled:
            ready &= ~np.isin(decodes, list(stalled))
        return decodes[ready]

    def _continue_prefills(self, budget: int, admitted: int = 0) -> list[tuple[Sequence, int]]:
        """Pieces of the running prefills, without the newest, which this step has ``admitted``."""
        slots, chunks = self._slots, []
        for seq in self._prefilling[: len(self._prefilling) - admitted]:
            if budget == 0:
                break
            left = int(slots.tokens[seq.slot] - slots.scheduled[seq.slot])
            count = min(left, budget, self.limits.max_prefill_chunk)
            chunks.append((seq, count))
            budget -= count
        return chunks

    def _admit(
        self, budget: int, chunks: list[tuple[Sequence, int]], admissions: list[Admission], *, whole: bool = False
    ) -> None:
        """Take waiting sequences in, in the policy's order. ``whole``: only those whose prefill this step completes,
        past others, so that a short prompt does not wait for a long one to be computed."""
        slots, pool, block_size = self._slots, self._pool, self.limits.block_size
        admitted: list[Sequence] = []
        for seq in islice(self._policy, _MAX_OVERTAKEN if whole else None):
            if budget == 0 or len(admitted) == len(slots.free):
                break
            if seq.held_for is not None and seq.held_for in self._computing and seq.held_plans < _MAX_HELD_PLANS:
                seq.held_plans += 1
                continue
            length = len(seq.tokens)
            hits: list[int] = []
            if self.limits.prefix_caching:
                # The last token is always computed: its logits give the next one.
                usable = (length - 1) // block_size
                if seq.scores:  # what is to be scored has to go through the model
                    usable = min(usable, seq.scored // block_size)
                hits = pool.match(self._prompt_keys(seq, usable))
                if len(hits) < usable:
                    seq.held_for = seq.block_keys[len(hits)]
                    if seq.held_for in self._computing and seq.held_plans < _MAX_HELD_PLANS:
                        seq.held_plans += 1
                        continue
            left = length - len(hits) * block_size
            if whole and left > min(budget, self.limits.max_prefill_chunk):
                continue
            need = -(-length // block_size) - len(hits)
            room = pool.available - pool.idle(hits) - need
            if room < (self.limits.watermark_blocks if self._running or admitted else 0):
                break
            pool.acquire(hits)
            seq.blocks = hits + pool.allocate(need)
            seq.published = len(hits)
            if pool.log is not None:
                seq.chain = PrefixChain(prefix_root(self._model, salt=seq.salt))
                seq.generation = pool.log.generation
            if self.limits.prefix_caching:
                self._extend_block_keys(seq, seq.tokens, length)
                for key in seq.block_keys[len(hits) :]:
                    self._computing.setdefault(key, seq)
            admitted.append(seq)
            count = min(left, budget, self.limits.max_prefill_chunk)
            chunks.append((seq, count))
            budget -= count
        for seq in admitted:
            self._dequeue(seq)
            admissions.append(self._take_slot(seq))

    def _take_slot(self, seq: Sequence) -> Admission:
        slots, length = self._slots, len(seq.tokens)
        seq.slot = slot = slots.free.pop()
        seq.status = Status.RUNNING
        seq.held_for, seq.held_plans = None, 0
        hit_tokens = seq.published * self.limits.block_size
        slots.token_ids[slot, :length] = seq.tokens
        slots.block_table[slot, : len(seq.blocks)] = seq.blocks
        slots.keys[slot] = seq.key
        slots.known[slot] = slots.tokens[slot] = length
        slots.scheduled[slot] = slots.computed[slot] = hit_tokens
        slots.capacity[slot] = len(seq.blocks) * self.limits.block_size
        slots.publish_at[slot] = hit_tokens + self.limits.block_size
        slots.limit[slot] = seq.limit
        slots.last_step[slot] = 0
        slots.alive[slot] = True
        slots.decoding[slot] = False
        slots.constrained[slot] = seq.params.constrained
        self._running[slot] = seq
        self._prefilling.append(seq)
        first, seq.started = not seq.started, True
        if first:
            seq.cached_tokens = min(hit_tokens, seq.prompt_len)
            self.counters.prompt_tokens += seq.prompt_len
            if self.limits.prefix_caching and not seq.scores:
                self.counters.prefix_query_tokens += seq.prompt_len
                self.counters.prefix_hit_tokens += seq.cached_tokens
        prompt, output = np.split(seq.tokens, [seq.prompt_len])
        return Admission(slot, seq.key, seq.params, prompt, output, first, seq.cached_tokens)

    def _start_decodes(self, sequences: list[Sequence]) -> None:
        if not sequences:
            return
        started = np.array([seq.slot for seq in sequences], np.int32)
        self._slots.decoding[started] = True
        self._decodes = np.concatenate((self._decodes, started))
        self._prefilling = [seq for seq in self._prefilling if not self._slots.decoding[seq.slot]]

    def _give_blocks(self, seq: Sequence, blocks: list[int]) -> None:
        slots, held = self._slots, len(seq.blocks)
        slots.block_table[seq.slot, held : held + len(blocks)] = blocks
        seq.blocks += blocks
        slots.capacity[seq.slot] = len(seq.blocks) * self.limits.block_size

    # -- retire --------------------------------------------------------------------------------------------------

    def retire(self, step: Step, tokens: IntArray) -> Retired:
        """Apply a step's result; ``tokens`` is int32 [rows], read where ``step.samples``. Steps retire in order."""
        if step.id != self._retired + 1:
            raise ValueError(f"step {step.id} retires out of order, expected {self._retired + 1}")
        self._retired = step.id
        self.counters.steps += 1
        self.counters.computed_tokens += step.num_tokens
        slots = self._slots

        # The one place where tokens of a sequence that ended while the step ran are dropped.
        alive = slots.alive[step.slots]
        computed = step.starts + step.counts
        slots.computed[step.slots[alive]] = computed[alive]
        rows = np.flatnonzero(alive & step.samples).astype(np.int32)
        row_slots, new = step.slots[rows], tokens[rows].astype(np.int32, copy=False)
        known = slots.known[row_slots]
        slots.token_ids[row_slots, known] = new
        known += 1
        slots.known[row_slots] = known
        self.counters.generated_tokens += len(rows)

        if self.limits.prefix_caching:
            for slot in step.slots[alive & (computed >= slots.publish_at[step.slots])].tolist():
                self._publish(self._running.get(slot) or next(s for s in self._leaving if s.slot == slot))

        finished: list[Finished] = []
        at_limit = known >= slots.limit[row_slots]
        for i in np.flatnonzero(at_limit | self._is_stop[new]).tolist():
            key, token = int(step.keys[rows[i]]), int(new[i])
            seq = self._sequences[key]
            # Before min_tokens a stop token is sampled only where nothing else could be: a grammar is complete.
            enough = known[i] - seq.prompt_len >= seq.params.min_tokens or seq.params.structured is not None
            if token in seq.stop_ids and enough:
                finished.append(Finished(key, "stop", token))
            elif at_limit[i]:
                finished.append(Finished(key, "length"))
            else:
                continue
            self._finish(seq)
        self._settle()
        return Retired(rows, step.keys[rows], new, finished)

    def _publish(self, seq: Sequence) -> None:
        """Put the blocks that have become full into the index, and take over those that are there already."""
        slots, slot, block_size = self._slots, seq.slot, self.limits.block_size
        full = int(slots.computed[slot]) // block_size
        self._extend_block_keys(seq, slots.token_ids[slot], full * block_size)
        for i in range(seq.published, full):
            key, block = seq.block_keys[i], seq.blocks[i]
            canonical = self._pool.publish(block, key)
            if canonical != block:
                seq.blocks[i] = slots.block_table[slot, i] = canonical
                # Steps in flight were planned with the old block in their table, and may write to it.
                self._replaced.append((self._planned, block))
            if self._computing.get(key) is seq:
                del self._computing[key]
        log = self._pool.log
        if log is not None and seq.chain is not None and seq.generation == log.generation:
            log.published(seq.blocks, seq.published, full, slots.token_ids[slot], seq.chain)
        seq.published = full
        slots.publish_at[slot] = (full + 1) * block_size

    def _prompt_keys(self, seq: Sequence, count: int) -> Iterator[bytes]:
        """Keys of the first ``count`` blocks, worked out a few ahead of what is asked for: those who wait need one."""
        done = 0
        while done < count:
            if done == len(seq.block_keys):
                self._extend_block_keys(seq, seq.tokens, min(count, 2 * done + 1) * self.limits.block_size)
            known = seq.block_keys[done:count]
            yield from known
            done += len(known)

    def _extend_block_keys(self, seq: Sequence, tokens: IntArray, length: int) -> None:
        """Work out the keys of the full blocks within ``tokens[:length]`` that are not known yet."""
        keys, block_size = seq.block_keys, self.limits.block_size
        parent = keys[-1] if keys else seq.root
        keys += block_keys(parent, tokens[len(keys) * block_size : length], block_size)

    # -- leaving -------------------------------------------------------------------------------------------------

    def _preempt(self, seq: Sequence) -> None:
        """Take a running sequence's slot and blocks; it waits, and what the cache loses meanwhile is recomputed."""
        self.counters.preemptions += 1
        seq.status = Status.LEAVING
        self._leave(seq)
        self._settle()

    def _finish(self, seq: Sequence) -> None:
        self._slots.alive[seq.slot] = False
        del self._sequences[seq.key]
        if seq.status is Status.RUNNING:
            self._leave(seq)
        seq.status = Status.FINISHED

    def _leave(self, seq: Sequence) -> None:
        slot = seq.slot
        del self._running[slot]
        if self._slots.decoding[slot]:
            self._slots.decoding[slot] = False
            self._decodes = self._decodes[self._decodes != slot]
        else:
            self._prefilling.remove(seq)
        for key in seq.block_keys[seq.published :]:
            if self._computing.get(key) is seq:
                del self._computing[key]
        self._leaving.append(seq)

    def _settle(self) -> None:
        """Release what no step in flight names any more."""
        while self._replaced and self._replaced[0][0] <= self._retired:
            self._pool.release((self._replaced.popleft()[1],))
        if not self._leaving:
            return
        slots = self._slots
        staying = []
        for seq in self._leaving:
            if slots.last_step[seq.slot] > self._retired:
                staying.append(seq)
                continue
            self._pool.release(seq.blocks)
            slots.alive[seq.slot] = False
            slots.free.append(seq.slot)
            if seq.status is Status.LEAVING:
                seq.tokens = slots.token_ids[seq.slot, : slots.known[seq.slot]].copy()
                seq.status = Status.WAITING
                self._enqueue(seq)
            seq.slot, seq.blocks, seq.published = -1, [], 0
        self._leaving = staying

    def _enqueue(self, seq: Sequence) -> None:
        self._policy.push(seq)
        self.waiting_tokens += len(seq.tokens)

    def _dequeue(self, seq: Sequence) -> None:
        self._policy.remove(seq)
        self.waiting_tokens -= len(seq.tokens)

    # -- checks --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that blocks, slots and counters agree. For tests: it costs as much as a step or more."""
        slots = self._slots
        tables: list[Iterable[int]] = [seq.blocks for seq in (*self._running.values(), *self._leaving)]
        self._pool.check([*map(list, tables), *([block] for _, block in self._replaced)])
        held = {seq.slot for seq in (*self._running.values(), *self._leaving)}
        assert len(held) + len(slots.free) == self.limits.max_num_seqs, "a slot is lost"
        assert held.isdisjoint(slots.free), "a slot in use is free"
        assert self.waiting_tokens == sum(len(seq.tokens) for seq in self._policy), "waiting tokens are miscounted"
        for seq in self._running.values():
            assert slots.block_table[seq.slot, : len(seq.blocks)].tolist() == seq.blocks, "block table differs"
            assert seq.published * self.limits.block_size <= slots.computed[seq.slot], "published too early"
            assert slots.computed[seq.slot] <= slots.scheduled[seq.slot] <= slots.capacity[seq.slot]
        assert all(seq.status is Status.RUNNING for seq in self._computing.values()), "a block under way has no maker"
        decoding = {s.slot for s in self._running.values()} - {s.slot for s in self._prefilling}
        assert set(self._decodes.tolist()) == decoding, "a running sequence is neither prefilling nor decoding"
        if not self._sequences and self._planned == self._retired:
            self.check_idle()

    def check_idle(self) -> None:
        """Assert that nothing is left behind when no request is unfinished and no step in flight."""
        assert self._pool.available == self._pool.num_blocks, "a block leaked"
        assert not self._running, "a finished sequence still runs"
        assert not self._leaving, "a finished sequence never left"
        assert not self._computing, "a prompt block is under way without a request"
        assert len(self._slots.free) == self.limits.max_num_seqs, "a slot leaked"
