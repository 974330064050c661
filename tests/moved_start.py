"""A script whose run starts from weights that are another by 1e-7, which is float32's rounding of them.

    MOVED=1 python -m tests.moved_start grpo_llm.py --iterations 3

Each weight becomes its neighbour above or below, by chance (MOVED is its seed), before the first optimiser is
made: the policy's, the critic's, an adapter's. The log differs as where a machine rounds otherwise.
"""

import gc
import os
import runpy
import sys

import torch

SIZE = 1e-7


def move_all():
    """Move every parameter that there is; the random numbers of the run are left alone."""
    signs = torch.Generator().manual_seed(int(os.environ["MOVED"]))
    for thing in gc.get_objects():
        if type(thing) is torch.nn.Parameter:
            sign = torch.randint(0, 2, thing.shape, generator=signs) * 2 - 1
            thing.data = (thing.data.double() * (1 + SIZE * sign)).to(thing.dtype)


def main():
    make = torch.optim.Optimizer.__init__

    def moved_first(optimizer, *args, **options):
        torch.optim.Optimizer.__init__ = make  # a second one finds them moved
        move_all()
        make(optimizer, *args, **options)

    torch.optim.Optimizer.__init__ = moved_first
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
