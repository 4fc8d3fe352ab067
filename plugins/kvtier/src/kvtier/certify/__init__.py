"""``kvtier certify``: whether an engine with kvtier answers as it does without, whatever was restored from where."""
