"""How long to wait: what a caller says, in a form that Python's locks take and that a deadline can be made of."""

LONGEST_S = 100 * 365 * 86_400.0
"""Python's locks refuse to wait longer than some centuries."""


def bounded(timeout_s: float) -> float:
    """*timeout_s*, at most a hundred years of it: so that infinity may be said. What is below 0, or no number, is 0."""
    return max(0.0, min(timeout_s, LONGEST_S))  # in this order, a NaN gives way to 0
