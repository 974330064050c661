from dataclasses import dataclass


@dataclass(frozen=True)
class Customer:
    name: str
    member: bool = False
    coupons: tuple = ()

    def has(self, coupon):
        return coupon.upper() in {name.upper() for name in self.coupons}
