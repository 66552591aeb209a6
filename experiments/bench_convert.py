"""How fast checkpoints become .ninfer files: blocks copied as they are, and weights encoded.

A Llama of random weights is written as a bf16 folder and as GGUF (rows repeat, bytes are really there), then converted
by each recipe. Rates are of bytes written, in GB/s; the last write is forced to the disk before the clock stops.

    python experiments/bench_convert.py --gib 1 --folder /var/tmp
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import struct
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np

from ninfer.artifacts import open_artifact
from ninfer.artifacts.convert import make_plan
from ninfer.artifacts.convert_objects import to_artifact
from ninfer.artifacts.ninfer_write import write_artifact
from ninfer.artifacts.recipes import recipe
from ninfer.artifacts.synthetic import shapes_of
from ninfer.formats.quant import by_name
from ninfer.formats.tile import TILE, make_tile

HIDDEN, INNER, VOCAB, HEADS, KV_HEADS = 4096, 14336, 32768, 32, 8
GGUF_NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
              "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
              "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
              "post_attention_layernorm": "ffn_norm"}  # fmt: skip


def config(layers: int) -> dict[str, object]:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
            "intermediate_size": INNER, "num_hidden_layers": layers, "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True}  # fmt: skip


def matrix(fmt_name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Bytes of a matrix; norms are ones in float32."""
    if len(shape) == 1:
        return np.ones(shape, np.float32).view(np.uint8)
    fmt, (n, k) = by_name(fmt_name), shape
    tile = make_tile(fmt, min(n, TILE), k)
    return fmt.gather_rows(tile.raw, tile.shape, np.arange(n) % tile.shape[0])


def write_folder(path: Path, layers: int) -> int:
    shapes = shapes_of(config(layers))
    header, at = dict[str, object](), 0
    for name, shape in shapes.items():
        nbytes = (4 if len(shape) == 1 else 2) * int(np.prod(shape))
        header[name] = {"dtype": "F32" if len(shape) == 1 else "BF16", "shape": list(shape),
                        "data_offsets": [at, at + nbytes]}  # fmt: skip
        at += nbytes
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            file.write(matrix("bf16", shape).data)
    (path / "config.json").write_text(json.dumps(config(layers)))
    return at


def write_gguf(path: Path, layers: int, fmt_name: str) -> None:
    out = gguf.GGUFWriter(path, "llama")
    for add, value in ((out.add_block_count, layers), (out.add_context_length, 8192),
                       (out.add_embedding_length, HIDDEN), (out.add_feed_forward_length, INNER),
                       (out.add_head_count, HEADS), (out.add_head_count_kv, KV_HEADS),
                       (out.add_layer_norm_rms_eps, 1e-5)):  # fmt: skip
        add(value)
    fmt = by_name(fmt_name)
    for name, shape in shapes_of(config(layers)).items():
        part = name.removeprefix("model.").removesuffix(".weight")
        target = {"embed_tokens": "token_embd", "norm": "output_norm"}.get(part)
        if target is None:
            _, index, rest = part.split(".", 2)
            target = f"blk.{index}.{GGUF_NAMES[rest]}"
        raw = matrix(fmt_name, shape)
        if len(shape) == 1:
            out.add_tensor(f"{target}.weight", raw.view(np.float32))
            continue
        kind = gguf.GGMLQuantizationType(fmt.ggml_type)
        rows = raw.reshape(shape[0], -1)
        out.add_tensor(f"{target}.weight", rows, raw_shape=rows.shape, raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def convert(model: Path, recipe_name: str, out: Path) -> tuple[int, float]:
    started = time.perf_counter()
    base = open_artifact(model)
    new = write_artifact(to_artifact(make_plan(recipe(recipe_name), base, {}, name="bench")), out)
    base.close()
    return new.payload_bytes, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="bf16 bytes of the model")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=3, help="of each conversion; the median counts")
    parser.add_argument("--encode", action="store_true", help="also encode to q4 and q8, once each")
    args = parser.parse_args()
    per_layer = 2 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN * KV_HEADS // HEADS + 3 * HIDDEN * INNER)
    layers = max(1, round((args.gib * 2**30 - 2 * VOCAB * HIDDEN) / per_layer))
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        work = Path(name)
        (work / "folder").mkdir()
        write_folder(work / "folder", layers)
        write_gguf(work / "model-q8_0.gguf", layers, "q8_0")
        write_gguf(work / "model-q4_k.gguf", layers, "q4_k")
        cases = [("bf16", "folder", args.rounds), ("gguf", "model-q8_0.gguf", args.rounds),
                 ("gguf", "model-q4_k.gguf", args.rounds)]  # fmt: skip
        cases += [("q4", "folder", 1), ("q8", "folder", 1)] if args.encode else []
        for recipe_name, model, rounds in cases:
            times, nbytes = list[float](), 0
            for _ in range(rounds):
                out = work / "out.ninfer"
                nbytes, seconds = convert(work / model, recipe_name, out)
                times.append(seconds)
                out.unlink()
            raw = work / "plain"  # what the disk takes, in the same minute
            source = next((work / model).glob("*.safetensors")) if (work / model).is_dir() else work / model
            started = time.perf_counter()
            shutil.copyfile(source, raw)
            with raw.open("rb+") as file:
                os.fsync(file.fileno())
            copy = raw.stat().st_size / (time.perf_counter() - started) / 1e9
            raw.unlink()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            rate = nbytes / sorted(times)[len(times) // 2] / 1e9
            print(json.dumps({"recipe": recipe_name, "source": model, "layers": layers, "bytes": nbytes,
                              "seconds": [round(t, 3) for t in times],
                              "gb_per_s": round(rate, 3),
                              "copy_gb_per_s": round(copy, 3), "peak_rss_gib": round(peak, 2)}),
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
