"""The official toolkit's client at a server of ours: `python play.py URL`, with what to do on standard input.

That is {"mode", "key", "games": [[game_id, [[action, x, y], ...]], ...], "baselines": {game_id: [actions]}}
as JSON; an action of 0 is a reset. The last line printed is JSON: what the client got, and as `expected` the
scorecard that the toolkit itself reckons from the frames which it was sent.
"""

import json
import sys

import requests
from arc_agi import Arcade, OperationMode
from arc_agi.models import EnvironmentInfo
from arc_agi.scorecard import EnvironmentScorecard, Scorecard
from arcengine import GameAction

url, todo = sys.argv[1], json.load(sys.stdin)
arcade = Arcade(todo["key"], url, OperationMode(todo["mode"]))
card_id = arcade.open_scorecard("http://127.0.0.1/source", ["tried"], {"note": [1, None]})
ours = Scorecard(card_id=card_id)
listed = [game.game_id for game in arcade.get_environments()]
told = {"key": arcade.arc_api_key, "listed": listed, "plays": []}


def seen(frame):
    if frame is None:  # refused
        return None
    ours.update_scorecard(frame.guid, frame, frame.full_reset)
    sent = frame.action_input
    return {"state": frame.state.name, "levels": [frame.levels_completed, frame.win_levels],
            "id": frame.game_id, "grids": [grid.tolist() for grid in frame.frame], "full": frame.full_reset,
            "sent": [sent.id.value, sent.data, sent.reasoning]}


def play(game, steps):
    frames = [seen(game.observation_space)]
    for number, x, y in steps:
        data = {"x": x, "y": y} if number == 6 else None
        frames.append(seen(game.step(GameAction.from_id(number), data, {"why": number})) if number
                      else seen(game.reset()))
    actions = [action.value for action in game.action_space]
    return {"actions": actions, "title": game.info.title, "frames": frames}


for game_id, steps in todo["games"]:
    game = arcade.make(game_id, scorecard_id=card_id)
    told["plays"].append(play(game, steps) if game else None)
try:
    told["before"] = arcade.get_scorecard(card_id).model_dump(mode="json")
except requests.HTTPError as error:
    told["before"] = error.response.status_code
told["after"] = arcade.close_scorecard(card_id).model_dump(mode="json")
known = [EnvironmentInfo(game_id=name, baseline_actions=least) for name, least in todo["baselines"].items()]
sent = EnvironmentScorecard.from_scorecard(ours, known).model_dump(exclude_none=True)  # as its server would
told["expected"] = EnvironmentScorecard.model_validate(sent).model_dump(mode="json")
print(json.dumps(told))
