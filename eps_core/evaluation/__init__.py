"""Quality and bounds measured: one runner under everything."""
