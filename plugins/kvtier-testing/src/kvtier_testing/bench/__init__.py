"""``kvtier bench``: how fast a configured tier stores and loads. Contenders, rows and rounds serve other benchmarks."""
