"""CUDA graphs of what a forward pass does between its attentions, for steps with prefill.

How many rows such a step has, how long they are, and which library attends, no graph can hold; all else depends on the
number of tokens alone. Launched one by one the kernels of 28 layers take the host 9 to 20 ms, as long as the GPU takes
for thousands of tokens of a small model. So each stretch from one attention to the next is a graph, and attention is
launched between them: a prompt of 512 tokens takes 2.9 ms where it took 9.4 (an H200, 0.6B).

There is a set of graphs for each of a grid of token counts; a step runs in the smallest that holds it. Its missing
tokens are computed and stored nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanoengine.attention.base import AttentionSpec, ForwardContext, KVCache
from nanoengine.models.config import ModelConfig
from nanoengine.models.registry import CausalLM
from nanoengine.runner.cuda_graphs import batch_sizes

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE as Pool

_LEAST = 8  # fewer tokens than that with a prefill among them are rare
_LAUNCHES = 9  # of a layer
_LAUNCH_S = 80e-6  # of one, from Python: 35 us on the fastest host seen, 82 on the slowest
_FLOPS = 4.7e14  # a second, of an H200, attention and norms included


def token_counts(most: int, config: ModelConfig) -> list[int]:
    """The grid, up to ``most`` tokens or to where the GPU takes as long as the host does to launch: from there on
    graphs gain nothing, and padding costs."""
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    weights = config.hidden_size * (attention + 3 * config.intermediate_size)  # of a layer
    even = int(_LAUNCHES * _LAUNCH_S * _FLOPS / (2 * weights))
    return [size for size in batch_sizes(min(most, even), fineness=2) if size >= _LEAST]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A graph, and the attention that comes after it."""

    graph: torch.cuda.CUDAGraph
    spec: AttentionSpec
    q: Tensor  # [size, heads, head_dim]


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A forward pass of so many tokens."""

    pieces: list[_Piece]
    last: torch.cuda.CUDAGraph
    hidden: Tensor  # [size, hidden_size]


class PiecewiseGraphs:
    """Of one model over one cache, for these numbers of tokens (ascending)."""

    def __init__(self, model: CausalLM, cache: KVCache, sizes: Sequence[int], device: torch.device) -> None:
        self._model, self._cache, self._sizes, self._device = model, cache, list(sizes), device
        most, config = self._sizes[-1], model.config
        self._ids, self._positions = (torch.zeros(most, dtype=torch.int32, device=device) for _ in range(2))
        self._kv_slots = torch.full((most,), -1, dtype=torch.int32, device=device)
        # What attention says, for the graph after it to read: zeros, so that padding is computed with numbers.
        self._attended = torch.zeros(most, config.num_heads, config.head_dim, dtype=model.dtype, device=device)
        self._of: dict[int, _Pieces] = {}

    def capture(self, pool: Pool) -> None:
        """Record all graphs; ``pool`` is memory that other graphs may have as well, as only one runs at a time."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for size in reversed(self._sizes):  # the largest first: the others fit into its memory
                inputs = self._ids[:size], self._positions[:size]
                cache, kv_slots, attended = self._cache, self._kv_slots[:size], self._attended[:size]
                # Compiles, and lets libraries choose kernels: not while recording.
                self._model(*inputs, _NoAttention(cache, kv_slots, attended))
                recorder = _Recorder(cache, kv_slots, attended, pool)
                self._of[size] = recorder.finish(self._model(*inputs, recorder))
        torch.cuda.synchronize(self._device)

    def __call__(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor | None:
        """The model's forward pass, to be read before the next one; None: there is no graph for so many tokens."""
        tokens = len(input_ids)
        size = next((size for size in self._sizes if size >= tokens), None)
        if size is None:
            return None
        self._ids[:tokens].copy_(input_ids)
        self._positions[:tokens].copy_(positions)
        self._kv_slots[:tokens].copy_(ctx.kv_slots)
        self._kv_slots[tokens:size].fill_(-1)
        pieces, attended = self._of[size], self._attended[:tokens]
        for piece in pieces.pieces:
            piece.graph.replay()
            ctx.attend(piece.spec, piece.q[:tokens], attended)
        pieces.last.replay()
        return pieces.hidden[:tokens]


class _NoAttention(ForwardContext):
    """For passes whose attention is left out."""

    __slots__ = ("_attended", "_kv_slots")

    def __init__(self, cache: KVCache, kv_slots: Tensor, attended: Tensor) -> None:
        self._cache, self._kv_slots, self._attended = cache, kv_slots, attended

    @property
    def kv_slots(self) -> Tensor:
        return self._kv_slots

    def attend(self, spec: AttentionSpec, q: Tensor, out: Tensor | None = None) -> Tensor:
        return self._attended


class _Recorder(_NoAttention):
    """Records a pass, from when it is made; each attention ends a graph and begins another."""

    __slots__ = ("_graph", "_pieces", "_pool")

    def __init__(self, cache: KVCache, kv_slots: Tensor, attended: Tensor, pool: Pool) -> None:
        super().__init__(cache, kv_slots, attended)
        self._pool, self._pieces = pool, list[_Piece]()
        self._begin()

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool)

    def attend(self, spec: AttentionSpec, q: Tensor, out: Tensor | None = None) -> Tensor:
        self._graph.capture_end()
        self._pieces.append(_Piece(self._graph, spec, _memory_of(q)))
        self._begin()
        return self._attended

    def finish(self, hidden: Tensor) -> _Pieces:
        self._graph.capture_end()
        return _Pieces(self._pieces, self._graph, _memory_of(hidden))


class _Memory:
    """A tensor's bytes, for torch to make a tensor of that does not own them."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.itemsize
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _memory_of(tensor: Tensor) -> Tensor:
    """The same memory as another tensor. It is the graphs' pool's and lasts as long as they do; ``tensor`` itself would
    keep it from graphs that are recorded later, and every layer of every size would have its own."""
    assert tensor.is_contiguous()
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)
