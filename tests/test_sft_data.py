"""sft.py from rows to tokens, as hostile data would have it: every form of a row, torn files, conversations
under templates in the manner of the well-known ones, streaming, data sets of the hub.

What a row's tokens should be is computed here a second time, slowly and without sft.py, its chat templates or
the tokenizer's offsets.
"""

import http.server
import io
import json
import math
import os
import random
import re
import threading
import tracemalloc
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import sft
from envs import BadInput
from tests.run_folders import command_line, log_lines, process, records

SMALL = dict(steps=2, batch_size=2, eval_every=0, checkpoint_every=2, log_every=1, warmup_steps=0,
             max_length=300)
COUNTS = ("rows", "held_out", "truncated", "dropped", "bad")


def train(folder, **flags):
    """A run in this process. -> what it logged of its data, and the rows that it took."""
    sft.main(sft.Args(**SMALL | dict(run_dir=str(folder), output_dir=f"{folder}-model") | flags))
    for line in records(folder):
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))
    return tuple(records(folder)[0][f"data/{name}"] for name in COUNTS), taken(folder)


def taken(folder, side="train"):
    """[(ids, mask)] of a run folder's data, without sft.py."""
    rows = datasets.Dataset.from_file(str(folder / "data" / f"{side}.arrow"))
    return [(row["ids"], [int(m) for m in row["mask"]]) for row in rows]


def refused(capsys, folder, *flags):
    """The one line that a command line ends with, which must begin nothing."""
    small = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    code = command_line("sft.py", *small, "--run-dir", folder, "--output-dir", f"{folder}-model", *flags)
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if line.startswith("error:")]
    assert code not in (0, None) and len(lines) == 1, output.err
    assert "Traceback" not in output.err and not Path(f"{folder}-model").exists()
    return lines[0]


def complaint(folder, **flags):
    """The error that a run ends with before it begins."""
    with pytest.raises(BadInput) as error:
        train(folder, **flags)
    assert not (folder / "checkpoints" / "step_000002").exists() and "\n" not in str(error.value)
    return str(error.value)


def write_jsonl(path, rows):
    """One line for each row; bytes are written as they are."""
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n"
                              for row in rows))
    return str(path)


def pairs(number, name=""):
    return [{"prompt": f"{name}p{i}", "response": f"{name}r{i}"} for i in range(number)]


def pair(prompt, response):
    return {"prompt": prompt, "response": response}


def system(content):
    return {"role": "system", "content": content}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content} | more


def blocks(*parts):
    """Blocks, as OpenAI's format has them."""
    return [{"type": "text", "text": part} for part in parts]


def args_of(**flags):
    return sft.Args(**dict(train_files=("x.jsonl",), max_length=10_000) | flags)


MARKERS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
           "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "</s>"]


def letters():
    """Byte -> its letter in a vocabulary, as GPT-2 has it: the printable ones are themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return {byte: chr(byte if byte in plain else next(others)) for byte in range(256)}


def bytes_to_ids(text, tokenizer):
    """The ids of a text under a tokenizer of bytes: special tokens whole, else one per byte."""
    letter, ids = letters(), {letter: i for i, letter in enumerate(sorted(letters().values()), 4)}
    special = tokenizer.get_added_vocab()
    parts = re.split("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")", text)
    return [i for part in parts
            for i in ([special[part]] if part in special else [ids[letter[b]] for b in part.encode()])]


def beginnings(ids, text, tokenizer):
    """The character of the text that each token begins in, from the bytes that the tokens stand for."""
    byte = {letter: byte for byte, letter in letters().items()}
    special = {i: word for word, i in tokenizer.get_added_vocab().items()}
    character = [index for index, c in enumerate(text) for _ in c.encode()]
    starts, position = [], 0
    for token in ids:
        word = special.get(token)
        size = len(word.encode() if word else bytes(byte[c] for c in tokenizer.convert_ids_to_tokens(token)))
        starts.append(character[position])
        position += size
    assert position == len(character)
    return starts


def expected_row(pieces, tokenizer):
    """[(text, whether it is learned)] -> (ids, mask)."""
    text = "".join(text for text, _ in pieces)
    learned = [flag for text, flag in pieces for _ in text]
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return ids, [int(learned[start]) for start in beginnings(ids, text, tokenizer)]


def byte_tokenizer(template=None, eos="<eos>", extra=()):
    """Asked for special tokens it would add a bos and an eos, which the template writes already."""
    tokenizer = sft.new_tokenizer(None)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)])
    tokenizer.add_special_tokens({"additional_special_tokens": MARKERS})
    tokenizer.add_tokens(list(extra), special_tokens=True)
    tokenizer.eos_token = eos
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


def merging_tokenizer(template, eos, texts):
    """Byte pairs merged across words and lines, whatever is frequent between the markers of these texts."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    special = ["<pad>", "<bos>", "<eos>", "<unk>", *MARKERS]
    parts = [part for text in texts for part in re.split("|".join(map(re.escape, special)), text)]
    core.train_from_iterator(parts, trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token=eos,
                                   unk_token="<unk>", additional_special_tokens=MARKERS,
                                   chat_template=template)


DEEP = b"[" * 100_000 + b"]" * 100_000
GOOD = [  # a line of JSONL, the texts of its messages, its response
    (pair("two and two?", "four"), ["two and two?"], "four"),
    (pair("", " 4 \n"), [""], " 4 \n"),
    (pair("👩‍👩‍👧 🏳️‍🌈", "e\u0301 ﬁ Å"), ["👩‍👩‍👧 🏳️‍🌈"], "e\u0301 ﬁ Å"),
    (pair("漢字 \u202eשלום عربى", "a\0\u2028c\u0085"), ["漢字 \u202eשלום عربى"], "a\0\u2028c\u0085"),
    (b'{"prompt": "\\ud83d\\ude00 \\ud83d", "response": "\\ude00\\ud83d"}', ["😀 \ufffd"], "\ufffd\ufffd"),
    (b'{"prompt": "<eos><bos>", "response": "<eos> : <pad>"}\r', ["<eos><bos>"], "<eos> : <pad>"),
    (b'\xef\xbb\xbf {"prompt": "a", "response": "\xe2\x80\xa8 b", "more": [NaN, 1e999, 9999999999999999999]}',
     ["a"], "\u2028 b"),
    (pair([system("be brief"), user("hi")], "yo"), ["be brief", "hi"], "yo"),
    (pair([user(None), user(blocks("one", "two"))], blocks("four", "five")), ["", "one\ntwo"], "four\nfive"),
    (pair([user([])], "0"), [""], "0"),
]
BLANK = [pair("a", response) for response in ("", " \n\t\u3000", None, [], blocks(""), blocks(" ", "\n"))]
BAD = {  # a line of JSONL, what the message says
    "number": (pair(3, "a"), "column prompt: .*3"),
    "empty list": (pair([], "a"), "column prompt: "),
    "list of texts": (pair(["a"], "a"), "column prompt, message 1: .*'a'"),
    "role": (pair([{"role": 1, "content": "a"}], "a"), "column prompt, message 1: .*role"),
    "content": (pair([user(1.5)], "a"), "column prompt, message 1: .*1.5"),
    "image": (pair([user([*blocks("see"), {"type": "image", "url": "x"}])], "a"),
              "column prompt, message 1: .*image"),
    "block without text": (pair([user([{"type": "text"}])], "a"), "column prompt, message 1: "),
    "answer number": (pair("a", 4), "column response: .*4"),
    "answer list": (pair("a", [1]), "column response: .*1"),
    "missing": ({"prompt": "a"}, "column response: missing"),
    "a list": ([1, 2], r"column prompt: missing; it has \[1, 2\]"),
    "torn": (b'{"prompt": "a", "resp', "JSON"),
    "two in one": (b'{"prompt": "a", "response": "b"}{}', "JSON"),
    "deep": (b'{"prompt": ' + DEEP + b', "response": "a"}', "JSON"),
    "deep but whole": (b'{"prompt": ' + DEEP[99_300:100_700] + b', "response": "a"}', "column prompt, mess"),
    "huge": (b'{"prompt": ' + b"9" * 5000 + b', "response": "a"}', "JSON|column prompt"),
    "bytes": (b'{"prompt": "\xff\xfe", "response": "a"}', "JSON"),
    "long": (pair("a" * 400, "a"), r"--max-length 300: .* 40\d tokens"),
}


def good_rows(tokenizer):
    """The ids and masks of GOOD under the template of sft.new_tokenizer."""
    rows = []
    for _, texts, response in GOOD:
        prompt = bytes_to_ids("<bos>" + "".join(" " + text for text in texts) + " : ", tokenizer)
        ids = [*bytes_to_ids(response, tokenizer), tokenizer.eos_token_id]
        rows.append((prompt + ids, [0] * len(prompt) + [1] * len(ids)))
    return rows


def test_rows_of_every_form_are_learned_dropped_or_left_out_as_they_should_be(tmp_path, capsys):
    """The good ones among the others, in the files' order, an empty line here and there."""
    rng, lines = random.Random(0), []
    groups = [list(GOOD), [(row,) for row in BLANK], [(row,) for row, _ in BAD.values()]]
    while any(groups):
        group = rng.choice([group for group in groups if group])
        lines += [b" \t"] * rng.randrange(2) + [group.pop(0)[0]]
    half = len(lines) // 2
    files = (write_jsonl(tmp_path / "one.jsonl", lines[:half]),
             write_jsonl(tmp_path / "two.jsonl", lines[half:]))
    counts, rows = train(tmp_path / "run", train_files=files, on_bad_row="skip", val_ratio=0.3)
    assert rows == good_rows(sft.new_tokenizer(None))
    assert counts == (len(GOOD) - 3, 3, 0, len(BLANK), len(BAD))
    named = re.findall(r"left out: --train-files (\S+), row (\d+), ", capsys.readouterr().out)
    wrong = [row for row, _ in BAD.values()]
    where = [(name, str(number)) for name, part in zip(files, (lines[:half], lines[half:]), strict=True)
             for number, line in enumerate(part, 1) if any(line is row for row in wrong)]
    assert len(named) >= 5 and named == where[:len(named)]


@pytest.mark.parametrize("case", [*BAD][::2])  # the others are among those left out above
def test_a_bad_row_ends_the_run_with_its_file_and_line(case, tmp_path):
    row, message = BAD[case]
    name = write_jsonl(tmp_path / "rows.jsonl", [*pairs(3), b"", row, *pairs(2)])
    line = complaint(tmp_path / "run", train_files=(name,))
    assert re.match(rf"--train-files {re.escape(name)}, row 5, .*{message}", line), line
    assert len(line) < 500 + len(name)


BROKEN = {  # a file, its rows, what the message says behind its name
    "no.jsonl": (None, ": expected an existing"),
    "words.jsonl": ([*pairs(3), b"a response"], ", row 4, expected a line of JSON"),
    "column.jsonl": ([*pairs(3), {"prompt": "a"}], ", row 4, column response: missing"),
    "column.parquet": ([{"prompt": "a"}] * 4, ".*no column response; it has prompt"),
    "half.parquet": (pairs(60), ": cannot be read after row 0 .*footer"),
    "empty.jsonl": ([], ": expected at least 2 rows.* got 0 "),
    "empty.parquet": ([], ": cannot be read after row 0 .* 0 bytes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_with_a_file_is_one_line_with_its_name_and_row(name, tmp_path, capsys):
    (rows, message), path = BROKEN[name], tmp_path / name
    if rows is not None:
        write_jsonl(path, rows)
    if rows and path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    if name == "half.parquet":
        os.truncate(path, path.stat().st_size // 2)
    line = refused(capsys, tmp_path / "run", "--train-files", path)
    assert re.match(f"error: (--train-files )?{re.escape(str(path))}{message}", line), line


def plain_rows(numbers, name=""):
    """The ids and masks of pairs()."""
    tokenizer, rows = sft.new_tokenizer(None), []
    for i in numbers:
        prompt = [1, *bytes_to_ids(f" {name}p{i} : ", tokenizer)]
        response = [*bytes_to_ids(f"{name}r{i}", tokenizer), 2]
        rows.append((prompt + response, [0] * len(prompt) + [1] * len(response)))
    return rows


def test_shares_held_out_are_of_rows_that_can_be_learned(tmp_path):
    name = write_jsonl(tmp_path / "rows.jsonl", [*BLANK, *pairs(10), {"prompt": 1}])
    for ratio, held_out in ((0.0, 0), (0.01, 1), (1.0, 9)):
        folder = tmp_path / str(ratio)
        counts, rows = train(folder, train_files=(name,), val_ratio=ratio, on_bad_row="skip")
        assert counts == (10 - held_out, held_out, 0, len(BLANK), 1) and rows == plain_rows(range(10))
        assert ("val/loss" in records(folder)[0]) == (held_out > 0)


def test_a_long_row_is_refused_or_loses_the_right_end_and_its_first_token_is_never_learned(tmp_path, capsys):
    """Each kind of row at, under and over the length; what is left of it is known token for token."""
    tokenizer = sft.new_tokenizer(None)
    sizes = ((5, 7), (6, 7), (40, 2), (40, 30), (0, 40), (13, 1), (14, 2), (11, 0), (60, 0))
    name = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p" * p, "response": "r" * r} for p, r in sizes])
    whole = []
    for p, r in sizes:
        ids = bytes_to_ids("<bos> " + "p" * p + " : " + "r" * r + "<eos>", tokenizer)
        whole.append((ids, [0] * (p + 5) + [int(r > 0)] * (r + 1)))
        assert len(ids) == len(whole[-1][1])
    long = sum(len(ids) > 18 for ids, _ in whole)
    assert len(whole[0][0]) == 18 and long == 7
    flags = dict(train_files=(name,), max_length=18, val_ratio=0.0)
    for side, kept in (("left", slice(-18, None)), ("right", slice(0, 18))):
        expected = [(ids[kept], [0, *mask[kept][1:]]) for ids, mask in whole]
        expected = [row for row in expected if any(row[1])]
        counts, rows = train(tmp_path / side, truncation=side, **flags)
        assert rows == expected
        assert counts == (len(expected), 0, long, len(whole) - len(expected), 0)
        assert all(mask[0] == 0 for _, mask in rows)
    line = refused(capsys, tmp_path / "run", "--train-files", name, "--max-length", "18")
    assert re.match(rf"error: --train-files {re.escape(name)}, row 2, --max-length 18: .* 19 tokens", line)
    assert train(tmp_path / "skip", on_bad_row="skip", **flags) == ((1, 0, 0, 1, long), whole[:1])


def test_a_row_that_is_all_response_gives_up_its_first_token(tmp_path):
    (tmp_path / "bare.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    rows = [pair("", "abc"), pair("", "<eos>"), pair("x", "y")]
    flags = dict(train_files=(write_jsonl(tmp_path / "rows.jsonl", rows),), val_ratio=0.0,
                 chat_template=str(tmp_path / "bare.jinja"))
    _, taken_rows = train(tmp_path / "run", **flags)
    assert [mask for _, mask in taken_rows] == [[0, 1, 1, 1], [0, 1], [0, 1, 1]]
    with pytest.raises(BadInput, match="at least 1 row"):
        train(tmp_path / "one", **flags | dict(max_length=1, truncation="left"))


@pytest.mark.parametrize("column", [
    pyarrow.array([0.5, math.nan]), pyarrow.array([b"a", b"b"]), pyarrow.array([[["a"]], [["b"]]])],
    ids=["numbers", "bytes", "lists"])
def test_a_parquet_column_of_another_type_is_refused_row_by_row(column, tmp_path):
    name = str(tmp_path / "rows.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "response": column}), name)
    line = complaint(tmp_path / "error", train_files=(name,))
    assert re.match(rf"--train-files {re.escape(name)}, row 1, ", line), line
    files = (name, write_jsonl(tmp_path / "good.jsonl", pairs(3)))
    counts, rows = train(tmp_path / "run", train_files=files, on_bad_row="skip", val_ratio=0.0)
    assert rows == plain_rows(range(3)) and counts == (3, 0, 0, 0, 2)


CHATML = (  # Qwen2.5
    "{%- if messages[0]['role'] == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}{%- else %}"
    "{{- '<|im_start|>system\nYou are kind.<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) "
    "or (message.role == 'assistant' and not message.tool_calls) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>' + message.role }}"
    "{%- if message.content %}{{- '\n' + message.content }}{%- endif %}"
    "{%- for call in message.tool_calls %}"
    "{{- '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}")
ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}")
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}" + ALTERNATE +
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}")
TAGGED = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{%- generation -%}"
    "{{ message.content + '<|im_end|>' }}{%- endgeneration -%}{{ '\n' }}"
    "{% else %}{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def learned(message):
    """Whether it is an assistant's and says something."""
    return message["role"] == "assistant" and bool(
        (message["content"] or "").strip() or message.get("tool_calls"))


def chatml_pieces(messages):
    if messages[0]["role"] != "system":
        yield "<|im_start|>system\nYou are kind.<|im_end|>\n", 0
    for i, message in enumerate(messages):
        role, content = message["role"], message["content"] or ""
        if role == "tool":
            around = [0 <= j < len(messages) and messages[j]["role"] == "tool" for j in (i - 1, i + 1)]
            yield "" if around[0] else "<|im_start|>user", 0
            yield f"\n<tool_response>\n{content}\n</tool_response>", 0
            yield "" if around[1] else "<|im_end|>\n", 0
            continue
        calls = "\n".join(f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>"
                          for call in message.get("tool_calls", ()))
        yield f"<|im_start|>{role}\n", 0
        yield content + "\n" * bool(content and calls) + calls + "<|im_end|>", learned(message)
        yield "\n", 0


def gemma_pieces(messages):
    yield "<bos>", 0
    for message in messages:
        yield f"<start_of_turn>{dict(assistant='model').get(message['role'], message['role'])}\n", 0
        yield (message["content"] or "").strip() + "<end_of_turn>", learned(message)
        yield "\n", 0


def tagged_pieces(messages):
    for message in messages:
        yield f"<|im_start|>{message['role']}\n", 0
        yield (message["content"] or "") + "<|im_end|>", learned(message)
        yield "\n", 0


TEMPLATES = {  # template, its pieces, eos, ids that end a turn, whether turns must alternate
    "chatml": (CHATML, chatml_pieces, "<|im_end|>", ["<|im_end|>", "<eos>"], False),
    "gemma": (GEMMA, gemma_pieces, "<eos>", ["<eos>", "<end_of_turn>"], True),
    "tagged": (TAGGED, tagged_pieces, "<|im_end|>", ["<|im_end|>"], False),
}
CONTENTS = [
    "yes", "yes", "yes", "a", "assistant", "assistant\n", "user\nyes", "\n\nyes\n\n", "  lead", "trail  ",
    "the cat\nthe cat\nthe cat", "\0", "👩‍👩‍👧", "é e\u0301 漢字", "שלום \u202e", "yes yes yes",
    "<think>\nhm\n</think>\n\nyes", "{{ messages }}", "<|im_end|>",
    "<|im_end|>\n<|im_start|>assistant\nyes", "<eos>", "no<eos>",
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nyes", "yes</s>[INST] no [/INST] yes</s>",
    "<end_of_turn>\n<start_of_turn>model\nno", "", None, " ", "\n"]
CALL = {"function": {"name": "sum", "arguments": {"of": [1, "two"]}}}


def conversation(rng, alternate):
    """Any roles in any order, after a first turn that is no assistant's; or by turns."""
    count = rng.randint(1, 7)
    roles = ["user" if i % 2 == 0 else "assistant" for i in range(count)]
    if not alternate:
        roles = [rng.choice(["user", "system"]), *rng.choices(
            ["user", "assistant", "assistant", "assistant", "system", "tool"], k=count)]
    messages = [{"role": role, "content": rng.choice(CONTENTS)} for role in roles]
    for message in messages:
        if message["role"] == "assistant" and (message["content"] or "").strip() and rng.random() < 0.2:
            message["tool_calls"] = [CALL] * rng.randint(1, 2)
    return messages


def row_of(messages, tokenizer, ends=("<|im_end|>",), **flags):
    args, eos = args_of(messages_key="messages", **flags), tokenizer.convert_tokens_to_ids(list(ends))
    ids, mask = sft.encode_row({"messages": messages}, tokenizer, args, eos)
    return ids, [int(m) for m in mask]


@pytest.mark.parametrize("merges", [False, True], ids=["bytes", "merges"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_learned_of_a_conversation_is_what_the_assistant_wrote(name, merges):
    """Against the pieces that the text was put together of, whatever they hold.

    A token that begins before the answer is the prompt's, even if the answer begins within it.
    """
    template, pieces, eos, ends, alternate = TEMPLATES[name]
    rng, count, straddling = random.Random(name), 0, 0
    conversations = [conversation(rng, alternate) for _ in range(40)]
    if name != "chatml":
        conversations = [[{key: message[key] for key in ("role", "content")} for message in messages]
                         for messages in conversations]
    texts = ["".join(text for text, _ in pieces(messages)) for messages in conversations]
    tokenizer = merging_tokenizer(template, eos, texts) if merges else byte_tokenizer(template, eos)
    for messages, text in zip(conversations, texts, strict=True):
        ids, mask = row_of(messages, tokenizer, ends)
        expected = expected_row(list(pieces(messages)), tokenizer)
        assert merges or ids == bytes_to_ids(text, tokenizer)
        starts, place = beginnings(ids, text, tokenizer), 0
        for part, flag in pieces(messages):
            if flag and place not in starts:
                straddling += 1
                if name == "tagged":  # transformers has it the other way there
                    token = sum(start < place for start in starts) - 1
                    mask[token] = expected[1][token]
            place += len(part)
        assert (ids, mask) == expected, (messages, written(ids, mask, tokenizer))
        count += any(mask)
    assert count > 25 and (straddling > 15 or not merges), (count, straddling)


def written(ids, mask, tokenizer):
    """What is learned, as text."""
    return tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])


@pytest.mark.parametrize("name", ["chatml", "tagged"])
def test_conversations_of_files_are_learned_dropped_and_left_out_as_they_should_be(name, tmp_path):
    """From JSONL, from parquet, and from a column of text that is JSON."""
    template, pieces, eos, _, _ = TEMPLATES[name]
    (tmp_path / "chat.jinja").write_text(template.replace("<|im_end|>", "<eos>"))
    good = [[user("a"), assistant("b")], [user(None), assistant("b", name="me"), user("c"), assistant("d\n")],
            [system("s"), user("é👩"), assistant("é👩")], [user("q"), assistant(None), assistant("x")]]
    empty = [[user("a")], [user("a"), assistant(None)], [user("a"), assistant(" \n"), user("b")]]
    bad = [[], None, [user("a"), {"role": "assistant", "content": [{"type": "image", "text": None}]}]]
    rows = [{"chat": chat} for chat in (*good, *empty, *bad)]
    worse = [{"chats": good[0]}, b'{"chat": [' + DEEP + b']}', *({"chat": chat} for chat in (
        1, "no", {"role": "user"}, [["a"]], [1.5], json.dumps([1]), "[" * 100_000))]
    texts = [{"chat": json.dumps(chat)} for chat in good]
    simple = pyarrow.Table.from_pylist([{"chat": chat} for chat in (*good, *empty, *bad[:2])])
    pyarrow.parquet.write_table(simple, tmp_path / "chat.parquet")
    files = (write_jsonl(tmp_path / "chat.jsonl", rows), write_jsonl(tmp_path / "bad.jsonl", worse),
             write_jsonl(tmp_path / "text.jsonl", texts), str(tmp_path / "chat.parquet"))
    counts, rows = train(tmp_path / "run", train_files=files, messages_key="chat", on_bad_row="skip",
                         val_ratio=0.0, chat_template=str(tmp_path / "chat.jinja"))
    tokenizer, expected = sft.new_tokenizer(None), []
    for chat in good:
        parts = [(text.replace("<|im_end|>", "<eos>"), flag) for text, flag in pieces(chat)]
        ids = bytes_to_ids("".join(text for text, _ in parts), tokenizer)
        expected.append((ids, expected_row(parts, tokenizer)[1]))
    assert rows == expected * 3
    assert counts == (12, 0, 0, 6, 3 + 2 + len(worse))


def test_a_template_that_says_no_makes_a_bad_row_and_names_why(tmp_path, capsys):
    (tmp_path / "gemma.jinja").write_text(GEMMA.replace("<end_of_turn>", "<eos>"))
    rows = [{"chat": chat} for chat in ([user("a"), assistant("b")], [system("s"), user("a"), assistant("b")],
                                        [user("a"), user("b"), assistant("c")])]
    flags = ["--messages-key", "chat", "--chat-template", tmp_path / "gemma.jinja", "--train-files"]
    for number, words in ((1, "System role not supported"), (2, "roles must alternate")):
        name = write_jsonl(tmp_path / f"{number}.jsonl", [rows[0], rows[number]])
        line = refused(capsys, tmp_path / "run", *flags, name)
        assert re.match(rf"error: --train-files {re.escape(name)}, row 2, .*{words}", line), line
    name = write_jsonl(tmp_path / "all.jsonl", rows)
    counts, _ = train(tmp_path / "skip", train_files=(name,), messages_key="chat", on_bad_row="skip",
                      chat_template=str(tmp_path / "gemma.jinja"), val_ratio=0.0)
    assert counts == (1, 0, 0, 0, 2)


@pytest.mark.parametrize("words", [
    "{{ 1 // (m.more | length - 1) }}", "{{ m.more + 1 }}", "{{ m.more.a.b }}", "{{ m.more | tojson }}",
    "{{ 'ab'.index('c') }}"])
def test_whatever_a_template_stumbles_over_is_a_bad_row(words):
    """Fields beyond role and content are as the data has them, and a template takes them for granted."""
    deep = []
    for _ in range(5_000):
        deep = [deep]
    template = "{% for m in messages %}{{ m.content }}" + words + "<|im_end|>{% endfor %}"
    tokenizer = byte_tokenizer(template, "<|im_end|>")
    for flags, row in ((dict(messages_key="m"), {"m": [user("a") | {"more": deep}, assistant("b")]}),
                       (dict(), {"prompt": [user("a") | {"more": deep}], "response": "b"})):
        with pytest.raises(sft.BadRow) as error:
            sft.encode_row(row, tokenizer, args_of(**flags), [tokenizer.eos_token_id])
        assert len(str(error.value)) < 500


def test_a_half_of_a_character_anywhere_in_a_row_is_a_bad_row_at_most(tmp_path, monkeypatch):
    """JSON can spell it, no terminal can show it, and no tokenizer reads it."""
    (tmp_path / "roles.jinja").write_text(
        "{% for m in messages %}{% if m.name %}{{ raise_exception('no ' + m.name) }}{% endif %}"
        "{{ m.role + m.content + eos_token }}{% endfor %}")
    half = b'{"m": [{"role": "%s", %s"content": "a"}, {"role": "assistant", "content": "b"}]}'
    rows = [{"m": [user("a"), assistant("b")]}, half % (b"\\ud800", b""),
            half % (b"user", b'"name": "\\udfff", '), b'{"\\ud800": 1}', b'{"m": "\\ud800"}',
            b'{"m": [{"role": "user", "content": [{"type": "\\ud800"}]}]}']
    name = write_jsonl(tmp_path / "rows.jsonl", rows)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))  # a terminal: strict
    counts, failure = (0,) * 5, ""
    try:
        counts, _ = train(tmp_path / "run", train_files=(name,), messages_key="m", on_bad_row="skip",
                          chat_template=str(tmp_path / "roles.jinja"), val_ratio=0.0)
    except UnicodeError as error:  # its text would stop pytest's own report
        failure = ascii(error)
    assert not failure
    assert counts[0] + counts[4] == 6 and counts[4] >= 4


QWEN3 = (
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- set text = m.content %}"
    "{%- if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in text %}"
    "{%- set text = text.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\n' }}{{- text + '<|im_end|>' }}{{- '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}")
THOUGHTS = [user("1?"), assistant("<think>\nhm\n</think>\n\none"),
            user("2?"), assistant("<think>\nhm\n</think>\n\ntwo")]


def test_a_template_that_drops_thoughts_is_refused_where_it_does_and_nowhere_else():
    tokenizer = byte_tokenizer(QWEN3, "<|im_end|>")
    with pytest.raises(BadInput, match="message 2.*generation"):
        row_of(THOUGHTS, tokenizer)
    plain = [user("1?"), assistant("one")]
    for messages in (THOUGHTS[2:], [*plain, *THOUGHTS[2:]], [THOUGHTS[0], *THOUGHTS[2:]]):
        ids, mask = row_of(messages, tokenizer)
        replies = [message["content"] for message in messages if message["role"] == "assistant"]
        assert written(ids, mask, tokenizer) == "".join(reply + "<|im_end|>" for reply in replies)


TAGS = ("{{% for m in messages %}}{{% if m.role == 'assistant' %}}{}"
        "{{% else %}}{{{{ m.content }}}}{{% endif %}}{{% endfor %}}")


@pytest.mark.parametrize(("template", "messages", "learned"), [
    # Whatever the tags enclose and nothing after it: an end at token 0, a last character of several tokens.
    (TAGS.format("{% generation %}{{ m.content }}<eos>{% endgeneration %}"),
     [assistant(""), user("no"), assistant("b")], "b<eos>"),
    (TAGS.format("{% generation %}{{ m.content }}<eos>👩{% endgeneration %}"),
     [user("no"), assistant("é"), user("no")], "é<eos>👩"),
    (TAGS.format("{%- generation -%}{{ m.content }}<eos>{%- endgeneration -%}"),
     [user("a"), assistant(" b"), user("no"), assistant("c")], " b<eos>c<eos>"),
    # "Assistant: " is what the reply follows; trimmed, its space is empty, where the answer begins.
    ("{% for m in messages %}{{ m.role + ': ' + m.content + '<eos> ' }}{% endfor %}"
     "{% if add_generation_prompt %}assistant: {% endif %}",
     [user(" a "), assistant(" b "), user("c"), assistant("d e")], " b <eos>d e<eos>"),
], ids=["first", "last-character", "leading-space", "space-before"])
@pytest.mark.parametrize("trims", [False, True], ids=["offsets", "trimmed-offsets"])
def test_answers_are_learned_to_the_letter(template, messages, learned, trims):
    """Offsets without the space that a token begins or ends with are GPT-NeoX's, for one."""
    tokenizer = byte_tokenizer(template)
    if trims:
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    ids, mask = row_of(messages, tokenizer, ["<eos>"])
    assert written(ids, mask, tokenizer) == learned


@pytest.mark.parametrize("template", [
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}",
    CHATML], ids=["none", "tagged", "another"])
def test_a_template_that_writes_no_eos_is_refused(template, tmp_path, capsys):
    """No reply would ever end. Another token than the tokenizer's eos is none either."""
    (tmp_path / "chat.jinja").write_text(template)
    name = write_jsonl(tmp_path / "chat.jsonl", [{"chat": [user("<eos>"), assistant("b")]}] * 3)
    line = refused(capsys, tmp_path / "run", "--train-files", name, "--messages-key", "chat",
                   "--chat-template", tmp_path / "chat.jinja", "--on-bad-row", "skip")
    assert re.search(rf"{re.escape(name)}, row 1.* eos ", line), line


def test_a_conversation_without_a_template_and_a_template_that_is_none_are_one_line(tmp_path, capsys):
    name = write_jsonl(tmp_path / "chat.jsonl", [{"chat": [user("a"), assistant("b")]}] * 3)
    flags = ["--train-files", name, "--messages-key", "chat", "--chat-template"]
    for path, content in dict(empty=b"", bytes=b"\xff\xfe{{ messages }}", no=b"{{ raise_exception(1) }}",
                              torn=b"{% for m in messages %}{{ m.content ").items():
        (tmp_path / path).write_bytes(content)
        assert "--chat-template" in refused(capsys, tmp_path / "run", *flags, tmp_path / path)
    assert f"--chat-template {tmp_path}" in refused(capsys, tmp_path / "run", *flags, tmp_path)
    assert "--chat-template nothing" in refused(capsys, tmp_path / "run", *flags, "nothing")


@pytest.mark.parametrize("merges", [False, True], ids=["bytes", "merges"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_row_is_the_prompt_then_the_responses_own_ids_then_eos(name, merges):
    """What the sampler is asked and what it then writes: no token spans the two."""
    template, pieces, eos, _, _ = TEMPLATES[name]
    rng, rows = random.Random(name), []
    reply = {"chatml": "<|im_start|>assistant\n", "tagged": "<|im_start|>assistant\n",
             "gemma": "<start_of_turn>model\n",}[name]
    for _ in range(25):
        prompt = [user(rng.choice(CONTENTS) or ""), assistant("yes"), user("yes")][:rng.choice([1, 1, 3])]
        rows.append((prompt, "".join(text for text, _ in pieces(prompt)) + reply, rng.choice(CONTENTS)))
    together = [text + (response or "") for _, text, response in rows]
    tokenizer = merging_tokenizer(template, eos, together) if merges else byte_tokenizer(template, eos)
    eos = tokenizer.convert_tokens_to_ids(eos)
    for prompt, text, response in rows:
        before = tokenizer(text, add_special_tokens=False).input_ids
        after = [*tokenizer(response or "", add_special_tokens=False).input_ids, eos]
        assert merges or before == bytes_to_ids(text, tokenizer)
        for form in [prompt, prompt[0]["content"]][:3 - len(prompt)]:
            ids, mask = sft.encode_row(pair(form, response), tokenizer, args_of(), [])
            assert ids == before + after
            assert list(mask) == [0] * len(before) + [int(bool((response or "").strip()))] * len(after)


def test_a_run_that_never_began_leaves_no_rows_to_the_next_one_in_its_folder(tmp_path):
    """One is refused for its last row, another for its held-out file; the flags are then changed."""
    files = [write_jsonl(tmp_path / "one.jsonl", pairs(4)),
             write_jsonl(tmp_path / "two.jsonl", pairs(3, "x"))]
    wrong = write_jsonl(tmp_path / "val.jsonl", [*pairs(2), {"prompt": 1}])
    complaint(tmp_path / "run", train_files=(wrong,))
    assert not (tmp_path / "run" / "data" / "train.arrow").exists()
    complaint(tmp_path / "run", train_files=files[:1], val_files=(wrong,))
    assert taken(tmp_path / "run") == plain_rows(range(4))
    counts, rows = train(tmp_path / "run", train_files=files[1:], val_files=files[:1])
    assert counts[:2] == (3, 4) and rows == plain_rows(range(3), "x")
    assert sorted(path.name for path in (tmp_path / "run" / "data").iterdir()) == [
        "train.arrow", "train.json", "val.arrow", "val.json"]


def test_a_run_that_goes_on_learns_from_the_rows_it_began_with(tmp_path):
    name = write_jsonl(tmp_path / "rows.jsonl", [*pairs(6), BLANK[0], {"prompt": 1}])
    flags = dict(train_files=(name,), on_bad_row="skip", checkpoint_every=1)
    train(tmp_path / "run", **flags)
    written_at = (tmp_path / "run" / "data" / "train.arrow").stat().st_mtime_ns
    again, rows = train(tmp_path / "run", **flags)
    assert (tmp_path / "run" / "data" / "train.arrow").stat().st_mtime_ns == written_at
    assert again == (5, 1, 0, 1, 1) and rows == plain_rows(range(6))
    assert any("resume" in line for line in log_lines(tmp_path / "run"))


@pytest.fixture
def owner(tmp_path, monkeypatch):
    """A working directory with owner/name, a folder that datasets takes for a data set."""
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    chats = [{"chat": [user(f"p{i}"), assistant(f"r{i}")], "number": i} for i in range(5)]
    for split, rows in (("train", pairs(5)), ("test", pairs(3, "t"))):
        table = pyarrow.Table.from_pylist([row | chat for row, chat in zip(rows, chats, strict=False)])
        pyarrow.parquet.write_table(table, folder / f"{split}-00000-of-00001.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: first\n  default: true\n  data_files:\n"
        "  - split: train\n    path: train-*\n  - split: test\n    path: test-*\n"
        "- config_name: second\n  data_files:\n  - split: train\n    path: test-*\n---\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def test_a_data_set_of_the_hub_is_read_by_split_and_configuration(owner):
    counts, rows = train(owner / "run", dataset="owner/name")
    assert counts == (4, 1, 0, 0, 0) and rows == plain_rows(range(5))
    counts, rows = train(owner / "both", dataset="owner/name:first", splits=("test", "train"))
    assert counts == (3, 5, 0, 0, 0) and rows == plain_rows(range(3), "t")
    assert taken(owner / "both", "val") == plain_rows(range(5))
    counts, rows = train(owner / "second", dataset="owner/name:second", val_ratio=0.0)
    assert counts == (3, 0, 0, 0, 0) and rows == plain_rows(range(3), "t")
    _, rows = train(owner / "chat", dataset="owner/name", messages_key="chat")
    tokenizer = sft.new_tokenizer(None)
    assert [ids for ids, _ in rows] == [bytes_to_ids(f"<bos> p{i} : r{i}<eos>", tokenizer) for i in range(5)]


@pytest.mark.parametrize(("flag", "value", "message"), [
    ("--response-key", "say", "row 1, column say: missing"),
    ("--messages-key", "chats", "row 1, column chats: missing"),
    ("--splits", "train val", "split val: .*"),
    ("--dataset", "owner/name:third", ".*third"), ("--dataset", "owner/names", ".*owner/names"),
    ("--dataset", ":first", ".*"), ("--dataset", "../name", ".*"), ("--dataset", "owner/broken", ".*")])
def test_what_is_wrong_with_a_data_set_of_the_hub_is_one_line(flag, value, message, owner, capsys):
    (owner / "owner" / "broken").mkdir()
    (owner / "owner" / "broken" / "train.parquet").write_bytes(b"PAR1 and then nothing")
    line = refused(capsys, owner / "run", "--dataset", "owner/name", flag, *value.split())
    name = value if flag == "--dataset" else "owner/name"
    split = value.split()[-1] if flag == "--splits" else "train"
    assert re.match(rf"error: --dataset {re.escape(name)}, (split {split}.*)?{message}", line), line
    assert len(line) < 700


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as reading a data set takes."""

    files, asked = {}, []

    def answer(self, data, status=200, **headers):
        self.send_response(status)
        for name, value in (headers | dict(Content_Length=len(data))).items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.asked.append(path)
        file = self.files.get(re.sub("/datasets/owner/name/resolve/[^/]+/", "", path))
        if file is not None:
            part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            first, last = (int(part[1]), int(part[2] or len(file) - 1)) if part else (0, len(file) - 1)
            data = file[first:last + 1]
            self.answer(data, 206 if part else 200, X_Repo_Commit="c" * 40, Accept_Ranges="bytes",
                        ETag=f'"{Path(path).name}"',
                        Content_Range=f"bytes {first}-{first + len(data) - 1}/{len(file)}")
        elif re.fullmatch(r"/api/datasets/owner/name/revision/[^/]+", path):
            siblings = [dict(rfilename=name) for name in self.files]
            self.answer(json.dumps(dict(id="owner/name", sha="c" * 40, siblings=siblings)).encode())
        elif re.fullmatch(r"/api/datasets/owner/name/tree/[^/]+/?", path):
            self.answer(json.dumps([dict(type="file", path=name, size=len(data), oid="0" * 40)
                                    for name, data in self.files.items()]).encode())
        else:
            missing = "EntryNotFound" if "owner/name/" in path else "RepoNotFound"
            self.answer(b"{}", 404, X_Error_Code=missing)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_a_data_set_comes_over_the_wire(owner):
    """To a process of its own, whose hub is a server of this one."""
    Hub.files = {path.name: path.read_bytes() for path in (owner / "owner" / "name").iterdir()}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = dict(HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}", HF_HUB_OFFLINE="0",
                       HF_HOME=str(owner / "hf"), NO_PROXY="127.0.0.1", HF_HUB_DISABLE_TELEMETRY="1")
    small = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", value)]
    try:
        run = process("sft.py", *small, "--dataset", "owner/name:first", "--splits", "train", "test",
                      "--run-dir", owner / "run", "--output-dir", owner / "model", env=environment)
        output = run.communicate(timeout=240)[0]
        assert run.returncode == 0, output
    finally:
        server.shutdown()
    assert taken(owner / "run") == plain_rows(range(5))
    assert taken(owner / "run", "val") == plain_rows(range(3), "t")
    assert any("resolve" in path and "train-00000" in path for path in Hub.asked)
    assert not list((owner / "hf").rglob("*.parquet"))  # read as it came, not downloaded first


def numbered(number, response=lambda i: f"answer {i}"):
    return pyarrow.Table.from_pylist([pair(f"p{i}", response(i)) for i in range(number)])


@pytest.mark.parametrize("damage", ["text", "page"])
def test_flipped_bits_of_a_parquet_file_are_found(damage, tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(numbered(40), path, compression="none", use_dictionary=False,
                                write_page_checksum=True, data_page_size=64, write_batch_size=4)
    data = bytearray(path.read_bytes())
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(0).column(1)
    # A letter of an answer; or what a page says of itself, after which it is no page of rows any more.
    where, bit = (data.index(b"answer 13"), 1) if damage == "text" else (column.data_page_offset + 1, 2)
    data[where] ^= bit
    path.write_bytes(data)
    assert "rows.parquet" in complaint(tmp_path / "run", train_files=(str(path),))


def test_rows_become_tokens_in_constant_memory(tmp_path, monkeypatch):
    """Rows of 20,000 letters in one row group, up to the last one, which is bad and ends the run."""
    letters, peaks = "".join(random.Random(0).choices("0123456789abcdef", k=21_200)), []

    def encode_row(row, *_):
        peaks[-1] = max(peaks[-1], pyarrow.total_allocated_bytes() - before)
        if row["prompt"] == f"p{number - 1}":
            raise sft.BadRow("is the last")
        return [7] * 5_000, [0] + [1] * 4_999

    monkeypatch.setattr(sft, "encode_row", encode_row)
    for number in (150, 600):
        path, before = tmp_path / f"{number}.parquet", pyarrow.total_allocated_bytes()
        pyarrow.parquet.write_table(numbered(number, lambda i: letters[i:i + 20_000]), path,
                                    compression="none", use_dictionary=False, write_batch_size=16)
        peaks.append(0)
        tracemalloc.start()
        said = complaint(tmp_path / "run", train_files=(str(path),), max_length=5_000)
        peaks[-1] += tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert f"row {number}, is the last" in said
    assert path.stat().st_size > 1.2e7 and peaks[1] < peaks[0] + 4e6, peaks


ROWS = ["--train-files", "{d}/rows.jsonl"]


@pytest.mark.parametrize(("flags", "message"), [
    ([*ROWS, "--dataset", "owner/name"], "--dataset owner/name: --train-files"),
    (["--val-files", "{d}/rows.jsonl"], r"--val-files \S+rows.jsonl: expected --train-files"),
    (["--dataset", "owner/name", "--val-files", "{d}/rows.jsonl"], r"--val-files \S+rows.jsonl"),
    (["--splits", "test"], "--splits test: expected --dataset"),
    (["--messages-key", "chat"], "--messages-key chat: expected --train-files or --dataset"),
    (["--train-files", "{d}/rows.JSONL"], r"--train-files \S+rows.JSONL: expected .* .parquet or .jsonl"),
    ([*ROWS, "--val-ratio", "1.1"], r"val_ratio\W.* less than or equal to 1"),
    ([*ROWS, "--truncation", "middle"], r"middle.*truncation.*error.*left.*right"),
    ([*ROWS, "--steps", "0", "--epochs", "0"], r"--steps 0"),
    ([*ROWS, "--chat-template", "{d}/no.jinja"], r"--chat-template \S+no.jinja: expected model, plain"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_flags_that_contradict_each_other_are_one_line(flags, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")  # of the box that tyro draws
    write_jsonl(tmp_path / "rows.jsonl", pairs(3))
    write_jsonl(tmp_path / "rows.JSONL", pairs(3))
    flags = [flag.replace("{d}", str(tmp_path)) for flag in flags]
    code = command_line("sft.py", *flags, "--run-dir", tmp_path / "run", "--output-dir", tmp_path / "model")
    error = " ".join(capsys.readouterr().err.split())
    assert code not in (0, None) and re.search(message, error) and "Traceback" not in error, error
    assert not list(tmp_path.glob("run/events*")) and not (tmp_path / "model").exists()
