"""GGUF: llama.cpp's file format for (quantised) models. Metadata and packed tensors, and these dequantised.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. We parse the header here rather than with the
``gguf`` package, whose reader makes some arrays per string: 4.6 s for SmolLM2's vocabulary on 2 cores, against 0.1 s.
The block formats (some 25 of them) are that package's: ``gguf.quants``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nanoengine.errors import ModelLoadError

if TYPE_CHECKING:
    from nanoengine.weights.stored import StoredTensor

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SCALARS_BY_TYPE = {code: struct.Struct("<" + char) for code, char in _SCALARS.items()}
_U32, _U64 = _SCALARS_BY_TYPE[4], _SCALARS_BY_TYPE[10]

_CHUNK = 1 << 15
"""Elements dequantised at a time. Larger is a third less work, but torch copies more than 32,768 elements on several
threads, and where other processes are starting on the same cores, waiting for the slowest thread costs far more: the
default model then loads in 2.7 s so, and in 10 s by pieces of 262,144."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor's entry in the header. ``shape`` is in our order: rows first, the contiguous axis last."""

    shape: tuple[int, ...]
    type: int  # GGMLQuantizationType
    offset: int  # bytes from the start of the file


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A GGUF file's header. ``metadata`` holds Python values: strings, numbers, booleans and lists of them."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Read the header.

        Raises:
            ModelLoadError: not a GGUF file of version 2 or 3, damaged, or one part of a split file.
        """
        try:
            data = np.memmap(path, mode="r").data
            if bytes(data[:4]) != b"GGUF":
                raise ModelLoadError(f"{path} is not a GGUF file")
            return _Header(path, data).read()
        except (OSError, ValueError, struct.error, IndexError, KeyError) as error:
            raise ModelLoadError(f"{path} is not a whole GGUF file, download it again: {error!r}") from error

    def packed(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor as stored, mapped: [rows, bytes of a row].

        Raises:
            ModelLoadError: the file ends before the tensor does, or its type is unknown.
        """
        tensor = self.tensors[name]
        columns, rows = tensor.shape[-1], math.prod(tensor.shape[:-1])
        block, block_bytes = _block_of(tensor.type, name)
        if columns % block:
            raise ModelLoadError(f"{self.path}: rows of {name} ({columns}) are no multiple of its block ({block})")
        row_bytes = columns // block * block_bytes
        try:
            return np.memmap(self.path, mode="r", offset=tensor.offset, shape=(rows, row_bytes), dtype=np.uint8)
        except ValueError as error:
            raise ModelLoadError(f"{self.path} is cut short: {name} lies past its end, download it again") from error

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """A whole tensor dequantised: float32 of its shape. For small ones; weights go by ``stored_tensors``."""
        packed, tensor = self.packed(name), self.tensors[name]
        return np.concatenate(list(_dequantised(packed, tensor.type))).reshape(tensor.shape)


class _Header:
    """A cursor over the header."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self._path, self._data, self._at = path, data, 4

    def read(self) -> GGUFFile:
        version = self._scalar(_U32)
        if version not in (2, 3):
            raise ModelLoadError(f"{self._path} is GGUF version {version} (or big-endian): versions 2 and 3 are read")
        num_tensors, num_keys = self._scalar(_U64), self._scalar(_U64)
        metadata = {self._string(): self._value(self._scalar(_U32)) for _ in range(num_keys)}
        if metadata.get("split.count", 1) > 1:
            raise ModelLoadError(f"{self._path} is one part of a split GGUF: merge it with llama-gguf-split --merge")
        entries = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        tensors = {name: GGUFTensor(shape, type_, start + offset) for name, shape, type_, offset in entries}
        return GGUFFile(self._path, metadata, tensors)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dims = [self._scalar(_U64) for _ in range(self._scalar(_U32))]
        return name, tuple(reversed(dims)), self._scalar(_U32), self._scalar(_U64)

    def _value(self, type_: int) -> Any:
        if type_ == _STRING:
            return self._string()
        if type_ != _ARRAY:
            return self._scalar(_SCALARS_BY_TYPE[type_])
        item, count = self._scalar(_U32), self._scalar(_U64)
        if item in _SCALARS:
            array = np.frombuffer(self._take(count * _SCALARS_BY_TYPE[item].size), "<" + _SCALARS[item])
            return array.tolist()
        return [self._value(item) for _ in range(count)]

    def _scalar(self, kind: struct.Struct) -> Any:
        value = kind.unpack_from(self._data, self._at)[0]
        self._at += kind.size
        return value

    def _string(self) -> str:
        return str(self._take(self._scalar(_U64)), "utf-8", "replace")

    def _take(self, size: int) -> memoryview:
        piece = self._data[self._at : self._at + size]
        if len(piece) < size:
            raise ValueError("ends inside its header")
        self._at += size
        return piece


def stored_tensors(file: GGUFFile, heads: int, kv_heads: int) -> Iterator[StoredTensor]:
    """The tensors of a file under the names that transformers gives them.

    llama.cpp's ``llama`` architecture rotates neighbouring pairs, so its converter permutes the rows of each head of q
    and k; that is undone here. ``rope_freqs`` is part of the configuration and left out.
    """
    permuted = file.metadata["general.architecture"] == "llama"
    for name, tensor in file.tensors.items():
        if name == "rope_freqs.weight":
            continue
        rows = None
        if permuted and ".attn_q." in name:
            rows = _unpermuted_rows(file, name, heads)
        elif permuted and ".attn_k." in name:
            rows = _unpermuted_rows(file, name, kv_heads)
        yield _stored(file, name, tensor, rows)


def _unpermuted_rows(file: GGUFFile, name: str, heads: int) -> npt.NDArray[np.int64]:
    """Where each row of transformers' order lies in the file: pairs (0, 1), (2, 3), .. become halves (0, 2, ..), .."""
    shape = file.tensors[name].shape
    size = shape[-1] if name.endswith(".bias") else shape[0]
    if size % (2 * heads):
        raise ModelLoadError(f"{file.path}: {name} of {size} rows does not divide into {heads} heads")
    return np.arange(size).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _stored(file: GGUFFile, name: str, tensor: GGUFTensor, rows: npt.NDArray[np.int64] | None) -> StoredTensor:
    import torch

    from nanoengine.weights.stored import StoredTensor

    def read_into(target: torch.Tensor) -> None:
        packed = file.packed(name)
        if rows is not None and len(tensor.shape) == 1:
            target.copy_(torch.from_numpy(file.floats(name)[rows]))
            return
        if rows is not None:
            packed = packed[rows]
        # Piece by piece into the target's own dtype, so that no second copy of a whole tensor exists.
        done, columns, flat = 0, tensor.shape[-1], target.view(-1, tensor.shape[-1])
        for piece in _dequantised(packed, tensor.type):
            count = piece.size // columns
            flat[done : done + count].copy_(torch.from_numpy(piece).view(count, columns))
            done += count

    return StoredTensor(_hf_name(name), tensor.shape, read_into)


def _dequantised(packed: npt.NDArray[np.uint8], type_: int) -> Iterator[npt.NDArray[np.float32]]:
    """Runs of whole rows as flat float32, ``_CHUNK`` elements or so each."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(type_)
    block, block_bytes = _block_of(type_, kind.name)
    row_elements = packed.shape[1] // block_bytes * block
    step = max(1, _CHUNK // row_elements)
    for first in range(0, len(packed), step):
        # As one long row: the library works through 16 rows at a time, which for short rows is mostly overhead.
        # A copy, as torch takes no arrays that cannot be written to.
        yield dequantize(packed[first : first + step].copy().reshape(1, -1), kind).reshape(-1)


def _block_of(type_: int, name: str) -> tuple[int, int]:
    """Elements and bytes of one block of a type."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        return GGML_QUANT_SIZES[GGMLQuantizationType(type_)]
    except (ValueError, KeyError):
        raise ModelLoadError(
            f"{name} is of GGUF type {type_}, which the installed gguf package does not know"
        ) from None


_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hf_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; a name not known here stays as it is."""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _NAMES:
        return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _NAMES:
        return f"{_NAMES[parts[0]]}.{parts[1]}"
    return name
