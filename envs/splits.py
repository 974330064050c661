"""Which rows of a file are learned from, and which are held out: none is held out whose prompt is learned."""

from __future__ import annotations

import hashlib

import numpy as np

from envs import BadInput


def fingerprints(ids: list[int], num_prompt: int, given) -> dict[str, int]:
    """Of a row of tokens: {"prompt", "row"}, two numbers of 64 bits.

    given: its prompt or messages. Where these ask nothing, the row is told from others by all that it says.
    """
    if isinstance(given, list):
        given = "".join(str(message.get("content") or "") for message in given if message["role"] == "user")
    result = {}
    for name, part in (("prompt", ids[:num_prompt] if given.strip() else ids), ("row", ids)):
        digest = hashlib.blake2b(np.array(part, np.int64).tobytes(), digest_size=8).digest()
        result[name] = int.from_bytes(digest, signed=True)
    return result


def _keys(*sides) -> list[np.ndarray]:
    """What tells rows apart, of each side: their prompts; or all that they say, where all have one prompt."""
    if any("prompt" not in getattr(side, "column_names", side) for side in sides):
        raise BadInput("the rows in the run's folder data/ are an earlier version's: expected the column "
                       "prompt too; without that folder they are tokenised anew")
    keys = [np.array(side["prompt"], np.int64) for side in sides]
    if len(np.unique(np.concatenate(keys))) > 1:
        return keys
    return [np.array(side["row"], np.int64) for side in sides]


def is_repeated(train, val) -> np.ndarray:
    """Whether each row of val repeats one of train.  Columns of fingerprints -> (len(val),) bool"""
    of_train, of_val = _keys(train, val)
    return np.isin(of_val, of_train)


def hold_out(data, most: int, seed: int) -> tuple[np.ndarray, np.ndarray, int]:
    """-> places of rows to learn from; of `most` rows to hold out; how many repeat the prompt of another.

    In an order drawn by the seed. Rows of one prompt stay together: as many prompts as fit are held out, or
    the one of fewest rows where none does; none where there is but one.
    """
    (keys,) = _keys(data)
    order = np.random.default_rng(seed).permutation(len(keys))
    _, prompts, sizes = np.unique(keys[order], return_inverse=True, return_counts=True)
    chosen = np.zeros(len(sizes), bool)
    room = most
    for prompt in dict.fromkeys(prompts.tolist()):
        if sizes[prompt] <= room:
            chosen[prompt] = True
            room -= sizes[prompt]
    if most > 0 and len(sizes) > 1 and not chosen.any():
        chosen[sizes.argmin()] = True
    return order[~chosen[prompts]], order[chosen[prompts]], len(keys) - len(sizes)
