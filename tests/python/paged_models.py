"""Tiny random models of the kinds of attention that paged caches meet."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx

VOCAB = 128
_COMMON = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": VOCAB}
_LLAMA = {**_COMMON, "num_hidden_layers": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "head_dim": 16}
_MLA = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "model_type": "llama", "num_key_value_heads": 2},
    "llama_mqa": {**_LLAMA, "model_type": "llama", "num_key_value_heads": 1},
    "qwen3": {
        **_LLAMA,
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        **_COMMON,
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 16,
    },
    "gpt_oss": {
        **_COMMON,
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "sliding_window": 16,
        "rope_theta": 1e4,
    },
    "deepseek_v2": {
        **_COMMON,
        **_MLA,
        "model_type": "deepseek_v2",
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 64,
        },
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
    },
    "deepseek_v3": {
        **_COMMON,
        **_MLA,
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": None,
    },
    "qwen3_next": {
        **_COMMON,
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "rms_norm_eps": 1e-5,
        "head_dim": 16,
        "rope_theta": 1e4,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 512,
    },
}


def tiny_model(name: str, dtype: Any = mx.float32, seed: int = 0) -> Any:
    """A model of mlx_lm's own class with random weights that do not fade to a constant output."""
    config = CONFIGS[name]
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def prompt(n: int, seed: int = 0) -> mx.array:
    return mx.random.randint(3, VOCAB, (n,), key=mx.random.key(seed))
