"""Tensors of a safetensors checkpoint, one file or sharded by ``model.safetensors.index.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanoengine.errors import ModelLoadError
from nanoengine.weights.device_reader import DeviceReader
from nanoengine.weights.stored import StoredTensor


def stored_tensors(root: Path) -> Iterator[StoredTensor]:
    """The tensors under ``root``, file by file. Those that are read into a GPU are there when the iteration ends.

    Raises:
        ModelLoadError: a file is missing, cut short or damaged, or lacks a tensor that the index places in it.
    """
    path = root
    try:
        with DeviceReader() as reader:
            for path, names in _shards(root).items():
                with safe_open(path, framework="pt") as file:
                    held = file.keys()
                    if lost := sorted(set(names or held) - set(held)):
                        raise ModelLoadError(f"{path} lacks {', '.join(lost)}, which the index places there")
                    offsets = _offsets(path)
                    for name in names or held:
                        read = partial(_read_into, file, name, reader, path, offsets[name])
                        yield StoredTensor(name, tuple(file.get_slice(name).get_shape()), read)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} cannot be read, download it again: {error}") from error


def _read_into(file: safe_open, name: str, reader: DeviceReader, path: Path, offset: int, target: Tensor) -> None:
    if target.device.type == "cuda" and target.is_contiguous():
        reader.read(path, offset, file.get_slice(name)[:0].dtype, target)
    else:
        target.copy_(file.get_tensor(name))


def _offsets(path: Path) -> dict[str, int]:
    """Where each tensor's bytes begin in a file that ``safe_open`` finds sound: a length, a JSON header, the data."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


def _shards(root: Path) -> dict[Path, list[str] | None]:
    """Files to read and the tensors wanted from each; None is all of them."""
    index = root / "model.safetensors.index.json"
    if index.exists():
        return _indexed(index)
    single = root / "model.safetensors"
    if single.exists():
        return {single: None}
    # Some folders hold one file by another name. Several without an index could be anything.
    files = sorted(root.glob("*.safetensors"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ModelLoadError(f"{root} has no model.safetensors and no index; safetensors files there: {found}")
    return {files[0]: None}


def _indexed(index: Path) -> dict[Path, list[str] | None]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index} is not a safetensors index: {error!r}") from error
    if outside := [file for file in files if Path(file).name != file]:
        raise ModelLoadError(f"{index} names files outside its folder: {', '.join(outside)}")
    return {index.parent / file: [name for name in weight_map if weight_map[name] == file] for file in files}
