"""What an engine's KV bytes depend on, as a fingerprint: configuration, weights, dtypes, layout."""

import logging
import re
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvstore.api.wire import canonical_json
from kvstore_client import KVSpec, fingerprint_folder, fingerprint_revision

log = logging.getLogger("vllm.kvstore_connectors")

_COMMIT = re.compile(r"[0-9a-f]{40}")
_LONG_S = 5.0


def model_fingerprint(vllm_config: Any, spec: KVSpec, revision: str) -> str:
    """The fingerprint of the model as this engine runs it: from `revision`, the commit of a hub's snapshot, or the files' digests.

    Raises ValueError if the weights can't be told apart from others: then nothing may be shared.
    """
    settings = {"engine": engine_settings(vllm_config)}
    model = vllm_config.model_config.model
    commit = revision or str(vllm_config.model_config.revision or "")
    if revision or _COMMIT.fullmatch(commit):
        return fingerprint_revision(Path(model).name if Path(model).is_dir() else model, commit, settings=settings)
    folder = Path(model)
    if not folder.is_dir():
        raise ValueError(
            f"kvstore: {model} is neither a folder nor at a fixed commit, so new weights could read old state; "
            'give kv_connector_extra_config a "revision"'
        )
    if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name):
        return fingerprint_revision("snapshot", folder.name, settings=settings)
    started = time.monotonic()
    fingerprint = fingerprint_folder(folder, settings=settings)
    if (seconds := time.monotonic() - started) > _LONG_S:
        log.info('kvstore: digesting the weights took %.0f s; kv_connector_extra_config: {"revision": …} saves that', seconds)
    return fingerprint


def engine_settings(vllm_config: Any) -> str:
    """What the engine decides itself and the bytes depend on, as canonical JSON: not its geometry, nor what only changes speed."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    model, cache = vllm_config.model_config, vllm_config.cache_config
    device = current_platform.device_type
    backend = vllm_config.attention_config.backend
    settings = {
        "vllm": ".".join(vllm.__version__.split(".")[:2]),
        "config": sha256(canonical_json(_plain(model.hf_config.to_dict()))).hexdigest(),
        "dtype": str(model.dtype),
        "kv_dtype": str(cache.cache_dtype),
        "kv_scales": bool(getattr(cache, "calculate_kv_scales", False)),
        "quantization": str(model.quantization),
        "device": device,
        "backend": str(getattr(backend, "name", backend)),
        "layout": _cpu_layout(vllm_config) if device == "cpu" else f"{current_platform.get_device_name()}, torch {torch.__version__}",
    }
    return canonical_json(settings).decode()


def _plain(value: Any) -> Any:
    """A configuration as plain JSON; what is neither is named by its text. The folder that it was read from is left out."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if k not in ("_name_or_path", "transformers_version")}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)


def _cpu_layout(vllm_config: Any) -> str:
    """How the CPU backend orders keys inside a block: that depends on the instructions that this machine has."""
    import torch

    features = [name for name in ("_is_amx_tile_supported", "_is_avx512_supported") if getattr(torch.cpu, name, lambda: False)()]
    return f"cpu, blocks of {vllm_config.cache_config.block_size}, {','.join(features) or 'base'}"


def namespace_name(vllm_config: Any, fingerprint: str, spec: KVSpec) -> str:
    """A name that says which model, and is another for another fingerprint or KV spec."""
    digest = sha256(canonical_json({"fingerprint": fingerprint, "spec": spec.to_dict()})).hexdigest()[:16]
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(vllm_config.model_config.model).name).strip("-.")[:40] or "model"
    return f"vllm-{model}-{digest}"
