"""Texts with questions: needles, RULER, LongBench."""
