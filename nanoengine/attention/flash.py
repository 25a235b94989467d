"""Prefill by flash-attn 2 (Dao, 2023), decode by our own kernel, which reads faster than the library's."""

from __future__ import annotations

from torch import Tensor

from nanoengine.attention.base import AttentionSpec, Batch
from nanoengine.attention.varlen import VarlenAttention, VarlenPlan

_PAGE = 256
"""The library reads pages of multiples of this size; others are gathered first."""


class FlashAttention(VarlenAttention):
    """Needs the package flash-attn and a GPU of compute capability 8 or more; float16 and bfloat16.

    Raises:
        ImportError: the package is not installed, or not for this torch and CUDA.
    """

    name = "flash"

    def __init__(self) -> None:
        super().__init__()
        from flash_attn import flash_attn_varlen_func

        self._attend = flash_attn_varlen_func

    def prefill(
        self, spec: AttentionSpec, q: Tensor, keys: Tensor, values: Tensor, batch: Batch, plan: object
    ) -> Tensor:
        assert isinstance(plan, VarlenPlan)
        if keys.shape[1] % _PAGE == 0 and keys.dtype == q.dtype and spec.head_dim % 8 == 0:
            k, v, starts, table = keys, values, plan.key_start, plan.table
        elif plan.gathered is None:
            return super().prefill(spec, q, keys, values, batch, plan)
        else:
            k, v = plan.gathered(keys, q.dtype), plan.gathered(values, q.dtype)
            starts, table = plan.gathered.starts, None
        return self._attend(
            q,
            k,
            v,
            plan.query_start,
            starts,
            plan.longest_query,
            plan.longest,
            softmax_scale=spec.scale,
            causal=True,
            window_size=(-1, -1) if spec.window is None else (spec.window - 1, 0),
            block_table=table,
        )
