"""Keys of the prefix cache: a hash chained over blocks, so that equal keys mean equal prefixes.

SHA-256 rather than a fast non-cryptographic hash: a collision would let one tenant read another's KV cache, and with
the CPU's SHA instructions it costs under a microsecond a block.
"""

from __future__ import annotations

import hashlib

from nanoengine.scheduling.step import IntArray


def root_key(model: str, adapter: str = "", salt: str = "") -> bytes:
    """Key before the first block. Prefixes are shared only where model, adapter and the caller's salt are equal."""
    digest = hashlib.sha256()
    for part in (model, adapter, salt):
        raw = part.encode()
        digest.update(len(raw).to_bytes(8, "little"))  # framed, so that ("ab", "c") is not ("a", "bc")
        digest.update(raw)
    return digest.digest()


def block_key(parent: bytes, tokens: IntArray) -> bytes:
    """Key of a full block with these token ids (int32 [block_size]) after the prefix with key ``parent``."""
    return hashlib.sha256(parent + tokens.tobytes()).digest()
