"""Qwen3, dense (arXiv 2505.09388): Llama with an RMSNorm on each head of q and k, and heads of their own size."""

from nanoengine.models.family import Family, sliding_upper_layers

FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    gguf="qwen3",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    traits=lambda config: {
        "qk_norm": True,
        "qkv_bias": config["attention_bias"],
        "output_bias": config["attention_bias"],
        "windows": sliding_upper_layers(config),
    },
)
