"""The text tier at work: recipes of pages, how they are kept and how they go."""
