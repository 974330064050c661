from inventory.order import total


class OutOfStock(Exception):
    pass


class Stock:
    """What lies on the shelf, and how much of it is promised."""

    def __init__(self, **shelf):
        self.shelf = dict(shelf)
        self.reserved = {}

    def available(self, sku):
        return self.shelf.get(sku, 0) - self.reserved.get(sku, 0)

    def reserve(self, lines):
        """Promise all lines of an order, or none of them."""
        for sku, quantity in total(lines).items():
            if quantity > self.available(sku):
                raise OutOfStock(sku)
        for sku, quantity in lines:
            self.reserved[sku] = self.reserved.get(sku, 0) + quantity

    def ship(self, lines):
        """Take reserved lines from the shelf. ValueError where more is shipped than was reserved."""
        for sku, quantity in total(lines).items():
            if quantity > self.reserved.get(sku, 0):
                raise ValueError(f"{sku} is not reserved")
        for sku, quantity in lines:
            self.reserved[sku] -= quantity
            self.shelf[sku] -= quantity

    def receive(self, lines):
        for sku, quantity in lines:
            self.shelf[sku] = self.shelf.get(sku, 0) + quantity
