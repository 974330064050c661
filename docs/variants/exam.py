"""An exam of Countdown problems: each reply is answered by the next problem, and earns its own reward.

    python grpo_llm.py --env docs/variants/exam.py:Exam --env-kwargs problems=4
"""

import dataclasses

from envs import BadInput, Episode, Step, Task, countdown


@dataclasses.dataclass(frozen=True)
class Config(countdown.Config):
    problems: int = 4
    """turns of an exam, each with a problem of its own"""
    ends_at_first_error: bool = False
    """a wrong reply ends the exam, so that what comes later is earned by what came before, too"""

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.problems <= 16:
            raise BadInput(f"environment exam: problems={self.problems}: expected 1 to 16")


class Exam(countdown.Countdown):
    """Each right reply earns 1 / problems; the exam is passed (`correct`) if all are right."""

    Config = Config
    multi_turn = True

    def num_tasks(self, split):
        return super().num_tasks(split) // self.config.problems

    def check_index(self, split, index):
        """Of a problem, of which an exam has several."""
        if not 0 <= index < super().num_tasks(split):
            raise IndexError(f"exam: {split} problem {index}")

    def task(self, split, index):
        problems = []
        for number in range(self.config.problems):
            problems.append(super().task(split, index * self.config.problems + number))
        data = dict(problems=[problem.data for problem in problems],
                    prompts=[problem.messages for problem in problems])
        return Task(f"exam-{split}-{index}", "exam", problems[0].messages, data)

    def start(self, task, seed):
        attempts = [countdown.Attempt(self.config, **problem) for problem in task.data["problems"]]
        return Sitting(attempts, task.data["prompts"], self.config.ends_at_first_error)

    def solution(self, task):
        return None  # a reply is to one problem; `demonstration` has the conversation

    def demonstration(self, task):
        messages = []
        pairs = zip(task.data["prompts"], task.data["problems"], strict=True)
        for number, (prompt, problem) in enumerate(pairs):
            reply = super().solution(dataclasses.replace(task, id=f"{task.id}-{number}", data=problem))
            if reply is None:
                return None
            messages += [*prompt, {"role": "assistant", "content": reply}]
        return messages


class Sitting(Episode):
    def __init__(self, attempts, prompts, ends_at_first_error):
        self.attempts, self.prompts = attempts, prompts
        self.ends_at_first_error = ends_at_first_error
        self.turn, self.solved = 0, 0

    def step(self, reply):
        found = self.attempts[self.turn].step(reply)
        self.turn += 1
        self.solved += int(found.reward)
        total = len(self.attempts)
        is_over = self.turn == total or self.ends_at_first_error and not found.reward
        messages = [] if is_over else self.prompts[self.turn]
        info = dict(correct=float(self.solved == total), solved=self.solved / total)
        return Step(messages, found.reward / total, is_over, False, info)
