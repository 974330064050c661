"""tools/check_rows.py: what a run would read, without a model."""

import re

import pytest

from tests.run_folders import ROOT, TINY
from tests.test_rows import sums, write
from tools import check_rows

pytestmark = pytest.mark.filterwarnings("ignore:environment rows")


def run(capsys, *argv):
    """-> exit status, standard output, standard error"""
    status = check_rows.main([*map(str, argv)])
    return status, *capsys.readouterr()


def test_it_shows_rows_as_the_model_will_see_them_and_what_is_read_of_replies(tmp_path, capsys):
    data = write(tmp_path / "train.jsonl", sums(40))
    options = [f"data={data}", "prompt=question", "answer=answer", "check=number", "system=Be brief."]
    status, said, _ = run(capsys, *options)
    first, *shown = said.split("\n\n")
    assert status == 0 and first.startswith(f"rows: {data}: ") and first.endswith("all 40 gold answers right")
    assert len(shown) == 10 and len({row.splitlines()[0] for row in shown}) == 10
    assert any("(test)" in row for row in shown)
    name, *lines = shown[0].splitlines()
    count = int(name.split()[0].removeprefix("train-"))
    right = 2 * count
    replies = [f"{right}", f"The answer is {right}.", f"\\boxed{{{right}}}", f"<answer>{right}</answer>"]
    assert lines == ["  system: 'Be brief.'", f"  user: 'What is {count} + {count}?'",
                     f"  right answer: '{right}'",
                     *(f"  reply {reply!r}: reads '{right}': right" for reply in replies),
                     "  reply 'I do not know.': reads nothing: wrong"]
    assert len(run(capsys, *options, "--rows", 3)[1].split("\n\n")) == 4
    assert run(capsys, *options, "--rows", 0)[1] == first + "\n"


def test_a_file_that_is_not_all_well_has_status_1(tmp_path, capsys):
    data = write(tmp_path / "a.jsonl", [*sums(9), dict(question="q", answer=None)])
    status, said, _ = run(capsys, f"data={data}", "prompt=question", "check=number")
    assert status == 1 and "left out: 1 that cannot be used (row 10: column answer" in said
    rows = [dict(prompt=f"q{n}", answer="a}b" if n == 1990 else "ab") for n in range(2000)]
    options = [f"data={write(tmp_path / 'b.jsonl', rows)}", "check=exact", "--rows", 0]
    assert run(capsys, *options)[0] == 1 and "row 1991" in run(capsys, *options, "--all")[1]
    rows[1990], rows[1991] = rows[1991], rows[1990]  # which the sample, each second row, does not see
    options[0] = f"data={write(tmp_path / 'c.jsonl', rows)}"
    assert run(capsys, *options)[0] == 0 and run(capsys, *options, "--all")[0] == 1
    train, test = write(tmp_path / "train.jsonl", sums(9)), write(tmp_path / "t.csv", sums(3))
    damaged = write(tmp_path / "d.jsonl", [*sums(3), dict(question="q", answer=None)])
    for files, expected in (((train, test), 0), ((data, test), 1), ((train, damaged), 1)):
        assert run(capsys, f"data={files[0]}", f"test={files[1]}", "prompt=question",
                   "check=number")[0] == expected, files  # rows that are held out too are no fault


def test_what_is_hostile_or_long_is_escaped_and_cut(tmp_path, capsys):
    hostile = "\x1b[2J\u202e\x00\u200b" + "x" * 5000
    rows = [dict(prompt=f"{n}{hostile}", answer=hostile) for n in range(5)]
    rows.append({"prompt": "q", "\x1b[2J\n": 1})
    _, said, _ = run(capsys, f"data={write(tmp_path / 'a.jsonl', rows)}", "check=exact")
    assert all(c.isprintable() or c == "\n" for c in said) and len(said) < 30_000
    assert r"'0\x1b[2J\u202e\x00\u200bxxx" in said and " ... 4,508 characters ... 'xxx" in said


def test_the_text_that_a_chat_template_makes(tmp_path, capsys):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / TINY)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    tokenizer.save_pretrained(tmp_path / "model")
    options = [f"data={write(tmp_path / 'a.jsonl', sums(2))}", "prompt=question", "check=number", "--model"]
    status, said, _ = run(capsys, *options, tmp_path / "model")
    assert status == 0 and "  the model reads: '<user>What is 1 + 1?<assistant>'" in said
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    tokenizer.save_pretrained(tmp_path / "model")
    status, _, error = run(capsys, *options, tmp_path / "model")
    assert status == 2 and error == "--model: its chat template cannot show these messages (no such role)\n"
    (tmp_path / "none").mkdir()
    status, _, error = run(capsys, *options, tmp_path / "none")
    assert status == 2 and error.startswith(f"--model {tmp_path}/none: expected a hub id or a folder with")


SHOP = '''
class Shop:
    def reset(self, answer, **row): return " In euros."
    def price(self, item: str) -> str:
        """Price of an item.

        Args:
            item: its name
        """
        return "2"
    def get_reward(self): return 0.0
'''


def test_an_environment_that_is_built_on_rows(tmp_path, capsys):
    (tmp_path / "shop.py").write_text(SHOP)
    options = ["--env", "trl", f"data={write(tmp_path / 'a.jsonl', sums(5))}", "prompt=question",
               f"file={tmp_path}/shop.py:Shop"]
    status, said, _ = run(capsys, *options, "check=number")
    assert status == 0 and "  user: 'What is 1 + 1? In euros.'\n  tool: price\n  right answer: '2'" in said
    status, said, _ = run(capsys, *options)  # without a check there is nothing to judge
    assert status == 0 and "right answer" not in said and "gold" not in said


@pytest.mark.parametrize("argv, message", [
    (["dta=a.jsonl"], "environment rows: unknown option 'dta' .did you mean 'data'"),
    (["a.jsonl"], "environment option 'a.jsonl': expected key=value"),
    (["data=none.csv", "check=exact"], "environment rows: data none.csv: cannot be read"),
    (["--env", "countdown", "max_operands=3"], "--env countdown: expected rows or an environment built on"),
    (["data=a", "--rows", "-1"], ".*--rows: -1: expected 0 or more")])
def test_bad_input_is_one_line(argv, message, capsys):
    status, said, error = run(capsys, *argv)
    assert status == 2 and not said and re.match(message, error) and error.count("\n") == 1
