from inventory.stock import OutOfStock, Stock

__all__ = ["OutOfStock", "Stock"]
