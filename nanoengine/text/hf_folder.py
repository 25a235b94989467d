"""The tokenizer of a Hugging Face folder: tokenizer.json, and the settings in the files around it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from nanoengine.errors import ModelLoadError
from nanoengine.text.tokenizer import Tokenizer


def load(folder: Path) -> Tokenizer:
    """Read a folder's tokenizer.

    tokenizer.json alone decides how text is split and what is put around it: it is what the model was published with.
    (transformers rebuilds some classes' splitting from code instead.) tokenizer_config.json adds names of special
    tokens and chat templates; its add_bos_token and add_eos_token have no say beside a tokenizer.json, as in
    transformers 5. Decoded text is not "cleaned up": that setting is for BERT's tokenizers and eats spaces.

    Raises ``ModelLoadError``.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelLoadError(_no_tokenizer(folder))
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"cannot read {file}: {error}") from error
    # The older special_tokens_map.json says the same things; tokenizer_config.json wins where both speak.
    config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")

    bos_token, eos_token = _content(config.get("bos_token")), _content(config.get("eos_token"))
    _add_tokens(backend, config)
    eos_ids = generation.get("eos_token_id")
    return Tokenizer(
        backend,
        bos_token=bos_token,
        eos_token=eos_token,
        more_eos_ids=eos_ids if isinstance(eos_ids, list) else [] if eos_ids is None else [eos_ids],
        chat_templates=_chat_templates(folder, config),
    )


def _no_tokenizer(folder: Path) -> str:
    others = [name for name in ("tokenizer.model", "tekken.json", "vocab.json") if (folder / name).is_file()]
    if not others:
        return f"{folder} has no tokenizer.json: copy the model's tokenizer files there"
    return (
        f"{folder} has {others[0]} but no tokenizer.json. Write one once, where transformers and sentencepiece are "
        f'installed: python -c "from transformers import AutoTokenizer as T; '
        f'T.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"'
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file} must hold a JSON object")
    return value


def _content(token: Any) -> str | None:
    """A special token's text: given plain, or as an object with flags."""
    return token["content"] if isinstance(token, dict) else token


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Tokens that only tokenizer_config.json knows, and the special mark on tokens that have a role.

    Roles of tokens without an id are dropped: a new id would lie beyond the model's vocabulary.
    """
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for index, token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        if backend.id_to_token(int(index)) is None and int(index) == backend.get_vocab_size():
            backend.add_tokens([AddedToken(token["content"], **{f: token[f] for f in flags if f in token})])
    roles = [config.get(role) for role in ("bos_token", "eos_token", "unk_token", "pad_token")]
    for more in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(more) or []
        roles += value.values() if isinstance(value, dict) else value
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for token in dict.fromkeys(map(_content, roles)):
        if token and token not in known and backend.token_to_id(token) is not None:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name. Files win over the configuration, as in transformers."""
    value = config.get("chat_template") or {}
    if isinstance(value, str):
        value = {"default": value}
    elif isinstance(value, list):
        value = {entry["name"]: entry["template"] for entry in value}
    for file in (folder / "additional_chat_templates").glob("*.jinja"):
        value[file.stem] = file.read_text(encoding="utf-8")
    file = folder / "chat_template.jinja"
    if file.is_file():
        value["default"] = file.read_text(encoding="utf-8")
    return value
