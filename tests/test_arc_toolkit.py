"""ARC-AGI-3's own toolkit (arc-agi and arcengine): its client at our server, our environment at its server.

The packages want Python 3.12: the variable ARC_PYTHON names one that has them, or else `toolkit` finds one.
"""

import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests

import envs
from envs.arcagi3 import games
from tests.run_folders import ROOT
from tools import run_arc_eval

pytestmark = pytest.mark.slow
PACKAGES = "arc-agi==0.9.9 arcengine==0.9.3"
PARTS = ROOT / "tests" / "data" / "arc_toolkit"
BASELINE = [2, 5, 7]  # actions of a shortest way through each level of door-0001
WALK = ["ACTION4"]
LEVELS = [WALK * 2, ["ACTION6 x=23 y=0", *WALK * 4], ["ACTION6 x=16 y=7", *WALK * 3, *["ACTION2"] * 2, *WALK]]


@pytest.fixture(scope="module")
def toolkit():
    """A Python that has the toolkit."""
    named, found = os.environ.get("ARC_PYTHON"), []
    versions = Path.home().glob(".pyenv/versions/3.1[2-9]*/bin/python")
    for python in [named] if named else [sys.executable, shutil.which("python3.12"), *sorted(versions)]:
        tried = python and subprocess.run(
            [python, "-c", "import sys; print(sys.version_info >= (3, 12)); import arc_agi, arcengine"],
            capture_output=True, text=True)
        if tried and tried.returncode == 0:
            return python
        if tried and tried.stdout.startswith("True"):
            found.append(python)
    if not found and not named:
        pytest.skip(f"no Python 3.12 or later, which {PACKAGES} want: this one is {sys.version.split()[0]}; "
                    "python3.12 is not on PATH, nor is there a ~/.pyenv/versions/3.12*")
    without = f"{named or found[0]} lacks {PACKAGES}; ARC_PYTHON can name a Python that has them"
    if named or "CI" in os.environ:
        pytest.fail(without)
    pytest.skip(without)


@contextlib.contextmanager
def started(folder, python, *words):
    """A server in a process of its own.  -> its address, which it tells first of all"""
    log = folder / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen([python, *map(str, words)], cwd=folder, stdout=output, stderr=output)
    try:
        end = time.monotonic() + 60
        while not (url := re.search(r"http://127\.0\.0\.1:[0-9]+", log.read_text())):
            assert server.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        yield url[0]
    finally:
        server.kill()
        server.wait()


def client(python, folder, url, **todo):
    """What tests/data/arc_toolkit/play.py, which plays by the toolkit's client, has to tell."""
    variables = {name: value for name, value in os.environ.items()
                 if not name.startswith("ARC_") and name != "OPERATION_MODE"}
    done = subprocess.run([python, PARTS / "play.py", url], input=json.dumps(todo), cwd=folder, env=variables,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


def steps_of(game_id):
    return games.new_game(game_id).solution()


def frames_of(game_id, steps, may_be_full=True):
    """What a play of a game of ours shows, from its first screen on: {state, levels, grids} or None."""
    game = games.new_game(game_id)
    grids = [game.frame()]
    for number, x, y in [(None, 0, 0), *steps]:
        refused = number and (game.state != "NOT_FINISHED" or number not in game.actions)
        if number == 0:
            game.reset(may_be_full)
            grids = [game.frame()]
        elif number and not refused:
            grids = game.act(number, x, y)
        yield None if refused else dict(state=game.state, levels=[game.completed, 3], grids=grids, id=game_id)


PLAYS = {  # by the id that is asked for
    "lights-3": [(3, 0, 0), *steps_of("lights-3")],  # it has no ACTION3
    "collect": steps_of("collect-0"),  # the first one that is listed
    # begun again, an action in vain, the level again; and after the end once more
    "maze-17": [(0, 0, 0), steps_of("maze-17")[0], (0, 0, 0), *steps_of("maze-17"), (1, 0, 0), (0, 0, 0)],
    "maze-2": [(1, 0, 0)] * 3 + [(2, 0, 0), (1, 0, 0)] * 20 + [(0, 0, 0), *steps_of("maze-2")[:5]],  # lost
}


@pytest.mark.parametrize("mode, key, flags", [
    ("online", "", []), ("competition", "secret", ["--api-key", "secret", "--require-cookie"])])
def test_their_client_plays_our_server(mode, key, flags, toolkit, tmp_path):
    plays = [*PLAYS.items(), ("lights-3", []), ("ls20-abc", [])]
    ids = {name: name if "-" in name else f"{name}-0" for name in PLAYS}
    least = {ids[name]: [game.least(level) for level in game.levels] for name in PLAYS
             for game in [games.new_game(ids[name])]}
    with started(tmp_path, sys.executable, ROOT / "tools" / "arc_server.py", "--port", 0, "--seeds", 1,
                 *flags) as url:
        told, _ = client(toolkit, tmp_path, url, mode=mode, key=key, games=plays, baselines=least)
        closed = f"{url}/api/scorecard/{told['after']['card_id']}"
        card = requests.get(closed, headers={"X-API-Key": key}).json()
    assert (told["key"], told["listed"]) == (key or "anonymous", ["maze-0", "lights-0", "collect-0"])

    online = mode == "online"
    for (name, steps), seen in zip(PLAYS.items(), told["plays"], strict=False):
        expected = list(frames_of(ids[name], steps, may_be_full=online))
        shown = [frame and {part: frame[part] for part in expected[0]} for frame in seen["frames"]]
        assert shown == expected, name
        for (number, x, y), frame in zip(steps, seen["frames"][1:], strict=True):
            why = json.dumps({"why": number}) if number else None
            assert not frame or frame["sent"] == [number, dict(x=x, y=y) if number == 6 else {}, why]
    lights, collect, maze, lost, again, unknown = told["plays"]
    assert lights["actions"] == [6] and lights["title"] == "Lights" and unknown is None
    assert [play["frames"][-1]["state"] for play in (lights, collect)] == ["WIN", "WIN"]
    assert "GAME_OVER" in [frame["state"] for frame in lost["frames"] if frame]
    assert [frame["full"] for frame in maze["frames"] if frame and frame["sent"][0] == 0] == (
        [True, online, False, True])
    assert bool(again["frames"][0]) is online  # in competition mode a game is played once

    # The scorecard is what the toolkit makes of these frames; and what of them is known by hand.
    score, expected = told["after"], told["expected"]
    rows = {row["id"]: row for row in score["environments"]}
    unplayed = [rows.pop(name) for name in ("maze-0", "lights-0") if name in rows]
    assert [row["score"] for row in unplayed] == [0] * (0 if online else 2)
    assert list(rows.values()) == expected["environments"] and len(rows) == 4
    assert score["score"] == pytest.approx(expected["score"] * 4 / (4 if online else 6))
    assert rows["collect-0"]["score"] == rows["lights-3"]["score"] == 100
    first, second, third = least["maze-17"]
    taken = [first + (2 if online else 3), second, third]  # in vain, and a reset; where it is not full, two
    won = next(run for run in rows["maze-17"]["runs"] if run["completed"])
    assert (won["level_actions"], won["resets"]) == (taken, 1 if online else 2)
    assert won["score"] == pytest.approx((100 * (first / taken[0]) ** 2 + 500) / 6)
    assert (score["tags"], score["opaque"]) == (["tried", "agent"], {"note": [1, None]})
    assert score["source_url"] == "http://127.0.0.1/source" and score["competition_mode"] is not online
    assert told["before"] == (score if online else 403)
    assert {name: card[name] for name in card if name.startswith("total")} == (
        {name: score[name] for name in score if name.startswith("total")})


def test_their_client_cannot_download_a_game_of_ours(toolkit, tmp_path):
    with started(tmp_path, sys.executable, ROOT / "tools" / "arc_server.py", "--port", 0) as url:
        told, log = client(toolkit, tmp_path, url, mode="normal", key="k", games=[["maze-17", []]],
                           baselines={})
    assert told["plays"] == [None] and "404" in log and "/api/games/maze-17/source" in log


@pytest.fixture(scope="module")
def theirs(toolkit, tmp_path_factory):
    """The address of the toolkit's server, for a game that is written for its engine."""
    with started(tmp_path_factory.mktemp("theirs"), toolkit, PARTS / "serve.py") as url:
        yield url


def door(url, **options):
    env = envs.make("arcagi3", root_url=url, test_ids="none", downsample=8, **options)
    assert env.num_tasks("train") == 1
    return env, env.task("train", 0)


def play(env, task, replies):
    episode = env.start(task, 1)
    return episode, [episode.step(reply) for reply in replies]


def test_our_environment_plays_their_server(theirs):
    env, task = door(theirs)
    assert task.source == "arcagi3/door" and task.data["game_id"] == "door-0001"
    first, second, third = LEVELS
    replies = ["begin", "hm", "ACTION5", "ACTION6 x=64 y=0", "ACTION4", "RESET", *first, "RESET", *first,
               "ACTION1", *second, *third]
    episode, steps = play(env, task, replies)
    texts = [step.messages[0]["content"] if step.messages else "" for step in steps]
    start = "\n".join(["90e00000", *["0" * 8] * 7])
    moved = start.replace("90e", "09e")
    opened, after_reset, door_shown = texts[0], texts[5], texts[7]
    assert opened.startswith("state: NOT_FINISHED\nscore: 0 of 3\n") and opened.endswith(start)
    assert "actions: ACTION1 ACTION2 ACTION3 ACTION4 ACTION6\n" in opened
    reasons = ("no action was found", "ACTION5 is not available", "x is 64")
    for text, why in zip(texts[1:4], reasons, strict=True):
        assert why in text and text.endswith(start)
    assert texts[4].endswith(moved) and after_reset.endswith(start)
    assert "animation: 2 screens" in door_shown and "90c0e000\n55555000" in door_shown

    rewards = {7: 1, 8: -1, 10: 1, 16: 1, 23: 1}  # RESET where nothing was done in the level takes it back
    assert {number: step.reward for number, step in enumerate(steps) if step.reward} == rewards
    assert [step.terminated for step in steps] == [False] * (len(steps) - 1) + [True]
    info = steps[-1].info
    assert (info["state"], info["score"], info["correct"], info["invalid"]) == ("WIN", 3, 1, 3)
    assert info["actions_taken"] == len(replies) - 4 and not info["errors"]

    card = episode.scorecard
    (row,) = card["environments"]
    begun, won = row["runs"]
    assert (begun["level_actions"], begun["resets"], begun["completed"]) == ([4, 0, 0], 1, False)
    assert (won["level_actions"], won["level_baseline_actions"]) == ([2, 6, 7], BASELINE)
    assert won["completed"] and card["score"] == pytest.approx((100 + 2 * 100 * (5 / 6) ** 2 + 300) / 6)
    assert card["total_levels_completed"] == 3 and "plainrl" in card["tags"]
    assert requests.get(f"{theirs}/api/scorecard/{info['card_id']}").status_code == 404  # it is closed


def test_a_lost_game_and_several_at_once(theirs):
    env, task = door(theirs)
    first, second, third = LEVELS
    lost = ["RESET", *first, *second, *third[:4], *WALK]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda replies: play(env, task, replies),
                              [lost, ["RESET", *first, *second, *third]] * 3))
    ends = [(steps[-1].info["state"], steps[-1].info["score"], steps[-1].terminated) for _, steps in found]
    assert ends == [("GAME_OVER", 2, True), ("WIN", 3, True)] * 3
    assert len({episode.card_id for episode, _ in found}) == 6
    assert [episode.scorecard["total_environments_completed"] for episode, _ in found] == [0, 1] * 3


def test_the_evaluation_records_a_game_of_their_server(theirs, tmp_path, capsys):
    def evaluate(*flags):
        run_arc_eval.main(list(map(str, flags)))
        return json.loads(capsys.readouterr().out)

    live = ["--live", "--root-url", theirs, "--game-id", "door-0001"]
    played = evaluate(*live, "--random", "--max-actions", 30, "--out", tmp_path)
    assert played["ok"] and played["scorecard"]["environments"][0]["actions"] > 0 and played["frames"] > 1
    replayed = evaluate("--mock-session", tmp_path / "session.jsonl", "--max-actions", 30)
    for name in ("state", "score", "reward", "guid", "scorecard"):
        assert replayed[name] == played[name]
    assert "no solver for door-0001" in evaluate(*live, "--scripted")["reason"]
