"""ARC-AGI-3: games, replies, screens, client, transports, tools; HTTP against our own server on loopback."""

import concurrent.futures
import contextlib
import functools
import http.server
import itertools
import json
import re
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import requests
from PIL import Image

import envs
from envs import BadInput, arcagi3
from envs.arcagi3 import Action, ClientError, HttpTransport, TransportError, games, parse_reply
from tools import arc_server, run_arc_eval

ROOT = Path(__file__).resolve().parent.parent
SESSION = str(ROOT / "envs" / "arcagi3" / "session.json")
KINDS = sorted(games.GAMES)
SHORT = dict(style="short", downsample="8")
NOBODY = dict(root_url="http://127.0.0.1:1")  # where no server is


@contextlib.contextmanager
def running(server):
    threading.Thread(target=server.serve_forever, kwargs=dict(poll_interval=0.01), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def serve():
    """A function: faults -> a running server of our own games; all of them end with the test."""
    with contextlib.ExitStack() as servers:
        yield lambda arcade=None, **faults: servers.enter_context(running(
            arc_server.ArcServer(arcade or games.Arcade(), arc_server.Faults(**faults))))


def connect(server, key="", **options):
    options = dict(timeout=30, retries=3, deadline=60, sleep=lambda seconds: None) | options
    return HttpTransport(server.url, key, **options)


make = functools.partial(envs.make, "arcagi3")


def one_game(game_id, **options):
    """(environment, task) of one game: of our own in this process, or of the server at root_url"""
    env = make(game_ids=game_id, test_ids="none", **options)
    return env, env.task("train", 0)


def over_http(server, game_id, key="", transport=None, **options):
    env, task = one_game(game_id, root_url=server.url, **options)
    env.make_transport = transport or (lambda: connect(server, key))
    return env, task


def run(env, task, replies=None):
    """An episode from its first reply to its end.  -> its steps"""
    if replies is None:
        replies = ([] if task.data["begun"] else ["RESET"]) + env.replies(task)
    episode, steps = env.start(task, 1), []
    for reply in replies:
        steps.append(episode.step(reply))
        if steps[-1].terminated or steps[-1].truncated:
            break
    episode.close()
    return steps


@pytest.mark.parametrize("name", KINDS)
def test_solutions_score_full_marks_and_corrupted_ones_do_not(name):
    for index, options in enumerate(({}, SHORT, SHORT | dict(levels=1))):
        env = make(game_ids=name, **options)
        task, levels = env.task("test", index), env.config.levels
        steps = run(env, task)
        assert [step.terminated for step in steps] == [False] * (len(steps) - 1) + [True]
        assert sum(step.reward for step in steps) == levels and steps[-1].messages == []

        info = steps[-1].info
        assert info["correct"] == info["progress"] == 1 and info["state"] == "WIN" and info["score"] == levels
        assert info["actions_taken"] == len(steps) and not info["invalid"] + info["errors"] + info["error"]
        assert run(env, task, env.replies(task)[1:])[-1].info["correct"] == 0

    whole = make(game_ids=name, **SHORT)  # a game of fewer levels begins with the same ones
    assert whole.replies(whole.task("test", index))[:len(steps)] == env.replies(task)


@pytest.mark.slow
def test_play_at_random_scores_little(capsys):
    assert run_arc_eval.main(["--random", "--tasks", "120"]) == 0
    rows = json.loads(capsys.readouterr().out)["games"]
    for name, most in (("maze", 0.3), ("lights", 0.05), ("collect", 0.2)):
        row = rows[f"arcagi3/{name}"]
        assert row["tasks"] == 40 and row["score"] <= most and row["correct"] == 0 and row["invalid"] == 0


def test_the_maze_by_hand():
    game = games.new_game("maze-17")
    before = np.array(game.frame())
    assert set(np.unique(before)) <= {0, 2, 5, 9, 11, 14}
    ((y, x),) = np.argwhere(before == 9)[:1] // 8
    for action, (dx, dy) in games.MOVES.items():
        game = games.new_game("maze-17")
        open_ = 0 <= x + dx < 7 and 0 <= y + dy < 7 and before[8 * (y + dy) + 4, 8 * (x + dx) + 4] != 5
        ((now_y, now_x),) = np.argwhere(np.array(game.act(action)[0]) == 9)[:1] // 8
        assert (now_x, now_y) == ((x + dx, y + dy) if open_ else (x, y))


def test_the_lights_by_hand():
    game = games.new_game("lights-17")
    left, top, (lit, dark), _, _ = game.level
    block = np.s_[8 * top + 4:8 * top + 32:8, 8 * left + 4:8 * left + 32:8]
    before = np.array(game.frame())[block]
    after = np.array(game.act(games.CLICK, 8 * left + 15, 8 * top)[0])[block]
    changed = before != after
    assert set(before.flat) == {lit, dark} and changed.sum() == 4
    assert changed[0].tolist() == [True, True, True, False] and changed[1, 1]
    assert (game.act(games.CLICK, 8 * left - 1 if left else 63, 63)[0] == np.array(game.frame())).all()


def test_collect_a_wrong_item_spoils_until_undone():
    game = next(game for seed in range(99) if (game := games.new_game(f"collect-{seed}")).completed == 0)
    for step in game.solve(game.level):
        game.act(*step)
    assert game.completed == 1
    order = game.items
    second = list(order)[1]
    way = game.solve((game.place, ((second, order[second]),)))
    for step in way:
        game.act(*step)
    assert game.spoiled and list(game.items) == list(order)[:1] and game.frame()[6 * 8 + 4][60] == 13
    game.act(games.UNDO)
    assert not game.spoiled and list(game.items) == list(order)


def test_no_test_game_looks_like_a_train_game_from_afar():
    ids = [f"{name}-{seed}" for name in KINDS for seed in range(60)]
    frames = [(arcagi3.split_of_game(game_id), games.new_game(game_id).frame()) for game_id in ids]
    for scale in (2, 3, 4, 8):
        view = arcagi3.View(arcagi3.Config(live=True, downsample=scale))
        screens = {split: {str(view.shrink(frame)) for of, frame in frames if of == split}
                   for split in ("train", "test")}
        assert not screens["train"] & screens["test"] and len(screens["test"]) > 20


def test_games_of_a_list_are_split_by_their_ids_without_network():
    def games_of(**options):
        env = make(**options, **NOBODY)
        return {split: {env.task(split, k).data["game_id"] for k in range(env.num_tasks(split))}
                for split in env.splits}

    ids = [f"g{k}-abc" for k in range(40)]
    found = games_of(game_ids=",".join(ids))
    assert found["train"] | found["test"] == set(ids) and not found["train"] & found["test"]
    assert 3 < len(found["test"]) < 20
    fewer = games_of(game_ids=",".join(ids[:20]))
    assert fewer["test"] <= found["test"]  # whether a game is held out does not depend on the others
    task = make(game_ids="ls20-abc", test_ids="none", **NOBODY).task("train", 0)
    assert task.source == "arcagi3/ls20" and "RESET" in task.messages[-1]["content"]

    assert games_of(game_ids="a,b,c", test_ids="b") == {"train": {"a", "c"}, "test": {"b"}}
    assert games_of(game_ids="a", test_ids="none") == {"train": {"a"}, "test": set()}
    with pytest.warns(match="game c is held out: of these 3"):  # no hash sends one to test
        assert games_of(game_ids="a,b,c") == {"train": {"a", "b"}, "test": {"c"}}


@pytest.mark.parametrize("options, says", [
    (dict(downsample=0), "downsample: expected 1 to 32, got 0"), (dict(reward_scale="inf"), "reward_scale"),
    (dict(downsample=5), "1, 2, 3, 4 or 8 .* got 5"), (dict(changes=True, style="short"), "changes"),
    (dict(session=SESSION, root_url="http://h"), "session"), (dict(session="no such file"), "no such file"),
    (dict(session=SESSION, game_ids="maze-1"), "game_ids: expected demo-0001, .* got 'maze-1'"),
    (dict(root_url="three.arcprize.org"), "http://host:port"), (dict(game_ids="mazes"), "maze.*live=true"),
    (dict(game_ids="maze,maze-1"), "not both"), (dict(test_ids="a"), "test_ids"),
    (dict(game_ids="a", **NOBODY), "a, the only game.*game_ids.*test_ids=none"),
    (dict(game_ids="a", test_ids="a", **NOBODY), "held out"),
    (dict(game_ids="a", test_ids="zz", **NOBODY), "test_ids.*zz"),
])
def test_options_that_cannot_be_are_named(options, says):
    with pytest.raises(BadInput, match=says):
        env = make(**options)
        assert [env.num_tasks(split) for split in env.splits]


def grid_of(text):
    return [[int(cell, 16) for cell in line] for line in text.partition("screen (64x64):\n")[2].split("\n")]


def test_a_screen_says_what_the_spec_promises():
    env, task = one_game("maze-17")
    text = task.messages[-1]["content"]
    assert "state: NOT_FINISHED\nscore: 0 of 3\nstep: 0 of 80\n" in text
    assert "actions: ACTION1 ACTION2 ACTION3 ACTION4\n" in text
    assert grid_of(text) == games.new_game("maze-17").frame()

    episode, animated = env.start(task, 1), 0
    for number, reply in enumerate(env.replies(task)[:5], 1):
        (message,) = episode.step(reply).messages
        assert message["role"] == "user" and f"step: {number} of 80" in message["content"]
        shown = grid_of(message["content"])
        first, *_, last = [[list(row) for row in grid] for grid in episode.frame.grids * 2]
        assert shown == last
        animated += "animation: 2 screens" in message["content"] and shown != first
    assert animated


@pytest.mark.parametrize("scale", [1, 3, 8])
def test_a_shrunk_screen_shows_majorities(scale):
    view = arcagi3.View(arcagi3.Config(live=True, downsample=scale))
    grid = np.random.default_rng(scale).choice([1, 4, 15], (10, 13))
    expected = []
    for y in range(0, 10, scale):
        blocks = [grid[y:y + scale, x:x + scale].flatten().tolist() for x in range(0, 13, scale)]
        expected.append([max(sorted(set(cells)), key=cells.count) for cells in blocks])
    assert view.shrink(grid.tolist()) == expected


def test_options_of_the_screen():
    env, task = one_game("maze-17", downsample=4, history=2, changes=True)
    assert "screen (16x16, a digit stands for 4x4 cells):" in task.messages[-1]["content"]
    texts = [step.messages[0]["content"] for step in run(env, task, [*env.replies(task)[:5], "hm"])]
    last = [reply.split('"')[3] for reply in env.replies(task)[3:5]]
    assert f"history: {', '.join(last)}\n" in texts[4]
    assert "no action was found. Expected" in texts[5] and "changed (x, y): nothing" in texts[5]
    echoed = run(env, task, [*env.replies(task)[:5], texts[4], ""])[-1]
    assert (echoed.reward, echoed.info["invalid"], echoed.info["actions_taken"]) == (0, 2, 5)


@pytest.mark.parametrize("scale", [1, 3, 8])
def test_changes_are_told_by_the_cell_that_a_click_takes(scale):
    env, task = one_game("lights-17", downsample=scale, changes=True)
    game = games.new_game("lights-17")
    (_, x, y), before = game.solution()[0], np.array(game.frame())
    episode = env.start(task, 1)
    line = next(line for line in episode.step(env.replies(task)[0]).messages[0]["content"].splitlines()
                if line.startswith("changed"))
    after, cells = np.array(episode.frame.grids[-1]), re.findall(r"\((\d+), (\d+)\) (.) to (.)", line)
    assert len(cells) > 3 and f"({x}, {y}) " in line or scale < 8
    for x, y, old, new in cells:
        assert (before[int(y), int(x)], after[int(y), int(x)]) == (int(old, 16), int(new, 16)), line
    view, black = arcagi3.View(arcagi3.Config(downsample=4)), [[0] * 10] * 10  # the last block is smaller
    assert view.changed(black, black[:8] + [[0] * 8 + [1] * 2] * 2) == "changed (x, y): (9, 9) 0 to 1"


def test_the_short_style_is_within_its_vocabulary():
    env = make(history=3, **SHORT)
    words = set(env.vocabulary)
    assert len(words) == len(env.vocabulary) < 300 and make().vocabulary is None
    for index in range(3):
        task = env.task("train", index)
        replies = ["nonsense", *env.replies(task)]
        steps = run(env, task, replies)
        texts = [message["content"] for step in steps for message in step.messages]
        texts += [task.messages[0]["content"], *replies[1:]]
        assert not {word for text in texts for word in text.split()} - words
        assert texts[0].startswith("bad score 0 actions") and len(texts[0].split()) < 80
        assert run(env, task, [*replies[:3], texts[2]])[-1].info["invalid"] == 2  # nor is an echo an action
    opening = make(game_ids="g", test_ids="none", **SHORT, **NOBODY).task("train", 0).messages
    assert opening == [{"role": "user", "content": "start"}]


@pytest.mark.parametrize("scale, reply, sent", [
    (1, "ACTION6 2 5", [dict(x=2, y=5)]), (3, "ACTION6 2 5", [dict(x=7, y=16)]),
    (8, "ACTION6 2 5", [dict(x=20, y=44)]), (1, "ACTION5", [])])
def test_a_short_click_is_in_the_middle_of_its_block_and_what_the_game_lacks_is_not_sent(scale, reply, sent):
    recorder = arcagi3.Recorder(arcagi3.LocalTransport())
    env, task = one_game("lights-17", style="short", downsample=scale)
    env.make_transport = lambda: recorder
    step = env.start(task, 1).step(reply)
    assert [step["payload"] for step in recorder.session["steps"]] == sent
    assert step.info["invalid"] == (not sent) and step.messages[0]["content"].startswith("bad") == (not sent)


@pytest.mark.parametrize("reply, expected", [
    ('{"action": "ACTION6", "x": 1, "y": 2, "reasoning": "why"}', Action("ACTION6", 1, 2, "why")),
    ("  action6 x = 1, y = 2  ", Action("ACTION6", 1, 2)), ("ACTION6 63 0", Action("ACTION6", 63, 0)),
    ("`ACTION6 x=1 y=2`.", Action("ACTION6", 1, 2)), ("I go up.\r\nACTION1\r\n", Action("ACTION1")),
    ('first {"action": "ACTION1"} then {"action": "action2"} done', Action("ACTION2")),
    ('{"action": "ACTION1"} {"note": 1}\nACTION4', Action("ACTION1")),
    ('```json\n{\r\n"action": "RESET"\r\n}\n```', Action("RESET")),
    ('<think>{"action": "ACTION1"}</think>\nACTION5', Action("ACTION5")),
    ('{"action": "ACTION2", "x": 99, "data": {"action": "ACTION3"}}', Action("ACTION2")),
    ('{"move": {"action": "ACTION1"}}\nACTION4', Action("ACTION4")),
    ('{"action": "ACTION1", "reasoning": ["a", 1]}', Action("ACTION1", reasoning="['a', 1]")),
    ('{"action": "ACTION1", "reasoning": "\nACTION2\n"}', Action("ACTION1", reasoning="\nACTION2\n")),
    ("<think>a</think>\nACTION1\n<think>\nACTION2", "no action"),
    ('{"action": "ACTION1"}</think>', "no action"), ("I choose ACTION1", "no action"),
    ("REſET", "no action"), ('{"action": "REſET"}', "not the name"), ("ACTION６ x=1 y=1", "no action"),
    ("ACTION8", "'ACTION8' is not"), ('{"action": 1}', "not the name"),
    ("ACTION6", "x is missing"), ('{"action": "ACTION6", "x": 1}', "y is missing"),
    ('{"action": "ACTION6", "x": true, "y": 1}', "x is True"), ("ACTION6 x=64 y=0", "x is 64"),
    ('{"action": "ACTION6", "x": 1, "y": -1}', "y is -1"),
    ('{"action": "ACTION6", "x": ' + "9" * 4000 + ', "y": 1}', "x is 9999"),
    ('{"action": "ACTION1"' + " " * 9000 + "}", "no action"),  # longer than what is read
])
def test_a_reply_names_an_action_or_it_is_said_why_not(reply, expected):
    found = parse_reply(reply)
    assert found == expected or isinstance(expected, str) and expected in found


@pytest.mark.parametrize("options, rewards", [
    ({}, [1, 2]), (dict(reward_mode="score"), [1, 3]), (dict(reward_mode="binary"), [0, 1]),
    (dict(reward_scale=0.5), [0.5, 1]), (dict(reward_mode="binary", reward_scale=-2), [0, -2]),
])
def test_the_bundled_session_ends_in_win(options, rewards):
    env = make(session=SESSION, test_ids="none", **options)
    task = env.task("train", 0)
    steps = run(env, task, ['{"action": "ACTION4"}', "ACTION6 x=7 y=3"])
    assert [step.reward for step in steps] == rewards
    assert steps[-1].terminated and steps[-1].info["state"] == "WIN" and steps[-1].info["correct"] == 1
    assert steps[-1].info["replay_url"].endswith("/replay/demo-0001/recorded-play")
    assert env.demonstration(task) is None and env.solution(task) is None


def test_reset_begins_the_level_and_twice_the_game():
    env, task = one_game("maze-3")
    replies = env.replies(task)
    first = len(games.new_game("maze-3").solve(games.new_game("maze-3").level))
    steps = run(env, task, replies[:first + 1] + ["RESET", "hm", "RESET", *replies])
    assert [step.reward for step in steps[first - 1:first + 4]] == [1, 0, 0, 0, -1]  # what a level earned
    assert sum(step.reward for step in steps) == 3 and steps[-1].info["correct"] == 1

    won, _, again, _, anew = (grid_of(step.messages[0]["content"]) for step in steps[first - 1:first + 4])
    assert again == won and anew == grid_of(task.messages[-1]["content"])


FRAME = {"game_id": "g", "guid": "u", "frame": [[[0, 15], [1, 2]]], "state": "NOT_FINISHED",
         "levels_completed": 0, "win_levels": 254, "available_actions": [1, 6], "action_input": {"id": 0},
         "full_reset": True}


@pytest.mark.parametrize("reply", [
    [], FRAME | {"error": "X"},
    *(FRAME | {name: None} for name in ("game_id", "guid", "frame", "state", "levels_completed")),
    *(FRAME | change for change in (
        {"guid": 1}, {"guid": ""}, {"state": "WON"}, {"state": []},
        {"frame": []}, {"frame": [[]]}, {"frame": [[[]]]}, {"frame": [[[16]]]}, {"frame": [[[True]]]},
        {"frame": [[[0], [0, 1]]]}, {"frame": [[[0] * 65]]}, {"frame": [[[0]] * 65]}, {"frame": [0]},
        {"frame": [[[0]]] * 1001}, {"levels_completed": 255}, {"levels_completed": True},
        {"win_levels": 255}, {"available_actions": [8]}, {"available_actions": "ACTION1"},
        {"available_actions": [True]}, {"full_reset": 1}, {"action_input": 5})),
])
def test_frames_that_fail_the_schema(reply):
    with pytest.raises(ClientError):
        arcagi3.read_frame(reply)


def test_the_client_checks_what_it_sends_and_gets():
    calls = []

    def transport(method, path, payload):
        calls.append((method, path, payload))
        if "cmd" in path:
            raise KeyError("a transport may raise anything")
        return [{"title": "no id"}] if path == "/api/games" else []

    client = arcagi3.Client(transport)
    for name, *place in (("ACTION6", 64, 0), ("ACTION6", 0, -1), ("ACTION6", True, 1), ("RESET",)):
        with pytest.raises(ClientError, match="0 to 63|not an action"):
            client.act("g", "u", name, *place)
    assert calls == []

    for ask in (client.games, client.open_scorecard, lambda: client.close_scorecard("c"),
                lambda: client.scorecard("../c d", "g/1")):
        with pytest.raises(ClientError):
            ask()
    assert calls[-1][1] == "/api/scorecard/..%2Fc%20d/g%2F1"
    with pytest.raises(TransportError, match="POST /api/cmd/ACTION1: KeyError"):
        client.act("g", "u", "ACTION1", reasoning="\ud800" + "r" * 10_000)
    assert len(calls[-1][2]["reasoning"]) == 2_000 and calls[-1][2]["reasoning"].isascii()


@pytest.mark.parametrize("name, old_names", [("maze", False), ("lights", True)])
def test_a_whole_game_over_http(name, old_names, serve):
    """Each third command fails at first, and is tried again."""
    server = serve(games.Arcade(old_names=old_names), require_cookie=True, api_key="secret", fail_every=3)
    env, task = over_http(server, f"{name}-5", "secret")
    steps = run(env, task)
    assert sum(step.reward for step in steps) == 3 and steps[-1].terminated
    info = steps[-1].info
    assert info["state"] == "WIN" and info["actions_taken"] == len(steps) - 1 == len(env.replies(task))
    assert info["replay_url"] == f"{server.url}/replay/{name}-5/{info['guid']}"
    paths = [path for _, path in server.requests]
    assert paths[:2] == ["/api/scorecard/open", "/api/cmd/RESET"]
    assert paths[-2:] == [f"/api/scorecard/{info['card_id']}", "/api/scorecard/close"]
    assert not server.arcade.cards[info["card_id"]]["open"]

    (here,) = run(*one_game(f"{name}-5"))[0].messages
    assert steps[1].messages == [here] or old_names  # the same screens in process


def test_the_list_of_games_is_fetched_once(serve):
    server = serve()
    env = make(root_url=server.url)
    assert list(server.requests) == []
    assert env.num_tasks("train") + env.num_tasks("test") == 24
    assert env.task("train", 0).data["game_id"] and env.num_tasks("train") > 15
    assert list(server.requests) == [("GET", "/api/games")]
    server.faults.api_key = "other"
    with pytest.raises(BadInput, match="401.*UNAUTHORIZED"):
        make(root_url=server.url).num_tasks("train")


def test_addresses_and_keys_come_from_the_environment(serve, tmp_path, capsys, monkeypatch):
    server = serve(api_key="k")
    monkeypatch.setenv("ARC_ROOT_URL", server.url)
    monkeypatch.setenv("ARC_API_KEY", "k")
    assert run(*one_game("lights-1", live=True))[-1].info["correct"] == 1
    monkeypatch.delenv("ARC_ROOT_URL")
    assert make(live=True).root_url == "https://three.arcprize.org"
    monkeypatch.delenv("ARC_API_KEY")
    with pytest.raises(BadInput, match="option live: https://three.arcprize.org wants a key.*ARC_API_KEY"):
        make(live=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("ARC_ROOT_URL=127.0.0.1:8001\n")
    assert "ARC_ROOT_URL=127.0.0.1:8001: expected the form http" in evaluate(capsys, "--live")["reason"]


def test_what_a_server_remembers_of_requests_is_bounded(serve, monkeypatch):
    monkeypatch.setattr(arc_server, "LATEST", 3)
    server = serve(rate_limit=4)
    codes = [requests.get(f"{server.url}/{number}").status_code for number in range(6)]
    assert codes == [404] * 4 + [429] * 2 and [path for _, path in server.requests] == ["/3", "/4", "/5"]


def test_429_waits_as_long_as_the_server_asks_within_the_limits(serve):
    server, waits = serve(rate_limit=1), []

    def sleep(seconds):
        waits.append(seconds)
        with server.lock:
            server.times.clear()  # a minute passes

    transport = connect(server, deadline=300, sleep=sleep)
    for _ in range(3):
        assert len(transport("GET", "/api/games")) == 24
    assert len(waits) == 2 and all(30 < wait <= 60 for wait in waits)
    for options, tries in ((dict(retries=2, deadline=300), 3), (dict(retries=9, deadline=1), 1)):
        before = len(server.requests)
        with pytest.raises(TransportError, match="HTTP 429 'RATE_LIMIT'") as failure:
            connect(server, **options)("GET", "/api/games")
        assert failure.value.status == 429 and not failure.value.unknown
        assert len(server.requests) == before + tries


def test_games_are_told_one_by_one_and_none_can_be_downloaded(serve):
    server = serve(games.Arcade(["maze-17", "lights-3"]))

    def ask(path):
        answer = requests.get(f"{server.url}/api/games{path}")
        return answer.status_code, answer.json()

    known = {"title": "Maze", "default_fps": 5, "tags": []}
    assert ask("/maze-17") == (200, {"game_id": "maze-17"} | known) and ask("")[1][0] == ask("/maze-17")[1]
    assert ask("/maze-250") == (200, {"game_id": "maze-250"} | known)  # played, though not listed
    assert ask("/maze") == (200, known)  # which of them is not said
    assert ask("/anonkey") == (200, {"api_key": "anonymous"})
    for path in ("/ls20", "/maze-01", "/maze-17/source", "/maze%2017"):
        status, answer = ask(path)
        assert status == 404 and answer["error"] == "NOT_FOUND" and answer["message"]


def test_a_kind_is_the_first_of_its_games_that_is_listed():
    arcade = games.Arcade(["maze-17", "lights-3"])
    client = arcagi3.Client(arcagi3.LocalTransport(arcade))
    frame = client.reset("lights", client.open_scorecard())
    assert frame.game_id == "lights-3"
    assert client.act("lights", frame.guid, "ACTION6", 1, 2).guid == frame.guid
    with pytest.raises(TransportError, match="no such game_id"):
        client.reset("collect", client.open_scorecard())


@pytest.mark.parametrize("competition", [False, True])
def test_a_scorecard_measures_against_shortest_ways(competition):
    arcade = games.Arcade(["maze-17", "lights-3"])

    def ask(path, **payload):
        status, reply = arcade.handle("GET" if path.startswith("scorecard/card") else "POST", f"/api/{path}",
                                      payload)
        return reply if status == 200 else status

    card_id = ask("scorecard/open", tags=["mine", "human"], competition_mode=competition or None)["card_id"]
    guid = ask("cmd/RESET", game_id="lights-3", card_id=card_id)["guid"]
    play = dict(game_id="lights-3", guid=guid)
    game = games.new_game("lights-3")
    assert ask("cmd/RESET", **play)["full_reset"] is not competition
    assert ask("cmd/ACTION6", **play, x=0, y=0, reasoning={"a": 1})["action_input"]["reasoning"] == {"a": 1}
    assert not ask("cmd/RESET", **play)["full_reset"]
    for _, x, y in game.solution():
        last = ask("cmd/ACTION6", **play, x=x, y=y)
    assert last["state"] == "WIN" and ask("cmd/ACTION6", **play, x=0, y=0) == 400
    status = 403 if competition else 200
    for path in (f"scorecard/{card_id}", f"scorecard/{card_id}/lights-3"):
        assert isinstance(ask(path), dict) or ask(path) == status

    least = [2, 3, 4]
    assert [game.least(level) for level in game.levels] == least
    card = ask("scorecard/close", card_id=card_id)
    *others, run = card["environments"][0]["runs"]
    assert len(others) == (not competition) and run["level_baseline_actions"] == least
    taken = 5 if competition else 4  # the click and the reset after it, and the first reset if it is not full
    assert (run["level_actions"], run["resets"]) == ([taken, 3, 4], 1 + competition)
    assert run["level_scores"] == [100 * (2 / taken) ** 2, 100, 100] and run["completed"]
    assert run["score"] == pytest.approx((run["level_scores"][0] + 500) / 6)
    assert card["score"] == run["score"] / (1 + competition)  # in which what was not played counts too
    assert card["total_environments"] == 1 + competition and card["tags"] == ["mine", "human"]
    assert ask(f"scorecard/{card_id}") == card == ask("scorecard/close", card_id=card_id)
    assert ask("cmd/RESET", **play) == 400  # it is closed
    lists = ask(f"scorecard/{card_id}/lights-3")
    assert (lists["won"], lists["played"], lists["levels_completed"]) == (1, 1 + competition, 3)
    assert lists["cards"]["lights-3"]["actions_by_level"][-1] == [[1, taken], [2, taken + 3], [3, taken + 7]]


@pytest.mark.parametrize("path, payload", [
    ("scorecard/open", dict(tags="mine")), ("scorecard/open", dict(tags=[1])),
    ("scorecard/open", dict(opaque="o" * 2**14)), ("cmd/RESET", dict(game_id="maze-1", guid={})),
    ("cmd/RESET", dict(game_id="maze-1", reasoning="r" * 2**14)), ("cmd/RESET", dict(game_id=["maze"]))])
def test_what_the_server_refuses(path, payload):
    arcade = games.Arcade()
    card_id = arcade.handle("POST", "/api/scorecard/open", {})[1]["card_id"]
    status, reply = arcade.handle("POST", f"/api/{path}", {"card_id": card_id} | payload)
    assert (status, reply["error"]) == (400, "VALIDATION_ERROR") and len(arcade.cards) == 1


@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Host": "evil.example"}])
def test_a_page_in_a_browser_cannot_play(serve, headers):
    server = serve()
    assert requests.get(f"{server.url}/api/games", headers=headers).status_code == 403
    assert requests.post(f"{server.url}/api/scorecard/open", json={}, headers=headers).status_code == 403
    assert not server.arcade.cards
    assert requests.get(f"{server.url}/api/games", headers={"Host": "localhost"}).status_code == 200


def test_a_dropped_action_is_not_sent_twice_and_the_next_frame_tells(serve):
    """Each 4th command is carried out and not answered: as a solver that trusts the screen would, go on."""
    server = serve(drop_every=4)
    env, task = over_http(server, "collect-8", max_errors=50)
    steps = run(env, task)
    assert "may have been carried out or not" in steps[3].messages[0]["content"]
    assert steps[3].info["errors"] == 1 and steps[3].info["actions_taken"] == 2
    commands = [path for _, path in server.requests if path.startswith("/api/cmd/ACTION")]
    (play,) = server.arcade.cards[steps[-1].info["card_id"]]["runs"]
    assert len(commands) == len(env.replies(task)) == play["actions"]  # none of them twice
    assert play["state"] == "WIN"


def test_a_new_play_is_asked_for_again_where_the_connection_was_lost(serve):
    server = serve(drop_every=2)
    client = arcagi3.Client(connect(server))
    card = client.open_scorecard()
    assert client.reset("maze-1", card).guid  # the first command is answered
    frame = client.reset("maze-1", card)  # the second is lost
    with pytest.raises(TransportError) as failure:  # and the fourth is of a play: not sent again
        client.reset("maze-1", card, frame.guid)
    assert failure.value.unknown and sum(path.endswith("RESET") for _, path in server.requests) == 4


def test_without_a_first_screen_any_reply_opens_the_game():
    env, task = one_game("maze-17", max_actions=2, first_screen=False)
    shown = one_game("maze-17", max_actions=2)[1].messages[-1]["content"]
    assert "not begun" in task.messages[-1]["content"] and not task.data["begun"]
    steps = run(env, task, ["", "", ""])
    assert shown.endswith(steps[0].messages[0]["content"]) and steps[0].info["invalid"] == 0
    assert len(steps) == 3 and steps[-1].truncated and steps[-1].info["invalid"] == 2


def test_a_wrong_key_ends_the_episode_at_once_and_other_failures_after_so_many(serve):
    server = serve(api_key="right")
    (step,) = run(*over_http(server, "maze-2", "wrong"))
    assert step.truncated and not step.terminated and step.messages == []
    assert step.info["error"] == 1 and step.info["correct"] == 0 and step.info["state"] == "NOT_STARTED"
    assert len(server.requests) == 1

    server = serve()
    env, task = over_http(server, "maze-2", max_errors=4)
    episode = env.start(task, 1)
    episode.step("RESET")
    server.faults.fail_every = 1
    steps = [episode.step("ACTION1") for _ in range(6)]
    assert [step.truncated for step in steps] == [False] * 3 + [True] * 3
    assert steps[3].info["error"] == 1 and steps[5].info["errors"] == 4
    assert "HTTP 500" in steps[0].messages[0]["content"]
    assert all(step.reward == 0 and not step.terminated for step in steps)

    before = len(server.requests)
    episode.close()
    assert len(server.requests) == before


def test_no_server_at_all():
    waits = []
    with pytest.raises(TransportError) as failure:
        HttpTransport(**NOBODY, retries=2, sleep=waits.append)("POST", "/api/cmd/ACTION1", {"guid": "u"})
    assert not failure.value.unknown and "0x" not in str(failure.value)
    first, second = waits  # nothing was sent, so it was tried again
    assert 0.25 <= first <= 0.5 <= second <= 1


def http_answer(body="", status="200 OK", missing=0):
    return (f"HTTP/1.1 {status}\r\nContent-Length: {len(body) + missing}\r\nConnection: close\r\n"
            f"Location: /elsewhere\r\nRetry-After: Wed, 21 Oct 2026 07:28:00 GMT\r\n\r\n{body}")


class Strange(http.server.BaseHTTPRequestHandler):
    """Answers by the parts that its server has, and hangs up."""

    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append(self.path)
        for part in self.server.parts:
            self.wfile.write(part.encode())
            self.server.sent += 1
            time.sleep(0.02)

    do_POST = do_GET


@pytest.fixture
def strange():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Strange)
    server.seen, server.sent, server.handle_error = [], 0, lambda *client: None  # one that gave up
    server.url = f"http://127.0.0.1:{server.server_port}"
    with running(server):
        yield server


GATEWAY = http_answer("{}", "502 Bad Gateway")


@pytest.mark.parametrize("path, answer, kind, says, tries", [
    ("/", GATEWAY, TransportError, "502", 2), ("/", http_answer("[" * 10**5), ClientError, "JSON", 1),
    ("/", http_answer("{}", "302 Found"), TransportError, "302", 1),
    ("/", http_answer("{}", missing=1), TransportError, "Error", 2),  # below: it may have been carried out
    ("/api/cmd/X", GATEWAY, TransportError, "502", 1), ("/api/cmd/X", http_answer(), ClientError, "not", 1),
])
def test_answers_that_are_no_json(path, answer, kind, says, tries, strange):
    strange.parts = [answer]
    with pytest.raises(ClientError, match=says) as failure:
        connect(strange, retries=1)("GET" if path == "/" else "POST", path, {"guid": "u"})
    assert type(failure.value) is kind and strange.seen == [path] * tries  # and not /elsewhere
    assert failure.value.unknown == (says in ("502", "Error", "not"))


@pytest.mark.parametrize("parts", [
    [http_answer(missing=1000), *" " * 999], [*f"HTTP/1.1 200 OK\r\nX: {'x' * 999}"]], ids=["body", "head"])
def test_an_answer_that_drips_is_given_up_at_the_deadline(parts, strange):
    strange.parts = parts
    transport, began = connect(strange, timeout=1, deadline=0.3), time.monotonic()
    with pytest.raises(TransportError, match="too slow") as failure:
        transport("GET", "/")
    assert 0.25 < time.monotonic() - began and strange.sent < len(parts) / 2
    assert failure.value.unknown and len(strange.seen) == 1
    strange.parts, transport.deadline = [http_answer("{}")], 30
    assert transport("GET", "/") == {}  # the next one has time of its own


def test_a_deadline_that_is_over_before_an_answer_is_awaited_holds(strange, monkeypatch):
    def timer(seconds, cut_off):
        return types.SimpleNamespace(start=cut_off, cancel=lambda: None)

    monkeypatch.setattr(threading, "Timer", timer)
    strange.parts = [http_answer(missing=1000), *" " * 999]
    with pytest.raises(TransportError, match="too slow") as failure:
        connect(strange, retries=0)("GET", "/")
    assert failure.value.unknown and strange.sent < len(strange.parts) / 2


def test_closing_is_best_effort(serve):
    server = serve()
    env, task = over_http(server, "maze-1")
    episode = env.start(task, 1)
    episode.close()
    assert list(server.requests) == []  # nothing was begun
    assert episode.step("RESET").truncated
    episode = env.start(task, 1)
    episode.step("RESET")
    server.arcade.cards.clear()
    episode.close()
    episode.close()
    assert episode.scorecard is None
    assert [path for _, path in server.requests][-1] == "/api/scorecard/close"


@pytest.mark.slow
def test_64_episodes_at_once_have_cookies_and_a_scorecard_each(serve):
    server = serve(require_cookie=True)
    plays = [over_http(server, f"maze-{seed}") for seed in range(64)]
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        ends = [steps[-1].info for steps in pool.map(lambda play: run(*play), plays)]
    assert [info["game_id"] for info in ends] == [f"maze-{seed}" for seed in range(64)]
    assert {info["score"] for info in ends} == {3} and len({info["guid"] for info in ends}) == 64
    cards = {info["card_id"]: server.arcade.cards[info["card_id"]] for info in ends}
    assert len(cards) == 64 and not any(card["open"] for card in cards.values())


@pytest.mark.parametrize("name, faults, retries", [
    ("lights-4", {}, 0), ("collect-8", dict(drop_every=4), 3),
    ("lights-4", dict(fail_every=2, drop_every=3), 0)])  # it fails to begin
def test_a_recording_replays_to_the_same_rewards(name, faults, retries, serve, tmp_path, capsys):
    server = serve(**faults)
    server.commands = itertools.count(faults.get("fail_every", 1))
    recorder = arcagi3.Recorder(connect(server, retries=retries))
    env, task = over_http(server, name, transport=lambda: recorder, max_errors=50)
    replies = ["RESET", "hm", env.replies(task)[0], "RESET"] + env.replies(task) + ["RESET"]
    steps, session = run(env, task, replies), recorder.session
    assert bool(session["failures"]) == ("fail_every" in faults)
    failed = len(session["failures"]) + sum("error" in step for step in session["steps"])
    assert failed == steps[-1].info["errors"] and bool(failed) == bool(faults)
    path = tmp_path / "session.jsonl"
    path.write_text("".join(recorder.lines()))
    again = make(session=str(path), max_errors=50, first_screen=False, test_ids="none")
    replayed = run(again, again.task("train", 0), replies)
    assert [step.reward for step in replayed] == [step.reward for step in steps]
    assert [step.messages for step in replayed] == [step.messages for step in steps]
    for option in ("first_screen=true", "first_screen=false"):  # the second replays the first one's recording
        result = evaluate(capsys, "--mock-session", path, "--out", tmp_path, "--env-kwargs", "max_errors=50",
                          option)
        assert (result["reward"], result["errors"]) == (sum(step.reward for step in steps), failed)


def test_deviating_from_a_recording_ends_the_episode():
    env = make(session=SESSION, test_ids="none")
    steps = run(env, env.task("train", 0), ["ACTION6 x=1 y=1"] * 9)
    assert len(steps) == 3 and steps[-1].info["error"] == 1 and steps[-1].truncated
    second = run(env, env.task("train", 0), ["ACTION4"] + ["ACTION6 x=1 y=1"] * 9)[1]
    read = second.messages[0]["content"]  # what the recording holds there is the answer
    assert "not what the recording holds" in read and "{" not in read


def test_session_files_of_other_editors(tmp_path):
    """A byte order mark, Windows' line ends, and what only Python takes for a line's end inside a text."""
    session, path = json.loads(Path(SESSION).read_text()), tmp_path / "b.jsonl"
    steps = [step | {"reasoning": "a\u2028b\x85c"} for step in session["steps"]]
    lines = [{"reset": session["reset"]}, *steps, {"scorecard": session["scorecard"]}]
    text = "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert arcagi3.load_session(str(path)) == session | {"steps": steps, "failures": []}


@pytest.mark.parametrize("text", [
    "", "[]", "{", "\xff", '{"steps": []}', '{"reset": {"error": "X"}}',
    *(json.dumps({"reset": FRAME} | more) for more in (
        {"failures": [{}]}, {"steps": 1}, {"scorecard": {"card_id": 1}},
        {"steps": [{"action": "ACTION9", "payload": {}, "response": {}}]},
        {"steps": [{"action": "ACTION1", "payload": []}]})),
])
def test_files_that_are_no_session(text, tmp_path):
    path = tmp_path / "session.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(BadInput, match="option session="):
        make(session=str(path))


def evaluate(capsys, *flags):
    code = run_arc_eval.main([*map(str, flags)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == (0 if result["ok"] else 1)
    return result


def test_run_arc_eval_plays_in_process_live_and_from_a_recording(serve, tmp_path, capsys):
    server, played = serve(), []
    for name, flags in (("here", []), ("live", ["--live", "--root-url", server.url])):
        result = evaluate(capsys, "--game-id", "maze-17", "--scripted", "--out", tmp_path / name, *flags)
        assert (result["state"], result["score"], result["reward"]) == ("WIN", 3, 3) and result["ok"]
        assert result["scorecard"]["score"] == 100 and result["scorecard"]["total_levels_completed"] == 3
        assert result["replay"] == (f"{server.url}/replay/maze-17/{result['guid']}" if flags else "")
        assert result["frames"] == 1 + result["actions_taken"] + 3  # each level ends with two frames
        played.append((result, (256, 276)))
    again = evaluate(capsys, "--mock-session", tmp_path / "live" / "session.jsonl")
    for name in ("state", "score", "reward", "guid", "scorecard"):
        assert again[name] == result[name]
    mock = evaluate(capsys, "--mock-session", SESSION, "--out", tmp_path / "mock")
    assert (mock["state"], mock["score"], mock["reward"], mock["frames"]) == ("WIN", 3, 3, 4)

    for result, size in (*played, (mock, (250, 220))):
        folder = Path(result["out"])
        with Image.open(folder / "frames.gif") as gif:
            assert gif.n_frames == result["frames"] and gif.size == size and gif.info["loop"] == 0
            assert len(gif.convert("RGB").getcolors()) > 4
        session, episode = (list(map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines()))
                            for name in ("session", "episode"))
        assert "reset" in session[0] and "scorecard" in session[-1]
        assert len(session) == result["actions_taken"] + 2
        assert sum(message.get("reward", 0) for message in episode) == result["reward"]


@pytest.mark.parametrize("flags, says", [
    (["--scripted", "--game-id", "maze"], "expected one game"),
    (["--scripted", "--game-id", "maze", "--tasks", "3", "--out", "D"], "--out D: expected one game"),
    (["--scripted", "--live", "--root-url", "http://127.0.0.1:1", "--game-id", "ls20-1"], "no solver"),
    (["--scripted", "--live", "--root-url", "http://127.0.0.1:1", "--game-id", "maze-1", "--env-kwargs",
      "retries=0", "max_errors=2"], "server failed"),
    pytest.param(["--model", "tests", "--game-id", "maze-1"], "cannot be loaded", marks=pytest.mark.slow),
    (["--live"], "ARC_API_KEY"),
    (["--scripted", "--random"], "not allowed"), (["--root-url", "http://h", "--scripted"], "--live"),
    (["--max-actions", "0"], "1 or more"),
])
def test_run_arc_eval_names_what_cannot_be_and_plays_nothing_else(flags, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = evaluate(capsys, *flags)
    assert not result["ok"] and says in result["reason"] and not list(tmp_path.iterdir()), result


def test_run_arc_eval_plays_by_default_and_says_how_to_play_live_games(capsys):
    assert run_arc_eval.main([]) == 0
    told = capsys.readouterr()
    result = json.loads(told.out)
    assert result["ok"] and result["game_id"] == "maze-17" and result["actions_taken"] > 0
    assert result["replay"].startswith("http://127.0.0.1:")  # of the server that it started
    assert told.err.count("\n") == 1
    assert "ARC_API_KEY=KEY python tools/run_arc_eval.py --live --model" in told.err


def test_the_server_as_a_program():
    flags = ["--port", "0", "--old-names", "--seeds", "2", "--levels", "2"]
    server = subprocess.Popen([sys.executable, "tools/arc_server.py", *flags], cwd=ROOT, text=True,
                              stdout=subprocess.PIPE)
    try:
        url = json.loads(server.stdout.readline())["url"]
        env = make(root_url=url, game_ids="lights-2", test_ids="none")
        played = run(env, env.task("train", 0))[-1]
        assert played.info["correct"] == 1 and played.info["score"] == 2
        assert make(root_url=url, test_ids="none").num_tasks("train") == 6
    finally:
        server.kill()
        server.communicate()


@pytest.mark.slow
def test_a_model_can_be_evaluated(tmp_path, capsys):
    import sft

    tokenizer = sft.new_tokenizer(make(**SHORT).vocabulary)
    sft.new_model(sft.Args(max_length=1024), tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    result = evaluate(capsys, "--model", tmp_path, "--game-id", "maze-1", "--max-actions", 3,
                      "--temperature", 1, "--max-response-tokens", 4, "--max-context-tokens", 200,
                      "--env-kwargs", "style=short", "downsample=8")
    assert result["ok"] and result["actions_taken"] + result["invalid"] == 3
