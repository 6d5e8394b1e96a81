"""What a prompt's K and V may be replaced by: one method, one file, over host arrays of a layer."""
