"""The `kvstore` command: run a daemon, look at it, and move pages by hand."""

import sys

from kvstore.cli.imports import imports


def main() -> None:
    """Run the command line."""
    try:
        with imports():
            from kvstore.cli.app import main as run
    except ModuleNotFoundError as error:
        print(f"kvstore: the command needs the daemon's packages ({error.name} is missing): install kvstore[server]", file=sys.stderr)
        sys.exit(2)
    run()
