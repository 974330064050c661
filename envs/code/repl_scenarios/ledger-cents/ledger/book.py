from ledger.money import format_cents, parse_amount


class Book:
    """Entries of several accounts; every entry moves money from one to another."""

    def __init__(self):
        self.entries = []

    def move(self, source, target, amount, note=""):
        cents = parse_amount(amount)
        if cents <= 0:
            raise ValueError("an entry moves a positive amount")
        self.entries.append((source, target, cents, note))

    def balance(self, account):
        got = sum(cents for _, target, cents, _ in self.entries if target == account)
        gave = sum(cents for source, _, cents, _ in self.entries if source == account)
        return got - gave

    def accounts(self):
        return sorted({name for source, target, _, _ in self.entries for name in (source, target)})

    def statement(self):
        """A line for each account, amounts flush right."""
        lines = []
        for name in self.accounts():
            lines.append(f"{name:<12}{format_cents(self.balance(name)):>12}")
        return "\n".join(lines)
