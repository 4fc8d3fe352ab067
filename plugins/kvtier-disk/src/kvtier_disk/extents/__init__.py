"""Blocks in slots of large preallocated files, with an index that all processes of a root share."""
