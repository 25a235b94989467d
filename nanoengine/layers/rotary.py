"""Rotary position embedding (arXiv 2104.09864) and its long-context forms, equal to transformers' in float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nanoengine.models.config import RopeConfig


class RotaryEmbedding(nn.Module):
    """Tables of cos and sin for positions 0 .. max_position - 1, float32; sequences are kept shorter by the engine."""

    table: Tensor  # [max_position, head_dim]: cos of each frequency, then sin

    def __init__(self, config: RopeConfig, head_dim: int, max_position: int, device: torch.device) -> None:
        super().__init__()
        positions = torch.arange(max_position, dtype=torch.float32)
        angles = positions[:, None] * frequencies(config, head_dim, max_position)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * config.attention_factor
        self.register_buffer("table", table.to(device), persistent=False)


def frequencies(config: RopeConfig, head_dim: int, max_position: int) -> Tensor:
    """Radians per position of each pair: float32 [head_dim / 2], or [max_position, head_dim / 2] if they depend on it.

    Every line is in the order of transformers' ``modeling_rope_utils``, so that the results are the same to the bit.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    if config.type == "dynamic":
        inverse = _dynamic_ntk(config, exponents, head_dim, max_position)
    elif config.type == "yarn":
        inverse = _yarn(config, exponents, head_dim)
    else:
        inverse = 1.0 / (config.theta**exponents)
        if config.type == "linear":
            inverse = inverse / config.factor
        elif config.type == "llama3":
            inverse = _llama3(config, inverse)
    return inverse / torch.tensor(config.divisors) if config.divisors else inverse


def _dynamic_ntk(config: RopeConfig, exponents: Tensor, head_dim: int, max_position: int) -> Tensor:
    """The base grows with the length of the sequence once that exceeds the trained context.

    transformers recomputes it from the longest sequence in the batch and leaves the keys in its cache as they are: what
    a position gets depends on its neighbours in the batch and on how the prompt was cut. We fix it by the position
    itself: position p is rotated as in a sequence of p + 1 tokens. That is what transformers does token by token with
    one sequence, so decoding agrees with it beyond the trained context too; it differs for a prompt that is longer than
    that. It is the same in any batch, any chunking and any cached prefix.
    """
    trained, factor, power = config.original_max_position, config.factor, head_dim / (head_dim - 2)
    base = config.theta * ((factor * trained / trained) - (factor - 1)) ** power
    within = (1.0 / (base**exponents)).expand(min(trained, max_position), -1)
    lengths = torch.arange(trained + 1, max(trained, max_position) + 1)
    bases = config.theta * ((factor * lengths / trained) - (factor - 1)) ** power
    return torch.cat((within, 1.0 / (bases[:, None] ** exponents)))


def _llama3(config: RopeConfig, inverse: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between blended."""
    trained, low, high = config.original_max_position, config.low_freq_factor, config.high_freq_factor
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > trained / low, inverse / config.factor, inverse)
    smooth = (trained / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / config.factor + smooth * scaled
    between = ~(wavelength < trained / high) & ~(wavelength > trained / low)
    return torch.where(between, blended, scaled)


def _yarn(config: RopeConfig, exponents: Tensor, head_dim: int) -> Tensor:
    """YaRN, section 3.2: frequencies of many rotations over the trained context are kept, of few divided, and a ramp
    leads from one to the other."""

    def dimension(rotations: float) -> float:
        """The (fractional) dimension that turns this often over the trained context."""
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return (head_dim * math.log(turns)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    wavelengths = config.theta**exponents
    return (1.0 / (config.factor * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept
