"""A cache with a limit on the total cost of its entries."""

from lrucost.cache import CostCache
from lrucost.stats import hit_rate

__all__ = ["CostCache", "hit_rate"]
