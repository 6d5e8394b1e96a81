"""One method, one file: how its summaries are built and scored."""
