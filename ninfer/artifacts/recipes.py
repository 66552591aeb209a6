"""Recipes: which weight format each logical matrix gets. Vectors, norms and convolutions keep their values.

A rule is a pattern over logical names and a format; the first that matches counts. KEEP stands for the format in which
the source has the matrix; `plain` is what it becomes where the source has plain numbers.
"""

from __future__ import annotations

import re

from attrs import frozen

from ninfer.errors import UsageError

KEEP = "keep"
DENSE, MOE, LLAMA = "qwen3_5_text", "qwen3_5_moe_text", "llama"


@frozen
class Rule:
    """policy: what activations a product may use."""

    pattern: str
    format: str
    policy: str = "AllowA8"
    plain: str = KEEP


@frozen
class Recipe:
    """models: model types that it fits; empty: any. sources: names of --source that it needs."""

    name: str
    about: str
    rules: tuple[Rule, ...]
    models: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    def rule(self, part: str) -> Rule:
        for rule in self.rules:
            if re.fullmatch(rule.pattern, part):
                return rule
        raise UsageError(f"--recipe: {self.name} says nothing of {part!r}")


EMBEDDING, HEAD = "text/token_embedding", "text/output_head"
_PLAIN_EMBEDDING = r"text/model\.embed_tokens\.weight|text/lm_head\.weight"
_DIRECT = (
    r".*/gdn/[ab]_projection|.*/moe/(router|shared_score)|text/model\..*(router|mlp\.gate)\..*"
    r"|dflash2?/.*(kernel_projection|hidden_projection|codebook)"
)
_BF16 = Rule(_DIRECT, "bf16", "A16Only")
_MTP = Rule(r"(mtp|dflash2?)/.*", "q8_g32")
_ADAPTER = Rule(r"dflash2/(feature_projection|layers/\d+/(attention/output|mlp/.*))", "q4_g64")
_FIRST = r".*/attention/(query|key)|.*/gdn/(query|key)|.*/mlp/(gate|up)"
_PLAIN_FIRST = r"text/model\..*\.(q_proj|k_proj|gate_proj|up_proj)\.weight"


def _all(name: str, fmt: str, about: str, policy: str = "AllowA8") -> Recipe:
    return Recipe(name, about, (_BF16, Rule(r".*", fmt, policy)))


def _mixed(
    name: str, about: str, embedding: str, head: str, *, inner: str = "", models: tuple[str, ...] = (DENSE,),
    sources: tuple[str, ...] = (),
) -> Recipe:  # fmt: skip
    """Queries, keys, gate and up in q4, the rest in q5.   inner: of gate and up, where they are not q4."""
    rules = (
        _BF16,
        _MTP,
        Rule(f"{EMBEDDING}|{_PLAIN_EMBEDDING}", embedding),
        Rule(HEAD, head),
        *((Rule(r".*/mlp/(gate|up)", inner),) if inner else ()),
        Rule(f"{_FIRST}|{_PLAIN_FIRST}", "q4_g64"),
        Rule(r".*", "q5_g64"),
    )
    return Recipe(name, about, rules, models, sources)


_KEEP_ALL = Rule(r".*", KEEP)

RECIPES: tuple[Recipe, ...] = (
    _all("bf16", "bf16", "any model: every matrix in bf16", "A16Only"),
    _all("q4", "q4_g64", "any model: 4.25 bits per weight, embedding and head included"),
    _all("q5", "q5_g64", "any model: 5.25 bits per weight"),
    _all("q6", "q6_g64", "any model: 6.25 bits per weight"),
    _all("q8", "q8_g32", "any model: 8.5 bits per weight"),
    _all("fp8", "fp8_e4m3fn_row_bf16", "any model: 8-bit floats with a scale per row"),
    Recipe("quantized", "any model: FP8, NVFP4 and MX weights of a folder as they are, other matrices in bf16",
           (_BF16, Rule(r".*", KEEP, "AllowA4", "bf16"))),
    _mixed("q4q5", "any model: q4 for queries, keys, gate and up, q5 for the rest, embedding and head in q8",
           "q8_g32", "q8_g32", models=()),
    Recipe("gguf", "any model: blocks of a GGUF file as they are", (_KEEP_ALL,)),
    _mixed("qwen3_6_27b", "Qwen3.6-27B: q4/q5, embedding and head in q6", "q6_g64", "q6_g64"),
    _mixed("qwen3_8_27b", "Qwen3.8-27B: q4/q5, embedding and head in q8", "q8_g32", "q8_g32"),
    _mixed("qwen3_8_27b_q6", "Qwen3.8-27B: as qwen3_8_27b with gate and up in q6", "q8_g32", "q8_g32", inner="q6_g64"),
    _mixed("qwen3_8_27b_imatrix", "Qwen3.8-27B: as qwen3_8_27b, scales searched by --source imatrix=GGUF",
           "q8_g32", "q8_g32", sources=("imatrix",)),
    Recipe("qwen3_8_27b_gguf", "Qwen3.8-27B: blocks of --source gguf=FILE as is, the delta rule's a and b in bf16",
           (Rule(r".*/gdn/[ab]_projection", "bf16", "A16Only"), _KEEP_ALL), (DENSE,), ("gguf",)),
    *(
        Recipe(f"{name}_nvfp4", f"{about}: NVFP4 weights of --source quantized=DIR, embedding and head in q8",
               (_BF16, _MTP, Rule(f"{EMBEDDING}|{HEAD}", "q8_g32"), *rest, Rule(r".*", KEEP, "AllowA4", "bf16")),
               (kind,), ("quantized",))
        for name, about, kind, rest in (
            ("qwen3_6_27b", "Qwen3.6-27B", DENSE, ()),
            ("qwen3_6_35b_a3b", "Qwen3.6-35B-A3B", MOE, (Rule(r".*/(attention|gdn)/.*", "q8_g32"),)),
        )
    ),
    Recipe("qwen3_8_27b_nvfp4",
           "Qwen3.8-27B: NVFP4 and FP8 weights of --source quantized=DIR, other matrices in FP8",
           (_BF16, _MTP, Rule(r".*", KEEP, "AllowA4", "fp8_e4m3fn_row_bf16")), (DENSE,), ("quantized",)),
    Recipe("gemma4_gguf", "Gemma 4: blocks of --source gguf=FILE (QAT Q4_0) as they are", (_KEEP_ALL,),
           ("gemma4_text", "gemma4"), ("gguf",)),
    Recipe("bonsai2_27b_ternary", "Ternary Bonsai 2 27B: --source ternary=GGUF (PQ2_0) as t2_g128",
           (_BF16, _ADAPTER, _MTP, Rule(r".*", "t2_g128")), (DENSE,), ("ternary",)),
    Recipe(
        "qwen3_6_35b_a3b",
        "Qwen3.6-35B-A3B: experts in q4/q5 (down of layers 34, 38, 39 in q6), other matrices in q8, head in q6",
        (
            _BF16,
            _MTP,
            Rule(EMBEDDING, "q8_g32"),
            Rule(HEAD, "q6_g64"),
            Rule(r".*/moe/experts/\d+/(gate|up)", "q4_g64"),
            Rule(r"text/layers/(34|38|39)/moe/experts/\d+/down", "q6_g64"),
            Rule(r".*/moe/experts/\d+/down", "q5_g64"),
            Rule(r".*", "q8_g32"),
        ),
        (MOE,),
    ),
)  # fmt: skip


def recipe(name: str) -> Recipe:
    for r in RECIPES:
        if r.name == name:
            return r
    raise UsageError(f"--recipe: no recipe {name!r}; there are {', '.join(r.name for r in RECIPES)}")
