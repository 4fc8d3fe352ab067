"""The deciding part: pure, events in, actions out. Its modules are imported by their own names."""
