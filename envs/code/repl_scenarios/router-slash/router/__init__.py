from router.route import NotFound, Router

__all__ = ["NotFound", "Router"]
