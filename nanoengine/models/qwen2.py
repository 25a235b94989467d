"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases on q, k and v."""

from nanoengine.models.family import Family, sliding_upper_layers

FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    gguf="qwen2",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    traits=lambda config: {"qkv_bias": True, "windows": sliding_upper_layers(config)},
)
