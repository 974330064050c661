"""Chat rows to prompts and responses: {name}_train.parquet and {name}_val.parquet for sft.py.

    python tools/convert_sft.py --data chats.parquet more.jsonl --output-dir data
    python sft.py --train-files data/chats_train.parquet

Rows have instance_id and messages (a list, or its JSON), and may have model_patch and run_name. Each gives at
most one: the response is its model_patch, and the prompt what comes before the first assistant message; or,
where there is no patch, the last assistant message with text, and the prompt all before it. --response says
which of the two alone. A prompt that is one user message is its text to the letter; else its turns are
rendered as "[role]", a line break and their text, with a blank line between them.

Prints a line of JSON: what was read, written, dropped and left out. What cannot be converted is one line of
JSON on standard error and exit status 1, and no file is written. docs/convert_sft.md has the details.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs import BadInput, check_names_once, first_line, from_arrow, from_json, without_nulls
from envs.chat import is_wanted
from envs.files import flush_to_disk
from tools.command_line import answers_in_json

COLUMNS = ("instance_id", "messages", "model_patch", "run_name")
SCHEMA = pa.schema([(name, pa.string()) for name in ("prompt", "response", "instance_id", "run_name")])
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(?<!\.parquet)(?<!\.jsonl)(?<!\.json)")
SURROGATE = re.compile("[\ud800-\udfff]")
SIDES = ("train", "val")


class BadRow(ValueError):
    """What was expected of a row, and what it has."""


# A row to a prompt and a response


def to_example(row: dict, response: str = "auto") -> tuple[dict[str, str | None], Counter]:
    """-> the columns of SCHEMA; how often each kind of block was met, and "" for turns after the response

    response: model_patch, last-assistant, or auto, the first of these that there is.
    """
    if not isinstance(row, dict):
        raise BadRow(f"expected an object with columns, got {reprlib.repr(row)}")
    for name in ("instance_id", "messages"):
        if name not in row:
            raise BadRow(f"column {name}: missing")
    for name in ("instance_id", "model_patch", "run_name"):
        if not isinstance(value := row.get(name), str) and (value is not None or name == "instance_id"):
            raise BadRow(f"column {name}: expected a text, got {reprlib.repr(value)}")
    messages = row["messages"]
    if isinstance(messages, str):
        messages = parse(messages, "column messages: expected a list of messages or its JSON")
    if not isinstance(messages, list):
        raise BadRow(f"column messages: expected a list of messages, got {reprlib.repr(messages)}")
    turns = [render_turn(message, number) for number, message in enumerate(messages, 1)]
    patch = row.get("model_patch") or ""
    if response == "model_patch" or response == "auto" and patch.strip():
        before = next((i for i, turn in enumerate(turns) if turn[0] == "assistant"), len(turns))
        text, used = patch, turns[:before]
    else:
        before = max((i for i, turn in enumerate(turns) if turn[0] == "assistant" and turn[2]), default=None)
        text, used = ("", turns) if before is None else (turns[before][1], turns[:before + 1])
    example = dict(prompt=render_prompt(turns[:before]), response=text, instance_id=row["instance_id"],
                   run_name=row.get("run_name"))
    met = sum((turn[3] for turn in used), Counter({"": len(turns) - len(used)}))
    # Half of a UTF-16 pair, which JSON can spell, has no UTF-8.
    return {name: value and SURROGATE.sub("\ufffd", value) for name, value in example.items()}, met


def render_prompt(turns: list[tuple]) -> str:
    shown = [(role, text) for role, text, *_ in turns if text]
    if [role for role, _ in shown] == ["user"]:
        return shown[0][1]
    return "\n\n".join(f"[{role}]\n{text}" for role, text in shown)


def render_turn(message, number: int = 1) -> tuple[str, str, bool, Counter]:
    """-> role; all that is rendered; whether it can be a response: text beside calls, no mark against it;
    kinds of blocks"""
    where, met = f"column messages, message {number}", Counter()
    if not isinstance(message, dict):
        raise BadRow(f"{where}: expected a role and a content, got {reprlib.repr(message)}")
    if not isinstance(role := message.get("role"), str):
        raise BadRow(f"{where}: expected a text as role, got {reprlib.repr(role)}")
    parts = render_content(message.get("content"), where, met)
    calls = message.get("tool_calls") or []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        function = function if isinstance(function, dict) else call if isinstance(call, dict) else {}
        parts.append(("tool_use", render_call(function.get("name"), function.get("arguments", call))))
        met["tool_use"] += 1
    try:
        can_be_response = any(kind == "text" for kind, _ in parts) and is_wanted(message)
    except BadInput as error:  # a mark that is not read
        raise BadRow(f"{where}: {error}") from error
    return role, "\n".join(text for _, text in parts), can_be_response, met


def render_content(content, where: str, met: Counter) -> list[tuple[str, str]]:
    """-> [(kind, text)] of what is not blank; `met` counts each kind, those that are left out too"""
    blocks = [] if content is None else [content] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise BadRow(f"{where}: expected text, blocks or null as content, got {reprlib.repr(content)}")
    parts = []
    for block in blocks:
        block = {"type": "text", "text": block} if isinstance(block, str) else block
        kind = block.get("type") if isinstance(block, dict) else None
        text = block.get("text") if kind == "text" else None
        if not isinstance(kind, str) or not (text is None or isinstance(text, str)):
            raise BadRow(f"{where}: expected a block with a type and its text, got {reprlib.repr(block)}")
        if kind == "tool_use":
            text = render_call(block.get("name"), block.get("input"))
        elif kind == "tool_result":
            text = "\n".join(["[tool_result]", *(
                text for _, text in render_content(block.get("content"), where, met))])
        met[kind] += 1
        if text and not text.isspace():
            parts.append((kind, text))
    return parts


def render_call(name, value) -> str:
    value = without_nulls(value)  # Arrow gives every call the keys of all others, as null
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return f"[tool_use {name}] {text}"


def reason_to_drop(example: dict, met: Counter, args: argparse.Namespace) -> str:
    """Empty for a row that stays. With --on-long cut a prompt keeps its end and a response its beginning."""
    for name, limit in (("response", args.max_chars_response), ("prompt", args.max_chars_prompt)):
        if 0 < limit < len(example[name]):
            if args.on_long == "drop":
                return f"{name}_too_long"
            example[name] = example[name][:limit] if name == "response" else example[name][-limit:]
            met[f"cut {name}"] += 1
        if not example[name].strip():
            return f"empty_{name}"
    return ""


# Which row goes where


def digest(*values) -> bytes:
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=16).digest()


def held_out(groups: list[str], ratio: float, seed: int) -> set[str]:
    """Given the group of each row, the groups that are held out: as many whole ones, in an order drawn by the
    seed, as fit into the share of rows; where none fits, the smallest; none where it would be the only one.
    """
    sizes = Counter(groups)
    order = sorted(sizes, key=lambda group: digest(seed, group))  # whatever the order of rows
    if not ratio or len(sizes) < 2:
        return set()
    room, chosen = min(max(1, round(ratio * len(groups))), len(groups) - 1), set()
    for group in order:
        if sizes[group] <= room:
            chosen.add(group)
            room -= sizes[group]
    return chosen or {min(order, key=sizes.get)}


# Read


def parse(text: str | bytes, expected: str):
    try:
        return from_json(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{expected} ({first_line(error)})") from error


def jsonl_rows(path: Path) -> Iterator:
    """Every line, parsed, or why it cannot be; None for a blank one."""
    with open(path, "rb") as file:
        for line in file:
            try:
                yield parse(line, "expected a line of JSON") if line.strip() else None
            except BadRow as error:
                yield error


def parquet_rows(path: Path) -> Iterator:
    with open(path, "rb") as handle:
        file = pq.ParquetFile(handle)
        check_names_once([*file.schema_arrow])
        columns = [name for name in COLUMNS if name in file.schema_arrow.names]
        yield from arrow_rows(file.iter_batches(batch_size=16, columns=columns))


def dataset_rows(data: datasets.Dataset) -> Iterator:
    def tables():
        for table in data.with_format("arrow").iter(16):
            table.validate(full=True)  # a torn file of Arrow's own format would crash the process
            yield table

    return arrow_rows(tables())


def arrow_rows(tables: Iterable) -> Iterator:
    for table in tables:
        columns = {name: table.column(name) for name in COLUMNS if name in table.schema.names}
        for index in range(table.num_rows):
            try:
                row = {name: from_arrow(column[index].as_py(), column.type)
                       for name, column in columns.items()}
            except ValueError as error:
                row = BadRow(f"expected UTF-8 text ({first_line(error)})")
            yield row


def open_source(data: str, split: str) -> tuple:
    """-> what messages call it, a function of nothing that gives its rows"""
    path, where = Path(data), f"--data {data}"
    reader = {".parquet": parquet_rows, ".jsonl": jsonl_rows}.get(path.suffix)
    if path.is_file() and reader:
        return where, lambda: reader(path)
    if not path.is_dir() and (path.exists() or not HUB_ID.fullmatch(data)):
        raise BadInput(f"{where}: expected an existing .parquet or .jsonl file, a folder made by "
                       "save_to_disk, or a hub id")
    try:
        found = datasets.load_from_disk(data) if path.is_dir() else datasets.load_dataset(data, split=split)
    except Exception as error:  # offline, no such data set, a torn folder: each has an exception of its own
        raise BadInput(f"{where}: " + ("expected a folder made by save_to_disk" if path.is_dir() else
                                       "no such file, nor can it be fetched from the hub")
                       + f" ({first_line(error)})") from error
    if isinstance(found, dict):
        if split not in found:
            raise BadInput(f"--split {split}: {where} has {', '.join(found)}")
        found = found[split]
    return where, lambda: dataset_rows(found)


def convert(sources: list, args: argparse.Namespace) -> Iterator:
    """Each row in order: (example, kinds of blocks), or why it is dropped, or a BadRow that says where."""
    for where, rows in sources:
        try:
            for number, row in enumerate(rows(), 1):
                try:
                    if isinstance(row, BadRow):
                        raise row
                    if row is None:
                        continue
                    found = to_example(row, args.response)
                    found = reason_to_drop(*found, args) or found
                except BadRow as error:
                    found = BadRow(f"{where}, row {number}, {error}")
                except RecursionError:
                    found = BadRow(f"{where}, row {number}, column messages: nested too deeply")
                yield found
        except Exception as error:  # whatever the readers raise on bytes that are not theirs
            raise BadInput(f"{where}: cannot be read ({first_line(error)})") from error


# Write


def write(placed: Iterable, paths: list[Path]) -> None:
    """Rows, each with the index of its file. Complete files get their names, the first of them last."""
    temporary = [path.with_name(f".{path.name}.writing") for path in paths]
    try:
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(path, "wb")) for path in temporary]
            writers = [stack.enter_context(pq.ParquetWriter(file, SCHEMA)) for file in files]
            waiting, size = [[] for _ in paths], [0 for _ in paths]

            def flush(side):
                if waiting[side]:  # datasets cannot read a row group of no rows
                    writers[side].write_table(pa.Table.from_pylist(waiting[side], SCHEMA))
                waiting[side], size[side] = [], 0

            for side, example in placed:
                waiting[side].append(example)
                size[side] += len(example["prompt"]) + len(example["response"])
                if size[side] > 2**24 or len(waiting[side]) == 1000:
                    flush(side)
            for side in range(len(paths)):
                flush(side)
        for path in temporary:
            flush_to_disk(path)
        paths[0].unlink(missing_ok=True)  # an old one never lies beside a new side of another split
        for path, target in reversed(list(zip(temporary, paths, strict=True))):
            path.replace(target)
        flush_to_disk(paths[0].parent)
    except (OSError, pa.ArrowException) as error:
        raise BadInput(f"--output-dir {paths[0].parent}: cannot be written ({first_line(error)})") from error
    finally:
        with contextlib.suppress(OSError):
            for path in temporary:
                path.unlink(missing_ok=True)


def check(args: argparse.Namespace) -> list[Path]:
    """-> the paths of the output.  BadInput for what is wrong before anything is read"""
    if not 0 <= args.val_ratio < 1:
        raise BadInput(f"--val-ratio {args.val_ratio}: expected 0 or more, and less than 1")
    for name in ("max_samples", "max_chars_prompt", "max_chars_response"):
        if getattr(args, name) < 0:
            raise BadInput(f"--{name.replace('_', '-')} {getattr(args, name)}: expected 0 or more")
    args.name = Path(args.data[0]).stem if args.name is None else args.name
    if not args.name or Path(args.name).name != args.name:
        raise BadInput(f"--name {args.name}: expected the start of a file name")
    folder = next(path for path in (args.output_dir, *args.output_dir.absolute().parents) if path.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise BadInput(f"--output-dir {args.output_dir}: {folder} is no folder that can be written to")
    paths = [args.output_dir / f"{args.name}_{side}.parquet" for side in SIDES]
    if found := [path for path in paths if path.exists() and not args.overwrite]:
        raise BadInput(f"--output-dir: {found[0]} exists; --overwrite replaces it")
    return paths


def run(args: argparse.Namespace) -> dict:
    paths = check(args)
    sources = [open_source(data, args.split) for data in args.data]
    # Twice over the rows: first to place each, keeping no text, then to write them.
    kept, dropped, bad, read = [], Counter(), [], 0
    for read, found in enumerate(convert(sources, args), 1):
        if isinstance(found, BadRow) and args.on_bad_row == "error":
            raise BadInput(found)
        if isinstance(found, BadRow):
            bad.append(str(found) if len(bad) < 5 else "")
        elif isinstance(found, str):
            dropped[found] += 1
        else:
            drawn = digest(args.seed, found[0]) if args.max_samples else b""
            kept.append((drawn, read, found[0]["instance_id"]))
    if args.max_samples and len(kept) > args.max_samples:
        dropped["max_samples"] = len(kept) - args.max_samples
        kept = sorted(kept)[:args.max_samples]
    counts = {"rows": read, "dropped": dict(sorted(dropped.items())), "bad_rows": len(bad),
              "first_bad_rows": [text for text in bad if text]}
    if not kept:
        raise BadInput(f"--data {' '.join(args.data)}: no row is left to train on, {json.dumps(counts)}")
    val = held_out([group for *_, group in kept], args.val_ratio, args.seed)
    sides = {number: int(group in val) for _, number, group in kept}
    met, written = Counter(), Counter()

    def placed():
        for number, found in enumerate(convert(sources, args), 1):
            if number in sides:
                if not isinstance(found, tuple):
                    raise BadInput(f"--data {' '.join(args.data)}: changed while it was read")
                met.update(found[1])
                written[sides[number]] += 1
                yield sides[number], found[0]
        if written.total() != len(sides):
            raise BadInput(f"--data {' '.join(args.data)}: changed while it was read")

    write(placed(), paths)
    later = met.pop("", 0)
    cut = {name: met.pop(f"cut {name}", 0) for name in ("prompt", "response")}
    return {"files": [str(path) for path in paths], "train": written[0], "val": written[1]} | counts | {
        "cut": cut,
        "rendered": {kind: met[kind] for kind in ("tool_use", "tool_result")}, "left_out": {
            "turns_after_response": later, "blocks": {
                kind: count for kind, count in met.most_common(20)
                if kind not in ("text", "tool_use", "tool_result")}}}


@answers_in_json
def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description="Convert chat rows to prompts and responses for sft.py.")
    parser.add_argument("--data", nargs="+", required=True, metavar="PATH_OR_ID",
                        help=".parquet and .jsonl files, folders made by save_to_disk, hub ids")
    parser.add_argument("--split", default="train",
                        help="of a hub data set, or of a folder that has several (default: train)")
    parser.add_argument("--name", help="how the two files' names start (default: as the first --data)")
    parser.add_argument("--output-dir", type=Path, required=True, metavar="DIR", help="their folder")
    parser.add_argument("--overwrite", action="store_true", help="replace files that are there")
    parser.add_argument("--response", choices=["auto", "model_patch", "last-assistant"], default="auto",
                        help="what is learned; auto: the model_patch, or else the message (default)")
    parser.add_argument("--val-ratio", type=float, default=0.1,
                        help="share of the rows to hold out, whole instances only (default: 0.1)")
    parser.add_argument("--seed", type=int, default=42,
                        help="of the split and of --max-samples (default: 42)")
    parser.add_argument("--max-samples", type=int, default=0,
                        help="most rows to write, drawn at random; 0: all (default)")
    parser.add_argument("--max-chars-prompt", type=int, default=0,
                        help="longest prompt [characters]; 0: no limit (default)")
    parser.add_argument("--max-chars-response", type=int, default=0,
                        help="longest response [characters]; 0: no limit (default)")
    parser.add_argument("--on-long", choices=["drop", "cut"], default="drop",
                        help="rows over a limit: leave them out (default), or cut the prompt's beginning and "
                             "the response's end")
    parser.add_argument("--on-bad-row", choices=["error", "skip"], default="error",
                        help="what to do with a malformed row: stop, or count it and go on (default: error)")
    args = parser.parse_args(argv)
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
