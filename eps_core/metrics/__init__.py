"""Output of a run: step records, JSONL files, text."""
