"""Mistral (arXiv 2310.06825): Llama with a sliding window on every layer, where the configuration names one."""

from nanoengine.models.family import Family

FAMILY = Family(
    architecture="MistralForCausalLM",
    gguf=None,  # llama.cpp's converter writes Mistral as "llama"
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    traits=lambda config: {"windows": (config["sliding_window"],) * config["num_hidden_layers"]},
)
