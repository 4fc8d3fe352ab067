"""Two tiers written against kvtier-core 0.1, on both interfaces, with every optional ability. Not to be changed."""
