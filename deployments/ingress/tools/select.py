"""Which format a model writes its calls in."""

from __future__ import annotations

from deployments.config import ToolParserName
from deployments.ingress.tools.format import ToolFormat
from deployments.ingress.tools.hermes import HERMES
from deployments.ingress.tools.llama3 import LLAMA3
from deployments.ingress.tools.llama3 import TAG as PYTHON_TAG
from deployments.ingress.tools.mistral import ARGS, MISTRAL_ARRAY, MISTRAL_NAMED
from deployments.ingress.tools.mistral import MARK as TOOL_CALLS
from deployments.ingress.tools.pythonic import PYTHONIC
from deployments.ingress.tools.qwen_coder import QWEN_CODER
from nanoengine.text.tokenizer import Tokenizer


def select(configured: ToolParserName, tokenizer: Tokenizer) -> ToolFormat | None:
    """The format, by the model's chat templates, which show a call as the model learnt to write it; None: not known.

    A model that was trained further may have the special tokens of its ancestor and write none of them, so templates
    come before tokens.
    """
    templates = "\n".join(tokenizer.chat_templates.values())
    mistral = MISTRAL_NAMED if ARGS in templates else MISTRAL_ARRAY
    match configured:
        case "none":
            return None
        case "hermes":
            return HERMES
        case "llama3":
            return LLAMA3
        case "mistral":
            return mistral
        case "pythonic":
            return PYTHONIC
        case "qwen_coder":
            return QWEN_CODER
    if "<tool_call>" in templates:
        return QWEN_CODER if "<function=" in templates else HERMES
    if TOOL_CALLS in templates:
        return mistral
    if "[func_name1(" in templates:  # the words in which Meta asks for it
        return PYTHONIC
    if PYTHON_TAG in templates or ("tools" in templates and tokenizer.token_id(PYTHON_TAG) is not None):
        return LLAMA3
    return None
