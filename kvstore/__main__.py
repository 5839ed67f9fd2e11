"""`python -m kvstore` is the `kvstore` command."""

from kvstore.cli import main

main()
