"""`.ninfer` files: bytes against the layout, written and read back, damaged in every way."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer.artifacts import open_artifact
from ninfer.artifacts.artifact import TokenizerFiles
from ninfer.artifacts.convert import make_plan
from ninfer.artifacts.convert_objects import to_artifact
from ninfer.artifacts.ninfer_artifact import NinferArtifact
from ninfer.artifacts.ninfer_v3 import NinferFile
from ninfer.artifacts.ninfer_write import NewArtifact, NewObject, check_written, raw_object, write_artifact
from ninfer.artifacts.recipes import recipe
from ninfer.errors import ArtifactError, NinferError, UsageError
from ninfer.formats.quant import by_name
from ninfer.models import identify
from tests.checkpoints import DATA
from tests.drawn import checkpoint

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}


def q4_object(id: str, n: int, k: int) -> NewObject:
    x = np.random.default_rng(1).standard_normal((n, k)).astype(np.float32)
    return raw_object(id, by_name("q4_g64").pack(x).tobytes(), shape=(n, k), format="q4_g64_fp16",
                      layout="row_split_k128_v1")  # fmt: skip


def bf16_object(id: str, *shape: int) -> NewObject:
    x = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    return raw_object(id, by_name("bf16").pack(x).tobytes(), shape=shape, format="bf16", layout="contiguous_le_v1")


def example() -> NewArtifact:
    """The small example of the layout: a norm, a matrix, a tokenizer's bytes, and a tail."""
    objects = [bf16_object("w.norm", 128), q4_object("w.q", 256, 128), raw_object("r.tok", bytes(range(250)) * 4)]
    bindings = {
        "text/final_norm": {"object": "w.norm"},
        "text/layers/0/attention/query": {"parts": [{"object": "w.q", "range": [16384, 32768]}]},
        "text/layers/0/attention/key": {"parts": [{"object": "w.q", "range": [0, 16384]}]},
    }
    uses = [{"parameter": "text/layers/0/attention/query", "input": "text/layers/0/mixer_input",
             "activation_policy": "A16Only"}]  # fmt: skip
    components = {"text": {"config": LLAMA, "resources": {"tokenizer.json": "r.tok"}}}
    return NewArtifact(components, objects, bindings, uses, {"name": "example"}, {})


def whole(tmp_path: Path, new: NewArtifact | None = None, **more: Any) -> Path:
    path = tmp_path / "model.ninfer"
    write_artifact(new or example(), path, **more)
    return path


def test_the_example_has_the_layouts_bytes(tmp_path: Path) -> None:
    path = whole(tmp_path)
    raw = path.read_bytes()
    assert raw[:8] == b"NINFER\0\x03"
    (json_bytes,) = struct.unpack("<Q", raw[8:16])
    assert len(raw) == -(-(32 + json_bytes) // 4096) * 4096 + 18664
    root = json.loads(raw[32 : 32 + json_bytes])
    assert [(o["offset"], o["bytes"]) for o in root["objects"]] == [(0, 256), (256, 17408), (17664, 1000)]
    assert root["files"] == [{"path": None, "payload_bytes": 18664}]


def test_rows_of_an_object_are_a_parameter(tmp_path: Path) -> None:
    path = whole(tmp_path)
    artifact = open_artifact(path)
    fmt = by_name("q4_g64")
    q = fmt.unpack(np.frombuffer(NinferFile(path).read(256, 17408, "w.q"), np.uint8), (256, 128))
    assert np.array_equal(artifact.get("model.layers.0.self_attn.q_proj.weight").f32(), q[128:])
    assert np.array_equal(artifact.get("model.layers.0.self_attn.k_proj.weight").f32(), q[:128])
    assert artifact.info("model.norm.weight").shape == (128,)
    assert isinstance(artifact, NinferArtifact)
    assert artifact.policy("model.layers.0.self_attn.q_proj.weight") == "A16Only"
    assert isinstance(artifact.tokenizer_source, TokenizerFiles)
    assert artifact.tokenizer_source.tokenizer == bytes(range(250)) * 4
    assert artifact.model_id == "example"


SIGNS: dict[str, tuple[str, str, str | None]] = {  # parameter, input, message
    "of a product": ("text/layers/0/attention/query", "text/layers/0/mixer_input", None),
    "of another input": (
        "text/layers/0/attention/query",
        "text/layers/0/mlp/product",
        "mlp/product' rotates it, which is not",
    ),
    "of columns": ("text/layers/0/attention/key", "text/layers/0/mixer_input", "permutes its input columns"),
}


@pytest.mark.parametrize("name", SIGNS)
def test_uses_that_cannot_be_honoured_are_refused(tmp_path: Path, name: str) -> None:
    parameter, input, message = SIGNS[name]
    new, role = example(), "input_columns" if name == "of columns" else "hadamard_signs"
    words = np.arange(128, dtype="<i4") if role == "input_columns" else np.full(128, 0x3F80, "<u2")
    aux = raw_object("a.0", words.tobytes(), shape=(128,), format="int32" if words.dtype == "<i4" else "bf16",
                     layout="contiguous_le_v1")  # fmt: skip
    use = {"parameter": parameter, "input": input, "auxiliaries": {role: {"object": "a.0"}}}
    path = whole(tmp_path, NewArtifact(new.components, [*new.objects, aux], new.bindings, [use], {}, {}))
    if message is None:
        artifact = open_artifact(path)
        assert artifact.config["hadamard_signs"].keys() == {"model.layers.0.self_attn.q_proj.weight"}
        assert isinstance(artifact, NinferArtifact)
        with pytest.raises(ArtifactError, match="states no activation_policy"):
            artifact.policy("model.layers.0.self_attn.q_proj.weight")
        return
    with pytest.raises(ArtifactError, match=message):
        open_artifact(path)


def test_components_that_are_not_run_are_kept_and_told(tmp_path: Path) -> None:
    new = example()
    components = {**new.components, "vision": {"config": {"depth": 2}, "target": "text"}}
    bindings = {**new.bindings, "vision/merger/fc1": {"object": "w.q"}}
    path = whole(tmp_path, NewArtifact(components, new.objects, bindings, new.uses, {}, {"recipe": "q4"}))
    artifact = open_artifact(path)
    assert not [n for n in artifact.names() if "vision" in n]
    assert "components text; kept and not used: vision" in artifact.details() and "recipe 'q4'" in artifact.details()
    alone: dict[str, Any] = {"ngram": {"config": {}}}
    write_artifact(NewArtifact(alone, new.objects, {}, [], {}, {}), tmp_path / "table.ninfer")
    with pytest.raises(ArtifactError, match="holds an n-gram table alone"):
        open_artifact(tmp_path / "table.ninfer")


def test_opening_maps_and_whole_objects_are_views(tmp_path: Path) -> None:
    new = example()
    bindings = {**new.bindings, "text/layers/0/mlp/up": {"object": "big"}}
    big = np.zeros(32 << 20, np.uint8)
    objects = [*new.objects, NewObject("big", big.size, lambda sink: sink.put(0, big), (16 << 10, 1024), "bf16",
                                       "contiguous_le_v1")]  # fmt: skip
    path = whole(tmp_path, NewArtifact(new.components, objects, bindings, new.uses, {}, {}))
    tracemalloc.start()
    artifact = open_artifact(path)
    raw = artifact.get("model.layers.0.mlp.up_proj.weight").raw
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert raw.size == 32 << 20 and not raw.flags.owndata


@pytest.mark.parametrize("limit", [1 << 14, 12288])
def test_split_files_read_as_one(tmp_path: Path, limit: int) -> None:
    one = NinferFile(whole(tmp_path))
    split = tmp_path / "split.ninfer"
    write_artifact(example(), split, max_file_bytes=limit)
    many = NinferFile(split)
    assert len(many.directory.files) > 1 and all(p.stat().st_size <= limit for p in tmp_path.glob("split.ninfer*"))
    assert np.array_equal(one.read(0, 18664, "all"), many.read(0, 18664, "all"))
    for offset, nbytes in ((4000, 9000), (8191, 2), (18663, 1)):
        assert np.array_equal(one.read(offset, nbytes, "some"), many.read(offset, nbytes, "some"))


def test_parts_that_are_missing_or_of_another_set_are_refused(tmp_path: Path) -> None:
    path = whole(tmp_path, max_file_bytes=1 << 14)
    part = tmp_path / "model.ninfer.part-0001"
    good = part.read_bytes()

    def reading() -> str:
        with pytest.raises(ArtifactError) as error:
            NinferFile(path).check_parts()
        return str(error.value)

    part.write_bytes(good[:-1])
    assert "it has" in reading() and "truncated" in reading()
    part.write_bytes(good[:16] + bytes(16) + good[32:])
    assert "belongs to another set (offset 16)" in reading()
    part.write_bytes(good[:8] + b"\x07" + good[9:])
    assert "it is part 7 (offset 8)" in reading()
    part.write_bytes(b"GGUF" + good[4:])
    assert "not a part" in reading()
    part.unlink()
    assert "files[1] 'model.ninfer.part-0001'" in reading() and "missing" in reading()


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The file with its directory changed; the payload stays where it is."""
    raw = path.read_bytes()
    (n,) = struct.unpack("<Q", raw[8:16])
    root = json.loads(raw[32 : 32 + n])
    change(root)
    text = json.dumps(root).encode()
    assert len(text) <= n
    out = path.with_name("changed.ninfer")
    out.write_bytes(raw[:32] + text.ljust(n) + raw[32 + n :])
    return out


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "unknown root member": (lambda r: r.update(extra=1), "the root has the unknown member 'extra'"),
    "no files": (lambda r: r.pop("files"), "the root has no member 'files'"),
    "a boolean size": (lambda r: r["files"][0].update(payload_bytes=True), r"files\[0\].payload_bytes is True"),
    "a float offset": (lambda r: r["objects"][0].update(offset=0.0), r"offset is 0.0, not a whole number"),
    "overlap": (lambda r: r["objects"][1].update(offset=0), r"objects\[1\] 'w.q'.offset 0 lies before the end 256"),
    "past the end": (lambda r: r["objects"][2].update(bytes=2000), r"needs bytes 17664 to 19664, but the payload has"),
    "twice the id": (lambda r: r["objects"][1].update(id="w.norm"), r"objects\[1\] 'w.norm'.id occurs twice"),
    "huge shape": (lambda r: r["objects"][1].update(shape=[1 << 40, 1 << 40]), "more elements than 64 bits"),
    "divisors": (lambda r: r["objects"][1].update(divisors=2), "divisors is 2, but only nvfp4"),
    "range": (
        lambda r: r["bindings"]["text/layers/0/attention/key"]["parts"][0].update(range=[0, 99999]),
        r"range is \[0, 99999\], but object 'w.q' has 32768",
    ),
    "a resource bound": (lambda r: r["bindings"].update({"text/final_norm": {"object": "r.tok"}}), "is a resource"),
    "policy": (lambda r: r["uses"][0].update(activation_policy="A2"), "activation_policy is 'A2'; there are A16Only"),
    "unknown role": (lambda r: r["uses"][0].update(auxiliaries={"x": {"object": "w.q"}}), "is no known role"),
    "two uses": (lambda r: r["uses"].append(r["uses"][0]), r"uses\[1\] of .* occurs twice"),
    "no text": (lambda r: r.update(components={}), "components has no 'text'"),
    "a path": (lambda r: r["files"].append({"path": "../x", "payload_bytes": 1}), "not the plain name of a file"),
    "target": (lambda r: r["components"]["text"].update(target="vision"), "which is no component"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_wrong_member_is_named(tmp_path: Path, name: str) -> None:
    change, message = CHANGES[name]
    with pytest.raises(ArtifactError, match=message) as error:
        open_artifact(rewritten(whole(tmp_path), change))
    assert str(error.value).count("\n") == 0 and "changed.ninfer" in str(error.value)


LAZY: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "format": (lambda r: r["objects"][1].update(format="q3_g64_fp16"), "format 'q3_g64_fp16' in layout 'row_split"),
    "layout": (lambda r: r["objects"][1].update(layout="row_split_v2"), "in layout 'row_split_v2', which is not"),
    "size": (lambda r: r["objects"][1].update(bytes=17400),
             r"has 17400 bytes, but q4_g64_fp16 \[256, 128\] takes 17408"),
    "place": (lambda r: r["objects"][1].update(offset=257, bytes=17407), "does not begin at a multiple of 256"),
    "rank": (lambda r: r["objects"][1].update(shape=[2, 128, 128]), r"has shape \[2, 128, 128\]"),
    "part of a row": (
        lambda r: r["bindings"]["text/layers/0/attention/query"]["parts"][0].update(range=[1, 129]), "not whole rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAZY)
def test_an_object_that_cannot_be_used_is_refused_when_it_is_asked_for(tmp_path: Path, name: str) -> None:
    change, message = LAZY[name]
    artifact = open_artifact(rewritten(whole(tmp_path), change))
    assert artifact.get("model.norm.weight").f32().shape == (128,)
    with pytest.raises(ArtifactError, match=message):
        artifact.info("model.layers.0.self_attn.q_proj.weight")


def test_framing_errors(tmp_path: Path) -> None:
    path = whole(tmp_path)
    raw = path.read_bytes()
    bad = tmp_path / "bad.ninfer"
    for text, message in (
        (raw[:-1], "truncated"),
        (raw + b"\0", "damaged"),
        (raw[:20], "less than the header"),
        (raw[:5000], "truncated"),
        (raw[:8] + b"\xff" * 8 + raw[16:], "offset 8"),
        (raw[:7] + b"\x02" + raw[8:], "version 2; version 3 is supported"),
        (b"NINPRT\0\x03" + raw[8:], "give the .ninfer file it belongs to"),
        (b"\0" * 4096, "not a .ninfer file"),
        (raw[:32] + b"\xef\xbb\xbf" + raw[35:], "JSON"),
        (raw[:32] + b'{"files":1,"files":1}'.ljust(4064) + raw[4096:], "'files' occurs twice"),
        (raw[:32] + (b"[" * 4064) + raw[4096:], "nested too deeply"),
        (raw[:32] + (b'{"files":' + b"9" * 4040 + b"}").ljust(4064) + raw[4096:], "the root has no member"),
    ):
        bad.write_bytes(text)
        with pytest.raises(ArtifactError, match=message):
            open_artifact(bad)


def test_random_damage_never_crashes_or_allocates(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Bytes of header and directory flipped, cut, repeated and replaced by large numbers."""
    seed = 20250
    rng = np.random.default_rng(seed)
    path = whole(tmp_path, max_file_bytes=1 << 14)
    raw = path.read_bytes()
    n = len(json.dumps(NinferFile(path).directory.metadata)) + len(raw[:4096].rstrip())
    words = [b"-1", b"1e9", b"18446744073709551616", b"true", b"null", b"[]", b"{}", b'""', b'"w.q"', b"9" * 30]
    tracemalloc.start()
    opened = 0
    for i in range(600):
        text = bytearray(raw)
        for _ in range(int(rng.integers(1, 4))):
            at, kind = int(rng.integers(0, min(n, 4096))), int(rng.integers(0, 4))
            if kind == 0:
                text[at] ^= 1 << int(rng.integers(0, 8))
            elif kind == 1:
                text[at] = int(rng.integers(0, 256))
            elif kind == 2:
                word = words[int(rng.integers(0, len(words)))]
                text[at : at + len(word)] = word
            else:
                source = int(rng.integers(32, n))
                text[at : at + 16] = text[source : source + 16]
        path.write_bytes(text[: int(rng.integers(1, len(text)))] if i % 10 == 0 else text)
        try:
            artifact = open_artifact(path)
            for name in artifact.names():
                artifact.get(name).f32()
            opened += 1
            artifact.close()
        except NinferError as error:
            assert str(error).count("\n") == 0, f"seed {seed}, mutation {i}"
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert 0 < opened < 600  # some mutations are harmless, as of a name or of free text


VALUES: list[Any] = [
    0,
    1,
    -1,
    2,
    7,
    1 << 20,
    1 << 40,
    1 << 63,
    1 << 64,
    True,
    None,
    "",
    "x",
    "text",
    0.5,
    1e30,
    [],
    [1],
    [1, 2],
    {},
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of every value inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [p for key, v in inner for p in places(v, (*path, key))]


def alter(value: Any, pool: Sequence[tuple[Any, ...]], rng: np.random.Generator) -> tuple[Any, ...]:
    """One of the places dropped or given another value."""
    *outer, last = place = pool[int(rng.integers(0, len(pool)))]
    for key in outer:
        value = value[key]
    if rng.integers(0, 6) == 0:
        del value[last]
    else:
        value[last] = VALUES[int(rng.integers(0, len(VALUES)))]
    return place


@pytest.mark.parametrize("name", ["qwen3_5_dense", "qwen3_5_dense.gguf", "qwen3_5_moe"])
def test_any_value_in_the_directory_may_be_another(tmp_path: Path, name: str) -> None:
    """Members replaced, dropped or copied from elsewhere: an error of ours, or a model that can be read."""
    model = checkpoint(DATA / name, tmp_path / "moe") if name == "qwen3_5_moe" else DATA / name
    new = to_artifact(make_plan(recipe("gguf"), open_artifact(model), {}, name="x", components=("text", "mtp")))
    path = tmp_path / "model.ninfer"
    write_artifact(new, path)
    raw, rng = path.read_bytes(), np.random.default_rng(77)
    (n,) = struct.unpack("<Q", raw[8:16])
    root = json.loads(raw[32 : 32 + n])
    within = [p for p in places(root) if p[0] == "components"]
    other = [p for p in places(root) if p[0] != "components"]
    refused = 0
    for i in range(400):
        changed, pool = json.loads(raw[32 : 32 + n]), within if i % 2 else other
        for _ in range(int(rng.integers(1, 3))):
            try:
                alter(changed, pool, rng)
            except (KeyError, IndexError, TypeError):
                continue  # an earlier change took the place away
        text = json.dumps(changed, separators=(",", ":")).encode()
        if len(text) > n:
            continue
        path.write_bytes(raw[:32] + text.ljust(n) + raw[32 + n :])
        try:
            artifact = open_artifact(path)
            identify(artifact.config)
            for tensor in artifact.names():
                artifact.get(tensor)
            artifact.close()
        except NinferError as error:
            refused += 1
            assert str(error).count("\n") == 0, f"mutation {i}"
    assert refused > 100


# writing


def test_nothing_is_left_of_a_conversion_that_fails(tmp_path: Path) -> None:
    def fail(sink: Any) -> None:
        sink.put(0, np.zeros(10, np.uint8))
        raise ArtifactError("the source is damaged")

    new = example()
    objects = [*new.objects, NewObject("x", 1 << 16, fail, (1 << 15,), "bf16", "contiguous_le_v1")]
    with pytest.raises(ArtifactError, match="the source is damaged"):
        whole(tmp_path, NewArtifact(new.components, objects, new.bindings, new.uses, {}, {}), max_file_bytes=1 << 15)
    assert not list(tmp_path.iterdir())


def test_an_unfinished_file_is_never_whole(tmp_path: Path) -> None:
    """While bytes are being written, no file has the wanted name and none can be opened."""
    seen = []

    def look(sink: Any) -> None:
        sink.put(0, np.zeros(64, np.uint8))
        for file in os.listdir(tmp_path):
            seen.append(file)
            with pytest.raises(ArtifactError):
                NinferFile(tmp_path / file)

    new = example()
    objects = [*new.objects, NewObject("x", 64, look, (32,), "bf16", "contiguous_le_v1")]
    path = whole(tmp_path, NewArtifact(new.components, objects, new.bindings, new.uses, {}, {}))
    assert seen and path.name not in seen
    assert os.listdir(tmp_path) == [path.name]


def test_an_output_that_exists_is_kept(tmp_path: Path) -> None:
    path = whole(tmp_path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        write_artifact(example(), path)
    assert path.read_bytes() == before
    with pytest.raises(UsageError, match="does not exist"):
        write_artifact(example(), tmp_path / "no" / "model.ninfer")


def test_verification_finds_one_changed_byte(tmp_path: Path) -> None:
    path = tmp_path / "model.ninfer"
    new = write_artifact(example(), path)
    check_written(new, path)
    raw = bytearray(path.read_bytes())
    raw[-500] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ArtifactError, match=r"bytes 17664 to 18664 of the payload \(object 'r.tok'\)"):
        check_written(new, path)


def test_large_directories_grow_their_reserve(tmp_path: Path) -> None:
    new = example()
    bindings = {**new.bindings, **{f"text/x/{i}": {"object": "w.norm"} for i in range(2000)}}
    path = whole(tmp_path, NewArtifact(new.components, new.objects, bindings, new.uses, {}, {}))
    assert len(NinferFile(path).directory.bindings) == 2003


def test_other_layouts_of_the_same_parameters_are_one_model(tmp_path: Path) -> None:
    """Files group parameters as they like: here q, k, v and z share a parent, and gate and up alternate with others."""
    base = open_artifact(DATA / "qwen3_5_dense")
    plan = make_plan(recipe("q8"), base, {}, name="x")
    new = to_artifact(plan)
    fmt = by_name("q8_g32")
    layer = "model.layers.0."
    names = {"qkv": f"{layer}linear_attn.in_proj_qkv.weight", "z": f"{layer}linear_attn.in_proj_z.weight"}
    values = {n: base.get(name).f32() for n, name in names.items()}
    parent = np.concatenate([values["z"], values["qkv"]])
    group = raw_object("group", fmt.pack(parent).tobytes(), shape=parent.shape, format="q8_g32_fp16",
                       layout="row_split_k128_v1")  # fmt: skip
    bindings, at = dict(new.bindings), 0
    for part, rows in (("z", 64), ("query", 32), ("key", 32), ("value", 64)):
        name = f"text/layers/0/gdn/{part}"
        assert name in bindings
        bindings[name] = {"parts": [{"object": "group", "range": [at * 64, (at + rows) * 64]}]}
        at += rows
    path = whole(tmp_path, NewArtifact(new.components, [*new.objects, group], bindings, new.uses, {}, {}))
    plain = tmp_path / "plain.ninfer"
    write_artifact(new, plain)
    grouped, straight = open_artifact(path), open_artifact(plain)
    assert isinstance(grouped, NinferArtifact)
    for name in straight.names():
        assert np.array_equal(grouped.get(name).raw, straight.get(name).raw), name
