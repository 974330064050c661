"""sft.py from rows to tokens, as hostile data would have it; which tokens is computed a second time."""

import functools
import itertools
import json
import math
import os
import random
import re
import tracemalloc

import datasets
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import envs
import sft
from envs import BadInput
from envs.splits import fingerprints, hold_out, is_repeated
from tests.run_folders import asked_once, log_lines, records, write_jsonl

SMALL = dict(steps=2, batch_size=2, eval_every=0, checkpoint_every=2, log_every=1, warmup_steps=0,
             max_length=300)
COUNTS = ("rows", "held_out", "truncated", "dropped")


def train(folder, **flags):
    """A run in this process. -> what it logged of its data, and the rows that it took."""
    with asked_once(sft):
        sft.main(sft.Args(**SMALL | dict(run_dir=str(folder)) | flags))
    for line in records(folder):
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))
    return tuple(records(folder)[0][f"data/{name}"] for name in COUNTS), taken(folder)


def taken(folder, side="train"):
    """[(ids, mask)] of a run folder's data, without sft.py."""
    rows = datasets.Dataset.from_file(str(folder / "data" / f"{side}.arrow"))
    return [(row["ids"], [int(m) for m in row["mask"]]) for row in rows]


def complaint(folder, **flags):
    """The error that a run ends with before it begins."""
    with pytest.raises(BadInput) as error:
        train(folder, **flags)
    assert not (folder / "checkpoints" / "step_000002").exists() and "\n" not in str(error.value)
    return str(error.value)


def pairs(number, name=""):
    return [{"prompt": f"{name}p{i}", "response": f"{name}r{i}"} for i in range(number)]


def pair(prompt, response):
    return {"prompt": prompt, "response": response}


def say(role, content, **more):
    return {"role": role, "content": content} | more


system, user, assistant = (functools.partial(say, role) for role in ("system", "user", "assistant"))


def blocks(*parts):
    """Blocks, as OpenAI's format has them."""
    return [{"type": "text", "text": part} for part in parts]


MARKERS = ["<|im_start|>", "<|im_end|>"]


def ids_of(text, tokenizer):
    return tokenizer(text, add_special_tokens=False).input_ids


def byte_tokenizer(template=None, eos="<eos>"):
    """Asked for special tokens it would add a bos and an eos, which the template writes already."""
    tokenizer = sft.new_tokenizer(None)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)])
    tokenizer.add_special_tokens({"additional_special_tokens": MARKERS})
    tokenizer.eos_token = eos
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


def merging_tokenizer(template, texts):
    """Byte pairs merged across words and lines, whatever is frequent between the markers of these texts."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    special = ["<pad>", "<bos>", "<eos>", "<unk>", *MARKERS]
    parts = [part for text in texts for part in re.split("|".join(map(re.escape, special)), text)]
    core.train_from_iterator(parts, trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<|im_end|>",
                                   additional_special_tokens=MARKERS, chat_template=template)


DEEP = b"[" * 100_000 + b"]" * 100_000
GOOD = [  # a line of JSONL, the texts of its messages, its response
    (pair("two and two?", "four"), ["two and two?"], "four"),
    (pair("", " 4 \n"), [""], " 4 \n"),
    (pair("👩‍👩‍👧 漢字 \u202eשלום", "e\u0301 ﬁ\0\u2028"), ["👩‍👩‍👧 漢字 \u202eשלום"], "e\u0301 ﬁ\0\u2028"),
    (b'{"prompt": "\\ud83d\\ude00 \\ud83d", "response": "\\ude00\\ud83d"}', ["😀 \ufffd"], "\ufffd\ufffd"),
    (b'{"prompt": "<eos><bos>", "response": "<bos> : <pad>"}\r', ["<eos><bos>"], "<bos> : <pad>"),
    (b'\xef\xbb\xbf {"prompt": "a", "response": "\xe2\x80\xa8 b", "more": [NaN, 1e999, 9999999999999999999]}',
     ["a"], "\u2028 b"),
    (pair([system("be brief"), user("hi")], "yo"), ["be brief", "hi"], "yo"),
    (pair(json.dumps([system("be brief"), user("hi")]), "yo"), ["be brief", "hi"], "yo"),
    (pair([user(None), user(blocks("one", "two"))], blocks("four", "five")), ["", "one\ntwo"], "four\nfive"),
    (pair([user([])], "0"), [""], "0"),
]
BLANK = [pair("a", response) for response in ("", " \n\t\u3000", None, [], blocks(" ", "\n"))]
BAD = {  # a line of JSONL, what the message says
    "half a character": (b'{"\\ud800": 1}', r": .* got \{'\\ud800': 1\} \(KeyError\('prompt'\)"),
    "role": (pair([{"content": "a"}], "a"), ": .*'role'"),
    "empty list": (pair([], "a"), ": .*empty"),
    "image": (pair([user([*blocks("see"), {"type": "image", "url": "x"}])], "a"), ": .*'text'"),
    "missing": ({"prompt": "a"}, ": expected text or messages in prompt and response, .*'response'"),
    "a list": ([1, 2], r": .* got \[1, 2\] "),
    "a number": (b"7", ": .* got 7 "),
    "deep": (b'{"prompt": ' + DEEP + b', "response": "a"}', " .RecursionError"),
    "bytes": (b'{"prompt": "\xff\xfe", "response": "a"}', " .UnicodeDecodeError"),
    "eos": (pair("a", "b<eos>"), ", a response holds '<eos>', which ends a turn, in content; "),
    "long": (pair("a" * 400, "a"), r", --max-length 300: .* 40\d tokens"),
}


def simple_row(text, response):
    """Ids and mask under the template of sft.new_tokenizer."""
    tokenizer = sft.new_tokenizer(None)
    prompt = ids_of(f"<bos>{text} : ", tokenizer)
    ids = [*ids_of(response, tokenizer), tokenizer.eos_token_id]
    return prompt + ids, [0] * len(prompt) + [1] * len(ids)


def plain_rows(numbers, name=""):
    """Those of pairs()."""
    return [simple_row(f" {name}p{i}", f"{name}r{i}") for i in numbers]


def test_rows_of_every_form_are_learned_or_dropped_as_they_should_be(tmp_path):
    good = [(row, simple_row("".join(" " + text for text in texts), said)) for row, texts, said in GOOD]
    lines = good + [(row, None) for row in (*BLANK, b" \t", b"")]
    random.Random(0).shuffle(lines)
    half = len(lines) // 2
    files = [write_jsonl(tmp_path / name, [row for row, _ in part])
             for name, part in (("one.jsonl", lines[:half]), ("two.jsonl", lines[half:]))]

    flags = dict(train_files=tuple(files), val_ratio=0.3)
    counts, rows = train(tmp_path / "run", **flags)
    assert rows == [expected for _, expected in lines if expected]
    assert counts == (len(GOOD) - 3, 3, 0, len(BLANK))

    # A run that goes on learns from the rows it began with.
    data = tmp_path / "run" / "data" / "train.arrow"
    written_at = data.stat().st_mtime_ns
    assert train(tmp_path / "run", **flags) == (counts, rows) and data.stat().st_mtime_ns == written_at
    assert any("resume" in line for line in log_lines(tmp_path / "run"))


BROKEN = {  # a file, its rows, what the message says behind its name
    "rows.txt": (pairs(3), r": cannot be read .*expected a \.jsonl, \.json or \.parquet file"),
    "column.parquet": ([{"prompt": "a"}] * 4, ".*no column response; it has prompt"),
    "type.parquet": ([pair("a", 0.5)] * 4, ", row 1: .*0.5"),
    "half.parquet": (pairs(60), ": cannot be read .*footer"),
    "empty.jsonl": ([], ": expected rows to learn from and rows to hold out .*, got 0 and 0; .*dropped': 0"),
    **{f"{case}.jsonl": ([*pairs(3), b"", line, *pairs(2)], f"(,|: cannot be read at) row 5{message}")
       for case, (line, message) in BAD.items()},
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_with_a_file_is_one_line_with_its_name_and_row(name, tmp_path):
    (rows, message), path = BROKEN[name], tmp_path / name
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        write_jsonl(path, rows)
    if name == "half.parquet":
        os.truncate(path, path.stat().st_size // 2)
    line = complaint(tmp_path / "run", train_files=(str(path),))
    where = re.escape(f"{'' if name == 'empty.jsonl' else '--train-files '}{path}")
    assert re.match(f"{where}{message}", line) and len(line) < 500 + len(str(path)), line


def test_rows_of_parquet_have_the_keys_that_they_were_written_with(tmp_path):
    """Arrow gives all calls of tools the arguments of any; datasets writes JSON where types are mixed."""
    rows = [dict(m=m, t=m) for m in ([dict(call=dict(a=1))], [dict(call=dict(b=[dict(c="d")]))], None)]
    t = pyarrow.array([json.dumps(row["t"]) for row in rows], pyarrow.json_())
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows).set_column(1, "t", t), tmp_path / "a.parquet")
    assert [row for _, row in envs.read_rows(str(tmp_path / "a.parquet"), "rows")] == rows


def test_shares_held_out_are_of_rows_that_can_be_learned(tmp_path):
    name = write_jsonl(tmp_path / "rows.jsonl", [*BLANK, *pairs(10)])
    for ratio, held_out in ((0.0, 0), (0.01, 1), (1.0, 9)):
        folder = tmp_path / str(ratio)
        counts, rows = train(folder, train_files=(name,), val_ratio=ratio)
        assert counts == (10 - held_out, held_out, 0, len(BLANK)) and rows == plain_rows(range(10))
        assert ("val/loss" in records(folder)[0]) == (held_out > 0)
    counts, _ = train(tmp_path / "few", train_files=(name,), val_ratio=0.5, eval_tasks=3)
    assert counts[:2] == (7, 3)  # none that would be neither learned nor measured


def test_a_long_row_is_refused_or_loses_an_end_and_its_first_token_is_never_learned(tmp_path):
    sizes = ((5, 7), (6, 7), (40, 2), (40, 30), (0, 40), (13, 1), (14, 3), (11, 0), (60, 0))
    name = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p" * p, "response": "r" * r} for p, r in sizes])
    whole = [simple_row(" " + "p" * p, "r" * r) for p, r in sizes]
    whole = [(ids, mask if r else [0] * len(mask)) for (ids, mask), (_, r) in zip(whole, sizes, strict=True)]
    assert len(whole[0][0]) == 18 and sum(len(ids) > 18 for ids, _ in whole) == 7

    flags = dict(train_files=(name,), max_length=18, val_ratio=0.0)
    for side, kept in (("left", slice(-18, None)), ("right", slice(0, 18))):
        expected = [(ids[kept], [0, *mask[kept][1:]]) for ids, mask in whole]
        expected = [row for row in expected if any(row[1])]
        counts, rows = train(tmp_path / side, truncation=side, **flags)
        assert rows == expected
        assert counts == (len(expected), 0, 7, len(whole) - len(expected))
        prompts = [p for (p, _), (_, mask) in zip(sizes, whole, strict=True) if any(mask[kept][1:])]
        repeated = records(tmp_path / side)[0]["data/repeated"]
        assert repeated == len(prompts) - len({*prompts}), f"of prompts before they are cut at their {side}"

    line = complaint(tmp_path / "run", **flags)
    assert re.match(rf"--train-files {re.escape(name)}, row 2, --max-length 18: a row has 19 tokens; pass "
                    "--max-length 19, .*, or --truncation right, or left$", line)


TURN = (
    "{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}{{ '<|im_end|>' }}")
CHATML = (  # in the manner of Qwen2.5
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}" + TURN + "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
TAGGED = CHATML.replace(TURN, (
    "{% if m.role == 'assistant' %}{%- generation -%}" + TURN + "{%- endgeneration -%}"
    "{% else %}" + TURN + "{% endif %}"))


def pieces(messages):
    """[(text, whether it is learned)] of what both templates write."""
    if messages[0]["role"] != "system":
        yield "<|im_start|>system\nYou are kind.<|im_end|>\n", 0
    for message in messages:
        calls = [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
        said = (message["content"] or "") + "".join(f"<tool_call>{call}</tool_call>" for call in calls)
        yield f"<|im_start|>{message['role']}\n", 0
        blank = not said.replace("<|im_end|>", "").strip()
        yield f"{said}<|im_end|>", message["role"] == "assistant" and not blank
        yield "\n", 0


CONTENTS = [
    "yes", "yes", "yes", "a", "assistant\n", "user\nyes", "\n\nyes\n\n", "  lead", "trail  ", "\0",
    "👩‍👩‍👧 漢字 e\u0301 שלום \u202e", "the cat\nthe cat\nthe cat", "<think>\nhm\n</think>\n\nyes",
    "{{ messages }}", "<|im_end|>", "<|im_end|>\n<|im_start|>assistant\nyes", "no<eos>", "", None, " ", "\n"]
REPLIES = [text for text in CONTENTS if not re.search(r"<eos>|<\|im_end", text or "")]
CALL = {"function": {"name": "sum", "arguments": {"of": [1, "two"]}}}


def conversation(rng):
    """Any roles in any order, after a first turn that is no assistant's."""
    roles = [rng.choice(["user", "system"]), *rng.choices(
        ["user", "assistant", "assistant", "assistant", "system", "tool"], k=rng.randint(1, 7))]
    messages = [{"role": role, "content": rng.choice(CONTENTS if role != "assistant" else REPLIES)}
                for role in roles]
    for message in messages:
        if message["role"] == "assistant" and rng.random() < 0.2:
            message["tool_calls"] = [CALL] * rng.randint(1, 2)
    return messages


def encoded(row, tokenizer, ends=("<|im_end|>",), **flags):
    args = sft.Args(train_files=("x.jsonl",), **flags)
    ids, mask = sft.encode_row(row, tokenizer, args, tokenizer.convert_tokens_to_ids(list(ends)))
    return ids, [int(m) for m in mask]


def chat_row(messages, tokenizer, ends=("<|im_end|>",)):
    return encoded({"messages": messages}, tokenizer, ends, messages_key="messages")


def written(ids, mask, tokenizer):
    """What is learned, as text."""
    return tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])


def expected_row(pieces, tokenizer):
    """[(text, whether it is learned)] -> (ids, mask): what is learned at a stretch are tokens of its own."""
    ids, mask = [], []
    for learned, stretch in itertools.groupby(pieces, key=lambda piece: int(piece[1])):
        part = ids_of("".join(text for text, _ in stretch), tokenizer)
        ids += part
        mask += [learned] * len(part)
    return ids, mask


@pytest.mark.parametrize("merges", [False, True], ids=["bytes", "merges"])
@pytest.mark.parametrize("template", [CHATML, TAGGED], ids=["untagged", "tagged"])
def test_what_is_learned_of_a_conversation_is_what_the_assistant_wrote(template, merges):
    """No token spans an answer's beginning, as none does at sampling, though in the whole text some would."""
    rng, count, spanning = random.Random(1), 0, 0
    conversations = [conversation(rng) for _ in range(60)]
    texts = ["".join(text for text, _ in pieces(messages)) for messages in conversations]
    tokenizer = merging_tokenizer(template, texts) if merges else byte_tokenizer(template, "<|im_end|>")

    for messages, text in zip(conversations, texts, strict=True):
        found = chat_row(messages, tokenizer, ["<|im_end|>", "<eos>"])
        assert found == expected_row(pieces(messages), tokenizer), (messages, written(*found, tokenizer))
        count += any(found[1])
        spanning += found[0] != ids_of(text, tokenizer)

        # As a prompt, which a response follows.
        response = rng.choice(REPLIES)
        before = ids_of(text + "<|im_start|>assistant\n", tokenizer)
        after = [*ids_of(response or "", tokenizer), tokenizer.eos_token_id]
        flag = int(bool((response or "").strip()))
        assert encoded(pair(messages, response), tokenizer) == (
            before + after, [0] * len(before) + [flag] * len(after))
    assert count > 25 and (spanning > 15 or not merges), (count, spanning)


def test_no_space_is_put_before_a_reply_or_after_its_end():
    """Where a tokenizer begins a text with one, as those after Llama 2's do."""
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted({*"\u2581:abcd"}))}, []))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", chat_template=(
        "{% for m in messages %}{{ m.content }}:{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"))
    ids, mask = chat_row([user("a"), assistant("b"), user("c"), assistant("d a")], tokenizer, ["<eos>"])
    assert tokenizer.convert_ids_to_tokens(ids) == [*"\u2581a:b:", "<eos>", *"c:d\u2581a:", "<eos>"]
    assert mask == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1]


def test_conversations_of_files_are_learned_dropped_or_refused_as_they_should_be(tmp_path):
    (tmp_path / "chat.jinja").write_text(CHATML.replace("<|im_end|>", "<eos>"))
    good = [[user("a"), assistant("b")], [user(None), assistant("b", name="me"), user("c"), assistant("d\n")],
            [system("s"), user("é👩"), assistant("é👩")], [user("q"), assistant(None), assistant("x")]]
    empty = [[user("a")], [user("a"), assistant(None)], [user("a"), assistant(" \n"), user("b")]]
    rows = [{"chat": chat} for chat in (*good, *empty)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chat.parquet")
    files = (write_jsonl(tmp_path / "chat.jsonl", rows),
             write_jsonl(tmp_path / "text.jsonl", [{"chat": json.dumps(chat)} for chat in good]),
             str(tmp_path / "chat.parquet"))

    flags = dict(messages_key="chat", val_ratio=0.0, chat_template=str(tmp_path / "chat.jinja"))
    counts, taken_rows = train(tmp_path / "run", train_files=files, **flags)
    parts = [[(text.replace("<|im_end|>", "<eos>"), flag) for text, flag in pieces(chat)] for chat in good]
    assert taken_rows == [expected_row(part, sft.new_tokenizer(None)) for part in parts] * 3
    assert counts == (12, 0, 0, 6)

    for wrong in ([], None, 1, "no", {"role": "user"}, [["a"]], json.dumps([1]), "[" * 100_000):
        name = write_jsonl(tmp_path / "wrong.jsonl", [*rows, {"chat": wrong}])
        line = complaint(tmp_path / "wrong", train_files=(name,), **flags)
        assert f"{name}, row {len(rows) + 1}: expected text or messages in chat, got {{'chat': " in line


@pytest.mark.parametrize(("words", "said"), [
    ("{{ raise_exception('no such role') }}", "no such role"), ("{{ m.more.a.b }}", "attribute"),
    ("{{ 'a' + 1 }}", "TypeError")])
@pytest.mark.parametrize("form", ["pair", "chat"])
def test_whatever_a_template_stumbles_over_is_a_bad_row(words, said, form, tmp_path):
    """Fields beyond role and content are as the data has them, and a template takes them for granted."""
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% if m.more %}" + words
                        + "{% endif %}<eos>{% endfor %}")
    messages = [user("a", more=1)]
    row, flags = {"pair": (pair(messages, "b"), {}),
                  "chat": ({"m": [*messages, assistant("b")]}, dict(messages_key="m"))}[form]
    name = write_jsonl(tmp_path / "rows.jsonl", [row])
    line = complaint(tmp_path / "run", train_files=(name,), chat_template=str(template), **flags)
    assert re.match(f"--train-files {re.escape(name)}, row 1: .*{said}", line) and len(line) < 600, line


QWEN3 = (  # of a reply that others follow the thoughts are dropped
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ m.content if loop.last else m.content.split('</think>')[-1].lstrip('\n') }}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def test_a_template_that_drops_thoughts_is_refused_where_it_does_and_nowhere_else():
    tokenizer = byte_tokenizer(QWEN3, "<|im_end|>")
    thoughtful, plain = [user("2?"), assistant("<think>hm</think>\ntwo")], [user("1?"), assistant("one")]
    with pytest.raises(BadInput, match="message 2.*generation"):
        chat_row([*thoughtful, *plain], tokenizer)
    for messages in (thoughtful, [*plain, *thoughtful], [user("1?"), *thoughtful]):
        replies = [message["content"] for message in messages if message["role"] == "assistant"]
        assert written(*chat_row(messages, tokenizer), tokenizer) == "".join(
            reply + "<|im_end|>" for reply in replies)


TAGS = ("{{% for m in messages %}}{{% if m.role == 'assistant' %}}{}"
        "{{% else %}}{{{{ m.content }}}}{{% endif %}}{{% endfor %}}")


@pytest.mark.parametrize(("template", "messages", "learned"), [
    # What the tags enclose, up to where sampling stops, and nothing after it.
    (TAGS.format("{% generation %}{{ m.content }}<eos>👩{% endgeneration %}"),
     [user("no"), assistant("é"), user("no")], "é<eos>"),
    (TAGS.format("{{ m.content }}<eos>"), [assistant("é"), user("no"), assistant("b")], "é<eos>b<eos>"),
    (TAGS.format("{%- generation -%}{{ m.content }}<eos>{%- endgeneration -%}"),
     [user("a"), assistant(" b"), user("no"), assistant("c")], " b<eos>c<eos>"),
    (TAGS.format("<think></think>{{ m.content }}<eos>"), [assistant("b"), user("no"), assistant(" ")],
     "<think></think>b<eos>"),
    # "Assistant: " is what the reply follows, and a space follows its eos.
    ("{% for m in messages %}{{ m.role + ': ' + m.content + '<eos> ' }}{% endfor %}"
     "{% if add_generation_prompt %}assistant: {% endif %}",
     [user(" a "), assistant(" b "), user("c"), assistant("d e")], " b <eos>d e<eos>"),
], ids=["ends", "first", "leading-space", "blank", "space-before"])
def test_answers_are_learned_to_the_letter(template, messages, learned):
    tokenizer = byte_tokenizer(template)
    assert written(*chat_row(messages, tokenizer, ["<eos>"]), tokenizer) == learned


@pytest.mark.parametrize(("template", "message"), [
    # Another token than the tokenizer's eos is none either.
    (CHATML.encode(), r"chat\.jsonl, row 1.* eos "), (TAGGED.encode(), r"chat\.jsonl, row 1.* eos "),
    (b"", "--chat-template"), (b"\xff\xfe", "--chat-template"), (None, "--chat-template"),
    (b"{% for m in messages %}{{ m.content ", "--chat-template")])
def test_a_template_that_ends_no_reply_is_refused_and_one_that_is_none(template, message, tmp_path):
    name = write_jsonl(tmp_path / "chat.jsonl", [{"chat": [user("<eos>"), assistant("b")]}] * 3)
    path = tmp_path / "chat.jinja"
    if template is not None:
        path.write_bytes(template)
    line = complaint(tmp_path / "run", train_files=(name,), messages_key="chat", chat_template=str(path))
    assert re.search(message, line), line


def test_a_run_that_never_began_leaves_no_rows_to_the_next_one_in_its_folder(tmp_path):
    """One is refused for its last row, another for its held-out file; the flags are then changed."""
    one, two = (write_jsonl(tmp_path / f"{name}.jsonl", pairs(4, name)) for name in ("one", "two"))
    wrong = write_jsonl(tmp_path / "val.jsonl", [*pairs(2), {"prompt": 1}])
    complaint(tmp_path / "run", train_files=(wrong,))
    assert not (tmp_path / "run" / "data" / "train.arrow").exists()
    complaint(tmp_path / "run", train_files=(one,), val_files=(wrong,))
    assert taken(tmp_path / "run") == plain_rows(range(4), "one")
    counts, rows = train(tmp_path / "run", train_files=(two,), val_files=(one,))
    assert counts[:2] == (4, 4) and rows == plain_rows(range(4), "two")
    assert taken(tmp_path / "run", "val") == plain_rows(range(4), "one")


@pytest.fixture
def owner(tmp_path, monkeypatch):
    """A working directory with owner/name, a folder that datasets takes for a data set."""
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    for split, rows in (("train", pairs(5)), ("test", pairs(3, "t"))):
        rows = [row | {"chat": [user(row["prompt"]), assistant(row["response"])], "more": 1} for row in rows]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows),
                                    folder / f"{split}-00000-of-00001.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: first\n  default: true\n  data_files:\n"
        "  - split: train\n    path: train-*\n  - split: test\n    path: test-*\n"
        "- config_name: second\n  data_files:\n  - split: train\n    path: test-*\n---\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


@pytest.mark.slow
def test_a_data_set_of_the_hub_is_read_by_split_and_configuration(owner):
    assert train(owner / "run", dataset="owner/name") == ((4, 1, 0, 0), plain_rows(range(5)))

    found = train(owner / "both", dataset="owner/name:first", splits=("test", "train"))
    assert found == ((3, 5, 0, 0), plain_rows(range(3), "t"))
    assert taken(owner / "both", "val") == plain_rows(range(5))

    found = train(owner / "chat", dataset="owner/name:second", val_ratio=0.0, messages_key="chat")
    assert found == ((3, 0, 0, 0), plain_rows(range(3), "t"))

    # Streamed, not prepared first.
    assert not [path for path in (owner / "cache").rglob("*") if path.suffix in (".arrow", ".parquet")]


@pytest.mark.parametrize(("flags", "message"), [
    (dict(messages_key="chats"), "owner/name, split train, row 1: .*'chats'"),
    (dict(splits=("train", "val")), "owner/name, split val: "), (dict(dataset="owner/names"), "owner/names,"),
    (dict(dataset="owner/name:third"), "owner/name:third, .*third")], ids=str)
def test_what_is_wrong_with_a_data_set_of_the_hub_is_one_line(flags, message, owner):
    line = complaint(owner / "run", **dict(dataset="owner/name") | flags)
    assert re.match(f"--dataset {message}", line) and len(line) < 700, line


@pytest.mark.parametrize("damage", ["text", "page"])
def test_flipped_bits_of_a_parquet_file_are_found(damage, tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(pairs(40)), path, compression="none",
                                use_dictionary=False, write_page_checksum=True, data_page_size=64,
                                write_batch_size=4)
    data = bytearray(path.read_bytes())
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(0).column(1)
    # A letter of a response; or what a page says of itself, after which it is no page of rows any more.
    where, bit = (data.index(b"r13"), 1) if damage == "text" else (column.data_page_offset + 1, 2)
    data[where] ^= bit
    path.write_bytes(data)
    assert "rows.parquet" in complaint(tmp_path / "run", train_files=(str(path),))


@pytest.mark.slow
def test_rows_become_tokens_in_constant_memory(tmp_path, monkeypatch):
    """Rows of 20,000 letters in one row group, up to the last one, which is bad and ends the run."""
    letters, peaks = "".join(random.Random(0).choices("0123456789abcdef", k=21_200)), []

    def encode_row(row, *_):
        peaks[-1] = max(peaks[-1], pyarrow.total_allocated_bytes() - before)
        if row["prompt"] == f"p{number - 1}":
            raise BadInput("is the last")
        return [7] * 5_000, [0] + [1] * 4_999

    monkeypatch.setattr(sft, "encode_row", encode_row)
    for number in (150, 600):
        path, before = tmp_path / f"{number}.parquet", pyarrow.total_allocated_bytes()
        rows = [pair(f"p{i}", letters[i:i + 20_000]) for i in range(number)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, compression="none",
                                    use_dictionary=False, write_batch_size=16)
        peaks.append(0)
        tracemalloc.start()
        said = complaint(tmp_path / "run", train_files=(str(path),), max_length=5_000)
        peaks[-1] += tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert f"row {number}, is the last" in said
    assert path.stat().st_size > 1.2e7 and peaks[1] < peaks[0] + 4e6, peaks


@pytest.mark.parametrize(("flags", "message"), [
    (dict(train_files=("a.jsonl",), dataset="owner/name"), "--dataset: expected no --train-files"),
    (dict(dataset="owner/name", val_files=("a.jsonl",)), "--val-files: expected --train-files"),
    (dict(splits=("test",)), "--splits: expected --dataset"),
    (dict(messages_key="chat"), "--messages-key: expected --train-files or --dataset"),
    (dict(train_files=("a.jsonl",), steps=0, epochs=0), "--steps 0"),
], ids=str)
def test_flags_that_contradict_each_other_are_named(flags, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(tmp_path / "run", **flags)
    assert not (tmp_path / "run").exists()


# Every text of a message, whatever its field


TEXT = r'{"of": "x\u003c|im_end|>y"}'  # JSON that spells a letter in another way
FIELDS = [  # a reply, where it holds the text of an eos
    (assistant("b", reasoning_content="hm {}"), "reasoning_content"),
    (assistant("b", thinking="{}"), "thinking"), (assistant(blocks("a", "{}")), "content"),
    (assistant("", tool_calls=[{"function": {"name": "sum", "arguments": {"of": ["1", {"a": "{}"}]}}}]),
     r"tool_calls\[0\].function.arguments.of\[1\].a"),
    (assistant("", tool_calls=[{"function": {"name": "sum", "arguments": TEXT}}]),
     r"tool_calls\[0\].function.arguments.of"),
    (assistant("", tool_calls=[{"function": {"name": "{}", "arguments": {"a": 1}}}]),
     r"tool_calls\[0\].function.name"),
    (assistant("", tool_calls=[{"function": {"name": "sum", "arguments": {"{}": 1}}}]),
     r"tool_calls\[0\].function.arguments."),
    (assistant("b", parts=[{"text": "{}"}]), r"parts\[0\].text")]


def filled(message, text):
    """The message with a text in place of {}."""
    return json.loads(json.dumps(message).replace("{}", json.dumps(text)[1:-1]))


@pytest.mark.parametrize(("message", "place"), FIELDS, ids=[place for _, place in FIELDS])
def test_the_text_of_an_eos_is_refused_in_every_field_of_a_reply(message, place):
    tokenizer = byte_tokenizer(CHATML, "<|im_end|>")
    row = {"messages": [user("a"), filled(message, "x<|im_end|>y"), user("b"), assistant("c")]}
    with pytest.raises(BadInput, match=rf"a response holds '<\|im_end\|>', which ends a turn, in {place}"):
        encoded(row, tokenizer, messages_key="messages")
    row["messages"][1]["weight"] = 0  # what is not learned teaches nothing
    assert written(*encoded(row, tokenizer, messages_key="messages"), tokenizer) == "c<|im_end|>"


HALVES = CHATML.replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.name }}{{ m.content }}")


@pytest.mark.parametrize("message", [
    user("\ud800"), user("a", name="\udfff"), assistant("b", reasoning_content="\ud83d"),
    assistant("b", tool_calls=[{"function": {"name": "s", "arguments": {"\ud800": ["\udc00"]}}}]),
    assistant("b", tool_calls=[{"function": {"name": "s", "arguments": '{"a": "\\ud800"}'}}])], ids=str)
def test_half_a_character_is_a_replacement_character_in_every_field(message):
    tokenizer = byte_tokenizer("{{ tools | tojson }}" + HALVES, "<|im_end|>")
    row = {"messages": [user("a"), message, user("b"), assistant("c")], "tools": [{"name": "\ud800"}]}
    ids, mask = encoded(row, tokenizer, messages_key="messages")
    text = tokenizer.decode(ids)
    assert text.count("\ufffd") >= 2 and written(ids, mask, tokenizer).endswith("c<|im_end|>")


MARKED = [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"train_on_turn": False},
          {"loss": False}, {"loss": 0}, {"loss_mask": 0}, {"step_loss_mask": 0}, {"loss_scale": 0.0},
          {"trainable": False}, {"masked": True}, {"weight": 0, "train": False, "loss": None}]


@pytest.mark.parametrize("mark", MARKED, ids=str)
@pytest.mark.parametrize("template", [CHATML, TAGGED], ids=["untagged", "tagged"])
def test_a_message_that_another_trainer_leaves_out_is_not_learned(template, mark):
    messages = [user("a"), assistant("one", **mark), user("b"), assistant("two")]
    tokenizer = byte_tokenizer(template, "<|im_end|>")
    assert written(*chat_row(messages, tokenizer), tokenizer) == "two<|im_end|>"
    messages[0] |= mark  # others are never learned
    opposite = {name: not value for name, value in mark.items() if value is not None}
    messages[3] |= opposite
    assert written(*chat_row(messages, tokenizer), tokenizer) == "two<|im_end|>"


@pytest.mark.parametrize(("role", "mark", "says"), [
    ("assistant", {"weight": 0.5}, "the weight of a message: expected 0 or 1, got 0.5"),
    ("assistant", {"loss": "no"}, "the loss of a message: expected 0 or 1, got 'no'"),
    ("assistant", {"loss_scale": 2.0}, "the loss_scale of a message: expected 0 or 1, got 2.0"),
    ("assistant", {"loss_mask": [0, 1]}, r"the loss_mask of a message: expected 0 or 1, got \[0, 1\]"),
    ("assistant", {"train_detail": [{"begin_offset": 0}]}, "the train_detail of a message: expected none"),
    ("assistant", {"weight": 1, "train": False}, "weight and train of a message: expected that they agree"),
    ("user", {"loss": True}, "the loss of a message of role 'user': expected True of assistants alone")])
def test_a_mark_that_cannot_be_kept_is_refused(role, mark, says):
    messages = [user("a"), assistant("one"), say(role, "x", **mark), assistant("two")]
    with pytest.raises(BadInput, match=says):
        chat_row(messages, byte_tokenizer(CHATML, "<|im_end|>"))


CHANNELS = (  # gpt-oss
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant"
    "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
    "<|channel|>final<|message|>{{ m.content }}<eos>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}")


@pytest.mark.parametrize("form", ["pair", "chat"])
@pytest.mark.parametrize("content", [
    "", None, " \n", [], "<|channel|>final<|message|>", "<think>\n\n</think>"])
def test_a_blank_reply_is_not_learned_whatever_the_template_writes_around_it(content, form):
    tokenizer = byte_tokenizer(CHANNELS, "<eos>")
    row = {"pair": pair("a", content), "chat": {"messages": [user("a"), assistant(content)]}}[form]
    _, mask = encoded(row, tokenizer, ["<eos>"], messages_key="messages" if form == "chat" else "")
    assert not any(mask)
    if form == "chat":
        row["messages"][1]["thinking"] = "hm"
        assert "hm" in written(*chat_row(row["messages"], tokenizer, ["<eos>"]), tokenizer)


@pytest.mark.parametrize("tags", [("", ""), ("{% generation %}", "{% endgeneration %}")])
def test_of_two_terminators_the_first_is_learned(tags):
    """Sampling stops there."""
    begin, end = tags
    tokenizer = byte_tokenizer(
        "{% for m in messages %}<|im_start|>{{ m.role }}: {% if m.role == 'assistant' %}" + begin
        + "{{ m.content }}<|im_end|>\n<eos>" + end + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}", "<eos>")
    ends = ["<|im_end|>", "<eos>"]
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    ids, mask = chat_row(messages, tokenizer, ends)
    assert written(ids, mask, tokenizer) == "b<|im_end|>d<|im_end|>"
    assert tokenizer.decode(ids).count("<eos>") == 2
    if not begin:
        assert written(*encoded(pair("a", "b"), tokenizer, ends), tokenizer) == "b<|im_end|>"


def test_a_template_that_writes_an_eos_in_the_middle_is_refused():
    template = CHATML.replace("{{ m.content }}", "{{ m.thinking }}<|im_end|>{{ m.content }}")
    with pytest.raises(BadInput, match="--chat-template: it writes 'b' between two eos of a turn"):
        chat_row([user("a"), assistant("b", thinking="hm")], byte_tokenizer(template, "<|im_end|>"))


# Rows held out


def prints_of(rows):
    """Columns of the fingerprints of rows (prompt, response)."""
    rows = [fingerprints([*p.encode(), *r.encode()], len(p), p) for p, r in rows]
    return {name: [row[name] for row in rows] for name in ("prompt", "row")}


@pytest.mark.parametrize("sizes", [[1] * 40, [3] * 12, [1, 9, 2, 2, 30, 5], [20, 20], [8] * 5, [30, 9, 7]],
                         ids=str)
def test_rows_of_one_prompt_are_learned_or_held_out_together(sizes):
    rows = [(f"p{i}", f"r{k}") for i, size in enumerate(sizes) for k in range(size)]
    for seed in range(5):
        learned, held, repeats = hold_out(prints_of(rows), 6, seed)
        assert sorted([*learned, *held]) == [*range(len(rows))] and repeats == len(rows) - len(sizes)
        assert {rows[i][0] for i in learned}.isdisjoint(rows[i][0] for i in held)
        assert 1 <= len(held) <= 6 or len(held) == min(sizes) > 6
        assert [*learned] == [*hold_out(prints_of(rows), 6, seed)[0]]
    if sizes[0] == 1:
        assert len({tuple(hold_out(prints_of(rows), 6, seed)[1]) for seed in range(5)}) > 1
        assert not len(hold_out(prints_of(rows), 0, 1)[1])  # where none is asked for
    assert not len(hold_out(prints_of([("p", "r")] * 5), 2, 1)[1])  # they are one


@pytest.mark.parametrize("more", [[], [("p", "r")] * 4])
@pytest.mark.parametrize("prompt", ["", "q"])
def test_rows_without_a_prompt_or_of_one_alone_are_told_apart_by_what_they_say(prompt, more):
    if prompt and more:
        return
    rows = [(prompt, f"r{k // 2}") for k in range(40)] + more
    learned, held, repeats = hold_out(prints_of(rows), 9, 1)
    assert 7 <= len(held) <= 9 and repeats == (23 if more else 20)
    assert {rows[i] for i in learned}.isdisjoint(rows[i] for i in held)
    val = prints_of([(prompt, "r1"), (prompt, "new")])
    assert is_repeated(prints_of(rows), val).tolist() == [True, False]


def test_prompts_of_one_side_alone_may_be_one_and_still_tell_rows_apart():
    """One that is learned is not held out, whatever the reply, where either side has a prompt more."""
    one, two = prints_of([("q", "r0"), ("q", "r1")]), prints_of([("q", "new"), ("p", "r0")])
    assert is_repeated(one, two).tolist() == [True, False]
    assert is_repeated(two, one).tolist() == [True, True]


def test_messages_that_ask_nothing_are_no_prompt():
    """A row is then told from others by all that it says."""
    def prompt(given, reply):
        return fingerprints([1, 2, 3, reply], 3, given)["prompt"]

    asks = [dict(role="system", content="Add."), dict(role="user", content="2 + 2?")]
    assert prompt(asks, 4) == prompt(asks, 5) == prompt("2 + 2?", 6)
    blank = dict(role="user", content=" \n")
    for given in (asks[:1], [*asks[:1], blank], [*asks[:1], dict(role="user")], " "):
        assert prompt(given, 4) != prompt(given, 5)


def test_a_file_of_an_earlier_version_is_one_line():
    old = datasets.Dataset.from_dict(dict(ids=[[1, 2]], mask=[[False, True]], file=[0]))
    with pytest.raises(BadInput, match="an earlier version's: expected the column prompt too; without"):
        hold_out(old, 1, 1)


def test_a_row_whose_prompt_is_learned_is_not_held_out_and_counted(tmp_path, capsys):
    """... also where truncation leaves little of it, another part in each row."""
    one = write_jsonl(tmp_path / "one.jsonl", pairs(4))
    long, other = "p" * 40, "q" + "p" * 39
    two = write_jsonl(tmp_path / "two.jsonl", [pair("p9", "r9"), pair("p1", "another"), pair("p9", "r10"),
                                               pair(long, "r")])
    held = write_jsonl(tmp_path / "held.jsonl", [*pairs(2), pair("p9", "x"), pair("new", "y"),
                                                 pair(long, "rr"), pair(long, "rrr"), pair(other, "r")])
    counts, _ = train(tmp_path / "run", train_files=(one, two), val_files=(held,), max_length=20,
                      truncation="left")
    assert records(tmp_path / "run")[0]["data/repeated"] == 5 and counts == (8, 2, 4, 0)
    assert "5 rows have the prompt of another one: they are not held out" in capsys.readouterr().out
    line = complaint(tmp_path / "same", train_files=(one,), val_files=(one,))
    assert "got 4 and 0; {'data/truncated': 0, 'data/dropped': 0, 'data/repeated': 4}" in line
    train(tmp_path / "drawn", train_files=(one, two))
    assert records(tmp_path / "drawn")[0]["data/repeated"] == 2
    assert "2 rows have the prompt of another one: all of one prompt are " in capsys.readouterr().out
