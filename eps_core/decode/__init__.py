"""How a loaded model decodes."""
