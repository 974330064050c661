from paragraph.wrap import fill, wrap

__all__ = ["fill", "wrap"]
