"""Connectors of inference engines to kvstore. Each is imported by module path; none needs more than the SDK and its engine."""
