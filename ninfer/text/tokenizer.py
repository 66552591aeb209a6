"""Text to token ids and back, from a tokenizer.json or from the tokenizer that a GGUF file carries."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from attrs import define, field
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ninfer.artifacts.artifact import Artifact, TokenizerFiles
from ninfer.errors import ArtifactError

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

# What gives a reply its structure. Some vocabularies call these control tokens; they are shown all the same, since
# whoever reads the reply needs them.
MARKUP = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"})
# The same in Gemma 4, whose templates alone may write them.
CHANNELS = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>')
SHOWN = MARKUP | frozenset(CHANNELS)

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def _byte_level(*, digits: bool) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if not digits:
        return byte_level
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


# tokenizer.ggml.pre -> pre-tokenizer, NFC first?, BPE takes whole-word tokens before merging?
_PRE: Mapping[str, tuple[Callable[[], pre_tokenizers.PreTokenizer], bool, bool]] = {
    "smollm": (lambda: _byte_level(digits=True), False, False),
    "gpt-2": (lambda: _byte_level(digits=False), False, False),
    "llama-bpe": (lambda: _split(_LLAMA3), False, True),
    "qwen2": (lambda: _split(_QWEN2), True, False),
    "qwen35": (lambda: _split(_QWEN35), True, False),
}


def _unicode_to_byte() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, back to the bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


_BYTE_OF = _unicode_to_byte()


@define
class Tokenizer:
    """encode and decode are thread-safe. `plain` reads control tokens as ordinary text."""

    backend: Backend
    plain: Backend
    bos_id: int | None = None
    add_bos: bool = False
    _special: frozenset[int] = frozenset()  # control tokens
    _added: frozenset[int] = frozenset()  # those, and others that are spelled as they are
    _pieces: dict[int, bytes] = field(factory=dict)
    _sentencepiece: bool = False

    @staticmethod
    def from_artifact(artifact: Artifact) -> Tokenizer:
        """Raises ArtifactError when the artifact carries no tokenizer, or one of an unknown kind."""
        source = artifact.tokenizer_source
        if source is None:
            raise ArtifactError(f"{artifact.path}: no tokenizer found; put tokenizer.json beside the weights")
        if isinstance(source, Path):
            return Tokenizer.from_hf(source)
        if isinstance(source, TokenizerFiles):
            return Tokenizer.from_files(source)
        return Tokenizer.from_gguf(source, str(artifact.path))

    @staticmethod
    def from_hf(path: Path) -> Tokenizer:
        """path: of a tokenizer.json; added tokens and the BOS rule come from tokenizer_config.json beside it."""
        beside = path.with_name("tokenizer_config.json")
        try:
            files = path.read_bytes(), beside.read_bytes() if beside.is_file() else b""
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from None
        return Tokenizer.from_files(TokenizerFiles(*files, str(path)))

    @staticmethod
    def from_files(files: TokenizerFiles) -> Tokenizer:
        config: dict[str, Any] = {}
        try:
            backend = Backend.from_str(files.tokenizer.decode("utf-8"))
            if files.config:
                config = json.loads(files.config)
        except Exception as error:
            raise ArtifactError(f"{files.origin}: not a usable tokenizer: {error}") from None
        for id, token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda t: int(t[0])):
            if backend.token_to_id(token["content"]) is None:
                special = bool(token.get("special", True))
                backend.add_tokens([AddedToken(token["content"], normalized=False, special=special)])
                if backend.token_to_id(token["content"]) != int(id):
                    raise ArtifactError(f"{files.origin}: added token {token['content']!r} cannot have id {id}")
        added = backend.get_added_tokens_decoder()
        bos = config.get("bos_token")
        bos_text = bos.get("content") if isinstance(bos, dict) else bos
        return Tokenizer(
            backend,
            _plain_of(backend, [t for _, t in sorted(added.items()) if _is_blank(t.content)]),
            bos_id=backend.token_to_id(bos_text) if bos_text else None,
            add_bos=bool(config.get("add_bos_token", False)),
            special=frozenset(i for i, t in added.items() if t.special and t.content not in SHOWN),
            added=frozenset(added),
            sentencepiece=bool(getattr(backend.model, "byte_fallback", False)),
        )

    @staticmethod
    def from_gguf(meta: Mapping[str, Any], origin: str) -> Tokenizer:
        """meta: the `tokenizer.ggml.*` keys."""

        def get(key: str, default: Any = None) -> Any:
            return meta.get(f"tokenizer.ggml.{key}", default)

        tokens: Sequence[str] = list(get("tokens") or [])
        if not tokens:
            raise ArtifactError(f"{origin}: no tokenizer.ggml.tokens: the file has no tokenizer")
        types = list(get("token_type") or [1] * len(tokens))
        kind = get("model")
        if kind == "gpt2":
            backend = _gpt2(tokens, get("merges") or [], get("pre"), origin)
        elif kind in ("llama", "gemma4"):
            prefix = bool(get("add_space_prefix", True))
            backend = _sentencepiece(tokens, get("scores") or [], get("merges"), prefix)
        else:
            raise ArtifactError(
                f"{origin}: tokenizer model {kind!r} is not supported; supported are gpt2, llama and gemma4"
            )
        marked = [(t, k) for t, k in zip(tokens, types, strict=False) if k in (CONTROL, USER_DEFINED)]
        plain = _plain_of(backend, [AddedToken(t, normalized=False, special=False) for t, _ in marked if _is_blank(t)])
        backend.add_tokens([AddedToken(t, normalized=False, special=k == CONTROL) for t, k in marked])
        return Tokenizer(
            backend,
            plain,
            bos_id=get("bos_token_id"),
            add_bos=bool(get("add_bos_token", kind != "gpt2")),
            special=frozenset(i for i, k in enumerate(types) if k == CONTROL and tokens[i] not in SHOWN),
            added=frozenset(i for i, k in enumerate(types) if k in (CONTROL, USER_DEFINED)),
            sentencepiece=kind != "gpt2",
        )

    @cached_property
    def vocab_size(self) -> int:
        """The highest id + 1: ids from here on mean nothing."""
        count: int = self.backend.get_vocab_size(with_added_tokens=True)
        if all(map(self.backend.id_to_token, range(count))):  # no gaps, so none beyond: twice as fast as a dict of all
            return count
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """Token ids. add_special: put the BOS token first, if the model wants one."""
        backend = self.backend if parse_special else self.plain
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        if add_special and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of whole tokens; bytes that are no UTF-8 become U+FFFD."""
        kept = [i for i in ids if not (skip_special and self.is_special(i))]
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def is_special(self, id: int) -> bool:
        """A control token: shown only on request."""
        return id in self._special

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special

    def special_texts(self) -> tuple[str, ...]:
        """The spellings of the control tokens, and of those that are shown but may come from a template alone."""
        hidden = tuple(t for i in sorted(self._special) if (t := self.token_text(i)))
        return hidden + tuple(t for t in CHANNELS if self.token_to_id(t) in self._added)

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self.backend.token_to_id(token)
        return found

    def token_text(self, id: int) -> str | None:
        """The vocabulary's spelling of a token."""
        found: str | None = self.backend.id_to_token(id)
        return found

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for; an unused id stands for none."""
        if id not in self._pieces:
            self._pieces[id] = self._bytes(id)
        return self._pieces[id]

    def _bytes(self, id: int) -> bytes:
        token = self.token_text(id)
        if token is None:
            return b""
        if id in self._added:
            return token.encode()
        if self._sentencepiece:
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes([int(token[3:5], 16)])
            return token.replace("▁", " ").encode()
        if all(c in _BYTE_OF for c in token):
            return bytes(_BYTE_OF[c] for c in token)
        return token.encode()


def _plain_of(backend: Backend, blanks: Sequence[AddedToken]) -> Backend:
    """The same model, which both share, and the same steps; of added tokens only these."""
    plain = Backend(backend.model)
    for step in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (given := getattr(backend, step)) is not None:
            setattr(plain, step, given)
    plain.add_tokens(list(blanks))
    return plain


def _is_blank(token: str) -> bool:
    """Runs of spaces or line breaks, which some vocabularies have as whole tokens: no control token reads like that."""
    return not token.strip("▁ \n\t\r")


def _gpt2(tokens: Sequence[str], merges: Sequence[str], pre: object, origin: str) -> Backend:
    if not isinstance(pre, str) or pre not in _PRE:
        raise ArtifactError(f"{origin}: pre-tokenizer {pre!r} is not supported; supported are {', '.join(_PRE)}")
    pre_tokenizer, nfc, ignore_merges = _PRE[pre]
    pairs = []
    for merge in merges:
        left, _, right = merge[1:].partition(" ")  # the first character may itself be a space
        pairs.append((merge[0] + left, right))
    vocab = {t: i for i, t in enumerate(tokens)}
    try:
        backend = Backend(models.BPE(vocab, pairs, fuse_unk=False, byte_fallback=False, ignore_merges=ignore_merges))
    except Exception as error:
        raise ArtifactError(f"{origin}: tokenizer.ggml.merges do not fit the tokens: {error}") from None
    backend.pre_tokenizer = pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    if nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(
    tokens: Sequence[str], scores: Sequence[float], merges: Sequence[str] | None, prefix: bool
) -> Backend:
    vocab = {t: i for i, t in enumerate(tokens)}
    if merges:
        pairs = [(left, right) for left, _, right in (m.partition(" ") for m in merges)]
    else:
        pairs = _merges_of_scores(vocab, scores)
    backend = Backend(models.BPE(vocab, pairs, fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _merges_of_scores(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every pair of tokens whose join is a token, better scores first."""
    found = []
    for token, id in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[id], vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]
