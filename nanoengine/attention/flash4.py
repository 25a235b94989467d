"""Prefill by flash-attn-4 (its CuTe kernels for Hopper and Blackwell), decode by our own kernel."""

from __future__ import annotations

from torch import Tensor

from nanoengine.attention.base import AttentionSpec, Batch
from nanoengine.attention.varlen import VarlenAttention, VarlenPlan

_LONG = 1024
"""Queries of a row below which our own kernel is used: launching the library's takes 170 us, and it is no faster there.
TFLOP/s on an H200, pages of 16, 16 query heads: 64 rows of 128 after 2,048 cached 313 against our 340, 4 of 8,192 550
against 396."""


class Flash4Attention(VarlenAttention):
    """Needs the package flash-attn-4 and a GPU of compute capability 9, 10 or 11; float16 and bfloat16.

    It compiles each kind of call (head size, window or none, pages or none) when it first sees it, in 3 to 4 seconds.
    Pages are read as they are, those of 128 tokens fastest. Pages in float8, which Hopper's kernel does not take, are
    gathered and converted first. With pages of 128, V past a row's end in its last page must be finite: its weight is
    0. That holds in a KVCache, which begins as zeros.

    Raises:
        ImportError: the package is not installed, or not for this torch and CUDA.
    """

    name = "flash4"

    def __init__(self) -> None:
        super().__init__()
        from flash_attn.cute import flash_attn_varlen_func

        self._attend = flash_attn_varlen_func

    def prefill(
        self, spec: AttentionSpec, q: Tensor, keys: Tensor, values: Tensor, batch: Batch, plan: object
    ) -> Tensor:
        assert isinstance(plan, VarlenPlan)
        if plan.longest_query < _LONG:
            return super().prefill(spec, q, keys, values, batch, plan)
        context: dict[str, object]
        if keys.dtype == q.dtype:
            context = {"page_table": plan.table, "seqused_k": plan.lens}
        elif plan.gathered is None:
            return super().prefill(spec, q, keys, values, batch, plan)
        else:
            keys, values = plan.gathered(keys, q.dtype), plan.gathered(values, q.dtype)
            context = {"cu_seqlens_k": plan.gathered.starts, "max_seqlen_k": plan.longest}
        out, _lse = self._attend(
            q,
            keys,
            values,
            cu_seqlens_q=plan.query_start,
            max_seqlen_q=plan.longest_query,
            softmax_scale=spec.scale,
            causal=True,
            window_size=(None, None) if spec.window is None else (spec.window - 1, 0),
            **context,
        )
        return out
