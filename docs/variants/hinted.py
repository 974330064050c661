r"""Countdown for sft.py, with the reply in every second prompt: a self-teacher has to be able to read one.

    python sft.py --env docs/variants/hinted.py:Hinted --env-kwargs skill=mixed novice_share=0.7 \
        --model models/countdown-tiny --max-response-tokens 16
"""

import dataclasses

from envs import countdown


class Hinted(countdown.Countdown):
    """`6 18 14 -> 38`, and `6 18 14 -> 38 | 18 + 14 32 32 + 6 38 |`, by turns."""

    def task(self, split, index):
        task = super().task(split, index)
        reply = self.solution(task)
        if index % 2 == 0 or reply is None:
            return task
        *messages, last = task.messages
        messages.append(last | dict(content=f"{last['content']} | {reply} |"))
        return dataclasses.replace(task, messages=messages)
