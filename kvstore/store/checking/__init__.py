"""Looking whether all is as it should be: of a running store, of a stopped one, and of bytes at rest."""
