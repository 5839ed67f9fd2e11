"""Which prefix is there, how much of it is worth loading, and leases on it."""
