"""The one thing about a row's format (C03) that transfers have to know. ``kvtier_core.proof`` has the rest.

Apart from that module, which wants more than torch and numpy.
"""

PROOF_BYTES = 64
"""What a row ends in: no worker writes there."""
