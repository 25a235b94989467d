"""Llama 1 to 3 (arXiv 2302.13971, 2307.09288, 2407.21783) and all that is built like it, such as SmolLM2."""

from nanoengine.models.family import Family

FAMILY = Family(
    architecture="LlamaForCausalLM",
    gguf="llama",
    defaults={"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    traits=lambda config: {
        "qkv_bias": config["attention_bias"],
        "output_bias": config["attention_bias"],
        "mlp_bias": config["mlp_bias"],
    },
)
