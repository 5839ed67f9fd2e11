"""The parts of the reuse classifier: what is known of a page, how that becomes a score, what ages say, and when to trust it."""
