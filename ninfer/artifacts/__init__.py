"""Where weights come from. `open_artifact` tells by the content what a path holds."""

from __future__ import annotations

from pathlib import Path

from ninfer.artifacts.artifact import Artifact, Parameter, TensorInfo
from ninfer.artifacts.gguf import MAGIC, OLD_MAGICS, GgufArtifact
from ninfer.artifacts.ninfer_artifact import NinferArtifact
from ninfer.artifacts.safetensors import SafetensorsArtifact
from ninfer.errors import ArtifactError

__all__ = ["Artifact", "Parameter", "TensorInfo", "open_artifact", "open_source"]

WANTED = "a .ninfer or .gguf file, or a folder with config.json and .safetensors files"


def open_artifact(path: Path | str) -> Artifact:
    """Raises ArtifactError: one line that names the file, what is wrong, and what would work."""
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise ArtifactError(f"{path}: no such file or folder; give {WANTED}")
    try:
        with path.open("rb") as file:
            magic = file.read(8)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from None
    if path.suffix == ".gguf" or magic[:4] in (MAGIC, MAGIC[::-1], *OLD_MAGICS):
        return GgufArtifact(path)
    if path.suffix == ".ninfer" or magic[:6] in (b"NINFER", b"NINPRT"):
        return NinferArtifact(path)
    if path.suffix in (".safetensors", ".json") and (path.parent / "config.json").is_file():
        return _open_folder(path.parent)
    raise ArtifactError(f"{path}: begins with {magic[:4]!r}, which is no known model file; give {WANTED}")


def open_source(path: Path) -> Artifact:
    """As `open_artifact`, but a .safetensors file stands for itself, not for its folder."""
    if path.suffix == ".safetensors" and path.is_file():
        return SafetensorsArtifact(path.parent, path.name)
    return open_artifact(path)


def _open_folder(path: Path) -> Artifact:
    if (path / "config.json").is_file():
        return SafetensorsArtifact(path)
    ggufs = sorted(p.name for p in path.glob("*.gguf"))
    firsts = [n for n in ggufs if "-of-" not in n or "-00001-of-" in n]
    firsts += sorted(p.name for p in path.glob("*.ninfer"))
    if len(firsts) == 1:
        return open_artifact(path / firsts[0])
    if firsts:
        raise ArtifactError(f"{path}: {len(firsts)} models in this folder; give one of {', '.join(firsts[:5])}")
    found = sorted(p.name for p in path.iterdir())[:5]
    raise ArtifactError(f"{path}: found {', '.join(found) or 'nothing'} there; give {WANTED}")
