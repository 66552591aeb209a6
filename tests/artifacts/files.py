"""Small model files for the tests of this folder."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np

from ninfer.formats.quant import QuantFormat, by_name

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 64, 4, 2, 16, 96, 40
LLAMA_KEYS: dict[str, object] = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": MLP,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": HEAD_DIM,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [1, 1, 3],
    "tokenizer.ggml.scores": [0.0, -1.0, -2.0],
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": "{{ messages }}",
}


def llama_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """A one-layer model under checkpoint names."""
    rng = np.random.default_rng(seed)

    def w(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": w(VOCAB, HIDDEN),
        "model.norm.weight": w(HIDDEN),
        layer + "input_layernorm.weight": w(HIDDEN),
        layer + "post_attention_layernorm.weight": w(HIDDEN),
        layer + "self_attn.q_proj.weight": w(HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.k_proj.weight": w(KV_HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.v_proj.weight": w(KV_HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.o_proj.weight": w(HIDDEN, HEADS * HEAD_DIM),
        layer + "mlp.gate_proj.weight": w(MLP, HIDDEN),
        layer + "mlp.up_proj.weight": w(MLP, HIDDEN),
        layer + "mlp.down_proj.weight": w(HIDDEN, MLP),
    }


LLAMA_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}


def permuted(x: np.ndarray, heads: int) -> np.ndarray:
    """What a converter does to q and k, in its own words."""
    d = x.shape[0] // heads
    return x.reshape(heads, 2, d // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


Stored = tuple[np.ndarray, QuantFormat]


def llama_tensors(fmt: QuantFormat, weights: dict[str, np.ndarray] | None = None) -> dict[str, Stored]:
    """As a GGUF file holds them: matrices in `fmt`, norms in f32."""
    out = {}
    for name, x in (weights or llama_weights()).items():
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
        out[LLAMA_NAMES[name]] = (permuted(x, heads) if heads else x, by_name("f32") if x.ndim == 1 else fmt)
    return out


def write_gguf(path: Path, keys: dict[str, object], tensors: dict[str, Stored]) -> Path:
    """With the gguf package's writer, except for keys' types, which follow from the values."""
    writer = gguf.GGUFWriter(path, str(keys["general.architecture"]))
    for key, value in keys.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            (writer.add_uint16 if key.startswith("split") else writer.add_uint32)(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, (x, fmt) in tensors.items():
        raw = fmt.pack(x)
        kind = gguf.GGMLQuantizationType(fmt.ggml_type)
        rows = raw.reshape(*x.shape[:-1], -1)
        writer.add_tensor(name, rows, raw_shape=rows.shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_llama(path: Path, fmt: str = "q8_0", **extra: object) -> Path:
    """extra: further keys, with __ for the dots; None takes a key away."""
    keys: dict[str, object] = LLAMA_KEYS | {k.replace("__", "."): v for k, v in extra.items()}
    return write_gguf(path, {k: v for k, v in keys.items() if v is not None}, llama_tensors(by_name(fmt)))


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def raw_gguf(keys: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3) -> bytes:
    """A file from ready pieces, for what the writer would refuse."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], type_id: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)
