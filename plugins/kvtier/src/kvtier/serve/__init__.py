"""``kvtier serve``: a small server with OpenAI's interface. One model, one prompt at a time."""
