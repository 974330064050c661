"""envs/adapters/textarena.py and seats.py: whose turn it is, what each seat reads and earns, what is refused.

Fast tests play a game of this file; those of the package's games are slow.
"""

import concurrent.futures
import copy
import dataclasses
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time

import numpy as np
import pytest

import envs
from envs import BadInput
from envs.adapters import arguments, seats, seeded
from tests import stand_ins
from tests.run_folders import package, work

HOSTILE = ["", "\0\x07\x1b[2J", "\ud800", "[" * 10**6, "]" * 10**6, "[" * 500 + "]" * 500, " " * 10**6,
           "9" * 10**6, "[" + "9" * 10**6 + "]", "[" + "9" * 900 + "]", "[²]", "[٣]", "[-1]", "[[0]]",
           "[offer" + " " * 10**6, "[offer" + "." * 10**6, "[call" * 10**5, "<think>[4]", "[col -1]",
           "[0] [1] [2]", "[GAME] Player 0 has won!", "\u2028\x85" * 10**5, "\n" * 10**6, "{}%s{0}"]


# ---- The seats, with a game that needs no package


class Race(seats.Game):
    """A step of 1 to 3 a move; who gets to 10 wins. "stumble" is more than the game can bear.

    Of one task after the other, another seat begins.
    """

    def reset(self, game, seed):
        with seeded(self.key):
            time.sleep(1e-4)  # lets other threads in
            self.at, self.winner, self.next = random.randrange(3), None, seed // 2 % self.seats
        self.unread = [[f"You are {seat} of {self.seats}, secret {seat * 7}, start {self.at}."]
                       for seat in range(self.seats)]

    def turn(self):
        return None if self.winner is not None else self.next

    def news(self, seat):
        told, self.unread[seat] = self.unread[seat], []
        return "\n".join(told)

    def move(self, seat, text):
        if text == "stumble":
            raise ZeroDivisionError
        if text not in ("1", "2", "3"):
            self.unread[seat].append("1, 2 or 3!")
            return False
        self.at += int(text)
        for other in range(self.seats):
            if other != seat:
                self.unread[other].append(f"{seat} is at {self.at}.")
        if self.at >= 10:
            self.winner = seat
        self.next = (seat + 1) % self.seats
        return True

    def random_reply(self, seat, rng):
        return rng.choice(["1", "2", "3"]) if self.task.data["game"] != "riddle" else None

    def rewards(self):
        return {} if self.winner is None else {s: 1 if s == self.winner else -1 for s in range(self.seats)}


@dataclasses.dataclass(frozen=True)
class RaceConfig(seats.Config):
    game: str = "race"


class Races(seats.Games):
    Config, Game = RaceConfig, Race

    def load(self, game):
        self.check_name(game, ("race", "trio", "riddle", "broken"), ["race", "trio"])
        if game == "broken":
            raise LookupError("\n*****\n  no words\n*****")
        return self.count_seats({"race": self.two, "trio": self.three, "riddle": self.two}[game])

    def two(self, count):
        assert count == 2, f"two, not {count}"

    def three(self, count):
        assert count == 3, f"three, not {count}"


def make_races(**options):
    return Races(envs.make_config(RaceConfig, "races", options))


def play(env, task, reply, seed=1):
    """Play an episode as the scripts do. reply: (seat, messages) -> text.
    -> the last Step, {seat: its conversation}, the tasks of the children"""
    episode, talk, tasks = env.start(task, seed), {0: [*task.messages]}, []
    step = None
    while step is None or not (step.terminated or step.truncated):
        text = reply(0, talk[0])
        talk[0].append({"role": "assistant", "content": text})
        step = episode.step(text)
        while step.children:
            (child, of_child), = step.children
            assert json.loads(json.dumps(dataclasses.asdict(child))) == dataclasses.asdict(child)
            assert child.messages[:len(talk.get(child.seat, ()))] == talk.get(child.seat, [])
            tasks.append(child)
            said = reply(child.seat, child.messages)
            end = of_child.step(said)
            assert (end.terminated, end.reward, end.messages) == (True, 0.0, [])
            talk[child.seat] = [*child.messages, {"role": "assistant", "content": said}]
            step = episode.resume([said])
        talk[0] += step.messages
        assert bool(step.messages) != (step.terminated or step.truncated)
    episode.close()
    assert episode.step("1") == step  # over is over
    return step, talk, tasks


def mover(seat, messages):
    return str(1 + len(messages) % 3)


def test_seats_take_turns_splits_are_apart_and_the_seed_tells_what_happens():
    env = make_races(game="race, trio")
    tasks = [env.task("test", k) for k in range(12)]
    assert [task.source for task in tasks[:2]] == ["races/race", "races/trio"]
    assert [task.data["seat"] for task in tasks] == [0, 0, 1, 1, 0, 2, 1, 0, 0, 1, 1, 2]
    assert len({env.task(split, k).data["seed"] for split in env.splits for k in range(50)}) == 100
    for task in tasks:
        own = task.data["seat"]
        assert task.messages[-1]["role"] == "user" and f"You are {own} of" in task.messages[0]["content"]
        once, again = (play(env, task, mover) for _ in range(2))
        assert once == again and once[0].seat_rewards == () and set(once[1]) == {0}
        assert once[0].info["correct"] == (once[0].reward == 1)
    assert len({str(play(env, tasks[0], mover, seed)[1]) for seed in range(9)}) > 1
    steps = set()  # of the other seat, which draws anew in each move
    for task in tasks[::4]:
        _, talk, _ = play(make_races(), task, lambda seat, messages: "1")
        told = [int(place) for place in re.findall(r"1 is at (\d+)", str(talk[0]))]
        steps.add(len({after - before - 1 for before, after in itertools.pairwise(told)}))
    assert max(steps) > 1
    for split, k in (("test", -1), ("test", 256), ("train", 100_000)):
        with pytest.raises(IndexError):
            env.task(split, k)


@pytest.mark.parametrize("game, count", [("race", 2), ("trio", 3)])
def test_in_self_play_each_seat_has_its_own_conversation_and_reward(game, count):
    env = make_races(game=game, self_play=True)
    wins = set()
    for k in range(6):
        task = env.task("train", k)
        step, talk, children = play(env, task, mover)
        assert set(talk) == set(range(count)) == {0, *(child.seat for child in children)}
        assert sorted(step.seat_rewards) == [-1.0] * (count - 1) + [1.0]
        assert step.reward == step.seat_rewards[0] and step.info["correct"] == (step.reward == 1)
        assert len({child.id for child in children}) == len(children)
        assert {child.source for child in children} == {f"races/{game}"}
        wins.add(step.seat_rewards.index(1.0))
        own = task.data["seed"] // 2 % count  # the one that begins, in the game's numbers
        for seat, messages in talk.items():
            roles = [message["role"] for message in messages]
            assert roles == ["user", "assistant"] * (len(roles) // 2)
            secrets = {other for other in range(count) if f"secret {other * 7}," in str(messages)}
            assert secrets == {(own + seat) % count}  # nobody reads what another one was told
    assert len(wins) > 1


def test_a_reply_that_breaks_the_game_loses_one_that_is_cut_too_and_limits_cut_it_short():
    env = make_races(self_play=True, max_turns=4)
    task = env.task("train", 0)
    step, *_ = play(env, task, lambda seat, messages: "stumble" if seat else "1")
    assert (step.terminated, step.seat_rewards, step.info["correct"]) == (True, (1.0, -1.0), 1)
    step, *_ = play(env, task, lambda seat, messages: "1" if seat else "stumble")
    assert step.seat_rewards == (-1.0, 1.0) and step.info["correct"] == 0
    step, *_ = play(env, task, lambda seat, messages: "1")
    assert step.truncated and step.seat_rewards == (0.0, 0.0) and step.info["moves"] == 4
    step, *_ = play(env, task, lambda seat, messages: "?")
    assert step.truncated and step.info["invalid_moves"] == 4
    step, *_ = play(env, task, lambda seat, messages: "?" if seat else "1")
    assert step.info["moves"] == 4 and step.info["invalid_moves"] == 0  # another's are not the policy's
    for reason, rewards in (("length", (-1.0, 1.0)), ("turns", (0.0, 0.0))):
        episode = env.start(task, 1)
        episode.step("1")
        end = episode.end(reason)
        assert end.truncated and end.seat_rewards == rewards and end.reward == rewards[0]
        assert episode.resume(["1"]) == episode.end("turns") == end
    episode = env.start(task, 1)
    episode.close()
    assert episode.step("1").truncated


def test_a_function_plays_the_other_seats_and_what_it_raises_is_not_the_policys_fault(tmp_path):
    path = tmp_path / "opponent.py"
    path.write_text("def two(observation, rng):\n    assert 'You are' in observation and rng.random() < 1\n"
                    "    return '2'\n"
                    "def late(observation, rng):\n    raise ConnectionError('no server')\n"
                    "late.blocking = True\n")
    step, talk, _ = play(make_races(opponent=f"{path}:two"), make_races().task("train", 0),
                         lambda seat, messages: "1")
    assert "1 is at 4" in str(talk[0]) and step.terminated  # it began at 1
    env = make_races(opponent=f"{path}:late")
    assert env.blocking and not make_races(opponent=f"{path}:two").blocking
    with pytest.raises(ConnectionError):
        env.start(env.task("train", 0), 1).step("1")


@pytest.mark.parametrize("options, message", [
    (dict(game="rase"), r"unknown game 'rase' \(did you mean 'race'\?\); known are race, trio$"),
    (dict(game="broken"), r"^environment races: game broken cannot be played \(no words\)$"),
    (dict(game="race", num_players=3), r"game race cannot be played \(two, not 3\)"),
    (dict(game="riddle"), r"game riddle: a random seat finds no legal move .* self_play=true"),
    (dict(opponent="none.py:f"), "option opponent none.py:f: expected path/to/file.py:name"),
    (dict(max_turns=0), "option max_turns: expected 1 or more, got 0"),
    (dict(selfplay="1"), r"unknown option 'selfplay' \(did you mean 'self_play'\?\)")])
def test_what_cannot_be_played_is_one_line(options, message):
    with pytest.raises(BadInput, match=message) as error:
        make_races(**options)
    assert "\n" not in str(error.value)


def test_draws_from_the_global_generators_are_the_keys_and_leave_no_trace(capsys):
    def draws():
        return random.random(), np.random.random(), random.choice("abc"), np.random.randint(99)

    own = np.random.MT19937(7)  # not what `seeded` may have left there
    np.random.set_bit_generator(own)
    random.seed(1)
    np.random.seed(1)
    expected = draws()
    random.seed(1)
    np.random.seed(1)
    seen = []
    for key in ("a", "b", "a"):
        with seeded(key), seeded("within"):
            draws()
        with seeded(key):
            print("noise")
            seen.append(draws())
            if len(seen) == 3:  # within another, too
                with seeded("c"):
                    draws()
            seen[-1] += draws()
    assert seen[0] == seen[2] != seen[1] and draws() == expected and capsys.readouterr().out == ""
    assert np.random.get_bit_generator() is own


def test_episodes_in_several_threads_do_not_draw_each_others_numbers():
    env = make_races(game="trio")
    tasks = [env.task("train", k) for k in range(24)]
    alone = [play(env, task, mover) for task in tasks]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda task: play(env, task, mover), tasks)) == alone


def test_arguments_have_the_types_of_the_functions_defaults():
    def function(size, share=0.5, name="a", quick: bool = True, piles=(1, 2)):
        pass

    given = arguments(function, "size=3;share=1;quick=0", "it", {"size": 5})
    assert given == dict(size=3, share=1.0, quick=False)
    assert arguments(function, "", "it", {}) == {}
    for text, message in (("sise=3", "did you mean 'size'"), ("size=x", "expected int, got 'x'"),
                          ("piles=3", "known: size, share, name, quick")):
        with pytest.raises(BadInput, match=f"environment it: .*{message}"):
            arguments(function, text, "it", {"size": 5})


# ---- A game in TextArena's place


def test_a_seat_reads_what_others_say_and_a_try_is_no_move(monkeypatch):
    stand_ins.install(monkeypatch)
    env = envs.make("textarena", game="Race-v0", game_options="largest=2")
    for k in range(4):
        task = env.task("train", k)
        own = task.data["seat"]
        assert f"You are {own}; say [1] or [2]." in task.messages[0]["content"]
        step, talk, _ = play(env, task, lambda seat, messages: "my words, [2]")
        assert step.info["moves"] == 4 and step.info["invalid_moves"] == 0
        read = "\n".join(message["content"] for message in talk[0] if message["role"] == "user")
        assert "my words" not in read and f"[{1 - own}] [" in read
        step, talk, _ = play(env, task, lambda seat, messages: "none")
        assert step.info["invalid_moves"] == 2
    tasks = [env.task("train", k) for k in range(12)]
    assert len({re.search(r"Race \d+", task.messages[0]["content"])[0] for task in tasks}) == 12


# ---- TextArena's games


@pytest.fixture(scope="module")
def games():
    package("textarena")


slow = [pytest.mark.slow, pytest.mark.usefixtures("games")]


def slow_test(function):
    return pytest.mark.slow(pytest.mark.usefixtures("games")(function))


def in_brackets(seat, messages, rng=None):
    """A move from the last list that the seat was shown."""
    shown = messages[-1]["content"].rpartition("Available Moves: ")[2].split(", ")
    return f"I take {(rng or random.Random(str(messages))).choice(shown)}"


@slow_test
@pytest.mark.parametrize("game", ["TicTacToe-v0", "ThreePlayerTicTacToe-v0"])
def test_a_game_against_random_seats(game):
    env = envs.make("textarena", game=game)
    results = []
    for k in range(24):
        task = env.task("test", k)
        own = task.data["seat"]
        assert own == k % (2 if game == "TicTacToe-v0" else 3) and task.source == f"textarena/{game}"
        assert f"You are Player {own}" in task.messages[0]["content"]
        assert ("[Player 0]" in task.messages[0]["content"]) == (own > 0)  # it has moved already
        step, talk, _ = play(env, task, in_brackets)
        assert (step, talk) == play(env, task, in_brackets)[:2] and step.terminated
        texts = [message["content"] for message in talk[0] if message["role"] == "user"]
        assert all(f"[Player {own}]" not in text for text in texts)  # its own words are the assistant's
        assert sum("You are Player" in text for text in texts) == 1  # each message has what is new
        assert step.info["invalid_moves"] == 0 and step.info["correct"] == (step.reward == 1)
        results.append(step.reward)
    assert set(results) >= {1.0, -1.0}
    assert len({play(env, env.task("test", 0), in_brackets, seed)[0].info["moves"] for seed in range(12)}) > 1


@slow_test
def test_self_play_of_a_game_with_hidden_cards():
    env = envs.make("textarena", game="KuhnPoker-v0", self_play=True)
    for k in range(12):
        rng = random.Random(k)

        def reply(seat, messages, rng=rng):
            return rng.choice(messages[-1]["content"].rpartition("available actions are: ")[2].split(", "))

        step, talk, tasks = play(env, env.task("train", k), reply)
        assert step.terminated and sum(step.seat_rewards) == 0 and len(step.seat_rewards) == 2
        assert step.info["invalid_moves"] == 0 and step.reward == step.seat_rewards[0]
        cards = [{}, {}]  # round -> the line that tells a seat its card; to one it is told twice
        for seat in (0, 1):
            lines = "\n".join(message["content"] for message in talk[seat]).splitlines()
            cards[seat] = {line.split(".")[0]: line for line in lines if "Your card is" in line}
        assert len(cards[0]) >= 2 and all(cards[1].get(key) != line for key, line in cards[0].items())


@slow_test
@pytest.mark.parametrize("options", [
    dict(), dict(self_play=True), dict(game="ConnectFour-v0", moves="[0][1][2][3][4][5][6]"),
    dict(game="KuhnPoker-v0", self_play=True), dict(game="GuessTheNumber-v0"), dict(game="PigDice-v0"),
    dict(game="SimpleNegotiation-v0", self_play=True), dict(game="ThreeCardMonte-v0"), dict(game="Snake-v0"),
    dict(game="PublicGoodsGame-v0", self_play=True), dict(game="ColonelBlotto-v0", self_play=True)],
    ids=lambda options: "-".join(map(str, options.values())) or "default")
def test_any_text_gets_an_answer_at_once(options):
    env = envs.make("textarena", **options)
    for k in range(4):
        rng, longest = random.Random(k), 0.0

        def reply(seat, messages, rng=rng):
            nonlocal began, longest
            longest = max(longest, time.process_time() - began)
            began = time.process_time()
            return rng.choice(HOSTILE)

        began = time.process_time()
        step, *_ = play(env, env.task("test", k), reply)
        assert max(longest, time.process_time() - began) < 5 * work()
        assert step.info["correct"] in (0, 1) and -1 <= step.reward <= 1
        began = time.process_time()
        rng.seed(k)
        assert play(env, env.task("test", k), reply)[0] == step


@slow_test
def test_an_opening_move_in_another_process_is_the_same():
    program = ("import envs\nenv = envs.make('textarena', game='TicTacToe-v0,Snake-v0,SimpleBlindAuction-v0,"
               "FrozenLake-v0,WildTicTacToe-v0,GameOfPureStrategy-v0')\n"
               "print([env.task('test', k).messages for k in range(24)])")
    told = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                           env={**os.environ, "PYTHONHASHSEED": seed}).stdout for seed in "12"]
    assert told[0] == told[1] and len(told[0]) > 5_000


@slow_test
def test_a_game_alone_is_won_by_all_of_its_reward():
    env = envs.make("textarena", game="GuessTheNumber-v0", game_options="max_number=3;max_turns=3")
    for k in range(8):
        guesses = iter(["1", "2", "3"])
        step, *_ = play(env, env.task("train", k), lambda seat, messages, g=guesses: next(g))
        assert step.reward == 1 == step.info["correct"] and step.info["moves"] <= 3
    step, *_ = play(env, env.task("train", 0), lambda seat, messages: "[9]")
    assert step.reward < 1 and step.info["correct"] == 0 and step.info["invalid_moves"] > 0


@slow_test
@pytest.mark.parametrize("options, message", [
    (dict(game="TicTacTo-v0"), r"unknown game .* \(did you mean 'TicTacToe-v0'\?\); known are 2048-v0"),
    (dict(game_options="size=3"), "environment textarena, game TicTacToe-v0: unknown option 'size'"),
    (dict(game="ConnectFour-v0", game_options="rows=5"), "did you mean 'num_rows'.*known: is_open, num_"),
    (dict(game="ConnectFour-v0", game_options="num_rows=x"), "option num_rows: expected int, got 'x'"),
    (dict(game="ConnectFour-v0"), "game ConnectFour-v0: a random seat finds no legal move"),
    (dict(num_players=3), r"cannot be played \(The number of players has to be 2, received 3\)"),
    (dict(game="TwentyQuestions-v0"), r"cannot be played \(OpenRouter API key not found")])
def test_a_game_that_cannot_be_played_is_one_line(options, message, capfd, monkeypatch):
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(BadInput, match=message) as error:
        envs.make("textarena", **options)
    assert "\n" not in str(error.value) and capfd.readouterr().err == ""


@slow_test
def test_random_seats_read_the_game_and_not_the_policy():
    """What the policy says in brackets is no move of theirs, and what they try leaves no trace."""
    env = envs.make("textarena", game="TicTacToe-v0")
    for k in range(0, 20, 2):
        task = env.task("test", k)
        moves = []
        for extra in ("", " [8] [8] [8]"):
            episode = env.start(task, 5)
            step = episode.step("[0]" + extra)
            moves.append(step.messages[0]["content"].partition("[Player 1] ")[2][:3])
            before = copy.deepcopy(episode.game.state.game_state)
            episode.random_reply(0, random.Random(1))
            assert episode.game.state.game_state == before
        assert moves[0] == moves[1] and moves[0] not in ("[0]", "")
