from pointer.document import Document
from pointer.errors import PointerError

__all__ = ["Document", "PointerError"]
