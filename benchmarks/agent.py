"""What an agent behind an endpoint costs: rollouts of --env agent beside the same task as an Env class.

    python benchmarks/agent.py                 # the table; the openai client's sides, where it is installed
    python benchmarks/agent.py --out FILE.csv

A Countdown problem of models/countdown-tiny; a reply that does not end with the target is answered by the
problem once more, and the second one counts. The sides play the same episodes, token by token:

    class             an Env class
    bare              a function that asks by http.client, one connection for each episode
    openai, shared    the openai client, one http client for all episodes
    openai            the same, with an http client of its own in each episode
    command           `bare` as a program, a process for each episode

They take turns, and a ratio is the median of the turns' ratios, in CPU time of this process and of those that
it starts. The time of a request is what a side takes more than `class`, by the number of requests. `no
episode` is what is left of it where nobody plays: `bare` requests, one after another, that the server answers
by itself.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import resource
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from urllib.parse import urlsplit

from sides import REPOSITORY, append_csv, check_environment

check_environment("torch", "transformers", "tyro", "pydantic", "peft", "tornado")
import transformers  # noqa: E402

sys.path.insert(0, str(REPOSITORY))
import envs  # noqa: E402
import grpo_llm  # noqa: E402

AGENT = '''
import http.client
import json
import os
import sys
from urllib.parse import urlsplit


def is_right(task, reply):
    return reply.split()[-1:] == [task["target"]]


def bare(task, base_url, api_key):
    place = urlsplit(base_url)
    connection = http.client.HTTPConnection(place.hostname, place.port)

    def ask(messages):
        body = json.dumps({"model": "policy", "messages": messages})
        connection.request("POST", f"{place.path}/chat/completions", body,
                           {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"})
        return json.load(connection.getresponse())["choices"][0]["message"]

    try:
        return play(task, ask)
    finally:
        connection.close()


def openai(task, base_url, api_key, **options):
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=api_key, **options)
    return play(task, lambda messages: client.chat.completions.create(
        model="policy", messages=messages).choices[0].message.model_dump(exclude_none=True))


def openai_shared(task, base_url, api_key):
    return openai(task, base_url, api_key, http_client=shared())


def shared(known=[]):
    if not known:
        from openai import DefaultHttpxClient

        known.append(DefaultHttpxClient())
    return known[0]


def play(task, ask):
    problem = {"role": "user", "content": task["problem"]}
    messages = [problem]
    for _ in range(2):
        said = ask(messages)
        if is_right(task, said["content"]):
            return 1.0
        messages += [said, problem]
    return 0.0


if __name__ == "__main__":
    print(bare(json.load(sys.stdin), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]))
'''
CLASS = '''
from agent_program import is_right
from envs import Episode, Step, rows


class TwoTurn(rows.Rows):
    scores_itself = multi_turn = True

    def start(self, task, seed):
        return Attempts(task)


class Attempts(Episode):
    def __init__(self, task):
        self.given, self.replies = task, 0

    def step(self, reply):
        self.replies += 1
        right = float(is_right(self.given.data["row"], reply))
        if right or self.replies == 2:
            return Step([], right, True, False, {"correct": right})
        return Step(self.given.messages, 0.0, False, False, {})
'''


def make_sides(folder, names):
    """-> {name of a side: its Env}; the files that they need are written to a folder"""
    (folder / "agent_program.py").write_text(AGENT)
    (folder / "agent_class.py").write_text(CLASS)
    countdown = envs.make("countdown")
    with (folder / "tasks.jsonl").open("w") as file:
        for number in range(1000):
            (message,) = countdown.task("train", number).messages
            numbers = message["content"].split()
            print(json.dumps(dict(problem=message["content"], target=numbers[-1])), file=file)
    sys.path.insert(0, str(folder))
    rows = dict(data=str(folder / "tasks.jsonl"), prompt="problem")
    program = folder / "agent_program.py"
    options = {"bare": dict(program=f"{program}:bare"), "openai": dict(program=f"{program}:openai"),
               "openai, shared": dict(program=f"{program}:openai_shared"),
               "command": dict(command=f"{sys.executable} -S {program}")}
    sides = {"class": envs.make(f"{folder}/agent_class.py:TwoTurn", **rows)}
    for name in names:
        sides[name] = envs.make("agent", **options[name], **rows)
    return sides


def cpu_seconds():
    """Of this process and of those that it started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + usage.ru_utime + usage.ru_stime


def play(env, engine, tokenizer, args, turn):
    """A rollout.  -> CPU seconds, replies, the ids that were sampled"""
    count = args.prompts_per_iteration
    tasks = [env.task("train", turn * count + number) for number in range(count)]
    began = cpu_seconds()
    rollouts = grpo_llm.rollout(engine, tokenizer, env, tasks, args.group_size,
                                grpo_llm.Sampling(1.0, (turn, "train")), args, grpo_llm.episode_reward)
    seconds = cpu_seconds() - began
    return seconds, sum(len(r.turns) for r in rollouts), [[s.ids for s in r.segments] for r in rollouts]


def compare(folder, names, prompts, repeats):
    """Let the sides take turns.  -> rows of the CSV, one for each side"""
    args = grpo_llm.Args(prompts_per_iteration=prompts)
    tokenizer = grpo_llm.load_tokenizer(args)
    engine = grpo_llm.HfEngine(grpo_llm.load_weights(args.model), tokenizer, args)
    sides = make_sides(folder, names)
    seconds, requests = {side: [] for side in sides}, []
    for turn in range(-1, repeats):  # turn -1 warms up
        sampled = {}
        for side in list(sides)[::1 if turn % 2 else -1]:
            cost, replies, sampled[side] = play(sides[side], engine, tokenizer, args, turn + 1)
            if turn >= 0:
                seconds[side].append(cost)
        assert all(ids == sampled["class"] for ids in sampled.values()), "the sides sampled other tokens"
        requests.append(replies)
    rows = []
    for side in sides:
        pairs = [*zip(seconds[side], seconds["class"], requests[1:], strict=True)]
        rows.append(dict(
            side=side, episodes=prompts * args.group_size, repeats=repeats,
            requests=statistics.median(requests[1:]), cpu_s=statistics.median(seconds[side]),
            ratio=statistics.median(own / least for own, least, _ in pairs),
            ms_per_request=statistics.median(1000 * (own - least) / count for own, least, count in pairs)))
    return rows


def without_episodes(env, requests):
    """CPU milliseconds of a request that the server answers by itself; two have a connection."""
    place = urlsplit(env.endpoint.url)
    env.endpoint.sessions["sk-some"] = env
    began = cpu_seconds()
    for _ in range(requests // 2):
        connection = http.client.HTTPConnection(place.hostname, place.port)
        for _ in range(2):
            connection.request("GET", f"{place.path}/models", headers={"Authorization": "Bearer sk-some"})
            json.load(connection.getresponse())
        connection.close()
    return 1000 * (cpu_seconds() - began) / (requests // 2 * 2)


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=64, help="of a rollout, with 8 episodes each; of "
                        "commands and of openai's client in each episode an eighth of them")
    parser.add_argument("--out", default="", help="CSV file to append the rows to")
    options = parser.parse_args()
    grpo_llm.start_processes()  # one thread
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    light, heavy = ["bare"], ["command"]
    if importlib.util.find_spec("openai"):
        light.append("openai, shared")
        heavy.append("openai")
    else:
        print("openai is not installed: its sides are left out", file=sys.stderr)
    rows = []
    for names, prompts in ((light, options.prompts), (heavy, max(1, options.prompts // 8))):
        with tempfile.TemporaryDirectory() as folder:
            rows += compare(Path(folder), names, prompts, options.repeats)
    with tempfile.TemporaryDirectory() as folder:
        alone = without_episodes(make_sides(Path(folder), ["bare"])["bare"], 2000)
    rows.append(dict.fromkeys(rows[0], "") | dict(side="no episode", requests=2000, ms_per_request=alone))
    print("| side | episodes | requests | CPU s | ratio | ms a request |\n|---|---|---|---|---|---|")
    for row in rows[:-1]:
        print(f"| {row['side']} | {row['episodes']} | {row['requests']:g} | {row['cpu_s']:.3f} | "
              f"{row['ratio']:.2f} | {row['ms_per_request']:.2f} |")
    print(f"| no episode | | 2000 | | | {alone:.2f} |")
    if options.out:
        append_csv(options.out, rows)


if __name__ == "__main__":
    main()
