"""For those who write tiers: one test class for every tier, and the helpers it is made of.

The only part of the core that may import pytest; nothing in the core imports it.
"""
