"""The tokenizer of ``model: synthetic``: one token per byte, so that a whole service runs with no download."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from nanoengine.text.token_bytes import BYTE_LEVEL
from nanoengine.text.tokenizer import Tokenizer

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")  # ids from 256 on

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>tools\\n' }}
{%- for tool in tools %}
{{- (tool | tojson) + '\\n' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}
{%- for call in message['tool_calls'] or [] %}
{{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' }}
{{- (call['function']['arguments'] | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def load() -> Tokenizer:
    """A byte's id is its value. Nothing is put around a text; chat is ChatML and ends with "<|im_end|>", and tool calls
    are written as Hermes writes them."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(BYTE_LEVEL), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return Tokenizer(
        backend,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        more_eos_ids=[256 + SPECIAL_TOKENS.index("<|eos|>")],
        chat_templates={"default": CHAT_TEMPLATE},
    )
