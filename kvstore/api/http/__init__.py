"""The HTTP control plane: health, metrics, namespaces, match, stat, blobs and checks. See docs/http.md."""

from kvstore.api.http.app import ControlPlane

__all__ = ["ControlPlane"]
