"""Random JSON schemas whose answers end, and a tiny model to answer them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.engine.tiny_models import write_tiny_model
from tests.engine.trained_tokenizers import trained

PADDING = 37  # rows of the tiny model's output layer that stand for no token


def write_tiny_llm(folder: Path) -> Path:
    """A random model with a trained byte-level tokenizer, whose vocabulary is padded."""
    tokenizer = trained("byte_level")
    write_tiny_model(folder, vocab_size=tokenizer.vocab_size + PADDING, max_position_embeddings=2048)
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    template = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Every keyword that is served has its turn; sizes are bounded, so that a random model comes to an end."""
    kinds = ["string", "pattern", "format", "integer", "number", "boolean", "null", "enum", "const"]
    kinds += ["object", "array", "tuple", "anyOf", "allOf", "ref", "dictionary"] * (depth > 0)
    kind = rng.choice(kinds)
    low = rng.randint(-50, 50)
    match kind:
        case "string":
            least = rng.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 6)}
        case "pattern":
            patterns = [
                r"^[a-z]{2,5}$",
                r"^\d{3}-\d{2}$",
                r'^[^"]{1,4}$',
                r'^[^\\"]{0,4}$',
                r"^(yes|no|maybe)$",
                r"^\w \S$",
            ]
            return {"type": "string", "pattern": rng.choice(patterns)}
        case "format":
            return {"type": "string", "format": rng.choice(["date", "date-time", "uuid", "ipv4"])}
        case "integer":
            return {"type": "integer", "minimum": low, rng.choice(["maximum", "exclusiveMaximum"]): low + 100}
        case "number":
            return {"type": "number", "exclusiveMinimum": low, "maximum": low + rng.choice([1, 2.5, 100])}
        case "boolean" | "null":
            return {"type": kind}
        case "enum":
            return {"enum": rng.sample([1, "one", None, True, 2.5, 'q"\\', "é", {"a": [1, "b"]}, []], 3)}
        case "const":
            return {"const": rng.choice([7, "x y", {"k": None}, "\n"])}
        case "object":
            names = rng.sample(["a", "name", "é", 'q"', "x y", "b1"], rng.randint(1, 4))
            required = rng.sample(names, rng.randint(0, len(names)))
            properties = {name: random_schema(rng, depth - 1) for name in names}
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "dictionary":
            inner = random_schema(rng, depth - 1)
            keys = {"patternProperties": {"^[a-z]{1,3}$": inner}, "additionalProperties": False}
            return {"type": "object", "minProperties": 1, "maxProperties": 2, **keys}
        case "array":
            least = rng.randint(0, 2)
            items = random_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}
        case "tuple":
            items = [random_schema(rng, depth - 1) for _ in range(2)]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
        case "allOf":
            return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + 20, "multipleOf": 3}]}
        case "ref":
            inner = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"type": "boolean"}}}
            inner |= {"required": ["v"], "additionalProperties": False}
            return inner  # its own "$defs" only where it is the root: see ``rooted``
    raise AssertionError(kind)


def rooted(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with what its references point to."""
    return schema | {"$defs": {"node": {"anyOf": [{"type": "null"}, {"enum": [1, 2]}]}}}
