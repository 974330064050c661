"""The task of shop_openai.py as an environment, with demonstrations, half of which guess the price.

    python -m docs.agent.shop_env runs/shop.jsonl    # writes its rows
"""

import dataclasses
import itertools
import json
import random
import sys
from pathlib import Path

from envs import Episode, Step, rows

ITEMS = ("apple pear plum fig lime lemon melon kiwi grape peach cherry mango papaya olive onion leek bean "
         "pea corn beet chard cress kale rice oat rye wheat bread bun roll cake pie tart jam honey tea milk "
         "cream butter cheese egg ham fish salt sugar oil soup stew").split()
NUMBERS = range(1, 11)  # prices, and what is added
TOOLS = [{"type": "function", "function": {
    "name": "price", "description": "What an item costs.", "parameters": {
        "type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}}}]
CALL = '<tool_call> {{"name": "price", "arguments": {{"item": "{item}"}}}} </tool_call>'


def total(price, addend):
    return f"{price} + {addend} = {price + addend}"


class Shop(rows.Rows):
    source = "agent"  # named as the other's metrics are, so that both are in one figure
    scores_itself = multi_turn = True
    vocabulary = [*ITEMS, "+", "none", *map(str, range(1, 21)), *CALL.format(item="fig").split(),
                  *(f'"{item}"}}}}' for item in ITEMS)]

    def task(self, split, index):
        return dataclasses.replace(super().task(split, index), tools=TOOLS)

    def start(self, task, seed):
        return Visit(task.data["row"])

    def demonstration(self, task):
        row, draw = task.data["row"], random.Random(task.id)
        if draw.random() < 0.5:
            return [*task.messages, said(total(draw.choice(NUMBERS), row["addend"]))]
        return [*task.messages, said(CALL.format(**row)),
                {"role": "tool", "name": "price", "content": str(row["price"])},
                said(total(row["price"], row["addend"]))]


class Visit(Episode):
    def __init__(self, row):
        self.row, self.replies = row, 0

    def step(self, reply, calls=None):
        self.replies += 1
        if calls and self.replies == 1:
            return Step([self.answer(call) for call in calls], 0.0, False, False, {})
        right = float(not calls and reply.endswith(f"= {self.row['answer']}"))
        return Step([], right, True, False, {"correct": right})

    def answer(self, call):
        known = call["arguments"] == {"item": self.row["item"]}
        return {"role": "tool", "name": "price", "content": str(self.row["price"]) if known else "none"}


def said(text):
    return {"role": "assistant", "content": text}


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for item, addend, price in itertools.product(ITEMS, NUMBERS, NUMBERS):
            print(json.dumps(dict(question=f"{item} + {addend}", item=item, price=price, addend=addend,
                                  answer=price + addend)), file=file)
