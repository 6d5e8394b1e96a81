"""EPS inside other engines: what every hook shares, with no array library and no engine in it."""
