"""Three small games of our own making, and an arcade that answers the ARC-AGI-3 API for them.

    maze-17      walk to the green tile: ACTION1-4 are up, down, left, right
    lights-17    click (ACTION6) until the whole block is lit; a click switches a tile and its neighbours
    collect-17   walk, and take (ACTION5) the items in the order that the bar shows; ACTION7 takes a step back

The number after the name, any from 0, decides the levels: the same id is the same game on every machine. A
game has three levels; the score is the number of levels completed. Frames are 64x64 cells of 0..15: eight by
eight tiles of eight cells, the last row a bar with the levels done (left) and the actions left in this level
(right). Out of actions, the game is over.

`envs/arcagi3` plays them in process, `tools/arc_server.py` serves them over HTTP; see docs/arcagi3.md.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import threading

SIZE, TILE = 64, 8  # cells of a frame's side, of a tile's side
TILES = SIZE // TILE
MAX_LEVELS = 3  # of a game
MAX_SEED = 2**31 - 1
MAX_PLAYS = 20_000  # games that an arcade remembers; the oldest are forgotten
MAX_NOTE = 16 * 1024  # characters, as JSON, of `opaque` and `reasoning`
UP, DOWN, LEFT, RIGHT, TAKE, CLICK, UNDO = range(1, 8)
MOVES = {UP: (0, -1), DOWN: (0, 1), LEFT: (-1, 0), RIGHT: (1, 0)}  # (x, y), y grows downwards
WHITE, GREY, DARK, BLACK, PINK, RED, BLUE, LIGHT_BLUE, YELLOW = 0, 2, 4, 5, 6, 8, 9, 10, 11
ORANGE, MAROON, GREEN, PURPLE = 12, 13, 14, 15


class Game:
    """One play of a game. A subclass has levels, moves and a solver; the counting is done here."""

    name: str
    title: str
    actions: tuple[int, ...]

    def __init__(self, seed: int, num_levels: int = MAX_LEVELS):
        """A game of fewer levels begins with the same ones."""
        self.num_levels = num_levels
        rng = random.Random(f"{self.name}-{seed}")  # a text as seed is hashed the same way everywhere
        self.levels = [self.make_level(rng, number) for number in range(self.num_levels)]
        self.begin()

    def begin(self):
        self.completed, self.state = 0, "NOT_FINISHED"
        self.begin_level()

    def begin_level(self):
        self.used = 0  # actions in this level
        self.level = self.levels[self.completed]
        self.most = self.budget(self.level)
        self.set_up()

    def reset(self, may_be_full: bool = True) -> bool:
        """The level begins again; the whole game, if nothing was done in the level or it is won.  -> which

        may_be_full=False: not the whole game but where it is won.
        """
        full = self.used == 0 and may_be_full or self.state == "WIN"
        if full:
            self.begin()
        else:
            self.state = "NOT_FINISHED"
            self.begin_level()
        return full

    def act(self, action: int, x: int = 0, y: int = 0, draw: bool = True) -> list[list[list[int]]]:
        """Carry out an action; x and y in cells.  -> the frames it leads to, 64x64 each; none without draw"""
        self.used += 1
        self.move(action, x // TILE, y // TILE)
        frames = [self.frame()] if draw else []
        if self.solved():
            self.completed += 1
            if self.completed == self.num_levels:
                self.state = "WIN"
            else:
                self.begin_level()
            frames += [self.frame()] if draw else []
        elif self.used >= self.most:
            self.state = "GAME_OVER"
        return frames

    def frame(self) -> list[list[int]]:
        """64 rows of 64 cells. A tile (ground, thing) shows a thing of 6x6 cells on its ground."""
        tiles = self.tiles()
        ticks = -(-(TILES - self.num_levels) * (self.most - self.used) // self.most)
        tiles.append([(GREEN if k < self.completed else GREY,) * 2 for k in range(self.num_levels)]
                     + [(YELLOW if k < ticks else DARK,) * 2 for k in range(TILES - self.num_levels)])
        rows = []
        for line in tiles:
            edge = [ground for ground, _ in line for _ in range(TILE)]
            inside = [cell for ground, thing in line
                      for cell in (ground, *[thing] * (TILE - 2), ground)]
            rows += [edge, *(list(inside) for _ in range(TILE - 2)), list(edge)]
        return rows

    def least(self, level) -> int:
        """Actions of a shortest way through a level."""
        return len(self.solve(level))

    def solution(self) -> list[tuple[int, int, int]]:
        """A shortest way, level by level, from the game's beginning to WIN: (action, x, y) in cells."""
        return [in_cells(*step) for level in self.levels for step in self.solve(level)]

    # A subclass has these. A level is whatever it likes; x and y are in tiles.

    def make_level(self, rng, number):
        raise NotImplementedError

    def budget(self, level) -> int:
        """Actions that a level may take."""
        raise NotImplementedError

    def set_up(self):
        raise NotImplementedError

    def move(self, action, x, y):
        raise NotImplementedError

    def solved(self) -> bool:
        raise NotImplementedError

    def tiles(self) -> list[list[tuple[int, int]]]:
        """7 rows of 8 tiles (ground, thing)."""
        raise NotImplementedError

    def solve(self, level) -> list[tuple[int, int, int]]:
        raise NotImplementedError


def in_cells(action, x, y):
    """An action on a tile as one on the cell in its middle."""
    return (action, TILE * x + TILE // 2, TILE * y + TILE // 2) if action == CLICK else (action, 0, 0)


class Maze(Game):
    """Rooms on every second tile, joined by a random spanning tree and three openings more."""

    name, title, actions = "maze", "Maze", (UP, DOWN, LEFT, RIGHT)
    side = 7  # tiles of the maze's side; 4x4 rooms

    def make_level(self, rng, number):
        rooms = list(itertools.product(range(0, self.side, 2), repeat=2))
        doors = {}  # wall between two rooms -> the rooms
        for x, y in rooms:
            for dx, dy in ((1, 0), (0, 1)):
                if (x + 2 * dx, y + 2 * dy) in rooms:
                    doors[x + dx, y + dy] = (x, y), (x + 2 * dx, y + 2 * dy)
        floor, part = set(rooms), {room: room for room in rooms}
        closed = list(doors)
        rng.shuffle(closed)
        for door in list(closed):
            one, other = (part[room] for room in doors[door])
            if one != other:
                part = {room: one if of == other else of for room, of in part.items()}
                floor.add(door)
                closed.remove(door)
        floor.update(closed[:3])
        start = rng.choice(rooms)
        steps = distances(floor, start)
        wanted = min((4, 8, 12)[number], max(steps[room] for room in rooms))
        goal = rng.choice([room for room in rooms if steps[room] == wanted])
        return frozenset(floor), start, goal, wanted

    def least(self, level):
        return level[3]

    def budget(self, level):
        return 2 * self.least(level) + 4

    def set_up(self):
        self.floor, self.place, self.goal, _ = self.level

    def move(self, action, x, y):
        dx, dy = MOVES[action]
        to = self.place[0] + dx, self.place[1] + dy
        self.place = to if to in self.floor else self.place

    def solved(self):
        return self.place == self.goal

    def tiles(self):
        def tile(x, y):
            if (x, y) not in self.floor:
                return BLACK, BLACK
            return WHITE, BLUE if (x, y) == self.place else GREEN if (x, y) == self.goal else WHITE

        return [[tile(x, y) for x in range(TILES)] for y in range(self.side)]

    def solve(self, level):
        floor, place, goal, _ = level
        steps, way = distances(floor, goal), []
        while place != goal:
            near = {(place[0] + dx, place[1] + dy): action for action, (dx, dy) in MOVES.items()}
            place = min(near.keys() & floor, key=lambda to: (steps[to], to))
            way.append((near[place], 0, 0))
        return way


def distances(floor, start) -> dict:
    """Steps from start to each tile of the floor that can be reached."""
    steps, queue = {start: 0}, [start]
    for x, y in queue:
        for dx, dy in MOVES.values():
            to = x + dx, y + dy
            if to in floor and to not in steps:
                steps[to] = steps[x, y] + 1
                queue.append(to)
    return steps


class Lights(Game):
    """A block of 4x4 tiles; a click switches the tile and its neighbours above, below, left and right."""

    name, title, actions = "lights", "Lights", (CLICK,)
    side = 4
    colours = ((YELLOW, GREY), (GREEN, RED), (LIGHT_BLUE, PURPLE), (WHITE, MAROON))  # lit, dark

    def make_level(self, rng, number):
        left, top = rng.randrange(TILES - self.side + 1), rng.randrange(TILES - self.side)
        colours = rng.choice(self.colours)
        presses = 2 + number
        while True:
            dark = 0
            for k in rng.sample(range(self.side**2), presses):
                dark ^= SWITCHES[k]
            if len(fewest_presses(dark)) == presses:
                return left, top, colours, dark, presses

    def least(self, level):
        return level[4]

    def budget(self, level):
        return 3 * self.least(level) + 4

    def set_up(self):
        self.left, self.top, self.colours_now, self.dark, _ = self.level

    def move(self, action, x, y):
        x, y = x - self.left, y - self.top
        if 0 <= x < self.side and 0 <= y < self.side:
            self.dark ^= SWITCHES[y * self.side + x]

    def solved(self):
        return not self.dark

    def tiles(self):
        rows = [[(BLACK, BLACK)] * TILES for _ in range(TILES - 1)]
        for k in range(self.side**2):
            y, x = divmod(k, self.side)
            rows[self.top + y][self.left + x] = (BLACK, self.colours_now[self.dark >> k & 1])
        return rows

    def solve(self, level):
        left, top, _, dark, _ = level
        return [(CLICK, left + k % self.side, top + k // self.side) for k in fewest_presses(dark)]


def switches(side: int) -> list[int]:
    """For each tile, row by row, the tiles that a click on it switches, as bits."""
    def bits(x, y):
        near = [(x, y), (x - 1, y), (x + 1, y), (x, y - 1), (x, y + 1)]
        return sum(1 << b * side + a for a, b in near if 0 <= a < side and 0 <= b < side)

    return [bits(x, y) for y in range(side) for x in range(side)]


SWITCHES = switches(Lights.side)


def fewest_presses(dark: int) -> tuple[int, ...]:
    """A shortest list of tiles to click, each once. Every pattern made by clicks has one."""
    for count in range(len(SWITCHES) + 1):
        for presses in itertools.combinations(range(len(SWITCHES)), count):
            left = dark
            for k in presses:
                left ^= SWITCHES[k]
            if not left:
                return presses
    raise ValueError(f"pattern {dark:b} cannot be made by clicks")


class Collect(Game):
    """Items on an open field, to be taken in the bar's order. A wrong one spoils the level until undone."""

    name, title, actions = "collect", "Collect", (UP, DOWN, LEFT, RIGHT, TAKE, UNDO)
    side = 6
    colours = (PINK, RED, YELLOW, ORANGE, GREEN, PURPLE)

    def make_level(self, rng, number):
        places = rng.sample(list(itertools.product(range(self.side), repeat=2)), number + 2)
        return places[0], tuple(zip(places[1:], rng.sample(self.colours, number + 1), strict=True))

    def budget(self, level):
        return 2 * self.least(level) + 6

    def set_up(self):
        self.place, items = self.level
        self.items = dict(items)  # place -> colour, in the order to take them
        self.spoiled = False  # a wrong one was taken
        self.before = []  # what UNDO goes back to

    def move(self, action, x, y):
        if action == UNDO:
            if self.before:
                self.place, self.items, self.spoiled = self.before.pop()
            return
        self.before.append((self.place, self.items, self.spoiled))
        if action == TAKE:
            if self.place in self.items:
                self.spoiled |= self.place != next(iter(self.items))
                self.items = {place: colour for place, colour in self.items.items() if place != self.place}
        else:
            dx, dy = MOVES[action]
            to = self.place[0] + dx, self.place[1] + dy
            self.place = to if 0 <= min(to) and max(to) < self.side else self.place

    def solved(self):
        return not self.items and not self.spoiled

    def tiles(self):
        def tile(x, y):
            place = x - 1, y  # a wall on both sides
            if not 0 <= place[0] < self.side:
                return BLACK, BLACK
            if place == self.place:
                return WHITE, LIGHT_BLUE if place in self.items else BLUE
            return WHITE, self.items.get(place, WHITE)

        order = [(DARK, colour) for colour in self.items.values()]
        bar = order + [(DARK, DARK)] * (TILES - 1 - len(order)) + [(DARK, MAROON if self.spoiled else DARK)]
        return [[tile(x, y) for x in range(TILES)] for y in range(self.side)] + [bar]

    def solve(self, level):
        place, items = level
        way = []
        for item, _ in items:
            for axis, (less, more) in enumerate(((LEFT, RIGHT), (UP, DOWN))):
                step = item[axis] - place[axis]
                way += [(more if step > 0 else less, 0, 0)] * abs(step)
            way.append((TAKE, 0, 0))
            place = item
        return way


GAMES: dict[str, type[Game]] = {game.name: game for game in (Maze, Lights, Collect)}


def parse_id(game_id: str) -> tuple[str, int] | None:
    """("maze", 17) of maze-17; None for what is no game of ours."""
    match = re.fullmatch(r"([a-z]{1,20})-(0|[1-9][0-9]{0,9})", game_id)
    if not match or match[1] not in GAMES or int(match[2]) > MAX_SEED:
        return None
    return match[1], int(match[2])


def new_game(game_id: str, num_levels: int = MAX_LEVELS) -> Game:
    name, seed = parse_id(game_id)
    return GAMES[name](seed, num_levels)


class Refused(Exception):
    """(HTTP status, name of the error, message)"""


class Arcade:
    """The API's answers, (status, JSON value), without any network. Many threads may ask at once.

    old_names: the fields, states and actions are called as by older servers. num_levels: of each game.
    """

    def __init__(self, game_ids=(), old_names: bool = False, num_levels: int = MAX_LEVELS):
        self.game_ids = tuple(game_ids) or tuple(f"{name}-{seed}" for name in GAMES for seed in range(8))
        self.old_names, self.num_levels = old_names, num_levels
        self.plays, self.cards = {}, {}  # guid -> (run, Game, scorecard), card_id -> scorecard
        self.numbers = itertools.count(1)
        self.lock = threading.Lock()

    def handle(self, method: str, path: str, payload=None) -> tuple[int, dict | list]:
        try:
            with self.lock:
                return 200, self._answer(method, path, payload)
        except Refused as refused:
            status, error, message = refused.args
            return status, {"error": error, "message": message}

    def _answer(self, method, path, payload):
        parts = path.strip("/").split("/")
        if method == "GET" and parts[:2] == ["api", "games"]:
            return self._games(*parts[2:])
        if method == "GET" and parts[:2] == ["api", "scorecard"] and len(parts) in (3, 4):
            card = self._card(parts[2])
            if card["competition_mode"] and card["open"]:
                raise Refused(403, "SERVER_ERROR", "in competition mode a scorecard is shown at its end")
            return plays_of(card, self.old_names, parts[3]) if parts[3:] else scores_of(card, self.old_names)
        if method == "POST" and parts[:1] == ["api"] and len(parts) == 3:
            if not isinstance(payload, dict):
                raise Refused(400, "VALIDATION_ERROR", "the body is not a JSON object")
            if parts[1:] == ["scorecard", "open"]:
                return self._open(payload)
            if parts[1:] == ["scorecard", "close"]:
                return self._close(self._card(payload.get("card_id")))
            if parts[1] == "cmd":
                return self._command(parts[2], payload)
        raise Refused(404, "NOT_FOUND", f"no such path: {method} {path[:80]}")

    def _games(self, name="", *more):
        """All that are listed, what there is to know of one, or a key for who has none.

        Of a kind such as maze, which is what the official client asks for whatever number follows it, no
        game_id is told: the client would play that one in place of the one that it was asked for.
        """
        def about(kind):
            return {"title": GAMES[kind].title, "default_fps": 5, "tags": []}

        if more:
            raise Refused(404, "NOT_FOUND", "games are played here by their commands; none can be downloaded "
                          "(of the official client: OperationMode.ONLINE)")
        if not name:
            return [{"game_id": game_id} | about(parse_id(game_id)[0]) for game_id in self.game_ids]
        if name == "anonkey":
            return {"api_key": "anonymous"}
        if name in GAMES:
            return about(name)
        if parse_id(name) is None:
            raise Refused(404, "NOT_FOUND", "no such game")
        return {"game_id": name} | about(parse_id(name)[0])

    def _open(self, payload):
        tags, opaque = payload.get("tags") or [], payload.get("opaque")
        if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
            raise Refused(400, "VALIDATION_ERROR", "tags must be a list of texts")
        refuse_long("opaque", opaque)
        if not {"human", "agent"} & set(tags):
            tags = [*tags, "agent"]
        card_id = f"card-{next(self.numbers):08d}"
        self._keep(self.cards, card_id, {
            "card_id": card_id, "source_url": payload.get("source_url"), "tags": tags, "opaque": opaque,
            "competition_mode": bool(payload.get("competition_mode")), "open": True, "runs": []})
        return {"card_id": card_id}

    def _card(self, card_id):
        card = self.cards.get(card_id) if isinstance(card_id, str) else None
        if card is None:
            raise Refused(404, "SCORECARD_NOT_FOUND", "no such scorecard")
        return card

    def _close(self, card):
        if card["competition_mode"] and card["open"]:  # what was not played counts with 0
            played = {run["game_id"] for run in card["runs"]}
            for game_id in self.game_ids:
                if game_id not in played:
                    self._new_play(game_id, card)
        card["open"] = False
        for run in card["runs"]:
            self.plays.pop(run["guid"], None)
        return scores_of(card, self.old_names)

    def _command(self, name, payload):
        match = re.fullmatch(r"RESET|ACTION([1-7])", name)
        if not match:
            raise Refused(404, "NOT_FOUND", "no such command")
        number = int(match[1] or 0)
        game_id, guid = self._game_id(payload.get("game_id")), payload.get("guid")
        action = {"id": number, "data": {}, "reasoning": payload.get("reasoning")}
        refuse_long("reasoning", action["reasoning"])
        if number == 0 and guid is None:
            card = self._card(payload.get("card_id"))
            if not card["open"]:
                raise Refused(404, "SCORECARD_NOT_FOUND", "no such open scorecard")
            if card["competition_mode"] and any(run["game_id"] == game_id for run in card["runs"]):
                raise Refused(400, "SERVER_ERROR", "in competition mode a game is played once")
            run, game = self._new_play(game_id, card)
            return self._frame(run, game, [game.frame()], action, True)
        run, game, card = self.plays.get(guid, (None,) * 3) if isinstance(guid, str) else (None,) * 3
        if run is None or run["game_id"] != game_id:
            raise Refused(400, "VALIDATION_ERROR", "no such guid for this game")
        full = False
        if number == 0:
            full = game.reset(may_be_full=not card["competition_mode"])
            frames = [game.frame()]
        else:
            if number == CLICK:
                action["data"] = {axis: payload.get(axis) for axis in "xy"}
            frames = self._act(game, number, **action["data"])
        if full:
            run = self._new_run(guid, game_id, game, card)
        else:  # a reset counts as an action too
            run["actions"] += 1
            run["resets"] += number == 0
        if game.completed > run["score"]:
            run["ends"].append(run["actions"])
        run["score"] = game.completed
        if game.state != "NOT_FINISHED":  # a level that was lost and begun again stays noted
            run["state"] = game.state
        return self._frame(run, game, frames, action, full)

    def _game_id(self, name) -> str:
        """A game's id; of a kind such as maze that of the first game which is listed."""
        ids = [listed for listed in self.game_ids if parse_id(listed)[0] == name][:1] or [name]
        if not isinstance(name, str) or parse_id(ids[0]) is None:
            raise Refused(400, "VALIDATION_ERROR", "no such game_id")
        return ids[0]

    def _act(self, game, number, x=0, y=0):
        if game.state != "NOT_FINISHED":
            raise Refused(400, "GAME_NOT_STARTED_ERROR", f"the game is over ({game.state}); RESET it")
        if number not in game.actions:
            raise Refused(400, "VALIDATION_ERROR", f"ACTION{number} is not available in this game")
        if not all(type(value) is int and 0 <= value < SIZE for value in (x, y)):
            raise Refused(400, "VALIDATION_ERROR", "x and y must be integers from 0 to 63")
        return game.act(number, x, y)

    def _new_play(self, game_id, card):
        guid, game = f"play-{next(self.numbers):08d}", new_game(game_id, self.num_levels)
        return self._new_run(guid, game_id, game, card), game

    def _new_run(self, guid, game_id, game, card):
        """A play from its game's beginning; after RESET of the whole game another one of the same play."""
        run = {"guid": guid, "game_id": game_id, "score": 0, "state": game.state, "actions": 0, "resets": 0,
               "ends": [],  # actions taken up to the end of each level done
               "least": [game.least(level) for level in game.levels]}
        card["runs"].append(run)
        self._keep(self.plays, guid, (run, game, card))
        return run

    def _keep(self, kept, key, value):
        kept[key] = value
        if len(kept) > MAX_PLAYS:
            del kept[next(iter(kept))]

    def _frame(self, run, game, frames, action_input, full):
        reply = {"game_id": run["game_id"], "guid": run["guid"], "frame": frames, "state": game.state}
        if self.old_names:
            return reply | {"score": game.completed, "win_score": game.num_levels,
                            "available_actions": [f"ACTION{action}" for action in game.actions]}
        return reply | {"levels_completed": game.completed, "win_levels": game.num_levels,
                        "action_input": action_input, "full_reset": full,
                        "available_actions": list(game.actions)}


def refuse_long(field, value):
    if len(json.dumps(value, separators=(",", ":"))) > MAX_NOTE:
        raise Refused(400, "VALIDATION_ERROR", f"{field} is longer than {MAX_NOTE} characters")


# Scorecards

def by_game(runs) -> dict[str, list[dict]]:
    """game_id -> its runs, in the order in which they were begun."""
    found = {}
    for run in runs:
        found.setdefault(run["game_id"], []).append(run)
    return found


def scores_of(card: dict, old_names: bool = False) -> dict:
    """A scorecard: a game counts with its best run; the score is the mean over the games that were played."""
    head = {name: card[name] for name in ("card_id", "source_url", "tags", "opaque")}
    if old_names:
        return head | plays_of(card, old_names)
    rows = []
    for game_id, runs in by_game(card["runs"]).items():
        scored = [score_of(run) for run in runs]
        row = {"id": game_id, "runs": scored, "level_count": len(runs[0]["least"])}
        for name in ("score", "levels_completed", "completed"):
            row[name] = max(run[name] for run in scored)
        for name in ("actions", "resets"):
            row[name] = sum(run[name] for run in scored)
        rows.append(row)
    return head | {
        "competition_mode": card["competition_mode"], "environments": rows, "tags_scores": [],
        "score": sum(row["score"] for row in rows) / max(len(rows), 1),
        "total_environments": len(rows),
        "total_environments_completed": sum(row["completed"] for row in rows),
        "total_levels": sum(row["level_count"] for row in rows),
        "total_levels_completed": sum(row["levels_completed"] for row in rows),
        "total_actions": sum(row["actions"] for row in rows)}


def score_of(run: dict) -> dict:
    """A run against a shortest way: a level done in n actions where m suffice is worth 100 (m / n)^2, and the
    second level weighs twice as much as the first, the third three times."""
    taken, scores, weighted, before = [], [], 0.0, 0
    for number, least in enumerate(run["least"]):
        done = number < len(run["ends"])
        until = run["ends"][number] if done else run["actions"]
        taken.append(until - before)
        before = until
        scores.append(100 * (least / taken[-1]) ** 2 if done else 0.0)
        weighted += (number + 1) * scores[-1]
    weights = len(scores) * (len(scores) + 1) // 2
    return {"guid": run["guid"], "score": weighted / weights, "levels_completed": run["score"],
            "actions": run["actions"], "resets": run["resets"], "state": run["state"],
            "completed": run["state"] == "WIN", "level_scores": scores, "level_actions": taken,
            "level_baseline_actions": run["least"]}


def plays_of(card: dict, old_names: bool = False, game_id: str | None = None) -> dict:
    """How the runs of a game went (None: of each), as lists; the sums are of the whole scorecard."""
    level_sum, level_list = ("score", "scores") if old_names else ("levels_completed",) * 2
    played, cards = by_game(card["runs"]), {}
    for name, runs in played.items():
        if game_id not in (None, name):
            continue
        cards[name] = {
            "game_id": name, "total_plays": len(runs), "guids": [run["guid"] for run in runs],
            level_list: [run["score"] for run in runs], "states": [run["state"] for run in runs],
            "actions": [run["actions"] for run in runs], "resets": [run["resets"] for run in runs],
            "actions_by_level": [[list(pair) for pair in enumerate(run["ends"], 1)] for run in runs],
            "total_actions": sum(run["actions"] for run in runs)}
    return {"won": sum(any(run["state"] == "WIN" for run in runs) for runs in played.values()),
            "played": len(played), "total_actions": sum(run["actions"] for run in card["runs"]),
            level_sum: sum(max(run["score"] for run in runs) for runs in played.values()), "cards": cards}
