"""The `kvstore` command: run a daemon, look at it, and move pages by hand."""

from kvstore.cli.app import main

__all__ = ["main"]
