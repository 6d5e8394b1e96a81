"""EPS inside other people's engines: at the edge, imported by name only."""
