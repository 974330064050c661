"""Who pays less. Amounts are cents."""

MINIMUM = 5000


def discount(customer, total):
    """Percent off. Members and holders of SAVE10 get 10 from 50.00 on, HALF gives 50 on anything."""
    if customer.has("HALF"):
        return 50
    if customer.member or customer.has("SAVE10") and total >= MINIMUM:
        return 10
    return 0


def shipping(customer, total, heavy=False):
    """Cents. Free from 50.00 on, and for members, unless it is heavy."""
    if total >= MINIMUM or customer.member and not heavy:
        return 0
    return 1290 if heavy else 490
