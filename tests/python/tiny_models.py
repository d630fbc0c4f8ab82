"""Small Llama-family models, written as GGUF by the gguf package, for tests that need no real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import llama, qwen2

SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def byte_alphabet() -> list[str]:
    """The 256 characters in which byte-level vocabularies spell bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]


def byte_level_vocab() -> tuple[list[str], list[str]]:
    """Tokens and merges: control tokens, all bytes, and a few merges."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w"]
    return CONTROL + byte_alphabet() + [merge.replace(" ", "") for merge in merges], merges


def random_model(arch: str = "llama", *, tied: bool = True, seed: int = 0, **shape: Any) -> Any:
    """A model of mlx_lm's own class with random float32 weights."""
    mx.random.seed(seed)
    module = {"llama": llama, "qwen2": qwen2}[arch]
    vocab_size = shape.pop("vocab_size", len(byte_level_vocab()[0]))
    config = {"model_type": arch, "vocab_size": vocab_size, "tie_word_embeddings": tied, **SHAPE, **shape}
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model


def write_byte_level(writer: gguf.GGUFWriter, pre: str = "smollm") -> None:
    """Writes the metadata of the byte-level tokenizer."""
    tokens, merges = byte_level_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def write_gguf(
    path: Path,
    model: Any = None,
    *,
    quantize: bool = False,
    tokenizer: Callable[[gguf.GGUFWriter], None] = write_byte_level,
    extra: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """Writes a model as llama.cpp's converter does.

    ``tokenizer`` writes its metadata; ``extra`` holds GGUFWriter's methods and their argument; ``tensors`` are added.
    """
    model = model or random_model()
    args = model.args
    writer = gguf.GGUFWriter(path, args.model_type)
    writer.add_block_count(args.num_hidden_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(args.hidden_size)
    writer.add_feed_forward_length(args.intermediate_size)
    writer.add_head_count(args.num_attention_heads)
    writer.add_head_count_kv(args.num_key_value_heads)
    writer.add_rope_freq_base(args.rope_theta)
    writer.add_layer_norm_rms_eps(args.rms_norm_eps)
    tokenizer(writer)
    for method, value in (extra or {}).items():
        getattr(writer, method)(value)
    for name, values in (_tensors(model) | (tensors or {})).items():
        _add(writer, name, values, quantize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: Any) -> dict[str, np.ndarray]:
    interleaves = model.args.model_type == "llama"
    tensors = {}
    for name, values in tree_flatten(model.parameters()):
        array = np.array(values)
        if interleaves and ("q_proj" in name or "k_proj" in name):
            n_heads = model.args.num_attention_heads if "q_proj" in name else model.args.num_key_value_heads
            array = array.reshape(n_heads, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        tensors[name] = array
    return tensors


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, quantize: bool) -> None:
    if quantize and values.ndim == 2:
        kind = gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, values)
