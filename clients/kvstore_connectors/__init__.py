"""Adapters that put kvstore behind inference engines: each module is one engine's, and needs that engine and the SDK."""
