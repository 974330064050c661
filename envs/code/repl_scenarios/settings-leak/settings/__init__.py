from settings.parser import ParseError, parse
from settings.store import Settings

__all__ = ["ParseError", "Settings", "parse"]
