"""Computing pages again from their text: which, by whom, and what came of it."""
