"""One tiny random-weight model of each kind of mlx_lm's that a cache meets."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx

VOCAB_SIZE = 64
N_LAYERS = 4
_COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": N_LAYERS,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {"original_max_position_embeddings": 512, "rope_scaling": None},
    "gemma3_text": {
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 8,
        "rope_global_base_freq": 10000.0,
        "rope_local_base_freq": 10000.0,
    },
    "gpt_oss": {
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * (N_LAYERS // 2),
    },
    "cohere2": {"sliding_window": 8, "sliding_window_pattern": 2, "layer_norm_eps": 1e-5, "logit_scale": 0.1},
    "deepseek_v2": {
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "n_routed_experts": 2,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "qk_nope_head_dim": 16,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 1,
        "first_k_dense_replace": 1,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
    },
    "mamba": {
        "state_size": 4,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
        "intermediate_size": 64,
    },
    "qwen3_next": {
        **_EXPERTS,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [],
        "moe_intermediate_size": 16,
        "full_attention_interval": 2,
        "partial_rotary_factor": 0.5,
    },
    "jamba": {
        **_EXPERTS,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 4,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
    },
}
KINDS = list(_OWN)


def make_model(kind: str, *, seed: int = 0, **shape: Any) -> Any:
    """A model of `kind` in float32; `shape` overrides its configuration."""
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict({**_COMMON, "model_type": kind, **_OWN[kind], **shape}))
    mx.eval(model.parameters())
    return model


def prompt_of(n: int, *, seed: int = 1) -> mx.array:
    mx.random.seed(seed)
    return mx.random.randint(0, VOCAB_SIZE, (n,))


def greedy(model: Any, prompt: mx.array, cache: list, n: int = 12) -> list[int]:
    """The next `n` tokens, by mlx_lm's own loop with small prefill chunks."""
    from mlx_lm.generate import generate_step

    steps = generate_step(prompt, model, max_tokens=n, prompt_cache=cache, prefill_step_size=16)
    return [int(token) for token, _ in steps]
