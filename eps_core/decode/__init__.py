"""A model and how it decodes."""
