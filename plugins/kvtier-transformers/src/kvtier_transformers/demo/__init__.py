"""``kvtier demo``: a real model answers questions about a long text with no cache, from the pool and from disk."""
