"""tools/view_episodes.py: what it reads, and no text gets out of its place (in Chromium, with selenium)."""

import base64
import functools
import hashlib
import importlib.util
import json
import os
import random
import re
import shutil
import time
import zlib
from pathlib import Path
from urllib.parse import urlencode

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import grpo_llm
from tests.run_folders import free_port, told, train
from tools import view_episodes

HOSTILE = ["</script><script>window.hacked = 1</script>", "<img src=x onerror='window.hacked = 1'>",
           "{{data}}", "<!-- <script>", "\u2028 \u2029", "\ud800 and \udfff", "nul \x00 \x1b[31m",
           "\u202e right to left", "`${window.hacked = 1}`", "&lt;b&gt;", "__proto__", "e\u0301\U0001f600"]
DATA = re.compile(r'<script type="text/plain" id="(\w+)">[A-Za-z0-9+/=]+</script>\n')


def episode(task="task-0", number=0, reward=1.0, replies=("1 + 2 = 3",), tool="", **more):
    messages = [dict(role="user", content=f"the task {task}")]
    for reply in replies:
        messages += [dict(role="assistant", content=reply), dict(role="user", content=tool or "wrong")]
    return dict(task_id=task, source="sums", number=number, reward=reward, correct=float(reward >= 1),
                info=dict(correct=float(reward >= 1), format=0.5), termination="done",
                messages=messages[:-1]) | more


@functools.cache
def byte_level():
    """A byte-level BPE such as those of Qwen and Llama 3: most characters beyond ASCII are several tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator(["one two three four", "x y z", "deep down line word"], trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    return made


def segment(ids, logprobs, **more):
    return dict(prompt_ids=[1, 2], response_ids=ids, response_mask=[1] * len(ids), rollout_logprobs=logprobs,
                old_logprobs=None, ref_logprobs=None, advantage=0.5) | more


def with_turns(made, rng):
    """Each reply as tokens of byte_level, in one segment."""
    ids, turns = [], []
    for message in made["messages"]:
        if message["role"] == "assistant":
            start = len(ids)
            ids += [*byte_level().encode(message["content"]).ids, 0]
            turns.append(dict(segment=0, start=start, end=len(ids), reward=0.0))
    turns[-1]["reward"] = made["reward"]
    return made | dict(turns=turns, segments=[segment(ids, [-rng.expovariate(1.0) for _ in ids])])


def texts_of(text):
    """The tokens of an ASCII reply."""
    return [byte_level().decode([token], skip_special_tokens=False) for token in
            [*byte_level().encode(text).ids, 0]]


def write(run, name, made):
    """Another line of episodes/name.jsonl."""
    file = run / "episodes" / f"{name}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as lines:
        lines.write(made if isinstance(made, bytes) else json.dumps(made).encode() + b"\n")
    return file


def write_tokenizer(run, tokenizer=None):
    place = run / "checkpoints" / "step_000010"
    place.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_level()).save(str(place / "tokenizer.json"))
    return run


SUMMARY = dict(summary=dict(episodes=64, reward_sum=8.0, correct_sum=8.0, logged=6))


@pytest.fixture
def a_run(tmp_path):
    """Steps 0 and 10, val and train, of which val has the same tasks."""
    run = tmp_path / "run"
    for step in (0, 10):
        for task in range(3):
            for number in range(2):
                reward = float(step == 10 or task == 0)
                write(run, f"val_step_{step:06d}", episode(f"test-{task}", number, reward))
        write(run, f"val_step_{step:06d}", SUMMARY)
        write(run, f"train_step_{step:06d}", episode(f"train-{step}", 0, -0.5, ("a", "b")))
    return run


def page_of(capsys, *flags):
    """-> the page, the report, the lines on standard error"""
    capsys.readouterr()
    assert view_episodes.main([*map(str, flags)]) == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    return Path(report["out"]).read_text("utf-8"), report, said.err.splitlines()


def unpacked(page, name):
    (data,) = re.findall(f'<script type="text/plain" id="{name}">([A-Za-z0-9+/=]*)</script>', page)
    return json.loads(zlib.decompress(base64.b64decode(data)))


def test_the_page_holds_every_episode_and_no_summary(a_run, capsys):
    page, report, complaints = page_of(capsys, a_run)
    assert report == dict(out=str(a_run / "episodes.html"), bytes=len(page.encode()), runs=1, episodes=14,
                          damaged=0)
    assert complaints == [] and page_of(capsys, a_run)[0] == page  # the same input gives the same bytes
    index, episodes = unpacked(page, "index"), unpacked(page, "episodes0")
    assert index["files"] == [["run", f"{kind}_step_{step:06d}", kind, f"{step:06d}"]
                              for step in (0, 10) for kind in ("train", "val")]
    assert index["sizes"] == [len(episodes)] == [14] and index["damaged"] == []
    (columns,) = re.findall(r"const COLUMNS = (\[[^\]]+\]);", page)
    assert dict(zip(json.loads(columns), index["rows"][0], strict=True)) == dict(
        file=0, line=1, task="train-0", number=0, source="sums", reward=-0.5, correct=0.0,
        termination="done", turns=2, length=2, tokens=0, preview="b")
    assert {key: episodes[1][key] for key in episode()} == episode("test-0", 0, 1.0)


def test_tokens_are_kept_apart_with_those_of_sub_agents(tmp_path, capsys):
    rng = random.Random(1)
    sub = with_turns(episode("sub", replies=("x y", "z")), rng)
    made = with_turns(episode(), rng)
    write(tmp_path, "val_step_000001", made | dict(sub_agents=[sub]))
    of_second = dict(segment=1, start=1, end=3, reward=None)
    of_first = dict(segment=0, start=0, end=1, reward=None)
    ppo = segment([5, 6, 7], [-0.5, None, -0.25], advantage=None, advantages=[1, None, -2.123456])
    write(tmp_path, "val_step_000001", episode(number=1, replies=("a", "b", "c"), segments=[
        segment([8, 9], [-1.5, -1.0]), ppo], turns=[of_first, of_second, of_first | dict(start=1, end=2)]))

    page, _, complaints = page_of(capsys, write_tokenizer(tmp_path))
    (first, second), tokens = unpacked(page, "episodes0"), unpacked(page, "tokens0")
    assert complaints == [] and first["turns"] == [dict(reward=1.0, tokens=0)] and second["segments"] == 2
    assert [turn["tokens"] for turn in first["sub_agents"][0]["turns"]] == [1, 2]
    logprobs = [pytest.approx(logprob, abs=1e-5) for logprob in made["segments"][0]["rollout_logprobs"]]
    assert tokens[0][0] == [texts_of("1 + 2 = 3"), logprobs, 0.5]
    assert [texts for texts, *_ in tokens[0][1:]] == [texts_of("x y"), texts_of("z")]
    texts = [byte_level().decode([each]) for each in range(6, 10)]
    assert tokens[1] == [[texts[2:3], [-1.5], 0.5], [texts[:2], [None, -0.25], [None, -2.12346]],
                         [texts[3:], [-1.0], 0.5]]  # each from its own segment
    assert [row[10] for row in unpacked(page, "index")["rows"]] == [
        sum(len(part[0]) for part in tokens[0]), 4]


def metaspace():
    """With a space before words, as Llama 2 and Gemma have it, and bytes for what is in no word."""
    words = ["<eos>", "a", "\u2581the", "\u2581", "b", "\u2581x", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(),
                                      decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return made


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_the_texts_of_tokens_joined_are_the_reply(make):
    tokenizer, rng = make(), random.Random(1)
    pieces, ids = view_episodes.Pieces(tokenizer), range(tokenizer.get_vocab_size())
    if make is not byte_level:  # of broken characters each kind makes its own
        ids = [token for token in ids if "\ufffd" not in tokenizer.decode([token])]
    for _ in range(100):
        reply = rng.choices(ids, k=rng.randrange(12))
        texts = pieces.texts(reply)
        assert len(texts) == len(reply)
        assert "".join(texts) == tokenizer.decode(reply, skip_special_tokens=False)


def test_the_tokenizer_is_that_of_the_newest_checkpoint_or_of_the_model(tmp_path, capsys):
    """With neither, a token is its number."""
    turn = dict(segment=0, start=0, end=3, reward=1.0)
    write(tmp_path, "val_step_000001", episode(turns=[turn], segments=[segment([5, 6, 2], [-1.0] * 3)]))
    meta = json.dumps(dict(meta=dict(args={}, model="models/countdown-tiny")))

    for prepare, texts, says in (
            (lambda: None, ["\u27e85\u27e9", "\u27e86\u27e9", "\u27e82\u27e9"], ["no tokenizer"]),
            (lambda: (tmp_path / "train_log.jsonl").write_text(meta), ["1", " 2", " <eos>"], []),
            (lambda: write_tokenizer(tmp_path, metaspace()), ["x", "\0", " the"], [])):
        prepare()
        page, _, complaints = page_of(capsys, tmp_path)
        assert unpacked(page, "tokens0")[0][0][0] == texts
        assert all(word in told for word, told in zip(says, complaints, strict=True))


def test_a_damaged_line_is_named_in_one_line_and_left_out(a_run, capsys):
    for line in (b"{", b"[]", b"\xff", b"[" * 100_000, b'{"messages": [1]}',
                 b'{"messages": [], "turns": [1]}', b'{"messages": [], "sub_agents": [{}]}',
                 b'{"messages": [], "reward": 1' + b"0" * 400 + b"}",
                 b'{"messages": [], "info": {"a": [1e999]}}',
                 b'{"messages": [], "turns": [{"segment": 0, "start": 0, "end": 1}]}'):
        file = write(a_run, "val_step_000010", line + b"\n")
    write(a_run, "val_step_000010", episode("after"))
    write(a_run, "val_step_000010", b'{"half a line')
    (a_run / "checkpoints" / "step_000001").mkdir(parents=True)
    (a_run / "checkpoints" / "step_000001" / "tokenizer.json").write_text("no tokenizer")

    page, report, complaints = page_of(capsys, a_run)
    numbers = [*range(8, 18), 19]  # after six episodes and their summary
    for number, said in zip(numbers, complaints, strict=True):
        assert f"{file}, line {number}:" in said and len(said) < 600
    assert (report["episodes"], report["damaged"]) == (15, len(numbers))
    assert unpacked(page, "index")["damaged"] == [f"run/val_step_000010.jsonl:{n}" for n in numbers]


def test_odd_values_become_what_the_page_can_show(tmp_path, capsys):
    odd = (b'{"task_id": 7, "number": NaN, "reward": Infinity, "correct": true, "source": null,'
           b'"termination": ["x"], "info": {"a": NaN, "b": 1e999, "c": {"d": -Infinity}},'
           b'"segments": [{"prompt_ids": [1]}, {"response_ids": [9, 8], "rollout_logprobs": [-Infinity, -1],'
           b'"advantage": NaN}], "messages": [{"role": "assistant", "content": [{"text": "a"}]}, {}],'
           b'"turns": [{"reward": NaN, "segment": 1, "start": 0, "end": 2}]}')
    write(tmp_path, "val_step_000001", odd)
    page, *_ = page_of(capsys, tmp_path)
    assert unpacked(page, "episodes0") == [dict(
        task_id="7", source="", number=None, reward=None, correct=1, termination='["x"]', segments=2,
        retries=0, info=dict(a=None, b=None, c=dict(d=None)), turns=[dict(reward=None, tokens=0)],
        sub_agents=[],
        messages=[dict(role="assistant", content='[{"text": "a"}]'), dict(role="", content="")])]
    assert unpacked(page, "tokens0") == [[[["\u27e89\u27e9", "\u27e88\u27e9"], [None, -1], None]]]


def hostile_run(folder):
    """The tokens of each are its text, twice."""
    vocabulary = {text: i for i, text in enumerate([*HOSTILE, "x"]) if "\ud800" not in text}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="x"))
    tokenizer.decoder = decoders.Fuse()
    for number, text in enumerate(HOSTILE):
        made = episode("task", number, replies=(text, text)) | dict(
            task_id=text, source=text, termination=text, info={text: text, "correct": 1.0})
        made["messages"][0] = dict(role=text, content=text)
        tokens = dict(turns=[dict(reward=1.0, segment=0, start=0, end=2)] * 2,
                      segments=[segment([number, number], [-0.1, None])])
        write(folder, "val_step_000001", made | tokens | dict(sub_agents=[made | tokens]))
    return write_tokenizer(folder, tokenizer)


def test_hostile_text_is_base64_and_the_rest_of_the_page_is_the_template(tmp_path, capsys):
    run = hostile_run(tmp_path / "<b>&\"'</script>")
    write(run, "val_step_000001", b"{")
    page, *_ = page_of(capsys, run, "--out", tmp_path / "page.html")
    before, after = view_episodes.page_halves()
    assert DATA.sub("", page) == before + after
    assert DATA.findall(page) == ["episodes0", "tokens0", "index"]
    assert [found["task_id"] for found in unpacked(page, "episodes0")] == HOSTILE


def test_the_policy_of_the_page_allows_its_own_code_alone(a_run, capsys):
    page = DATA.sub("", page_of(capsys, a_run)[0])
    (policy,) = re.findall('<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for tag in ("style", "script"):
        (code,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert rules.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert rules == {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'",
                     "require-trusted-types-for": "'script'"}
    assert page.index("Content-Security-Policy") < page.index("<style>")


@pytest.mark.parametrize("inside", ["episodes/val_step_000010.jsonl", "checkpoints/step_000010", ".."])
def test_a_run_is_found_from_within_and_from_above(a_run, tmp_path, capsys, inside):
    (a_run / "checkpoints" / "step_000010").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    _, report, _ = page_of(capsys, a_run / inside)
    assert report["episodes"] == (6 if "val" in inside else 14)
    assert Path(report["out"]) == a_run / "episodes.html"


def test_what_cannot_be_done_is_one_line_and_leaves_nothing(a_run, tmp_path, capsys):
    empty = tmp_path / "empty"
    write(empty, "val_step_000001", SUMMARY)
    (tmp_path / "nothing" / "checkpoints").mkdir(parents=True)
    (tmp_path / "folder.html").mkdir()

    for flags, says in ((("--o",), "--o"),
                        ((a_run, tmp_path / "missing"), "missing: there is no such folder"),
                        ((tmp_path / "nothing",), "nothing: no episodes (expected a run folder"),
                        ((empty,), "no episode that can be read (0 damaged lines)"),
                        ((a_run, "--out", tmp_path / "page.txt"), "ends in .html"),
                        ((a_run, "--out", tmp_path / "folder.html"), "cannot be written"),
                        ((a_run, "--out", tmp_path / "missing" / "page.html"), "cannot be written")):
        report = told(capsys, view_episodes.main, *flags)
        assert list(report) == ["error"] and says in report["error"], (flags, report)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and re.search("writ|html", path.name)]


def test_a_run_of_grpo_can_be_viewed(tmp_path, capsys):
    run = train(grpo_llm, tmp_path / "run", iterations=1, eval_tasks=4, eval_every=1, log_episodes=1.0)
    page, report, complaints = page_of(capsys, run)
    assert (report["episodes"], report["damaged"], complaints) == (16 + 2 * 8, 0, [])
    for found, tokens in zip(unpacked(page, "episodes0"), unpacked(page, "tokens0"), strict=True):
        (texts, logprobs, _), reply = tokens[0], found["messages"][-1]["content"]
        assert len(texts) == len(logprobs) and found["reward"] == found["correct"]
        assert "".join(texts).removesuffix(" <eos>").split() == re.sub("[;=]", " ", reply).split()


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    missing = [name for name in ("chromium", "chromedriver") if not shutil.which(name)]
    missing += ["selenium"] * (importlib.util.find_spec("selenium") is None)
    if missing and os.environ.get("CI") != "true":
        pytest.skip(f"not installed: {', '.join(missing)}")
    assert not missing

    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                 "--disable-background-networking", "--disable-component-update", "--disable-sync",
                 "--disable-dev-shm-usage", "--window-size=1280,900",
                 f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = Service(shutil.which("chromedriver"), port=free_port())
    chromium = webdriver.Chrome(options=options, service=service)
    chromium.get("about:blank")
    yield chromium
    chromium.quit()


class Page:
    """A page in the browser, with what a test asks of it."""

    def __init__(self, driver, file, **state):
        self.driver, self.url = driver, file.resolve().as_uri()
        self.go(**state)

    def go(self, **state):
        self.driver.get("about:blank")
        self.driver.get(f"{self.url}#{urlencode(state)}")
        self.settle()

    def js(self, code, *args):
        return self.driver.execute_script(code, *args)

    def wait(self, condition, *args):
        deadline = time.monotonic() + 120  # only a page that hangs reaches it
        while not (found := self.js(f"return {condition}", *args)):
            assert time.monotonic() < deadline, condition
            time.sleep(0.01)
        return found

    def settle(self):
        """The list and the episode are those of the state."""
        self.wait("document.body?.dataset.ready && Number(document.body.dataset.done) === search && "
                  "(!byKey.has(state.e) || (document.getElementById('detail').dataset.drawn ?? '') === "
                  "String(drawing))")

    def find(self, selector):
        from selenium.webdriver.common.by import By

        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector):
        return self.each(selector, "innerText.trim()")

    def each(self, selector, what):
        """element.what of all that the selector finds."""
        return self.js(f"return [...document.querySelectorAll(arguments[0])].map(e => e.{what})", selector)

    def click(self, selector, at=0):
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.ui import WebDriverWait

        # A list that is drawn between the look and the click has another element in that place.
        drawn_anew = [StaleElementReferenceException]
        WebDriverWait(self.driver, 120, 0.01, drawn_anew).until(
            lambda _: self.find(selector)[at].click() or True)
        self.settle()

    def choose(self, name, value):
        from selenium.webdriver.support.ui import Select

        number = self.js("return search")
        Select(self.find(f"[data-name={name}], #{name}")[0]).select_by_value(value)
        if name not in ("compare", "by"):
            self.wait("search > arguments[0]", number)
        self.settle()

    def type(self, selector, text):
        number, control = self.js("return search"), self.find(selector)[0]
        control.send_keys(text)
        # A slow machine searches between two keys: only the search for the whole text counts.
        self.wait("search > arguments[0] && state[arguments[1].dataset.name] === arguments[1].value",
                  number, control)
        self.settle()

    def press(self, *keys):
        from selenium.webdriver.common.action_chains import ActionChains

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()
        self.settle()

    def hash(self):
        return dict(self.js("return [...new URLSearchParams(location.hash.slice(1))]"))

    def sums(self):
        return self.js("return document.getElementById('sums').innerText.split(/\\s*\\n\\s*/).join(' | ')")


@pytest.fixture
def open_page(driver, capsys):
    driver.get_log("browser")
    yield lambda *flags, **state: Page(driver, Path(page_of(capsys, *flags)[1]["out"]), **state)
    assert driver.get_log("browser") == []


@pytest.mark.slow
def test_filters_sort_and_address(a_run, open_page):
    page = open_page(a_run)
    assert "14 of 14 episodes" in page.sums() and "correct 57.1 %" in page.sums()
    page.choose("split", "val")
    page.choose("step", "0")
    page.choose("correct", "no")
    assert "4 of 14 episodes" in page.sums() and page.hash() == dict(split="val", step="0", correct="no")
    page.type("[data-name=low]", "0.5")
    assert "0 of 14 episodes" in page.sums() and "No episode passes" in page.texts("#rows")[0]
    page.click("#clear")
    assert "14 of 14 episodes" in page.sums() and page.hash() == {}

    page.choose("sort", "reward")
    assert page.texts(".row .chip")[:3] == ["-0.5", "-0.5", "0"]
    page.choose("source", "sums")
    page.choose("termination", "done")
    page.choose("sort", "-turns")
    before = page.texts(".row")
    assert "2 turns" in before[0] and "2 turns" not in before[2]

    page.click(".row", 1)
    state, address = page.hash(), page.js("return location.hash")
    assert state["sort"] == "-turns" and state["e"] == "run/train_step_000010/1"
    page.driver.refresh()
    page.settle()
    assert page.texts(".row") == before and page.hash() == state
    page.click("#permalink")
    assert page.hash() == dict(e=state["e"]) and page.texts("#detail h2") == ["✗ train-10"]
    number = page.js("return search")
    page.driver.back()  # which returns before the page has seen it
    page.wait("location.hash === arguments[0] && search > arguments[1]", address, number)
    page.settle()
    assert page.hash() == state and page.texts(".row") == before


@pytest.mark.slow
def test_keys(a_run, open_page):
    from selenium.webdriver.common.keys import Keys

    page = open_page(a_run, split="val")
    for keys, at in ((("j", "j"), 2), (("k", "k", "k"), 1), ((Keys.ARROW_DOWN,), 2)):
        page.press(*keys)
        assert page.hash()["e"] == f"run/val_step_000000/{at}"

    page.press("/")
    page.type("#search", "task test-2")
    assert "4 of 14 episodes" in page.sums()
    page.press(Keys.ENTER, "j")
    assert page.hash() == dict(split="val", q="task test-2", e="run/val_step_000000/5")
    page.press("c")
    assert page.js("return document.activeElement.id") == "compare"
    page.press(Keys.ESCAPE, Keys.ESCAPE)
    assert "e" not in page.hash()
    page.press("?")
    assert page.find("#keys")[0].is_displayed()
    page.press("j", Keys.ESCAPE)
    assert not page.find("#keys")[0].is_displayed() and "e" not in page.hash()


@pytest.mark.slow
def test_search_finds_texts_of_any_part_and_shows_where(tmp_path, open_page):
    long = "\n".join(f"line {i}" for i in range(100)) + "\nthe Needle <here>"
    sub = episode("sub", replies=("a HIDDEN stone",))
    for number in range(30):
        write(tmp_path, "val_step_000001", episode(
            number=number, replies=("a", "b"), tool=long if number == 3 else "",
            sub_agents=[sub] if number == 4 else []))
    page = open_page(tmp_path)

    page.type("#search", "nEEDLE <h")
    assert "1 of 30 episodes" in page.sums()
    page.click(".row")
    assert "the Needle <here>" in page.texts(".message pre")[2]  # unfolded, for what is sought lies below
    assert page.js("return [...CSS.highlights.get('found')].map(String)") == ["Needle <h"]
    page.click("#clear")
    assert page.texts(".message pre")[2].endswith("line 5 …")

    page.type("#search", "hidden STONE")
    page.click(".row")
    assert "a HIDDEN stone" in page.texts("details.sub .message pre")
    page.type("#search", " nowhere")
    assert "0 of 30 episodes" in page.sums()


@pytest.mark.slow
def test_an_episode_folds_and_nests(tmp_path, open_page):
    rng, long = random.Random(1), "\n".join(f"line {i}" for i in range(40))
    inner = with_turns(episode("inner", replies=("deepest",)), rng)
    sub = with_turns(episode("sub", replies=("x y",)), rng) | dict(sub_agents=[inner])
    made = with_turns(episode(replies=("one\ttab", "two"), tool=long, reward=-0.25), rng)
    made["messages"].insert(0, dict(role="assistant", content="an example in the prompt"))
    tokens = sum(len(texts_of(text)) for text in ("one\ttab", "two", "x y", "deepest"))
    write(tmp_path, "val_step_000001", made | dict(sub_agents=[sub]))
    page = open_page(tmp_path)

    page.press("j")
    assert page.texts(".turns > .message > header") == [
        "Assistant", "User", "Assistant\nturn 1\nreward 0", "User", "Assistant\nturn 2\nreward -0.25"]
    facts = dict(zip(page.texts(".facts dt"), page.texts(".facts dd"), strict=True))
    assert facts == {
        "split": "val", "step": "1", "number": "0", "source": "sums", "reward": "-0.25", "correct": "0",
        "termination": "done", "turns": "3", "characters": "34", "tokens": str(tokens), "segments": "1",
        "info: format": "0.5"}

    folded = "\n".join(long.splitlines()[:5]) + "\nline 5 …"
    for shown in (folded, long):
        assert page.texts(".message pre")[3] == shown
        page.click("button.fold")
    assert page.find("details.sub .message") == []
    page.click("details.sub > summary")
    page.wait("document.querySelectorAll('details.sub .message').length === 2")
    page.click("details.sub details.sub > summary")
    page.wait("document.querySelectorAll('details.sub details.sub .message').length === 2")
    assert page.texts("details.sub details.sub .message pre") == ["the task inner", "deepest"]
    for shown in (folded, long):
        assert page.texts(".message pre")[3] == shown
        page.press("x")
    assert page.texts(".message pre")[3] == folded


@pytest.mark.slow
def test_tokens_are_coloured_by_their_probability(tmp_path, open_page):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    logprobs = [0.0, -0.2, -0.5, -1.0, -2.0, -4.0, -9.0, None]
    advantages = [4.0, 1.0, 0.0, -1.0, -3.0, None, 2.0, 2.5]
    tokens = ["a", " b", "\n", "\t", "", " e  f", "g", "<eos>"]
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(tokens)}, unk_token="g"))
    tokenizer.decoder = decoders.Fuse()
    write(tmp_path, "val_step_000001", episode(
        replies=("a b\n\t e  fg",), turns=[dict(segment=0, start=0, end=8, reward=1.0)],
        segments=[segment([*range(8)], logprobs, advantages=advantages)]))
    write(tmp_path, "val_step_000001", episode(number=1))
    page = open_page(write_tokenizer(tmp_path, tokenizer))

    page.press("j")
    assert page.find(".tok") == []
    page.press("t")
    assert page.each("pre .tok", "textContent") == ["a", "·b", "↵\n", "⇥\t", "∅", "·e··f", "g", "<eos>"]
    colours = page.each("pre .tok", "computedStyleMap().get('background-color').toString()")
    assert len(set(colours)) == len(colours)
    assert colours == page.each(".legend .tok", "computedStyleMap().get('background-color').toString()")
    assert page.find("#tip")[0].is_displayed() is False

    ActionChains(page.driver).move_to_element(page.find("pre .tok")[4]).perform()
    page.wait("!document.getElementById('tip').hidden")
    assert page.texts("#tip") == ['""\nlog-probability -2.0000 nats\nprobability 0.1353\nadvantage -3']
    page.js("document.querySelector('.painted').focus()")
    for says in ("-4.0000", "-9.0000", "no log-probability"):
        page.press(Keys.ARROW_RIGHT)
        page.wait("document.getElementById('tip').innerText.includes(arguments[0])", says)

    page.choose("by", "advantage")
    page.wait("document.querySelector('pre .up2')")
    assert page.hash()["tokens"] == "advantage"
    assert page.each("pre .tok", "className.replace(' here', '')") == [
        f"tok {level}" for level in ("up2", "up1", "", "down1", "down2", "pn", "up1", "up2")]
    page.press("j")  # one that has no tokens
    assert page.find("#tokens")[0].is_enabled() is False and page.texts(".message pre")[1] == "1 + 2 = 3"
    page.press("k", "t")
    assert page.find("pre .tok") == [] and "tokens" not in page.hash()


@pytest.mark.slow
def test_while_none_is_chosen_the_samples_of_validation_are_shown(a_run, open_page):
    write(a_run, "val_step_000010", episode("test-9", 0, 0.5, ("one", "two"), info=dict(format=0.2)))
    page = open_page(a_run)
    page.wait("document.querySelectorAll('#samples tbody tr').length === 4")
    assert page.texts("#samples tbody tr:last-child > *") == [
        "\u2717 test-9", "the task test-9", "two", "+0.5", "sums", "format 0.2"]
    page.choose("split", "train")
    page.wait("!document.querySelector('#samples')")
    page.choose("split", "")
    page.choose("step", "0")
    page.wait("document.querySelectorAll('#samples tbody tr').length === 3")
    page.click("#samples tbody tr", 1)
    assert page.texts("#detail h2") == ["\u2717 test-1"]


@pytest.mark.slow
def test_two_steps_side_by_side(a_run, tmp_path, open_page):
    other = tmp_path / "other"
    write(other, "val_step_000010", episode("test-1", 1, 0.0, ("first", "second")))
    page = open_page(a_run, other, run="run", e="run/val_step_000000/4")
    values = page.each("#compare option", "value")
    assert values == ["", "run/val_step_000010/4", "other/val_step_000010/1", "run/val_step_000000/3",
                      "run/val_step_000010/3"]

    page.choose("compare", values[1])
    columns = page.texts("#outcomes thead th")
    table = [dict(zip(columns, page.texts(f"#outcomes tbody tr:nth-child({line}) td"), strict=True))
             for line in (1, 2, 3)]
    for name, expected in dict(step=["0", "10", "+10"], reward=["0", "1", "+1"],
                               termination=["done", "done", ""]).items():
        assert [line[name] for line in table] == expected
    assert page.texts(".turns.two > .both pre") == ["the task test-1"]  # what both were given is shown once
    left, right = (box.rect for box in page.find(".turns.two > .message.assistant"))
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]

    page.choose("compare", values[2])
    assert page.texts(".turns.two .side") == ["A and B", "A", "B", "B", "B"]
    assert page.texts(".turns.two .missing") == ["A has ended", "A has ended"]
    page.choose("compare", "")
    assert "with" not in page.hash() and page.find(".turns.two") == []


@pytest.mark.slow
def test_hostile_texts_are_shown_as_they_are_and_run_nothing(tmp_path, open_page):
    page = open_page(hostile_run(tmp_path / "<img src=x onerror=window.hacked=1>"))
    for number, text in enumerate(HOSTILE):
        for tokens in ("", "1"):
            page.js("open(all[arguments[0]], true); set({tokens: arguments[1]}); drawDetail(true);",
                    number, tokens)
            page.settle()
            page.press("x")
            page.wait("document.querySelectorAll('details.sub pre').length === 4")
            shown = page.js("""
                const text = JSON.parse(arguments[0]);
                const count = name => [...document.querySelectorAll(name)].filter(
                    element => element.textContent === text).length;
                return [count("pre"), count("dd")];""", json.dumps(text))
            assert shown == [2 if tokens else 6, 6], text
    assert page.js("return window.hacked") is None
    assert page.find("img, a:not(#permalink), iframe, body b:not(header b, #sums b)") == []


@pytest.mark.slow
def test_many_episodes_and_a_long_one_are_no_burden(tmp_path, open_page):
    rng = random.Random(1)

    def text(count):
        return " ".join(f"word{rng.randrange(500)}" for _ in range(count))

    made = [with_turns(episode(replies=(text(60), text(60)), tool=text(250)), rng) for _ in range(100)]
    for number in range(5000):
        write(tmp_path, f"val_step_{number // 100:06d}", made[number % 100] | dict(
            task_id=f"test-{number % 25}", number=number % 100, reward=rng.random()))
    lines = "\n".join(" ".join(rng.choices(("one", "two", "x", "deep"), k=12)) for _ in range(4_700))
    long = with_turns(episode("long", replies=(lines,)), rng)
    write(tmp_path, "train_step_000000", long)
    start = time.process_time()
    page = open_page(write_tokenizer(tmp_path))
    written = time.process_time() - start

    assert "5,001 of 5,001 episodes" in page.sums()
    page.js("window.turns = 0; setInterval(() => turns++, 1)")

    def took(work, times=3):
        """Other processes may stop this one at any time, so: the shortest of several [ms]"""
        return min(page.js(f"const start = performance.now(); {work}; return performance.now() - start")
                   for _ in range(times))

    search = took("state.q = 'word7 word8'; await filter()", 1)
    turns, again = page.js("return turns"), took("await filter()")
    assert page.js("return shown.length") in range(1, 5000)
    filtered = took("state.q = ''; state.step = '5'; await filter()")
    opened = took("const ep = all[Math.floor(Math.random() * 4000)]; open(ep, false); while (document."
                  "getElementById('detail').dataset.key !== ep.key) await new Promise(r => setTimeout(r))")
    size = (tmp_path / "episodes.html").stat().st_size
    print(f"a page of {size / 1e6:.1f} MB, written in {written:.1f} s of processor time; [ms]: ready "
          f"{page.js('return document.body.dataset.ready')}, search {search:.0f}, again {again:.0f}, "
          f"filter {filtered:.0f}, open {opened:.0f}")
    assert opened < search  # one of the chunks, not all of them
    assert again < search and filtered < search and turns > 5  # the page stays awake
    assert len(page.find(".row")) < 60

    page.go(split="train")
    page.click(".row")
    page.js("""
        let last = performance.now();
        setInterval(() => {
            window.longest = Math.max(window.longest, performance.now() - last);
            last = performance.now();
        });""")
    count = len(long["segments"][0]["response_ids"])
    shares = []
    for _ in range(3):  # the machine may stop one of them
        page.js("window.longest = 0; window.began = performance.now()")
        page.press("t")
        page.wait(f"document.querySelectorAll('pre .tok').length === {count}")
        pause, whole = page.js("return [longest, performance.now() - began]")
        print(f"{count} tokens in {whole:.0f} ms: no pause over {pause:.0f} ms")
        shares.append(pause / whole)
        page.press("t")
        page.wait("!document.querySelector('pre .tok')")
    assert count > 100_000 and min(shares) < 1 / 2
