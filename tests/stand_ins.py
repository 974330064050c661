"""What the adapters of envs/adapters adapt, as small as can be: fast tests need none of the packages.

`install` puts modules in their place, `serving` is a server of OpenEnv's protocol. Whether the adapters
fit the packages themselves is asked by slow tests, which have these.
"""

import asyncio
import contextlib
import dataclasses
import json
import random
import re
import sys
import threading
import types

import gymnasium
import numpy as np
import pydantic
import tornado.httpserver
import tornado.netutil
import tornado.web
import tornado.websocket

# ---- reasoning-gym: sums of a few numbers, so that seeds draw the same questions again and again


@dataclasses.dataclass
class SumsConfig:
    seed: int = 0
    size: int = 10
    most: int = 14


class Sums:
    def __init__(self, config):
        self.config = config

    def pair(self, index):
        """As in the package, an entry has a seed of its own: those of seed 2 are seed 1's, but for one."""
        if not 0 <= index < self.config.size:
            raise IndexError(index)
        rng = random.Random(self.config.seed + index)
        return rng.randint(0, self.config.most), rng.randint(0, self.config.most)

    def __getitem__(self, index):
        a, b = self.pair(index)
        return dict(question=f"{a} + {b} = ?", answer=str(a + b))

    def score_answer(self, answer, entry):
        """1 for the answer, .5 for the number before or behind it, .01 for any other."""
        off = abs(int(answer) - int(entry["answer"]))
        return {0: 1.0, 1: 0.5}.get(off, 0.01)


@dataclasses.dataclass
class WordsConfig:
    seed: int = 0
    size: int = 10
    most: int = 20
    sign: str = "and"  # an option that the other has not


class Words(Sums):
    def __init__(self, config):
        super().__init__(config)
        self.form = f"Add {{}} {config.sign} {{}}."

    def __getitem__(self, index):
        return super().__getitem__(index) | dict(question=self.form.format(*self.pair(index)))


def reasoning_gym():
    kinds = {"sums": (Sums, SumsConfig), "sums_in_words": (Words, WordsConfig)}

    def create_dataset(name, **options):
        kind, config = kinds[name]
        return kind(config(**options))

    return {"reasoning_gym": dict(create_dataset=create_dataset),
            "reasoning_gym.factory": dict(DATASETS=kinds)}


# ---- verifiers: tasks of two rewards, of which one is `exact`


class Task:
    NEEDS_CONTAINER = False
    setup = finalize = None
    toolsets = classmethod(lambda cls, config: [])
    config = types.SimpleNamespace(judges=[])
    hash = key = ""

    def __init__(self, **data):
        empty = dict(image="", skills=[], artifacts=[], system_prompt="")
        self.data = types.SimpleNamespace(**empty | data)


class Letters(Task):
    def hooks(self, kind):
        return [self.exact, self.close] if kind == "reward" else []

    def exact(self, reply):
        return float(reply == self.data.answer)

    def close(self, reply):
        """1 for up to one off, .5 for another number, whatever else is said."""
        numbers = re.findall(r"\d+", reply)
        if not numbers:
            return 0.0
        return 1.0 if abs(int(numbers[-1]) - int(self.data.answer)) <= 1 else 0.5

    async def score(self, trace):
        reply = trace.nodes[-1].message["content"]
        await asyncio.sleep(90 if reply == "wait" else 0)
        scores = {hook.__name__: hook(reply) for hook in self.hooks("reward")}
        trace.rewards = {name: types.SimpleNamespace(score=score) for name, score in scores.items()}
        trace.reward = sum(scores.values())
        if reply == "raise":
            raise ValueError("what is this?")


class LettersConfig(pydantic.BaseModel):
    id: str = ""
    letter: str = "a"


class Taskset:
    toolsets = Task.toolsets

    def __init__(self, config):
        self.config = config

    def take(self, count):
        """Ninety words, each of which stands there twice."""
        for number in range(min(count, 180)):
            word = "banana"[:number // 2 % 6 + 1] + "a" * (number // 2 % 15)
            yield Letters(idx=number, system_prompt="You count.", answer=str(word.count(self.config.letter)),
                          prompt=f"How many {self.config.letter} are in {word}? ({number // 2})")


class Trace:
    reward, rewards, state = 0.0, {}, None

    def __init__(self, nodes, agent, task):
        self.nodes = nodes

    def stop(self, reason):
        pass


def verifiers():
    class SingleAgentEnv:
        pass

    named = types.SimpleNamespace
    loaders = dict(Task=Task, Taskset=Taskset, TasksetConfig=LettersConfig, SingleAgentEnv=SingleAgentEnv,
                   taskset_class=lambda name: Taskset, concrete_type=lambda *kinds, origin: LettersConfig,
                   environment_class=lambda name: SingleAgentEnv)
    v1 = dict(MessageNode=named, Trace=Trace, AgentInfo=named, AgentConfig=named, TraceTask=named)
    state = dict(state_cls=lambda kind: dict)
    return {"verifiers": {}, "verifiers.v1": v1, "verifiers.v1.state": state, "verifiers.v1.utils": {},
            "verifiers.v1.utils.loaders": loaders}


# ---- TextArena: two moves each; the larger sum wins, and who comes close to it gets a half


class Race:
    def __init__(self, largest: int = 3, seats: int = 2):
        self.largest, self.seats = largest, seats

    def reset(self, num_players, seed=None):
        assert num_players == self.seats, "another number of players"
        self.sums, self.start = [0] * self.seats, random.randrange(10**6)
        self.state = types.SimpleNamespace(
            done=False, current_player_id=0, rewards=None, logs=[], role_mapping={}, turn=0,
            observations=[[] for _ in self.sums], game_info=[{"invalid_move": False} for _ in self.sums])
        self.tell(f"Race {self.start} begins.")

    def tell(self, text):
        """The game's word to each seat, and what the next one may do."""
        for seat, observations in enumerate(self.state.observations):
            moves = " or ".join(f"[{k}]" for k in range(1, self.largest + 1))
            observations.append((-1, f"{text} You are {seat}; say {moves}.", "game"))

    def step(self, text):
        state = self.state
        seat = state.current_player_id
        for observations in state.observations:
            observations.append((seat, text, "said"))
        match = re.search(rf"\[([1-{self.largest}])\]", text)
        state.game_info[seat]["invalid_move"] = not match
        if match:
            self.sums[seat] += int(match[1])
        state.turn += 1
        state.current_player_id = (seat + 1) % self.seats
        state.done = state.turn == 2 * self.seats
        state.rewards = dict(enumerate(self.rewards())) if state.done else None
        if not state.done:
            self.tell(f"{seat} is at {self.sums[seat]}.")

    def rewards(self):
        best = max(self.sums)
        if self.seats == 1:
            return [best / (2 * self.largest)]
        if self.sums.count(best) > 1:
            return [0.0] * self.seats
        return [{0: 1.0, 1: 0.5}.get(best - own, -1.0) for own in self.sums]


def textarena():
    games = {"Race-v0": dict(largest=3), "Trio-v0": dict(seats=3), "Alone-v0": dict(seats=1)}
    known = {name: types.SimpleNamespace(entry_point=f"{__name__}:Race", kwargs=kwargs)
             for name, kwargs in games.items()}
    registration = types.SimpleNamespace(ENV_REGISTRY=known)
    return {"textarena": dict(GAME_ID=-1, envs=types.SimpleNamespace(registration=registration),
                              make=lambda name, **options: Race(**games[name] | options))}


def install(monkeypatch):
    """Imports find them in place of the packages."""
    for name, content in (reasoning_gym() | verifiers() | textarena()).items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


# ---- ale-py: games of three lives, whose pictures are of one shade each


class AtariVectorEnv:
    """A shade a step, by chance and the action: it earns -2 to 6, and one in five costs a life."""

    def __init__(self, game, num_envs, *, frameskip, img_height, img_width, stack_num,
                 max_num_frames_per_episode, **options):
        self.game, self.most = game, max_num_frames_per_episode // frameskip
        self.single_observation_space = types.SimpleNamespace(shape=(stack_num, img_height, img_width))
        actions = [types.SimpleNamespace(name=name) for name in ("NOOP", "FIRE", "UP", "DOWN")]
        self.ale = types.SimpleNamespace(get_action_set=lambda: actions)
        self.shades = np.zeros((num_envs, *self.single_observation_space.shape), np.uint8)
        self.lives, self.steps = np.zeros((2, num_envs), np.int32)
        self.generators = [None] * num_envs

    def show(self, row, action):
        self.shades[row, :-1] = self.shades[row, 1:]
        self.shades[row, -1] = (self.generators[row].randrange(256) + 37 * action) % 256

    def reset(self, seed, options):
        for row, number in zip(np.flatnonzero(options["reset_mask"]), seed, strict=True):
            if number >= 0:
                self.generators[row] = random.Random(f"{self.game} {number}")
            self.lives[row], self.steps[row], self.shades[row] = 3, 0, 0
            self.show(row, 0)
        return self.shades.copy(), dict(lives=self.lives.copy())

    def step(self, actions):
        for row, action in enumerate(actions):
            self.show(row, int(action))
        newest = self.shades[:, -1, 0, 0].astype(int)
        self.lives -= newest % 5 == 0
        self.steps += 1
        truncated = (self.steps >= self.most) & (self.lives > 0)
        return (self.shades.copy(), newest % 9 - 2.0, self.lives == 0, truncated,
                dict(lives=self.lives.copy()))


def install_atari(monkeypatch):
    """ALE/Dice-v5 and ALE/Cards-v5."""
    ale_py, vector_env = types.ModuleType("ale_py"), types.ModuleType("ale_py.vector_env")
    ale_py.__version__, vector_env.AtariVectorEnv = "0", AtariVectorEnv
    monkeypatch.setitem(sys.modules, "ale_py", ale_py)
    monkeypatch.setitem(sys.modules, "ale_py.vector_env", vector_env)
    for name in ("Dice", "Cards"):
        spec = gymnasium.envs.registration.EnvSpec(f"ALE/{name}-v5", kwargs=dict(game=name.lower()))
        monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    monkeypatch.setitem(sys.modules, "envs.pixels.atari", None)
    del sys.modules["envs.pixels.atari"]  # it is imported anew, and put back at the end


# ---- OpenEnv: a sum in up to several replies

SPLITS = {"train": 90, "held": 40}


def sum_of(task):
    """-> the numbers that a reset asks for"""
    number = task["seed"] if "seed" in task else 1000 * [*SPLITS].index(task["split"]) + task["index"]
    return number, 7 * number % 100


class Session(tornado.websocket.WebSocketHandler):
    """`hint` earns .3 and the game goes on; the sum .6, one off .5, anything else 0, and it ends.

    Seed 200 is another game each time; `crash` is an error; an action of more than nine characters is none.
    """

    sessions = 0

    def initialize(self, listed):
        self.listed = listed

    def open(self):
        Session.sessions += 1

    def on_message(self, text):
        message = json.loads(text)
        data = message["data"] if message["type"] != "close" else self.close()
        if message["type"] == "reset":
            self.numbers = sum_of(data)
            if self.numbers[0] == 200:
                self.numbers = 200, Session.sessions
            self.answer("{} + {} = ?".format(*self.numbers))
        elif message["type"] == "step" and data["answer"] == "crash":
            self.refuse("EXECUTION_ERROR")
        elif message["type"] == "step" and len(data["answer"]) > 9:
            self.refuse("VALIDATION_ERROR", errors=[dict(loc=["answer"], msg="too long")])
        elif message["type"] == "step" and data["answer"] == "hint":
            self.answer("go on", 0.3)
        elif message["type"] == "step":
            digits = data["answer"] if data["answer"].isdecimal() else "-9"
            off = abs(int(digits) - sum(self.numbers))
            verdict = {} if self.listed else dict(correct={0: 1.0, 1: 0.5}.get(off, 0.0), success=True)
            self.answer("over", {0: 0.6, 1: 0.5}.get(off, 0.0), True, verdict)

    def refuse(self, code, **more):
        self.write_message(json.dumps(dict(type="error", data=dict(code=code, message="oh", **more))))

    def answer(self, text, reward=None, done=False, verdict=()):
        data = dict(observation=dict(text=text, metadata=dict(verdict)), reward=reward, done=done)
        self.write_message(json.dumps(dict(type="observation", data=data)))


class Answer(tornado.web.RequestHandler):
    def initialize(self, value):
        self.value = value

    def get(self):
        self.write(json.dumps(self.value))

    def post(self):
        self.write(dict(num_tasks=self.value[json.loads(self.request.body)["split"]]))


@contextlib.contextmanager
def serving(listed):
    """-> the URL of a server. listed: it lists its tasks, and does not say what is correct."""
    schema = dict(action=dict(title="Answer", properties=dict(answer=dict(type="string"))),
                  observation=dict(properties=dict(text=dict(type="string"))))
    paths = [("/schema", schema), ("/metadata", dict(name="Sum"))]
    if listed:
        paths += [("/list_environments", ["Sum"]), ("/Sum/splits", [dict(name=name) for name in SPLITS]),
                  ("/Sum/num_tasks", SPLITS)]
    handlers = [(path, Answer, dict(value=value)) for path, value in paths]
    loop = asyncio.new_event_loop()
    sockets = tornado.netutil.bind_sockets(0, "127.0.0.1")

    async def listen():
        web = tornado.web.Application([*handlers, ("/ws", Session, dict(listed=listed))],
                                      log_function=lambda handler: None)
        tornado.httpserver.HTTPServer(web).add_sockets(sockets)

    loop.run_until_complete(listen())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
