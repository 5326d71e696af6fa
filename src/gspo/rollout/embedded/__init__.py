"""The engine that samples with the very module that trains."""

from gspo.rollout.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
