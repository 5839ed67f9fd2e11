"""A simulated token factory around a real store: worker processes, an orchestrator, and its controls (docs/factory.md)."""
