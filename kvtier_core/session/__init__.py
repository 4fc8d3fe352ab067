"""What an engine drives, request by request."""

from kvtier_core.session.session import EngineSession as EngineSession
