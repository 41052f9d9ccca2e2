"""Model configurations as plain Python, for planning without weights."""
