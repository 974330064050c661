"""Board and card games of open_spiel (https://github.com/google-deepmind/open_spiel): one move, or a game.

    env = envs.make("openspiel", cases="breakthrough(rows=5,columns=4);hex(board_size=5)")
    step = env.start(env.task("train", 0), seed=1).step("<answer>c5d4</answer>")

A case is a game with its parameters; a task of it is a state after a few random moves, in which a player has
a choice. What a move is worth is the mean result of games played on from it at random (or by MCTS), scaled to
0..1. Other processes play these games, from the start of an episode on. With mode=game the reply is the first
of a whole game against an opponent.

Whether a state belongs to train or test is a hash of the state. A reply is compared with the texts of the
legal moves and nothing else. docs/openspiel.md has the options and the rules.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import itertools
import math
import random
import re
import threading
import warnings
import zlib
from concurrent.futures import Future
from typing import Literal

from envs import BadInput, Env, Episode, Message, Step, Task, final_part, hint, play
from envs.workers import cores, shared_pool

CASES = (*(f"hex(board_size={n})" for n in (5, 7, 9)), *(f"go(board_size={n})" for n in (9, 13)),
         *(f"breakthrough(rows={n},columns={n})" for n in (6, 8)),
         *(f"dots_and_boxes(num_rows={n},num_cols={n})" for n in (3, 4, 5)),
         *(f"clobber(rows={n},columns={n})" for n in (5, 6, 7)), "othello", "chess", "checkers")
TEST_SHARE = 10  # one state in so many belongs to the test split
DRAWN = ("dots_and_boxes", "quoridor", "rbc")  # their boards have blanks for what is not there
SHOWN_MOVES = 50  # legal moves that a prompt lists
MAX_ANSWER = 200  # characters of an answer that are read at all
MAX_LENGTH = 20_000  # moves of a game: bounds a playout
MAX_TURNS = 200  # replies of a whole game; a game that is not over by then is lost
PROBE, SMALL = 256, 128  # fewer than SMALL different states among PROBE: a case with few states
DRAWS = 2_000  # random openings that look for all states of such a case
SPLIT_STEPS = 8  # random moves of the openings that tell which few states a case has
RESTARTS = 100  # games that may end, one after the other, before a player has had a choice
SIDES = 10_000  # random openings in search of a state of the wanted split
VOCABULARY_GAMES, VOCABULARY_QUIET = 20_000, 500  # random games for words; so many without a new one end it
CACHED_TASKS = 2_048  # tasks whose moves' scores are kept
REQUEST_MOVES = 16  # moves that a worker scores at a time
MOST_WORKERS = 16  # by default
CHECK_SECONDS = 60.0  # limit for loading a case [s]
MCTS_EXPLORATION = 2.0  # UCT's constant, for returns in -1..1
MCTS_MEMORY = 64  # [MB]

PROMPT = """You are player {player} of {players} in {title}. {parameters}

{state}

{moves}

Choose your move. Reply with exactly one legal move, as it is written above, inside <answer> </answer>."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The options. Between the items of a list stands `;`, or a comma, but for those of `game_configs`."""

    cases: str | list[str] = ""
    """games with their parameters, such as `hex(board_size=5),othello`, or a JSON list of them; goes before
    `game_list`"""
    game_list: str = ""
    """names of games, such as `hex,y`; empty: the 16 default cases"""
    game_configs: str = ""
    """parameters for each game of `game_list`, such as `board_size=5;board_size=7`: a case per pair"""
    game_types: str = ""
    """keep the cases of these games alone, such as `hex,go`"""
    num_tasks_per_case: int = 100
    """tasks of a case, in each split"""
    max_random_steps: int = 8
    """random moves before the state that is shown: 0 to so many"""
    reward_mode: Literal["outcome", "legal"] = "outcome"
    """`outcome`: what the move is worth, by playouts; `legal`: 1 for any legal move"""
    mode: Literal["move", "game"] = "move"
    """`move`: one reply, one move; `game`: a whole game, a move a turn"""
    opponent: Literal["random", "mcts"] = "random"
    """`game`: who the others are; `move`: who plays on, for all players, after the reply's move"""
    mcts_simulations: int = 50
    """simulations of a move of MCTS"""
    playouts: int = 8
    """games played on from each move to score it"""
    baseline_moves: int = 0
    """`correct` compares with the mean of so many legal moves, drawn at random; 0: with that of all"""
    style: Literal["full", "short", "words"] = "full"
    """`short`, `words`: the bare state, and the bare move as the reply, for small models of bytes or words"""
    seed: int = 0
    """the tasks begin so many further on, with other playouts; same splits"""
    workers: int = -1
    """processes that play to score moves, beside this one; -1: one for each core but one, 1 to 16; 0: none"""

    def __post_init__(self):
        for option, low, high in (("num_tasks_per_case", 1, 10**9), ("max_random_steps", 0, 10_000),
                                  ("mcts_simulations", 1, 10**6), ("playouts", 1, 10_000),
                                  ("baseline_moves", 0, 10**6), ("workers", -1, 1_000)):
            if not low <= getattr(self, option) <= high:
                raise bad(option, f"{low} to {high}", getattr(self, option))
        if isinstance(self.cases, list) and not self.cases:
            raise bad("cases", "at least one game", self.cases)
        if self.game_configs and (self.cases or not self.game_list):
            raise bad("game_configs", "game_list beside it, and no cases", self.game_configs)


def bad(option, expected, got) -> BadInput:
    return BadInput(f"environment openspiel: option {option}: expected {expected}, got {got!r}")


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    text: str  # the game string as given
    name: str  # open_spiel's short name
    title: str
    parameters: str
    key: str  # name and all parameters, defaults too: the same for every way to write the case
    game: object  # pyspiel.Game
    perfect: bool  # whether the players see all there is
    low: float  # utility
    high: float


class OpenSpiel(Env):
    """One state per task. mode=move: one reply; mode=game: replies until the game is over."""

    Config = Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.multi_turn = config.mode == "game"
        # A move waits for the workers that score it; a game is played in this process.
        self.blocking = bool(config.workers) and config.mode == "move" and config.reward_mode == "outcome"
        workers = min(max(cores() - 1, 1), MOST_WORKERS)
        count = config.workers if config.workers > 0 else workers
        self.pool = shared_pool(count, "envs.openspiel")  # nothing starts here
        self.cases = load_cases(config, self.pool)
        self._few = [self._few_states(case) for case in self.cases]
        self._scores, self._lock = collections.OrderedDict(), threading.Lock()

    @property
    def vocabulary(self) -> list[str] | None:
        """Words for a word-level tokenizer (None unless style is words): all that random games bring up."""
        if self.config.style != "words":
            return None
        found = {}
        for case in self.cases:
            rng, quiet = random.Random(f"{case.key} vocabulary").random, 0
            for _ in range(VOCABULARY_GAMES):
                size, state = len(found), case.game.new_initial_state()
                while not state.is_terminal():
                    for player in choosers(state):
                        moves = [move_text(state, player, action) for action in state.legal_actions(player)]
                        found |= dict.fromkeys(" ".join([self.prompt(case, state, player), *moves]).split())
                    random_node(state, rng)
                quiet = quiet + 1 if len(found) == size else 0
                if quiet == VOCABULARY_QUIET:
                    break
        return [*sorted(found), ":"]  # the colon: before a reply

    def num_tasks(self, split: str) -> int:
        """Cases times num_tasks_per_case, less where a case has not so many different states."""
        sizes = self._sizes(split)
        if not any(sizes):
            raise BadInput(f"environment openspiel: no {split} state, since these cases have few; expected a "
                           f"larger max_random_steps ({self.config.max_random_steps} now), another case or "
                           "mode=game")
        return sum(sizes)

    def task(self, split: str, index: int) -> Task:
        self.check_index(split, index)
        number, sizes = index, self._sizes(split)
        which = 0
        while number >= sizes[which]:
            number -= sizes[which]
            which += 1
        case = self.cases[which]
        if (few := self._few[which]) is not None:
            state, player = few[split][number % len(few[split])]
        else:
            state, player = self._draw(case, split, index)
        data = {"case": case.text, "state": state.serialize(), "player": player}
        return Task(f"openspiel-{split}-{index}", f"openspiel/{case.name}",
                    [{"role": "user", "content": self.prompt(case, state, player)}], data)

    def start(self, task: Task, seed: int) -> Episode:
        return Game(self, task, seed) if self.config.mode == "game" else Move(self, task)

    def solution(self, task: Task) -> str | None:
        """legal: a legal move, at random; outcome and mode=game: the move that scores best."""
        case, state, player = self.load(task)
        return self.reference(case, state, player, task.id)

    def demonstration(self, task: Task) -> list[Message] | None:
        """The solution; with mode=game a whole game, in which each move is the one that scores best."""
        if self.config.mode == "move":
            return super().demonstration(task)
        game = Game(self, task, seed=0)
        return play(game, task, game.reference)

    def reference(self, case, state, player, task_id) -> str:
        """A good reply in a state, as the options have it."""
        if self.config.reward_mode == "legal" and self.config.mode == "move":
            rng = random.Random(f"{self.config.seed} solution {task_id}").random
            action = pick(state.legal_actions(player), rng)
        else:
            scores = self.scores(case, state, player, task_id)
            action = max(scores, key=scores.get)
        move = move_text(state, player, action)
        return f"<answer>{move}</answer>" if self.config.style == "full" else move

    def load(self, task):
        """The task's case, its state and the player who moves. Raises BadInput for data of other options."""
        case = next((case for case in self.cases if case.text == task.data["case"]), None)
        if case is None:
            raise BadInput(f"environment openspiel: task {task.id}: its case {task.data['case']} is none of "
                           f"{'; '.join(case.text for case in self.cases)}")
        return case, case.game.deserialize_state(task.data["state"]), task.data["player"]

    def scores(self, case, state, player, task_id, actions=None) -> dict[int, float]:
        """What the legal moves are worth, or those of `actions`: see `score_moves`."""
        actions = state.legal_actions(player) if actions is None else actions
        return self.scores_of(case, state, player, task_id).wait(actions)

    def scores_of(self, case, state, player, task_id) -> Scores:
        """They are kept: a group of replies asks for the same ones."""
        key = (case.text, state.serialize(), player, task_id)

        def submit(actions):
            function = functools.partial(score_moves, *key[:3], actions, task_id, self.config)
            if self.config.workers:
                return self.pool.submit(function)
            future = Future()
            future.set_result(function())
            return future

        with self._lock:
            scores = self._scores.setdefault(key, Scores(submit))
            self._scores.move_to_end(key)
            if len(self._scores) > CACHED_TASKS:
                self._scores.popitem(last=False)
        return scores

    def baseline(self, state, player, task_id) -> list[int]:
        """The legal moves whose mean score a correct move has to beat."""
        legal, most = state.legal_actions(player), self.config.baseline_moves
        if most and len(legal) > most:
            rng = random.Random(f"{self.config.seed} baseline {task_id}").random
            legal = [legal.pop(int(rng() * len(legal))) for _ in range(most)]
        return legal

    def prompt(self, case, state, player) -> str:
        if self.config.style != "full":
            board = shown_state(case, state, player)
            if any(name in case.text for name in DRAWN):  # as it is, or in misere(game=rbc())
                board = board.replace(" ", "_")
            parts = board.split()
            if self.config.style == "words":  # a word for each cell of a board
                parts = "".join(re.sub(r"(?<=\d)\s+(?=\d)", "_", board).split())  # 2 17 is not 21 7
            text = " ".join([*parts, f"p{player}"])
            return f"{case.text} {text}" if len(self.cases) > 1 else text
        moves = [move_text(state, player, action) for action in state.legal_actions(player)]
        shown = f"Legal moves ({len(moves)}): {'; '.join(moves[:SHOWN_MOVES])}"
        if len(moves) > SHOWN_MOVES:
            shown += f"; and {len(moves) - SHOWN_MOVES} more, {len(moves)} in all"
        board = f"State:\n{shown_state(case, state, player)}"
        if case.perfect and case.game.get_type().provides_information_state_string:
            board += f"\n\nActions so far, as numbers: {state.information_state_string(player) or 'none'}"
        return PROMPT.format(player=player, players=case.game.num_players(), title=case.title, state=board,
                             parameters=case.parameters, moves=shown)

    def _sizes(self, split) -> list[int]:
        """Tasks of each case."""
        self.check_split(split)
        most = self.config.num_tasks_per_case
        return [most if few is None or few[split] and self.config.mode == "game" else
                min(most, len(few[split])) for few in self._few]

    def _draw(self, case, split, index):
        """A random state of the split, and the player who moves: from the seed and the index alone."""
        rng = random.Random(f"{case.key} {split} {self.config.seed + index}").random
        for _ in range(SIDES):
            state, player = opening(case, self.config.max_random_steps, rng)
            if is_test(case, state, player) == (split == "test"):
                return state, player
        raise BadInput(f"environment openspiel: case {case.text}: expected a {split} state among {SIDES} "
                       "random openings, found none; more max_random_steps reach more states")

    def _few_states(self, case) -> dict | None:
        """The different states of a case that has only a few, by split, as they are drawn (None: many)."""
        found = few_states(case, self.config.max_random_steps)
        if found is None:
            return None
        few, most = {"train": [], "test": []}, self.config.num_tasks_per_case
        for state, player in found.values():
            few["test" if is_test(case, state, player) else "train"].append((state, player))
        counts, note = {split: len(states) for split, states in few.items()}, "each is one task"
        if self.config.mode == "game" and len(found) == 1:
            few = {split: list(found.values()) for split in few}
            note = "tasks of both splits begin there, and differ by the opponent's moves alone"
        elif min(counts.values()) >= (most if self.config.mode == "move" else 1):
            return few
        warnings.warn(f"environment openspiel: case {case.text}: {counts['train']} different train "
                      f"states and {counts['test']} test states for num_tasks_per_case={most}; {note} "
                      f"(max_random_steps={self.config.max_random_steps})", stacklevel=4)
        return few


class Scores:
    """What the moves of one state are worth, played for once each: known, or asked of a worker.

    submit(actions) -> Future of {action: score}.
    """

    def __init__(self, submit):
        self.submit, self.lock, self.holders = submit, threading.Lock(), 0
        self.known, self.asked = {}, {}  # action -> score, action -> Future

    def ask(self, actions) -> set[Future]:
        """Have the games played of those moves that nobody has asked for yet.  -> what is not known yet"""
        with self.lock:  # without workers, the other replies of a group wait here
            new = [a for a in dict.fromkeys(actions) if a not in self.known and a not in self.asked]
            for first in range(0, len(new), REQUEST_MOVES):
                part = new[first:first + REQUEST_MOVES]
                self.asked |= dict.fromkeys(part, self.submit(part))
            return {self.asked[action] for action in actions if action in self.asked}

    def wait(self, actions) -> dict[int, float]:
        """The moves' scores. RuntimeError: the workers failed; the next call asks others."""
        self.hold()
        try:
            for future in self.ask(actions):
                error = future.exception()
                with self.lock:
                    self.asked = {a: other for a, other in self.asked.items() if other is not future}
                    self.known |= {} if error else future.result()
                if error:
                    raise error
            return {action: self.known[action] for action in actions}
        finally:
            self.release()

    def hold(self) -> None:
        with self.lock:
            self.holders += 1

    def release(self) -> None:
        """Once nobody holds them, what no worker has begun is given up."""
        with self.lock:
            self.holders -= 1
            if not self.holders:
                self.asked = {a: future for a, future in self.asked.items() if not future.cancel()}


class Move(Episode):
    """One reply: a move. The games that score the task's moves are played from the episode's start on."""

    def __init__(self, env, task):
        self.env, self.task, self.scores = env, task, None
        if env.config.reward_mode == "outcome":
            case, state, player = env.load(task)
            self.others = env.baseline(state, player, task.id)
            self.scores = env.scores_of(case, state, player, task.id)
            self.scores.hold()
            if env.config.workers:
                self.scores.ask(self.others)
        self.held = self.scores is not None

    def step(self, reply: str) -> Step:
        _, state, player = self.env.load(self.task)
        action = read_move(reply, state, player)
        legal = float(action is not None)
        reward = correct = legal
        if legal and self.scores:
            scores = self.scores.wait([action, *self.others])
            reward = scores[action]
            correct = float(is_good(reward, [scores[other] for other in self.others]))
        self.close()
        return Step([], reward, True, False, {"correct": correct, "legal": legal, "outcome": reward})

    def close(self) -> None:
        if self.held:
            self.held = False
            self.scores.release()


class Game(Episode):
    """A whole game: the policy has the place of the player who moves in the task's state."""

    def __init__(self, env, task, seed):
        self.env, self.task = env, task
        self.case, self.state, self.player = env.load(task)
        self.rng = random.Random(f"{seed} opponent {task.id}").random
        bot_seed = zlib.crc32(f"{seed} {task.id}".encode()) % 2**31
        self.bot = make_bot(self.case, 0, bot_seed, env.config) if env.config.opponent == "mcts" else None
        self.turns, self.over = 0, None

    def step(self, reply: str) -> Step:
        if self.over:
            return self.over
        self.turns += 1
        action = read_move(reply, self.state, self.player)
        if action is None:
            return self._end(0.0, 0.0, legal=0.0)
        log = []
        self._play(action, log)
        while not self.state.is_terminal() and self.player not in choosers(self.state):
            self._play(None, log)
        if self.state.is_terminal():
            returns = self.state.returns()
            return self._end(scaled(self.case, returns[self.player]), won(self.case, returns, self.player))
        if self.turns == MAX_TURNS:
            return self._end(0.0, 0.0, truncated=True)
        text = self.env.prompt(self.case, self.state, self.player)
        if self.env.config.style == "full" and self.case.perfect and log:
            text = f"{' '.join(log)}\n\n{text}"
        return Step([{"role": "user", "content": text}], 0.0, False, False, self._info(0.0, 0.0, 1.0))

    def reference(self) -> str:
        """A good reply in the state that the game is in."""
        return self.env.reference(self.case, self.state, self.player, self.task.id)

    def _play(self, action, log):
        """One node: chance, the policy's `action` where it has one, the opponents' moves."""
        state, player = self.state, self.player
        if state.is_chance_node():
            return random_node(state, self.rng)
        if state.is_simultaneous_node():
            moves = [pick(state.legal_actions(p) or [0], self.rng) for p in range(state.num_players())]
            moves[player] = moves[player] if action is None else action
            return state.apply_actions(moves)
        mover, legal = state.current_player(), state.legal_actions()
        if action is None:
            search = self.bot and len(legal) > 1
            action = self.bot.step(state) if search else pick(legal, self.rng)
            log.append(f"Player {mover} played {move_text(state, mover, action)}.")
        state.apply_action(action)

    def _info(self, correct, outcome, legal):
        return {"correct": float(correct), "legal": legal, "outcome": outcome, "turns": float(self.turns)}

    def _end(self, outcome, correct, legal=1.0, truncated=False):
        self.over = Step([], outcome, not truncated, truncated, self._info(correct, outcome, legal))
        return self.over


# ---- Cases

def items(text, commas=True) -> list[str]:
    """What stands between semicolons, or commas outside parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == ";" or letter == "," and commas and not depth:
            parts.append("")
            depth = 0
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def case_texts(config) -> list[str]:
    """The game strings that the options ask for."""
    if config.cases:
        texts = items(config.cases) if isinstance(config.cases, str) else [*map(str.strip, config.cases)]
    elif config.game_list:
        configs = [",".join(sorted(part.strip() for part in text.split(",")))
                   for text in items(config.game_configs, commas=False)]
        texts = [f"{name}({text})" if text else name
                 for name, text in itertools.product(items(config.game_list), configs or [""])]
    else:
        texts = list(CASES)
    option = "cases" if config.cases else "game_list"
    if not texts:
        raise bad(option, "at least one game", getattr(config, option))
    if config.game_types:
        types = items(config.game_types)
        kept = [text for text in texts if any(text == name or text.startswith(f"{name}(") for name in types)]
        if not kept:
            raise bad("game_types", f"some of {', '.join(dict.fromkeys(t.split('(')[0] for t in texts))}",
                      config.game_types)
        texts = kept
    return texts


def load_cases(config, pool) -> list[Case]:
    """Raises BadInput for a game that is unknown, cannot be loaded, does not fit or is given twice."""
    option = option_of(config)
    cases = [checked_case(text, option, pool) for text in case_texts(config)]
    for number, case in enumerate(cases):
        if case.key in (earlier.key for earlier in cases[:number]):
            raise bad(option, "different games", case.text)
        if config.opponent == "mcts":
            why = no_mcts(case.game)
            if why:
                raise bad("opponent", f"random, since MCTS cannot play {case.text} ({why})", "mcts")
    return cases


def option_of(config) -> str:
    """The option that names the cases."""
    return "cases" if config.cases or not config.game_list else "game_list"


@functools.lru_cache(maxsize=256)
def checked_case(text, option, pool) -> Case:
    """The case, which a worker has loaded before: a game's parameters may ask for any time and memory."""
    if text not in CASES:
        try:
            pool.submit(check_case, text, option, seconds=CHECK_SECONDS).result()
        except RuntimeError as error:
            raise bad(option, f"a game that loads ({error})", text) from error
    return load_case(text, option)


def check_case(text, option) -> None:
    load_case(text, option)


@functools.lru_cache(maxsize=256)
def load_case(text, option) -> Case:
    try:
        import pyspiel
    except ImportError as error:
        raise BadInput("environment openspiel: expected the package open_spiel, see requirements.txt "
                       f"({error})") from error
    name, known = text.partition("(")[0], sorted(pyspiel.registered_names())
    if name not in known:
        raise BadInput(f"environment openspiel: option {option}: unknown game {name!r}{hint(name, known)}; "
                       f"known: {', '.join(known)}")
    failures = (pyspiel.SpielError, RuntimeError, LookupError, TypeError, ValueError, MemoryError)
    try:
        game = pyspiel.load_game(text)
        low, high = game.min_utility(), game.max_utility()
    except failures as error:
        raise bad(option, f"a game that loads ({one_line(error)})", text) from error
    if why := unfit(game, low, high):
        raise bad(option, f"a game that this environment can play ({why})", text)
    kind, parameters = game.get_type(), game.get_parameters()
    told = "Parameters: " + ", ".join(f"{key} {value}" for key, value in sorted(parameters.items())) + "."
    case = Case(text, name, f"{text} ({kind.long_name})", told if parameters else "It has no parameters.",
                f"{name} {sorted(parameters.items())}", game,
                kind.information == kind.Information.PERFECT_INFORMATION, low, high)
    try:
        opening(case, 0, random.Random(0).random)
    except failures as error:
        raise bad(option, f"a game that can be played ({one_line(error)})", text) from error
    return case


def one_line(error) -> str:
    if isinstance(error, MemoryError):
        return "it takes too much memory"
    return (words(str(error)) or type(error).__name__)[:300]


def unfit(game, low, high) -> str:
    """Why the environment cannot play a game; empty if it can."""
    kind = game.get_type()
    if kind.dynamics == kind.Dynamics.MEAN_FIELD:
        return "mean-field games have no single players"
    if kind.chance_mode == kind.ChanceMode.SAMPLED_STOCHASTIC:
        return "its chance cannot be seeded"
    if not (kind.provides_observation_string or kind.provides_information_state_string):
        return "it has no text of a state"
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        return f"its utilities {low} to {high} cannot be scaled"
    if game.max_game_length() > MAX_LENGTH:
        return f"a game may take {game.max_game_length()} moves, over {MAX_LENGTH}"
    return ""


def no_mcts(game) -> str:
    """Why open_spiel's MCTS cannot play a game; empty if it can."""
    kind = game.get_type()
    if kind.dynamics != kind.Dynamics.SEQUENTIAL:
        return "moves are simultaneous"
    if kind.information != kind.Information.PERFECT_INFORMATION:
        return "it would see hidden information"
    if kind.reward_model != kind.RewardModel.TERMINAL:
        return "rewards come before the end"
    return ""


# ---- States

def pick(options, rng):
    return options[int(rng() * len(options))]


def choosers(state) -> list[int]:
    """The players who have a choice now: more than one legal move."""
    if state.is_terminal() or state.is_chance_node():
        return []
    players = range(state.num_players()) if state.is_simultaneous_node() else [state.current_player()]
    return [player for player in players if len(state.legal_actions(player)) > 1]


def random_node(state, rng):
    """Play one node: chance by its probabilities, players uniformly."""
    if state.is_chance_node():
        outcomes, probabilities = zip(*state.chance_outcomes(), strict=True)
        ends = list(itertools.accumulate(probabilities))
        state.apply_action(outcomes[bisect.bisect_right(ends, rng() * ends[-1], hi=len(ends) - 1)])
    elif state.is_simultaneous_node():
        state.apply_actions([pick(state.legal_actions(player) or [0], rng)
                             for player in range(state.num_players())])
    else:
        state.apply_action(pick(state.legal_actions(), rng))


def opening(case, max_random_steps, rng):
    """A state after 0 to max_random_steps random moves, and a player who has a choice there.

    Chance and forced moves play themselves and are not counted. A finished game starts again. ValueError
    where RESTARTS games end before anyone has a choice.
    """
    def settle(state):
        while not state.is_terminal() and not choosers(state):
            random_node(state, rng)
        return state

    state, left = settle(case.game.new_initial_state()), int(rng() * (max_random_steps + 1))
    for _ in range(left):
        if not state.is_terminal():
            random_node(state, rng)
            settle(state)
        if state.is_terminal():
            state = settle(case.game.new_initial_state())
    for _ in range(RESTARTS):
        if players := choosers(state):
            return state, pick(players, rng)
        state = settle(case.game.new_initial_state())
    raise ValueError("no player ever has a choice")


def shown_state(case, state, player) -> str:
    """What the player sees: of a game of perfect information the board, else his information state.

    open_spiel's information state of chess or hex is a bare list of action numbers.
    """
    kind = case.game.get_type()
    if kind.provides_observation_string and (case.perfect or not kind.provides_information_state_string):
        text = state.observation_string(player)
    else:
        text = state.information_state_string(player)
    return text.strip("\n")


def state_key(case, state, player) -> str:
    """The same for two states exactly if a player could not tell them apart, save by how they came about."""
    return f"{case.key}\n{player}\n{shown_state(case, state, player)}"


def is_test(case, state, player) -> bool:
    """Whether a state belongs to the test split: a property of the case and of what the player sees."""
    key = state_key(case, state, player)
    return zlib.crc32(key.encode()) % TEST_SHARE == 0 or key == spare_test(case)


@functools.lru_cache(maxsize=256)
def few_states(case, max_random_steps) -> dict | None:
    """state_key -> (state, player) of a case that has only a few, as they are drawn (None: many)."""
    rng, found = random.Random(f"{case.key} states").random, {}
    for k in range(DRAWS):
        if k == PROBE and len(found) >= SMALL:
            return None
        if k == PROBE and len(found) == 1:
            break
        state, player = opening(case, max_random_steps, rng)
        found.setdefault(state_key(case, state, player), (state, player))
    return found


@functools.lru_cache(maxsize=256)
def spare_test(case) -> str:
    """The state_key that is the test split where a case's states are few and no hash is; else empty."""
    hashes = {key: zlib.crc32(key.encode()) for key in few_states(case, SPLIT_STEPS) or ()}
    spare = len(hashes) > 1 and all(value % TEST_SHARE for value in hashes.values())
    return min(hashes, key=hashes.get) if spare else ""


# ---- Moves and scores

def words(text) -> str:
    return " ".join(text.split())


def move_text(state, player, action) -> str:
    return words(state.action_to_string(player, action))


NUMBER = re.compile("0|[1-9][0-9]{0,17}", re.ASCII)


def answer_of(reply) -> str:
    """What the last <answer> </answer> of the final part holds, else its last line with text."""
    reply = final_part(reply)
    start = reply.rfind("<answer>", 0, max(reply.rfind("</answer>"), 0))
    if start >= 0:
        text = reply[start + len("<answer>"):reply.find("</answer>", start)]
    else:
        text = reply.rstrip()
        text = text[max(text.rfind("\n"), text.rfind("\r")) + 1:]
    return words(text) if len(text) <= MAX_ANSWER else ""


def read_move(reply, state, player) -> int | None:
    """The legal action that a reply names and nothing else besides (None: it names none).

    The move's text as it is; else in other case, where that fits one move alone (bxc3 and Bxc3 are two moves
    of chess); else the action's number.
    """
    answer = answer_of(reply)
    if not answer:
        return None
    legal = state.legal_actions(player)
    texts = {}
    for action in legal:
        texts.setdefault(move_text(state, player, action), action)
    if answer in texts:
        return texts[answer]
    if answer.isascii():  # lower() makes a plain k of the Kelvin sign
        alike = [action for text, action in texts.items() if text.lower() == answer.lower()]
        if alike:
            return alike[0] if len(alike) == 1 else None
    number = int(answer) if NUMBER.fullmatch(answer) else -1
    return number if number in legal else None


def score_moves(text, state, player, actions, task_id, config) -> dict[int, float]:
    """What moves are worth in a serialised state of the case `text`: {action: score}. Workers call it, too.

    The k-th playout of all moves has the same seed, from (seed, task id, k): what one move has of luck the
    others have of the same kind, and a reply scores the same at any time and in any process.
    """
    case = load_case(text, option_of(config))
    state = case.game.deserialize_state(state)
    seeds = [zlib.crc32(f"{config.seed} {task_id} {k}".encode()) for k in range(config.playouts)]
    return {action: worth(case, state, player, action, seeds, config) for action in actions}


def worth(case, state, player, action, seeds, config) -> float:
    """Mean scaled return of a move over games played on from it, one per seed."""
    import pyspiel
    total, players = 0.0, range(case.game.num_players())
    for seed in seeds:
        after = state.clone()
        if state.is_simultaneous_node():
            rng = random.Random(seed).random
            moves = [pick(state.legal_actions(p) or [0], rng) for p in players]
            moves[player] = action
            after.apply_actions(moves)
        else:
            after.apply_action(action)
            if after.is_terminal():
                return scaled(case, after.returns()[player])
        bots = [make_bot(case, p, (seed + p + 1) % 2**31, config) for p in players]
        total += scaled(case, pyspiel.evaluate_bots(after, bots, seed % 2**31)[player])
    return total / len(seeds)


def make_bot(case, player, seed, config):
    """Who plays on: at random or by MCTS."""
    import pyspiel
    if config.opponent == "random":
        return pyspiel.make_uniform_random_bot(player, seed)
    return pyspiel.MCTSBot(case.game, pyspiel.RandomRolloutEvaluator(1, seed), MCTS_EXPLORATION,
                           config.mcts_simulations, MCTS_MEMORY, True, seed, False)


def scaled(case, value) -> float:
    """A return as 0..1 by the game's least and greatest utility."""
    return min(max((value - case.low) / (case.high - case.low), 0.0), 1.0)


def is_good(score, others) -> bool:
    """Whether a score is above the others' mean; or, where all are the same, not below: no move is better."""
    margin = score - sum(others) / len(others)
    return margin > 1e-9 or (margin > -1e-9 and max(others) - min(others) < 1e-9)


def won(case, returns, player) -> bool:
    """More than every other player; alone, or where all get the same, more than half of the scale."""
    others = [value for p, value in enumerate(returns) if p != player]
    kind = case.game.get_type()
    if not others or kind.utility == kind.Utility.IDENTICAL:
        return scaled(case, returns[player]) > 0.5
    return returns[player] > max(others)
