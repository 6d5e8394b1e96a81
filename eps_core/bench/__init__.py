"""One layer, timed against the platform's own attention, after its results are proven."""
