"""What a run says: step records, JSONL files, text."""
