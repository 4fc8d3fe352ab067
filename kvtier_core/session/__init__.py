"""The engine session: requests, step by step."""

from kvtier_core.session.session import EngineSession as EngineSession
