"""Puts: how pages come in."""
