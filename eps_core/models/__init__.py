"""The models that the decoders read: a family a file, and what every family shares."""
