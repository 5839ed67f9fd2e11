"""Model fingerprints: a digest of everything the KV bytes depend on, so that new weights never read old state."""

import json
from collections.abc import Mapping
from hashlib import file_digest, sha256
from os import PathLike
from pathlib import Path
from typing import Any

from kvstore.api.wire import BadRequest, canonical_json
from kvstore_client.arguments import wrong

_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
_CONFIGS = ("config.json", "quantize_config.json", "quantization_config.json", "hf_quant_config.json")
_MOVING = frozenset({"main", "master", "latest", "head", "default", ""})


def fingerprint_folder(folder: str | Path, *, settings: Mapping[str, str] | None = None) -> str:
    """The fingerprint of a model in a folder: its configs (RoPE and quantisation are in them) and a digest of every weight file.

    `settings` adds what the engine decides itself and the bytes depend on: KV dtype, KV scales, axis order, adapters.
    Reads all weights once (about 1 GiB/s): keep the result. Raises BadRequest if the folder holds no weights or no config.
    """
    if not isinstance(folder, str | PathLike):
        raise wrong("folder", folder, "the path of a folder")
    root = Path(folder)
    configs = {n: json.loads((root / n).read_bytes()) for n in _CONFIGS if (root / n).is_file()}
    weights = sorted(p for p in root.rglob("*") if p.suffix in _WEIGHTS and p.is_file())
    if "config.json" not in configs and not any(p.suffix == ".gguf" for p in weights):
        raise BadRequest(f"{root} has no config.json: is it the folder of a model?")
    if not weights:
        raise BadRequest(f"{root} has no weight files ({', '.join(_WEIGHTS)}); or give an explicit revision: fingerprint_revision")
    digests = {}
    for path in weights:
        with path.open("rb") as file:
            digests[path.relative_to(root).as_posix()] = file_digest(file, "sha256").hexdigest()
    return _digest({"configs": configs, "weights": digests, "settings": _checked(settings)})


def fingerprint_revision(model: str, revision: str, *, settings: Mapping[str, str] | None = None) -> str:
    """The fingerprint of a model named by an explicit, immutable revision (a commit hash, a release number).

    Raises BadRequest for revisions that move, such as `main`: new weights under an old name must not read old state.
    """
    for name, value in (("model", model), ("revision", revision)):
        if not isinstance(value, str):
            raise wrong(name, value, "text")
    if not model or revision.strip().lower() in _MOVING:
        raise BadRequest(f"revision {revision!r} of model {model!r} does not name fixed weights; give a commit hash or a version")
    return _digest({"model": model, "revision": revision, "settings": _checked(settings)})


def _checked(settings: Mapping[str, str] | None) -> dict[str, Any]:
    """The settings as they are digested. Raises BadRequest for what is no mapping of text to text (or numbers)."""
    if settings is not None and not isinstance(settings, Mapping):
        raise wrong("settings", settings, "a mapping, such as {'kv_dtype': 'fp8'}")
    found = dict(settings or {})
    try:
        canonical_json(found)
    except (TypeError, ValueError):
        raise wrong("settings", settings, "a mapping of text to text") from None
    return found


def _digest(data: object) -> str:
    return "sha256:" + sha256(b"kvstore model fingerprint\n" + canonical_json(data)).hexdigest()
