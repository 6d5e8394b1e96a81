"""The sparse layer: its data and its order, whatever the backend."""
