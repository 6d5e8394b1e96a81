"""The settings of what is kept and of what a step reads, checked at birth."""
