"""All that is read from outside and written to it: one reader, one writer, one owner of caches."""
