"""Paths to handlers."""

from routes.pattern import Pattern
from routes.router import NotFound, Router

__all__ = ["NotFound", "Pattern", "Router"]
