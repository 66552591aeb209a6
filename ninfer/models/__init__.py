"""Model families, in one visible tuple. A new one is a file beside this one and an entry here."""

from __future__ import annotations

from ninfer.models.family import Config, Family, ModelSpec
from ninfer.models.family import identify as _identify
from ninfer.models.gemma3 import GEMMA3
from ninfer.models.gemma4 import GEMMA4
from ninfer.models.llama import LLAMA
from ninfer.models.qwen3_5 import QWEN3_5
from ninfer.models.qwen3_5_moe import QWEN3_5_MOE
from ninfer.models.qwen3_next import QWEN3_NEXT

FAMILIES: tuple[Family, ...] = (LLAMA, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, GEMMA3, GEMMA4)


def identify(config: Config) -> tuple[Family, ModelSpec]:
    """The family of a config, and the config checked.   Raises ArtifactError listing what is supported."""
    return _identify(config, FAMILIES)
