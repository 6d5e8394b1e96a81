"""One method, one file: what it stores, how it is built and what it estimates and bounds."""
