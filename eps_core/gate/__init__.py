"""The gated layer: its data and its order, whatever the backend."""
