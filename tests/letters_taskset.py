"""A taskset of verifiers: how often is a letter in a word? Two rewards, one of which counts twice."""

import asyncio

import verifiers.v1 as vf

WORDS = "banana cherry papaya apricot coconut lemon orange tangerine melon raspberry quince plum".split()


class LettersConfig(vf.TasksetConfig):
    letter: str = "a"
    copies: int = 1  # of each task


class LettersData(vf.TaskData):
    word: str
    letter: str


class LettersTask(vf.Task[LettersData]):
    @vf.reward(weight=2.0)
    async def exact(self, trace):
        await asyncio.sleep(0)
        return float(trace.last_reply == str(self.data.word.count(self.data.letter)))

    @vf.reward(weight=0.5)
    async def number(self, task, trace):
        if "raise" in trace.last_reply:
            raise ValueError("what is this?")
        if "wait" in trace.last_reply:
            await asyncio.sleep(90)
        if "nan" in trace.last_reply:
            return float("nan")
        return float(trace.messages[-1].content.strip().isdigit() and len(trace.nodes) == 3)

    @vf.metric
    async def length(self, trace):
        return len(trace.last_reply)


class Letters(vf.Taskset[LettersTask, LettersConfig]):
    INFINITE = True
    task = LettersTask

    def load(self):
        number = 0
        while True:
            for word in WORDS * self.config.copies:
                prompt = f"How often is the letter {self.config.letter} in {word}{number}? Say the number."
                yield self.task(LettersData(prompt=prompt, system_prompt="You count.", word=word,
                                            letter=self.config.letter), self.config.task)
            number += 1


class NeedsRuntime(LettersTask):
    @vf.reward
    async def passes(self, trace, runtime):
        return 1.0


class NeedsSetup(LettersTask):
    async def setup(self, trace, runtime):
        pass


class NeedsContainer(LettersTask):
    NEEDS_CONTAINER = True


class NeedsTools(LettersTask):
    @classmethod
    def toolsets(cls, config):
        return [vf.Toolset(vf.ToolsetConfig())]


class Boxes(Letters):
    task = NeedsRuntime


class Prepared(Letters):
    task = NeedsSetup


class Contained(Letters):
    task = NeedsContainer


class Tools(Letters):
    task = NeedsTools


class Opening(Letters):
    """The user begins, in an exchange of several turns."""

    def load(self):
        yield LettersTask(LettersData(word="plum", letter="u"))


class UnscoredTask(vf.Task[LettersData]):
    pass


class Unscored(Letters):
    task = UnscoredTask
