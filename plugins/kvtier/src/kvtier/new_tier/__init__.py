"""``kvtier new-tier``: a package for a new tier type that works, from templates that are a tier called *shelf*."""
