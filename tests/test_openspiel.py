"""Games of open_spiel: tasks, splits, replies, scores and whole games, against play written apart."""

import concurrent.futures
import itertools
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyspiel
import pytest

import envs
from envs import openspiel, workers
from tests.run_folders import until

# Games with few states say so; a test of its own looks at that.
pytestmark = pytest.mark.filterwarnings("ignore:environment openspiel")
ROOT = Path(__file__).resolve().parent.parent
BREAKTHROUGH = "breakthrough(rows=5,columns=4)"
SMALL = f"{BREAKTHROUGH};hex(board_size=4);tic_tac_toe;connect_four(rows=4,columns=5)"
KINDS = ("backgammon", "pig", "kuhn_poker", "leduc_poker", "goofspiel(num_cards=4)", "matrix_rps",
         "goofspiel(num_cards=4,returns_type=total_points)", "matching_pennies_3p", "liars_dice", "catch",
         "tiny_hanabi", "first_sealed_auction", "2048", "misere(game=tic_tac_toe())", "othello", "checkers",
         "turn_based_simultaneous_game(game=matrix_rps())", "dots_and_boxes(num_rows=1,num_cols=2)")


def make(cases=SMALL, **options):
    return envs.make("openspiel", cases=cases, **options)


def all_tasks(env):
    def count(split):
        try:
            return env.num_tasks(split)
        except envs.BadInput:
            return 0

    return [env.task(split, k) for split in env.splits for k in range(count(split))]


def step(env, reply, task, seed=0):
    result = env.start(task, seed).step(reply)
    assert result.terminated and not result.truncated and result.messages == []
    assert result.info["outcome"] == result.reward and 0 <= result.reward <= 1
    assert result.info["legal"] in (0, 1) and result.info["correct"] in (0, 1)
    assert result.info["correct"] <= result.info["legal"] and (result.info["legal"] or result.reward == 0)
    return result


def state_at(game, history):
    state = game.new_initial_state()
    for action in history:
        state.apply_action(action)
    return state


def task_of(case, history, player=None):
    """A task of any position, made by hand."""
    state = state_at(pyspiel.load_game(case), history)
    player = state.current_player() if player is None else player
    return envs.Task(f"{case} {history}", "openspiel", [], {"case": case, "state": state.serialize(),
                                                            "player": player})


def position(task):
    state = pyspiel.load_game(task.data["case"]).deserialize_state(task.data["state"])
    return state, task.data["player"]


def play(env, task, policy, seed=0):
    """Play to the end. policy(episode) -> reply.  -> the last Step, all messages, the episode"""
    episode, prompts = env.start(task, seed), list(task.messages)
    while True:
        result = episode.step(policy(episode))
        prompts += result.messages
        if result.terminated or result.truncated:
            assert result.messages == [] and episode.step("anything") is result
            episode.close()
            return result, prompts, episode
        assert result.reward == 0 and len(result.messages) == 1 and result.messages[0]["role"] == "user"
        assert result.info["legal"] == 1 and result.info["correct"] == 0


def texts_of(state, player):
    """Legal action -> its text, by open_spiel itself."""
    return {a: " ".join(state.action_to_string(player, a).split()) for a in state.legal_actions(player)}


def moves(task):
    return texts_of(*position(task))


def anyone(rng):
    def policy(episode):
        texts = [*texts_of(episode.state, episode.player).values()]
        assert len(texts) > 1
        return rng.choice(texts)
    return policy


def test_every_default_case_has_a_prompt_and_scores_its_solution():
    env = envs.make("openspiel", playouts=1, num_tasks_per_case=1)
    assert [case.text for case in env.cases] == list(openspiel.CASES) and len(openspiel.CASES) == 16
    for index, case in enumerate(openspiel.CASES):
        task = env.task("train", index)
        assert task.data["case"] == case and task.source == f"openspiel/{case.split('(')[0]}"
        assert task.id == f"openspiel-train-{index}"
        assert step(env, env.solution(task), task).info["correct"] == 1


@pytest.mark.parametrize("case", KINDS)
def test_games_of_every_kind(case):
    """Chance, simultaneous moves, hidden cards, one player, three, common payoffs, games of other games."""
    options = dict(style="short", num_tasks_per_case=2 if case == "backgammon" else 8, playouts=2)
    env = make(case, **options)
    for task in all_tasks(env):
        state, player = position(task)
        assert not (state.is_chance_node() or state.is_terminal()) and len(state.legal_actions(player)) > 1
        assert state.is_simultaneous_node() or state.current_player() == player
        assert step(env, env.solution(task), task).info["correct"] == 1
    assert len({task.messages[0]["content"] for task in all_tasks(env)}) == len({*map(shown, all_tasks(env))})

    game, rng = pyspiel.load_game(case), random.Random(1)
    low, high = game.min_utility(), game.max_utility()
    env = make(case, mode="game", **options)
    for task in all_tasks(env)[:4]:
        result, _, episode = play(env, task, anyone(rng), seed=3)
        returns, player = episode.state.returns(), task.data["player"]
        assert result.reward == pytest.approx((returns[player] - low) / (high - low))
        others = [value for p, value in enumerate(returns) if p != player]
        if others and case != "tiny_hanabi":
            assert result.info["correct"] == (returns[player] > max(others))


def test_the_prompt_tells_the_task_and_no_hidden_cards():
    shapes = {BREAKTHROUGH: "columns 4, rows 5", "hex(board_size=9)": "board_size 9",
              "kuhn_poker": "players 2", "leduc_poker": "suit_isomorphism"}
    for task in all_tasks(make(";".join(shapes), num_tasks_per_case=10)):
        (state, player), case = position(task), task.data["case"]
        text, texts = task.messages[0]["content"], list(moves(task).values())
        assert case in text and shapes[case] in text and f"player {player} of 2" in text
        assert shown(task)[2].strip("\n") in text and "<answer> </answer>" in text
        assert "poker" not in case or str(state) not in text
        if "hex" in case:
            assert f"numbers: {state.information_state_string(player) or 'none'}\n" in text
            assert f"and {len(texts) - 50} more, {len(texts)} in all" in text
        listed = re.search(r"Legal moves \(\d+\): (.*)", text)[1].split("; ")
        assert listed[:50] == texts[:50] and len(listed) == min(50, len(texts)) + (len(texts) > 50)


@pytest.mark.parametrize("cases", ["breakthrough(rows=4,columns=2)", "hex(board_size=2);tic_tac_toe"])
def test_the_vocabulary_holds_all_words(cases):
    env = make(cases, style="words", reward_mode="legal", num_tasks_per_case=40, max_random_steps=20)
    known = set(env.vocabulary)
    assert len(known) == len(env.vocabulary) < 130 and env.vocabulary == make(cases, style="words").vocabulary
    for task in all_tasks(env):
        state, player = position(task)
        text = task.messages[0]["content"]
        assert set(text.split()) <= known and set(moves(task).values()) <= known
        board = "".join(state.observation_string(player).split())
        assert text.replace(" ", "").endswith(f"{board}p{player}")
        assert step(env, env.solution(task), task).info["legal"] == 1
    assert make().vocabulary is None and make(style="short").vocabulary is None


def shown(task):
    state, player = position(task)
    kind = state.get_game().get_type()
    perfect = kind.information == kind.Information.PERFECT_INFORMATION
    seen = state.observation_string(player) if perfect else state.information_state_string(player)
    return task.data["case"], player, seen


def test_splits_do_not_depend_on_how_a_case_is_written():
    first, second = (make(case, num_tasks_per_case=40)
                     for case in ("hex(board_size=3)", "hex(num_cols=3,num_rows=3,board_size=3)"))
    assert first.task("test", 3).data["state"] == second.task("test", 3).data["state"]


def test_a_game_of_one_state_is_one_task_and_says_so():
    with pytest.warns(UserWarning) as caught:
        env = envs.make("openspiel", cases="hex(board_size=5);kuhn_poker", max_random_steps=0)
    first, second = (str(warning.message) for warning in caught)
    assert ("case hex(board_size=5): 1 different train states and 0 test states for num_tasks_per_case=100; "
            in first) and "\n" not in first
    assert "case kuhn_poker: 3 different train states and 0 test states" in second  # three cards
    assert env.num_tasks("train") == 4
    with pytest.raises(envs.BadInput, match="no test state.*max_random_steps"):
        env.num_tasks("test")
    tasks = all_tasks(env)
    assert len({shown(task) for task in tasks}) == len(tasks)
    with pytest.warns(UserWarning, match="tasks of both splits begin there, and differ by"):
        env = envs.make("openspiel", cases="hex(board_size=5)", max_random_steps=0, mode="game")
    assert env.task("train", 0).data == env.task("test", 0).data


@pytest.mark.parametrize("case", ["connect_four", "tiny_hanabi", BREAKTHROUGH, "leduc_poker"])
def test_a_state_is_in_one_split_whatever_the_options(case):
    """Not even where the states are so few that no hash sends one to test, and one is taken."""
    sides = {}
    for steps in (0, 1, 2, 8):
        env = make(case, max_random_steps=steps, reward_mode="legal", num_tasks_per_case=40, seed=steps)
        for task in all_tasks(env):
            sides.setdefault(shown(task), set()).add(task.id.split("-")[1])
    assert all(len(found) == 1 for found in sides.values())
    assert {split for found in sides.values() for split in found} == {"train", "test"}


@pytest.mark.parametrize("page", ["docs/openspiel.md", "envs/openspiel/__init__.py"])
def test_the_example_of_the_docs_runs(page):
    text = (ROOT / page).read_text("utf-8")
    lines = re.findall(r"^    ((?:env|task|step) = .*|env\.start.*)", text, re.MULTILINE)[:3]
    found = {"envs": envs}
    exec("\n".join(lines[:-1]), found)
    info = eval(lines[-1].removeprefix("step = ").removesuffix(".info"), found).info
    assert info == {"correct": 1.0, "legal": 1.0, "outcome": 0.625}
    task = found.get("task") or found["env"].task("train", 0)
    shown_board = task.messages[0]["content"].splitlines()[3].strip()
    assert page.endswith(".py") or repr(info) in text and shown_board in text


def test_a_reply_is_one_whole_move():
    env = make(BREAKTHROUGH, reward_mode="legal")
    task = task_of(BREAKTHROUGH, [])
    texts = moves(task)
    (action, move), (_, other), *_ = texts.items()
    assert move == "a5a4" and 10 * action not in texts

    def legal(reply):
        return step(env, reply, task).info["legal"]

    for reply in (f" {move.upper()} ", f"<answer>\n{move}\n</answer> so", f"I think that\n{move}\n\n",
                  f"<answer>{action}</answer>", f"no\r{action}\r", f"{'x' * 10**6}</think>\n{move}",
                  f"<answer>zz</answer> no: <answer>{move}</answer>", f"<answer>{move}</answer>zz</answer>"):
        assert legal(reply) == 1, reply[:80]
    essay = f"One could play {move}, which is strong, but {other} is another way to go."
    for reply in (essay, f"<answer>{essay}</answer>", f"{move} {other}", f"{move}.", f"0{action}",
                  f"{action}.0", f"{move}\nis my move", f"{move}\rno", f"<answer>{move}", f"{move}</answer>",
                  f"</think></think>{move}</think>x", f"<answer>{move}</answer><answer>zz</answer>",
                  f"<think> maybe <answer>{move}</answer>", f"{move}<think>", move[:-1], f"{move}0",
                  f"{action}0", "9" * 5000, "²", " " * 10**7, f"{move}{' ' * 300}."):
        assert legal(reply) == 0, reply[:80]


def test_case_matters_only_where_it_tells_moves_apart():
    # The pawn's bxc3 and the bishop's Bxc3.
    state = pyspiel.load_game("chess").new_initial_state("4k3/8/8/8/8/2p5/1P1B4/4K3 w - - 0 1")
    texts = {state.action_to_string(a): a for a in state.legal_actions()}
    assert {"bxc3", "Bxc3", "Ke2"} <= set(texts)
    for text, action in texts.items():
        assert openspiel.read_move(text, state, state.current_player()) == action
    assert openspiel.read_move("BXC3", state, state.current_player()) is None
    assert openspiel.read_move("ke2", state, state.current_player()) == texts["Ke2"]
    assert openspiel.read_move("\N{KELVIN SIGN}e2", state, state.current_player()) is None


def expected(state, value):
    """The mean of value(returns) over uniformly random play, exactly."""
    if state.is_terminal():
        return value(state.returns())
    if state.is_chance_node():
        return sum(weight * expected(state.child(a), value) for a, weight in state.chance_outcomes())
    return statistics.fmean(expected(state.child(a), value) for a in state.legal_actions())


@pytest.mark.parametrize("case, history", [
    ("hex(board_size=3)", [0, 1, 5, 7]), ("kuhn_poker(players=3)", [0, 1, 2]),
    ("goofspiel(num_cards=3,returns_type=total_points)", []), ("pig(winscore=6,players=3,horizon=4)", [])])
def test_scores_are_those_of_random_play(case, history):
    env = make(case, playouts=600, workers=0)
    task, game = task_of(case, history, player=0), pyspiel.load_game_as_turn_based(case)
    state, low, high = state_at(game, history), game.min_utility(), game.max_utility()
    scores = env.scores(*env.load(task), task.id)
    assert len(scores) > 1
    for action, score in scores.items():
        mean, square = (expected(state.child(action), lambda returns, power=power: (
            (returns[0] - low) / (high - low)) ** power) for power in (1, 2))
        error = (max(square - mean**2, 0) / env.config.playouts) ** 0.5
        assert abs(mean - score) <= 4.5 * error + 0.002, (action, mean, score)


def test_a_winning_move_scores_one_and_a_losing_one_nothing():
    env = make("tic_tac_toe")
    task = task_of("tic_tac_toe", [0, 3, 1, 4])  # xx. oo. ...: x wins at once by (0,2)
    result = step(env, "x(0,2)", task)
    assert result.reward == 1 and result.info["correct"] == 1
    assert env.solution(task) == "<answer>x(0,2)</answer>"
    assert step(env, "x(2,2)", task).reward < 1
    task = task_of("tic_tac_toe", [0, 1, 2, 3, 4, 5, 7])  # xox oxo .x.: x wins by the cell that o leaves
    scores = env.scores(*env.load(task), task.id)
    assert set(scores.values()) == {0.0}
    assert step(env, env.solution(task), task).info["correct"] == 1  # no move is better


def test_correct_is_above_the_mean_of_the_legal_moves_or_of_a_few():
    """The same few for all replies to a task, whatever the attempt."""
    options = dict(cases="hex(board_size=4)", playouts=2, num_tasks_per_case=5, workers=0)
    environments = make(baseline_moves=3, **options), make(**options), make(seed=1, **options)
    of_means = of_seeds = 0  # tasks in which these differ
    for task in all_tasks(environments[0]):
        results = [[step(env, text, task, seed=k) for k, text in enumerate(moves(task).values())]
                   for env in environments]
        few, values, others = ([result.reward for result in each] for each in results)
        assert few == values

        def parted(some, values=values):
            mean, same = statistics.mean(some) + 1e-9, max(some) == min(some)
            return [value > mean or same and value == some[0] for value in values]

        few, every, _ = ([result.info["correct"] == 1 for result in each] for each in results)
        assert every == parted(values) and few in map(parted, itertools.combinations(values, 3))
        of_means, of_seeds = of_means + (few != every), of_seeds + (others != values)
        assert step(environments[0], environments[0].solution(task), task).info["correct"] == 1
    assert of_means and of_seeds


def test_what_all_players_get_is_won_beyond_half_of_the_scale():
    case = openspiel.load_case("tiny_hanabi", "cases")
    half = (case.low + case.high) / 2
    won = [openspiel.won(case, [value] * 2, 1) for value in (half - 1, half, half + 1)]
    assert won == [False, False, True]


@pytest.mark.parametrize("options", [
    {"cases": "hex(board_size=4);goofspiel(num_cards=4);kuhn_poker;2048", "seed": 3, "baseline_moves": 4},
    {"cases": "tic_tac_toe", "opponent": "mcts"}], ids=str)
def test_workers_score_as_this_process_does(options):
    """The same reply scores the same from any thread, whatever the attempt and the replies before."""
    here, *others = [make(**options, playouts=2, num_tasks_per_case=3, workers=count) for count in (0, 1, 3)]
    for task in all_tasks(here):
        texts = list(moves(task).values())[::5]
        results = [step(here, text, task) for text in texts]
        for env in others:
            episodes = [env.start(task, seed) for seed, _ in enumerate(texts)]
            with concurrent.futures.ThreadPoolExecutor(len(texts)) as pool:
                found = [*pool.map(lambda episode, text: episode.step(text), episodes[::-1], texts[::-1])]
            assert found[::-1] == results
            assert env.solution(task) == here.solution(task)


def test_a_worker_that_dies_is_replaced():
    env, here = [make("chess", workers=workers, playouts=4, baseline_moves=15) for workers in (1, 0)]
    task = env.task("train", 0)
    pid = env.pool.submit(os.getpid).result()
    os.kill(pid, signal.SIGINT)  # Ctrl-C is the parent's to handle
    assert env.pool.submit(os.getpid).result() == pid
    episode = env.start(task, 0)  # 100 ms of games
    os.kill(pid, signal.SIGKILL)
    assert episode.step(here.solution(task)) == step(here, here.solution(task), task)
    assert env.pool.submit(os.getpid).result() != pid
    with pytest.raises(RuntimeError, match="^a worker process died, exit status 3, twice$"):
        env.pool.submit(os._exit, 3).result()
    assert env.pool.submit(os.getpid).result() != pid


def test_workers_import_no_trainer_and_send_their_errors():
    pool = workers.shared_pool(1, "envs.openspiel")
    assert pool.submit(eval, "'torch' in __import__('sys').modules").result() is False
    main = pool.submit(eval, "__import__('sys').modules['__main__'].__file__").result()
    assert main.endswith("envs/workers.py")
    with pytest.raises(RuntimeError, match="SpielError: .*Unknown game 'nope'"):
        pool.submit(pyspiel.load_game, "nope").result()
    with pytest.raises(RuntimeError, match="^MemoryError"):
        pool.submit(bytearray, workers.MEMORY).result()


def test_a_limit_is_of_processor_time_and_what_the_machine_is_to_blame_for_is_no_verdict(monkeypatch):
    pool = workers.shared_pool(1, "envs.openspiel")
    with pytest.raises(RuntimeError, match="^a worker process took over 0.1 s$"):
        pool.submit(sum, range(10**15), seconds=0.1).result()
    assert pool.submit(time.sleep, 0.5, seconds=0.1).result() is None
    pid = pool.submit(os.getpid).result()
    os.kill(pid, signal.SIGKILL)
    assert pool.submit(os.getpid, seconds=0.1).result() != pid  # it died before it was asked
    with pytest.raises(RuntimeError, match="^a worker process died, exit status 3, twice$"):
        pool.submit(os._exit, 3, seconds=0.1).result()
    monkeypatch.setattr(workers, "STUCK", 0.2)
    with pytest.raises(workers.WorkerError, match="^a worker process did not answer in 0.3"):
        pool.submit(time.sleep, 60, seconds=0.1).result()
    with pytest.raises(workers.WorkerError, match=r"^a worker process did not start \(exit status 1\)$"):
        workers.shared_pool(1, "no_such_module").submit(os.getpid, seconds=0.1).result()


ENDS = """
import os, sys, time, envs
env = envs.make("openspiel", cases="go(board_size=13)", workers=2)
pids = [env.pool.submit(eval, "(__import__('time').sleep(0.3), __import__('os').getpid())[1]") for _ in "12"]
print(*[pid.result() for pid in pids], flush=True)
episodes = [env.start(env.task("train", k), 0) for k in range(50)]
if sys.argv[1] == "wait": time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [None, signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(how):
    parent = subprocess.Popen([sys.executable, "-c", ENDS, "wait" if how else "end"], cwd=ROOT, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    pids = {int(pid) for pid in parent.stdout.readline().split()}
    assert len(pids) == 2
    if how:
        parent.send_signal(how)
    parent.wait(30)  # though a minute of games is asked for
    parent.stdout.close()
    until(lambda: all(process.info["status"] == psutil.STATUS_ZOMBIE
                      for process in psutil.process_iter(["status"]) if process.pid in pids))


def test_an_illegal_move_loses_the_game():
    env = make("hex(board_size=3);kuhn_poker", mode="game")
    assert env.multi_turn and not make().multi_turn
    for task in (env.task("train", 0), env.task("train", 150)):
        result = env.start(task, 0).step("a99")
        assert result.terminated and not result.truncated and result.reward == 0 and result.messages == []
        assert result.info == {"correct": 0.0, "legal": 0.0, "outcome": 0.0, "turns": 1.0}
    task = task_of("hex(board_size=3)", [])
    episode = env.start(task, 0)
    assert not episode.step("b2").terminated
    taken = episode.step("b2")
    assert taken.terminated and taken.info == {"correct": 0.0, "legal": 0.0, "outcome": 0.0, "turns": 2.0}


def test_games_repeat_with_their_seed_and_differ_with_others():
    env = make(BREAKTHROUGH, mode="game", max_random_steps=0)
    first, second = env.task("train", 0), env.task("train", 1)
    assert env.num_tasks("train") == env.num_tasks("test") == 100 and first.messages == second.messages

    def lowest(episode):
        return min(texts_of(episode.state, episode.player).values())

    def game(task, seed):
        return [m["content"] for m in play(env, task, lowest, seed)[1]]

    assert game(first, 0) == game(first, 0)
    assert game(first, 0) != game(first, 1) and game(first, 0) != game(second, 0)
    assert "Player 1 played " in game(first, 0)[1] and "Legal moves" in game(first, 0)[1]


def test_a_game_has_a_limit_of_turns(monkeypatch):
    monkeypatch.setattr(openspiel, "MAX_TURNS", 2)
    env = make("othello", mode="game", max_random_steps=0)
    result, *_ = play(env, env.task("train", 0), anyone(random.Random(0)))
    assert result.truncated and not result.terminated and result.reward == 0 and result.info["turns"] == 2


def test_mcts_is_a_stronger_opponent_than_random_play_and_the_reference_a_stronger_player():
    def wins(player=None, **options):
        env = make("tic_tac_toe", mode="game", max_random_steps=0, playouts=4, **options)
        results = [play(env, env.task("train", k), player or anyone(random.Random(k)))[0] for k in range(40)]
        assert all(result.reward == result.info["outcome"] for result in results)
        return statistics.mean(result.info["correct"] for result in results)

    assert wins(opponent="mcts", mcts_simulations=100) < 0.25 < 0.3 < wins() < 0.7
    assert wins(lambda episode: episode.reference()) > 0.85


@pytest.mark.parametrize("options, expected", [
    ({"cases": "chess", "game_list": "hex"}, ["chess"]),
    ({"cases": "hex(board_size=4) , breakthrough(rows=5,columns=4);"}, ["hex(board_size=4)", BREAKTHROUGH]),
    ({"cases": f'["hex(board_size=4)", " {BREAKTHROUGH}"]'}, ["hex(board_size=4)", BREAKTHROUGH]),
    ({"cases": [BREAKTHROUGH]}, [BREAKTHROUGH]),
    ({"game_list": "hex;y", "game_configs": "board_size=4;board_size=5"},
     ["hex(board_size=4)", "hex(board_size=5)", "y(board_size=4)", "y(board_size=5)"]),
    ({"game_list": "breakthrough", "game_configs": "rows=5, columns=4"}, ["breakthrough(columns=4,rows=5)"]),
    ({"game_types": "go, checkers"}, ["go(board_size=9)", "go(board_size=13)", "checkers"]),
    ({"game_types": "hex(board_size=5)"}, ["hex(board_size=5)"]),
])
def test_cases_come_from_the_options(options, expected):
    assert [case.text for case in make(options.pop("cases", ""), **options).cases] == expected


@pytest.mark.parametrize("options, expected", [
    ({"cases": "hexx"}, "option cases: unknown game 'hexx' .did you mean 'hex'.*known: 2048, .*tic_tac_toe"),
    ({"game_list": "hex;nope"}, "option game_list: unknown game 'nope'; known: 2048"),
    ({"cases": "hex(size=5)"}, "option cases: .*Unknown parameter 'size'. Available .* board_size"),
    ({"cases": "hex(board_size=x)"}, "board_size. Expected type"), ({"cases": "hex(board_size=5"}, "bracket"),
    ({"cases": "mnk(m=0)"}, "has a choice"), ({"cases": "clobber(rows=0,columns=4)"}, "rows_ >= 1 rows_ = 0"),
    ({"cases": ";"}, "cases: expected at least one game"), ({"cases": "[]"}, "at least one game, got .."),
    ({"cases": "hex;hex(board_size=11)"}, "cases: expected different games, got 'hex.board_size=11.'"),
    ({"game_types": "he"}, "game_types: expected some of hex, go, .*checkers, got 'he'"),
    ({"cases": "mfg_garnet"}, "mean-field"), ({"cases": "negotiation"}, "chance cannot be seeded"),
    ({"cases": "cursor_go"}, "72922 moves"), ({"game_configs": "board_size=5"}, "game_list beside it"),
    ({"cases": "hex", "game_configs": "board_size=5"}, "no cases"),
    ({"cases": "kuhn_poker", "opponent": "mcts"}, "random, since MCTS cannot play kuhn_poker .*hidden"),
    ({"cases": "goofspiel", "opponent": "mcts"}, "simultaneous"),
    ({"cases": "2048", "opponent": "mcts"}, "reward"), ({"playouts": 0}, "playouts: expected 1 to"),
])
def test_bad_options_are_named(options, expected):
    with pytest.raises(envs.BadInput, match=expected) as error:
        envs.make("openspiel", **options)
    assert "\n" not in str(error.value) and str(error.value).startswith("environment openspiel")


@pytest.mark.parametrize("case", ["pig(players=1000000000)", "misere", "hex(board_size=100000)"])
def test_games_that_take_all_memory_are_refused(case, capfd):
    before = Path("/proc/self/statm").read_text().split()[0]
    with pytest.raises(envs.BadInput, match="option cases: expected a game that") as error:
        envs.make("openspiel", cases=case)
    assert "\n" not in str(error.value) and "".join(capfd.readouterr()) == ""  # no line of open_spiel's
    assert int(Path("/proc/self/statm").read_text().split()[0]) - int(before) < 10**5


def test_tasks_of_other_options_are_named():
    env = make("hex(board_size=4)")
    with pytest.raises(envs.BadInput, match=r"case chess is none of hex\(board_size=4\)"):
        env.start(task_of("chess", []), 0).step("a3")


def test_open_spiel_is_imported_only_where_it_is_used():
    program = ("import sys, envs, envs.openspiel; assert 'pyspiel' not in sys.modules\n"
               "sys.modules['pyspiel'] = None\n"
               "try: envs.make('openspiel')\n"
               "except envs.BadInput as error: print(error)")
    said = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)
    assert "expected the package open_spiel, see requirements.txt" in said


@pytest.mark.slow
def test_all_games_that_load_can_be_played():
    played = 0
    for name in sorted(pyspiel.registered_names())[::4]:
        if name.startswith("bridge"):
            continue  # a deal takes 0.2 s
        try:
            env = make(name, playouts=1, num_tasks_per_case=2)
        except envs.BadInput as error:
            assert "\n" not in str(error)
            continue
        for task in all_tasks(env):
            assert step(env, env.solution(task), task).info["correct"] == 1
        played += 1
    assert played > 22
