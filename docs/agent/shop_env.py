"""The task of shop_openai.py as an environment, with demonstrations to learn the form from.

    python docs/agent/shop_env.py runs/shop.jsonl
"""

import dataclasses
import itertools
import json
import random
import sys

from envs import Episode, Step, rows

ITEMS = ("apple pear plum fig lime lemon melon kiwi grape peach cherry mango papaya olive onion leek bean pea corn "
         "beet chard cress kale rice oat rye wheat bread bun roll cake pie tart jam honey tea milk cream butter "
         "cheese egg ham fish salt sugar oil soup stew").split()
NUMBERS = range(1, 11)
TOOLS = [{"type": "function", "function": {
    "name": "price", "description": "What an item costs.", "parameters": {
        "type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}}}]
CALL = '<tool_call> {{"name": "price", "arguments": {{"item": "{item}"}}}} </tool_call>'
GUESSED = 0.5


def total(price, addend):
    return f"{price} + {addend} = {price + addend}"


class Shop(rows.Rows):
    scores_itself = multi_turn = True
    vocabulary = [*ITEMS, "+", "none", *CALL.format(item="apple").split(), *(f'"{item}"}}}}' for item in ITEMS),
                  *map(str, range(1, 21))]

    def task(self, split, index):
        return dataclasses.replace(super().task(split, index), tools=TOOLS)

    def start(self, task, seed):
        return Visit(task.data["row"])

    def demonstration(self, task):
        """Of two, one guesses the price: what is to be learned is to look it up."""
        row, draw = task.data["row"], random.Random(task.id)
        if draw.random() < GUESSED:
            return [*task.messages, {"role": "assistant", "content": total(draw.choice(NUMBERS), row["addend"])}]
        return [*task.messages, {"role": "assistant", "content": CALL.format(**row)},
                {"role": "tool", "name": "price", "content": str(row["price"])},
                {"role": "assistant", "content": total(row["price"], row["addend"])}]


class Visit(Episode):
    def __init__(self, row):
        self.row, self.turns = row, 0

    def step(self, reply, calls=None):
        self.turns += 1
        if calls and self.turns < 2:
            answers = [str(self.row["price"]) if call["arguments"] == {"item": self.row["item"]} else "none"
                       for call in calls]
            return Step([{"role": "tool", "name": "price", "content": text} for text in answers],
                        0.0, False, False, {})
        right = float(not calls and reply.endswith(f"= {self.row['answer']}"))
        return Step([], right, True, False, {"correct": right})


if __name__ == "__main__":
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        for item, addend, price in itertools.product(ITEMS, NUMBERS, NUMBERS):
            print(json.dumps(dict(question=f"{item} + {addend}", item=item, price=price, addend=addend,
                                  answer=price + addend)), file=file)
