"""Play ARC-AGI-3 games and keep what happened: the outcome as JSON, a recording and a GIF.

    python tools/run_arc_eval.py                     # a game of our own, played at random
    python tools/run_arc_eval.py --mock-session envs/arcagi3/session.json
    python tools/run_arc_eval.py --game-id maze-17 --scripted --out look
    python tools/run_arc_eval.py --game-id maze-17 --model models/mine --env-kwargs style=short downsample=8
    ARC_API_KEY=... python tools/run_arc_eval.py --game-id ls20-016295f7601e --live --model PATH

The game is one of a server (--live, at --root-url, ARC_ROOT_URL or https://three.arcprize.org; the first
that it lists, without --game-id), a recording's (--mock-session), or one of our own in this process
(--game-id maze-17, lights-17, collect-17). Without any of these it is maze-17, from tools/arc_server.py,
which is started on this machine for it and asked as a live one is. It is played by a model (--model, a
folder or hub id with a chat template), by the solver of our own games (--scripted), by the recorded actions
(--mock-session alone), or else at random. Under --out DIR:

    session.jsonl   the recording, which --mock-session and the option `session` of envs/arcagi3 replay
    frames.gif      all frames, animations included, with the action that led to each
    episode.jsonl   the conversation: a line for each message, with the reward that a reply brought

--tasks N plays N tasks of --split in place of one game, and prints means: the score of a player.

The last line printed is JSON, "ok": true; or false with a reason, and exit status 1.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import envs
from envs import BadInput, arcagi3
from envs.arcagi3 import games
from envs.chat import opened_thought
from tools.arc_server import ArcServer
from tools.command_line import Parser, at_least, one_line

# The colours of a cell's sixteen values, as close to those of three.arcprize.org as we know them.
PALETTE = ("ffffff cccccc 999999 666666 333333 000000 e53aa3 ff7bcc "
           "f93c31 1e93ff 88d8f1 ffdc00 ff851b 921231 4fcc30 a356d6").split()
STRIP = 20  # height of the text below a frame [pixels]


# Players: functions (messages so far, frame or None) -> reply


def scripted(env, task):
    """The replies of the shortest way; what a game that has not begun is opened by, first."""
    replies = env.replies(task)
    if replies is None:
        raise BadInput(f"--scripted: there is no solver for {task.data['game_id']}; expected a game such as "
                       f"{', '.join(f'{name}-17' for name in games.GAMES)}")
    ahead = iter(([] if task.data["begun"] else ["RESET"]) + replies)
    return lambda messages, frame: next(ahead, "")


def recorded(env, task):
    """The actions of a recording, after so many to begin with as it failed to begin."""
    session = arcagi3.load_session(env.config.session)
    actions = [{"action": step["action"]} | step["payload"] for step in session["steps"]]
    opening = [{"action": "RESET"}] * (len(session["failures"]) + (not task.data["begun"]))
    ahead = iter(map(json.dumps, opening + actions))
    return lambda messages, frame: next(ahead, "")


def at_random(env, task, seed):
    """One of the available actions; of clicks, any cell that is shown."""
    rng, view = random.Random(f"{seed} {task.id}"), arcagi3.View(env.config)

    def reply(messages, frame):
        if frame is None:  # the screen is in the prompt, and the frame not fetched yet
            game = games.parse_id(task.data["game_id"])
            actions = games.GAMES[game[0]].actions if game else range(1, 8)
        else:
            actions = frame.actions or range(1, 8)
        return view.reply(rng.choice(actions), rng.randrange(64), rng.randrange(64))
    return reply


def load_player(args):
    """-> a function (env, task) -> player, of the model at --model"""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(args.model, trust_remote_code=False).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise BadInput(f"--model {args.model}: cannot be loaded ({one_line(error)})") from error
    if tokenizer.chat_template is None:
        raise BadInput(f"--model {args.model}: its tokenizer has no chat template")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
    longest = min(args.max_context_tokens, positions - args.max_response_tokens)  # of what the model reads
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    sampling = {"do_sample": args.temperature > 0}
    if args.temperature > 0:
        sampling |= {"temperature": args.temperature, "top_k": 0, "top_p": 1.0}

    def tokens(messages):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False, return_tensors="pt").to(model.device)

    def reply(messages, frame, prompt):
        start = prompt
        batch = tokens(messages)
        while batch.input_ids.shape[1] > longest and start + 1 < len(messages):
            start += 2  # the oldest reply and its answer; the prompt stays
            batch = tokens(messages[:prompt] + messages[start:])
        if (room := positions - batch.input_ids.shape[1]) < 1:
            raise BadInput(f"--model {args.model}: it has {positions} positions, and the prompt "
                           f"{positions - room} tokens; expected room for a reply")
        ids = model.generate(batch.input_ids, attention_mask=batch.attention_mask, **sampling,
                             max_new_tokens=min(args.max_response_tokens, room),
                             pad_token_id=tokenizer.pad_token_id)
        sampled = ids[0, batch.input_ids.shape[1]:].tolist()
        more = model.generation_config.eos_token_id  # one, several or None
        ends = [tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])]
        if sampled[-1] in ends:
            sampled.pop()
        # As in the scripts: a thought that the prompt opens begins the reply, and special tokens stay.
        return opened_thought(tokenizer.decode(batch.input_ids[0])) + tokenizer.decode(sampled)

    return lambda env, task: lambda messages, frame: reply(messages, frame, len(task.messages))


# Play


def play(env, task, player):
    """One episode.  -> the last Step, the sum of rewards, the messages, the episode"""
    episode, messages, total, step = env.start(task, 0), list(task.messages), 0.0, None
    try:
        while step is None or not (step.terminated or step.truncated):
            reply = player(messages, episode.frame)
            step = episode.step(reply)
            total += step.reward
            messages += [{"role": "assistant", "content": reply, "reward": step.reward}, *step.messages]
    finally:
        episode.close()
    return step, total, messages, episode


def make_env(args):
    """The environment, and the recorders of the episodes that it starts."""
    options = {"max_actions": str(args.max_actions)} | envs.parse_options(args.env_kwargs)
    options |= {"live": str(args.live), "root_url": args.root_url}
    if args.mock_session:
        options["session"] = str(args.mock_session)
    if args.game_id:
        options["game_ids"] = args.game_id
    env = envs.make("arcagi3", **options)
    recorders, inner = [], env.make_transport

    def transport():
        recorders.append(arcagi3.Recorder(inner()))
        return recorders[-1]

    if args.out:
        env.make_transport = transport
    return env, recorders


def player_of(args):
    if args.model:
        return load_player(args)
    if args.scripted:
        return scripted
    if args.mock_session and not args.random:
        return recorded
    return lambda env, task: at_random(env, task, args.seed)


def evaluate(args) -> dict:
    env, recorders = make_env(args)
    player = player_of(args)
    if args.tasks:
        return means(args, env, player)
    game_id = args.game_id
    if args.mock_session:
        game_id = arcagi3.load_session(env.config.session)["reset"]["game_id"]
    elif not game_id:
        game_id = env.task("train", 0).data["game_id"]
    if not game_id or "," in game_id or game_id in games.GAMES:
        raise BadInput(f"--game-id {game_id!r}: expected one game, such as maze-17")
    task = env.task_of(game_id)
    step, total, messages, episode = play(env, task, player(env, task))
    info = step.info
    names = ("correct", "actions_taken", "invalid", "errors", "game_id", "guid", "card_id")
    result = {"ok": not info["error"], "state": info["state"], "score": info["score"], "reward": total,
              **{name: info[name] for name in names}, "replay": info["replay_url"],
              "scorecard": episode.scorecard}
    if info["error"]:
        result["reason"] = "the server failed too often, or refused; see episode.jsonl under --out"
    if args.out:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(message) + "\n" for message in messages]
            (args.out / "episode.jsonl").write_text("".join(lines), encoding="utf-8")
            if recorders and recorders[-1].session["reset"]:
                (args.out / "session.jsonl").write_text("".join(recorders[-1].lines()), encoding="utf-8")
                result["frames"] = write_gif(args.out / "frames.gif", recorders[-1].session, args)
        except OSError as error:
            raise BadInput(f"--out {args.out}: cannot be written ({error})") from error
        result["out"] = str(args.out)
    return result


def means(args, env, player) -> dict:
    """--tasks: what a player scores on the first tasks of a split, by game."""
    sums, count = {}, min(args.tasks, env.num_tasks(args.split))
    if count == 0:
        raise BadInput(f"--tasks {args.tasks}: the {args.split} split has no game; expected --split train, a "
                       "name such as maze, or --env-kwargs test_ids=...")
    for index in range(count):
        task = env.task(args.split, index)
        step, total, _, _ = play(env, task, player(env, task))
        row = {"tasks": 1, "reward": total} | {name: step.info[name] for name in (
            "correct", "score", "progress", "actions_taken", "invalid", "error")}
        old = sums.get(task.source, {})
        sums[task.source] = {name: value + old.get(name, 0) for name, value in row.items()}
    return {"ok": True, "split": args.split, "games": {
        source: {"tasks": row["tasks"]} | {name: round(value / row["tasks"], 4) for name, value in row.items()
                                           if name != "tasks"} for source, row in sums.items()}}


# Pictures


def write_gif(path: Path, session: dict, args) -> int:
    """All frames of a recording, `scale` pixels a cell, a strip of text below.  -> how many"""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(13)
    palette = [int(colour[k:k + 2], 16) for colour in PALETTE for k in (0, 2, 4)]
    shots = [("start", session["reset"])]
    for number, step in enumerate(session["steps"], 1):
        if "error" in step:  # no frame came
            continue
        place = "".join(f" {axis}={step['payload'][axis]}" for axis in "xy" if axis in step["payload"])
        shots.append((f"{number}  {step['action']}{place}", step["response"]))
    pictures, milliseconds = [], []
    for text, reply in shots:
        frame = arcagi3.read_frame(reply)
        for grid in frame.grids:
            screen = Image.new("P", (len(grid[0]), len(grid)))
            screen.putdata([cell for row in grid for cell in row])
            screen.putpalette(palette)
            scale = args.scale or max(1, 256 // max(screen.size))
            width = max(screen.width * scale, 240)  # room for the text
            picture = Image.new("P", (width, screen.height * scale + STRIP), 4)
            picture.putpalette(palette)
            size = screen.width * scale, screen.height * scale
            picture.paste(screen.resize(size, Image.Resampling.NEAREST))
            pen = ImageDraw.Draw(picture)
            pen.fontmode = "1"
            # The number of the frame in a corner: of equal frames Pillow would write one alone.
            pen.text((4, picture.height - STRIP + 2), text, 0, font)
            end = "" if frame.state == "NOT_FINISHED" else frame.state
            pen.text((width - 4, picture.height - STRIP + 2),
                     f"{end}  {frame.score}/{frame.win_score}  {len(pictures)}", 11, font, anchor="ra")
            pictures.append(picture)
            milliseconds.append(round(1000 / args.fps))
    milliseconds[0], milliseconds[-1] = max(milliseconds[0], 800), max(milliseconds[-1], 1500)
    pictures[0].save(path, "GIF", save_all=True, append_images=pictures[1:], duration=milliseconds, loop=0)
    return len(pictures)


# The command


def evaluate_here(args) -> dict:
    """Without flags: a game of our own, by the API of the live ones, from a server on this machine."""
    if not (args.model or args.scripted):
        print("maze-17, a game of our own, played at random. Those of three.arcprize.org: "
              "ARC_API_KEY=KEY python tools/run_arc_eval.py --live --model PATH", file=sys.stderr)
    with ArcServer(games.Arcade()) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            args.live, args.root_url, args.game_id = True, server.url, "maze-17"
            return evaluate(args)
        finally:
            server.shutdown()


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description="Play ARC-AGI-3 games and keep what happened.")
    parser.add_argument("--game-id", default="",
                        help="the game (the first of --live); with --tasks names or ids")
    parser.add_argument("--root-url", default="", help="the server of --live")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--mock-session", type=Path, metavar="FILE", help="replay this recording")
    place.add_argument("--live", action="store_true", help="ask the server")
    who = parser.add_mutually_exclusive_group()
    who.add_argument("--model", default="", metavar="PATH", help="folder or hub id of the model that plays")
    who.add_argument("--scripted", action="store_true", help="the solver of our own games plays")
    who.add_argument("--random", action="store_true", help="play at random (the default)")
    parser.add_argument("--max-actions", type=at_least(1), default=80, help="replies at most (80)")
    parser.add_argument("--env-kwargs", nargs="*", default=[], metavar="KEY=VALUE",
                        help="further options of the environment")
    parser.add_argument("--out", type=Path, help="folder for recording, conversation and GIF")
    parser.add_argument("--tasks", type=at_least(1), default=0, help="play so many tasks, print means")
    parser.add_argument("--split", choices=("train", "test"), default="test", help="of --tasks (test)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="of --random and sampling (0)")
    parser.add_argument("--temperature", type=at_least(0, float), default=0.0, help="0: greedy (0)")
    parser.add_argument("--max-response-tokens", type=at_least(1), default=512, help="of a reply (512)")
    parser.add_argument("--max-context-tokens", type=at_least(1), default=8192,
                        help="the oldest turns of a longer conversation are left out (8192)")
    parser.add_argument("--threads", type=at_least(1), default=1, help="CPU threads of torch (1)")
    parser.add_argument("--scale", type=at_least(1, most=32), default=0, metavar="PIXELS",
                        help="of a cell in the GIF (as many as make 256)")
    parser.add_argument("--fps", type=at_least(0.1, float, 50), default=4, help="frames a second (4)")
    try:
        args = parser.parse_args(argv)
        if args.root_url and not args.live:
            raise BadInput(f"--root-url {args.root_url}: expected --live beside it")
        if args.out and args.tasks:
            raise BadInput(f"--out {args.out}: expected one game, without --tasks")
        named = args.live or args.mock_session or args.game_id or args.tasks
        result = evaluate(args) if named else evaluate_here(args)
    except Exception as error:
        result = {"ok": False, "reason": one_line(error)}
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
