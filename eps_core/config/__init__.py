"""What is kept and what a step reads, checked at birth."""
