"""Games of TextArena, with other players, alone, or with oneself (self_play): docs/textarena.md.

A random seat takes one of the texts in brackets that the game accepts (tried on a copy), each alike, of the
game's newest message to it that has any, or of those in `moves`.
"""

import contextlib
import copy
import dataclasses
import pkgutil
import re

from envs.adapters import arguments, package, seats, seeded

TRIES = 200  # texts that a random seat tries for a move


@dataclasses.dataclass(frozen=True)
class Config(seats.Config):
    game: str = "TicTacToe-v0"
    """ids of games, with commas: the tasks take turns"""
    game_options: str = ""
    """of the games' constructors, such as `num_rows=5;num_cols=4`"""
    moves: str = ""
    """what random seats draw from, such as `[0][1][2]`, where a game lists no moves"""


def ending(kind):
    """The class of a state, whose own step looks for a next player for ever where all of them are out."""
    def step(self, rotate_player=True):
        if not self.done and len(set(self.elimination_order)) == self.num_players:
            self.set_draw("All players are out.")
        return kind.step(self, rotate_player)
    return type("Ending", (kind,), {"step": step})


class Game(seats.Game):
    def reset(self, game, seed):
        self.game = self.env.package.make(game, **self.env.options[game])
        self.told = [[] for _ in range(self.seats)]  # what the game itself has told each seat
        with seeded(f"{self.key} reset"):
            self.game.reset(self.seats, seed)
        if hasattr(self.game.state, "elimination_order"):
            self.game.state.__class__ = ending(type(self.game.state))

    def turn(self):
        return None if self.game.state.done else self.game.state.current_player_id

    def rewards(self):
        return self.game.state.rewards or {}

    def news(self, seat):
        state, new = self.game.state, self.game.state.observations[seat]
        state.observations[seat], state.logs = [], []  # nothing reads the logs, and each copy copies them
        self.told[seat] += [text for sender, text, _ in new if sender == self.env.package.GAME_ID]
        return "\n".join(f"[{state.role_mapping.get(sender, sender)}] {text}"
                         for sender, text, _ in new if sender != seat)

    def move(self, seat, text, game=None):
        game = game or self.game
        turn = game.state.turn
        with seeded(f"{self.key} {self.moves}"):
            game.step(text)
        return game.state.turn > turn and not game.state.game_info[seat]["invalid_move"]

    def random_reply(self, seat, rng):
        tried, given = 0, self.env.config.moves
        for text in [given] if given else reversed(self.told[seat]):
            moves = sorted(set(re.findall(r"\[[^][\n]+\]", text)))
            for move in rng.sample(moves, len(moves))[:TRIES - tried]:
                tried += 1
                with contextlib.suppress(Exception):
                    if self.move(seat, move, copy.deepcopy(self.game)):
                        return move


class TextArena(seats.Games):
    Config, Game = Config, Game

    def __init__(self, config):
        with seeded("import"):  # nltk keeps the stderr of its import to complain of missing words
            self.package, self.options = package("textarena", "textarena"), {}
        super().__init__(config)

    def load(self, game):
        known = self.package.envs.registration.ENV_REGISTRY
        self.check_name(game, known, [name for name in known if name.endswith("-v0")])
        create, defaults = pkgutil.resolve_name(known[game].entry_point), known[game].kwargs
        self.options[game] = arguments(create, self.config.game_options, f"textarena, game {game}", defaults)
        return self.count_seats(self.package.make(game, **self.options[game]).reset)
