from checkout.cart import Cart
from checkout.rules import discount

__all__ = ["Cart", "discount"]
