"""What a run on your own rows would read, without a model: the rows, the prompts, the answers, the verdicts.

    python tools/check_rows.py data=train.jsonl prompt=question answer=answer check=number

The options are those of --env-kwargs (docs/rows.md); --env names another environment that is built on rows,
such as trl. It prints the lines that a run begins with, and some rows as the model will see them, each with
its right answer, what the check reads out of a few replies, and its verdict. --model shows the text that a
model's chat template makes of them. Texts are quoted as Python does, so that no character hides, and cut.

Exit status: 0; 1 where rows cannot be used, or the check does not judge all right answers right; 2 for an
option or a file that cannot be used, with one line that names it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import envs
from envs import BadInput, census, rows
from tools.command_line import Parser, at_least, ends_in_one_line

LONGEST = 500  # text that is shown whole [characters]
NO_ANSWER = "I do not know."


def shown(text: str) -> str:
    """A text with every character that does not print escaped; of a long one the two ends."""
    if len(text) <= LONGEST:
        return repr(text)
    half = LONGEST // 2
    return f"{text[:half]!r} ... {len(text) - 2 * half:,} characters ... {text[-half:]!r}"


def show_row(env: rows.Rows, split: str, index: int, tokenizer) -> list[str]:
    task = env.task(split, index)
    lines = [f"{task.id} ({split})"]
    for message in task.messages:
        lines.append(f"  {message['role']}: {shown(message.get('content', ''))}")
        lines += [f"    calls {call!r:.{LONGEST}}" for call in message.get("tool_calls") or ()]
    for tool in task.tools or ():
        lines.append(f"  tool: {tool['function']['name']}")
    if tokenizer:
        with envs.as_bad_input("--model: its chat template cannot show these messages"):
            text = tokenizer.apply_chat_template(task.messages, tools=task.tools, tokenize=False,
                                                 add_generation_prompt=True)
        lines.append(f"  the model reads: {shown(text)}")
    if env.check:
        lines += show_verdicts(env, task)
    return lines


def show_verdicts(env: rows.Rows, task: envs.Task) -> list[str]:
    lines = [f"  right answer: {shown(answer)}" for answer in task.data["answers"]]
    given = [reply for _, some in census.replies(env, task)[:1] for _, reply in some]
    for reply in [*given, NO_ANSWER]:
        found, right = env.judge(task, reply)
        read = "nothing" if found is None else shown(found)
        lines.append(f"  reply {shown(reply)}: reads {read}: {'right' if right else 'wrong'}")
    return lines


def load_tokenizer(name: str):
    from transformers import AutoTokenizer  # slow to import

    with envs.as_bad_input(f"--model {name}: expected a hub id or a folder with a tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(name)
    if not tokenizer.chat_template:
        raise BadInput(f"--model {name}: its tokenizer has no chat template")
    return tokenizer


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("options", nargs="+", metavar="KEY=VALUE", help="as --env-kwargs has them: data=FILE")
    parser.add_argument("--env", default="rows", help="rows, or what is built on it, such as trl (rows)")
    parser.add_argument("--rows", type=at_least(0), default=10, help="how many to show, evenly spread (10)")
    parser.add_argument("--all", action="store_true",
                        help="judge every right answer; else as a run does, those of a sample of the rows")
    parser.add_argument("--model", help="folder or hub id whose chat template makes text of the messages")
    return parser.parse_args(argv)


@ends_in_one_line
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    env = envs.make(args.env, **envs.parse_options(args.options))
    if not isinstance(env, rows.Rows):
        raise BadInput(f"--env {args.env}: expected rows or an environment built on it, such as trl")
    tokenizer = load_tokenizer(args.model) if args.model else None
    fine = True
    for part in env.parts:
        line, all_fine = census.look(env, part, args.all)
        fine &= all_fine
        print(line)
    tasks = [(split, index) for split in env.splits for index in range(env.num_tasks(split))]
    count = min(args.rows, len(tasks))
    for k in range(count):  # from the first to the last, which is held out
        split, index = tasks[k * (len(tasks) - 1) // max(count - 1, 1)]
        print("\n" + "\n".join(show_row(env, split, index, tokenizer)))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
