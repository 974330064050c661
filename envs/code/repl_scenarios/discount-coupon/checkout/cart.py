from checkout.rules import discount, shipping


class Cart:
    def __init__(self, customer):
        self.customer, self.lines = customer, []

    def add(self, name, price, count=1, heavy=False):
        if count < 1:
            raise ValueError("count must be positive")
        self.lines.append((name, price, count, heavy))
        return self

    @property
    def subtotal(self):
        return sum(price * count for _, price, count, _ in self.lines)

    @property
    def heavy(self):
        return any(line[3] for line in self.lines)

    def total(self):
        """What is to be paid: goods less the discount, and shipping by what the goods cost before it."""
        if not self.lines:
            return 0
        off = self.subtotal * discount(self.customer, self.subtotal) // 100
        return self.subtotal - off + shipping(self.customer, self.subtotal, self.heavy)
