"""``kvtier check``: the rules that a tier must keep, tried on a configured tier and its storage."""
