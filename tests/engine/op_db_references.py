NORMALISERS = frozenset({"reciprocal", "rsqrt"})
REFERENCES = {}
