"""Which rows of a cache are kept: one policy, one file, over statistics that a backend gathered."""
