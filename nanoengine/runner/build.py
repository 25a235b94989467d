"""From a configuration to a runner that is ready: where files, model, attention backend, KV pool and sampler meet."""

from __future__ import annotations

from nanoengine.config import EngineConfig
from nanoengine.outputs import EngineInfo, MemorySummary
from nanoengine.runner.built import BuiltRunner, Phases, model_len
from nanoengine.runner.synthetic import SyntheticRunner
from nanoengine.text.tokenizer import load_tokenizer
from nanoengine.weights.sources import ModelFiles, resolve_model


def build_runner(
    config: EngineConfig, eos_token_ids: tuple[int, ...] = (), num_tokens: int | None = None
) -> BuiltRunner:
    """Load what ``config`` names. ``eos_token_ids`` end a sequence as the model's own do; ids from ``num_tokens`` on,
    which the tokenizer does not have, are never sampled.

    Raises ``ModelLoadError`` if the model cannot be loaded, ``ValueError`` if the configuration does not fit it.
    """
    phases = Phases()
    with phases("files"):
        files = resolve_model(config.model, config.revision)
    if files.format == "synthetic":
        return _build_synthetic(config, files, phases)
    with phases("import"):
        from nanoengine.runner.load import load_runner  # imports torch, which a stand-in does without
    return load_runner(config, files, eos_token_ids, num_tokens, phases)


def _build_synthetic(config: EngineConfig, files: ModelFiles, phases: Phases) -> BuiltRunner:
    synthetic = config.synthetic
    tokenizer = load_tokenizer(files)
    max_num_seqs, max_num_batched_tokens = config.step_limits("none")
    num_blocks = config.num_blocks or -(-max_num_seqs * synthetic.max_model_len // config.block_size)
    runner = SyntheticRunner(
        num_slots=max_num_seqs,
        num_blocks=num_blocks,
        block_size=config.block_size,
        step_seconds=synthetic.step_seconds,
        prefill_tokens_per_second=synthetic.prefill_tokens_per_second,
        context=synthetic.context,
        num_tokens=tokenizer.vocab_size,
        eos_token_id=tokenizer.eos_token_ids[0],
    )
    info = EngineInfo(
        model=config.model,
        max_model_len=model_len(config, synthetic.max_model_len, num_blocks),
        vocab_size=tokenizer.vocab_size,
        num_tokens=tokenizer.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        device="none",
        dtype="none",
        load_seconds=phases.seconds,
    )
    return BuiltRunner(runner, info, lambda: MemorySummary(weights=0, kv_pool=0))
