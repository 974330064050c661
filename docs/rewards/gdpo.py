"""GDPO (arXiv:2601.05242): each named part is normalised in its group, then they are added."""

import numpy as np


def gdpo(rollouts):
    """The parts and their weights stand here, so that a run that goes on is refused other ones."""
    return decoupled(rollouts, {"correct": 1.0, "format": 0.5})


def decoupled(rollouts, weights):
    """weights: {name of a part of r.info: its weight}.  -> the weighted sum of the normalised parts (G,)"""
    known = set().union(*(r.info for r in rollouts))
    total = np.zeros(len(rollouts))
    for part, weight in weights.items():
        if known and part not in known:
            raise ValueError(f"no part is named {part!r}; the environment tells {', '.join(sorted(known))}")
        values = np.array([float(r.info.get(part, 0.0)) for r in rollouts])  # 0 where a reply was cut
        normalised = (values - values.mean()) / (values.std() + 1e-6)  # GDPO eq. 4
        total += weight * normalised  # GDPO eq. 7; with equal weights eq. 5
    return total
