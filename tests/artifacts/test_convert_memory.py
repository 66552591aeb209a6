"""What a conversion holds in memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ninfer.artifacts import open_artifact
from ninfer.artifacts.convert import make_plan
from ninfer.artifacts.convert_objects import to_artifact
from ninfer.artifacts.ninfer_write import write_artifact
from ninfer.artifacts.recipes import recipe
from ninfer.artifacts.synthetic import shapes_of
from tests.artifacts.test_hf_quant import folder

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 3072,
          "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32768,
          "tie_word_embeddings": True}  # fmt: skip


@pytest.mark.parametrize(("name", "most"), [("bf16", 4 << 20), ("q4", 160 << 20)])
def test_a_conversion_holds_little_at_a_time(tmp_path: Path, name: str, most: int) -> None:
    """92 MB in bf16, of which 67 MB are the embedding; encoding takes 8 million values at a time, copying 1 MB."""
    row = np.random.default_rng(0).integers(0x3C00, 0x3D00, 4096).astype("<u2")
    tensors = {n: ("BF16", np.resize(row, shape)) for n, shape in shapes_of(CONFIG).items()}
    path = folder(tmp_path / "m", tensors, CONFIG)
    del tensors
    tracemalloc.start()
    new = to_artifact(make_plan(recipe(name), open_artifact(path), {}, name="m"))
    write_artifact(new, tmp_path / "m.ninfer")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < most, f"{peak >> 20} MiB"
