"""The model that GPU benchmarks train: a Llama of a published size, with random weights and tokens."""

from __future__ import annotations

import torch

VOCABULARY = 32_000
SIZES = {  # width, layers, feed-forward width, heads
    "tiny": (64, 2, 128, 4),
    "0.4b": (1024, 24, 2816, 16),
    "1.3b": (2048, 24, 5504, 16),
    "2.7b": (2560, 32, 6912, 20),
    "7b": (4096, 32, 11008, 32),
    "13b": (5120, 40, 13824, 40),
}


def build_llama(size: str, device: str) -> torch.nn.Module:
    """Return a bf16 model in training mode that computes activations again in backward."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, feed_forward, heads = SIZES[size]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        intermediate_size=feed_forward,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        use_cache=False,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model: torch.nn.Module = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    model.train()
    return model


def random_tokens(batch: int, length: int, device: str) -> torch.Tensor:
    """Return token numbers, which are their own labels."""
    return torch.randint(0, VOCABULARY, (batch, length), device=device)
