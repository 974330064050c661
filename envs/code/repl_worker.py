"""The Python REPL of envs/code/repl.py, as it runs in the sandbox: `python3 -I -c <this file> OPTIONS`.

Two processes: one keeps the conversation with the trainer, a line of JSON each way on standard input and
output; its child runs the model's code, and is replaced when that code ends it or takes too long. The folder
stays. The code cannot reach into the first process; the trainer does not rely on that.
"""

import ast
import json
import os
import selectors
import signal
import sys
import time

# re, subprocess and traceback are loaded where they are used: they take as long to load as all of these.
SYSTEM_PATH = tuple(sys.path)

MOST_FILES = 20_000  # of a tree that is handed back
MOST_BYTES = 32 * 2**20
MOST_LINE = 4 * 2**20  # bytes that the code's process may say at once
MOST_TEXT = 20_000  # characters of a question, or of a sub-agent's answer
SKIPPED = {".git", "__pycache__", ".pytest_cache"}


def library(name):
    """A module of the standard library, also where the repository has one of that name."""
    path = sys.path
    sys.path = list(SYSTEM_PATH)
    try:
        return __import__(name)
    finally:
        sys.path = path


# What the model's code can call


class Finished(BaseException):
    """finish() was called."""


def files_under(path):
    if os.path.isfile(path):
        yield path
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        for name in sorted(names):
            yield os.path.relpath(os.path.join(folder, name))


def ls(path="."):
    """The entries of a folder, folders with a slash."""
    return "\n".join(sorted(name + "/" * os.path.isdir(os.path.join(path, name)) for name in os.listdir(path)
                            if name not in SKIPPED))


def read(path, start=1, end=None):
    """A file's text, or its lines start to end with their numbers."""
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    if start == 1 and end is None:
        return text
    lines = text.removesuffix("\n").split("\n") if text else []  # as git and grep count them
    return "\n".join(f"{number}: {lines[number - 1]}"
                     for number in range(max(1, start), min(end or len(lines), len(lines)) + 1))


def grep(pattern, path="."):
    """Lines of the files under path that a regular expression matches, as file:number: line."""
    re, found = library("re"), []
    for name in files_under(path):
        try:
            with open(name, encoding="utf-8") as file:
                found += [f"{name}:{number}: {line.rstrip()}" for number, line in enumerate(file, 1)
                          if re.search(pattern, line)]
        except (OSError, UnicodeDecodeError):
            continue
    return "\n".join(found) or "no match"


def git_apply(patch, *options):
    """What git has against a patch; empty: it is applied."""
    done = library("subprocess").run(["git", "apply", "--whitespace=nowarn", *options, "-"],
                                     input=patch.encode(), capture_output=True)
    return done.stderr.decode(errors="replace").strip() or "failed" if done.returncode else ""


def apply_patch(patch, old=None, new=None):
    """apply_patch(diff): a unified diff. apply_patch(path, old, new): the one place with `old` gets `new`."""
    if old is None:
        patch = patch.strip("\n") + "\n"
        error = git_apply(patch)
        if error and not git_apply(patch.replace("\n", "\r\n")):
            return True  # to a file with Windows' line ends, which read() does not show
        if error:
            # The counts after @@ may be wrong. Git can count, but takes the head of a next file for a line.
            heads = r"(?m)^(?=--- .*\n\+\+\+ )"
            parts = [patch] if "diff --git " in patch else library("re").split(heads, patch)
            parts = [part for part in parts if "+++ " in part]
            for check in (["--check"], []) if parts else ():
                error = next(filter(None, (git_apply(part, "--recount", *check) for part in parts)), "")
                if error:
                    break
        if error:
            raise ValueError(f"the patch does not apply: {error}")
        return True
    with open(patch, encoding="utf-8", newline="") as file:  # the ends of its lines stay as they are
        text = file.read()
    if text.count("\r\n") == text.count("\n") > 0 and "\r" not in old + new:
        old, new = old.replace("\n", "\r\n"), new.replace("\n", "\r\n")
    if text.count(old) != 1:
        raise ValueError(f"{patch} holds the text to replace {text.count(old)} times, expected once")
    with open(patch, "w", encoding="utf-8", newline="") as file:
        file.write(text.replace(old, new))
    return True


def bash(command, timeout=None):
    """What a shell command prints, and its exit code where that is not 0."""
    subprocess = library("subprocess")
    if timeout is None:  # before the block's own time is over, which would cost the interpreter
        timeout = 0.8 * OPTIONS["turn"]
    try:
        done = subprocess.run(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        return (error.output or b"").decode(errors="replace") + f"\n(stopped after {timeout:g} s)"
    text = done.stdout.decode(errors="replace")
    return text if done.returncode == 0 else f"{text}\n(exit code {done.returncode})"


def run_tests(*paths):
    """What the tests say: all of them, or those of the files (or pytest's names) given."""
    command = OPTIONS["test_command"]
    return bash(f"{command} {' '.join(map(shell_quote, paths))}",
                timeout=min(OPTIONS["timeout"], 0.8 * OPTIONS["turn"]))


def finish(answer=""):
    """The work is done."""
    raise Finished(str(answer))


def llm_query(prompt):
    """The answer of a sub-agent to one question."""
    return llm_query_batched([prompt])[0]


def llm_query_batched(prompts):
    """The answers of as many sub-agents, which work side by side."""
    prompts = [str(prompt) for prompt in prompts]
    if not OPTIONS["queries"]:
        raise RuntimeError("there are no sub-agents here")
    if not 0 < len(prompts) <= OPTIONS["queries"]:
        raise ValueError(f"{len(prompts)} questions, expected 1 to {OPTIONS['queries']}")
    if max(map(len, prompts)) > MOST_TEXT:
        raise ValueError(f"a question of {max(map(len, prompts))} characters, expected at most {MOST_TEXT}")
    send(CONTROL, {"op": "query", "prompts": prompts})
    answer = receive(COMMANDS)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["texts"]


def shell_quote(text):
    return "'" + str(text).replace("'", "'\\''") + "'"


TOOLS = (ls, read, grep, apply_patch, bash, run_tests, finish, llm_query, llm_query_batched)


# The process that runs the code


def send(file, message):
    file.write(json.dumps(message).encode() + b"\n")
    file.flush()


def receive(file):
    line = file.readline()
    return json.loads(line) if line else None


def serve_code():
    """Run one block after another in the same namespace."""
    namespace = {"__name__": "__main__", **{tool.__name__: tool for tool in TOOLS}}
    sys.path.insert(0, "")
    this = os.getpid()
    while (message := receive(COMMANDS)) is not None:
        done = {"op": "done", "finished": False, "answer": ""}
        try:
            execute(message["code"], namespace)
        except Finished as finished:
            done.update(finished=True, answer=str(finished)[:MOST_TEXT])
        except SystemExit as error:
            print(f"SystemExit: {error}")
        except BaseException as error:
            traceback = library("traceback")
            frames = traceback.extract_tb(error.__traceback__)
            while frames and frames[0].filename != "<code>":
                del frames[0]
            own = [frame for frame in frames if frame.filename != "<string>"]  # without this file's
            print("Traceback (most recent call last):")
            print("".join(traceback.format_list(own) + traceback.format_exception_only(error)), end="")
        sys.stdout.flush()
        sys.stderr.flush()
        if os.getpid() != this:  # the code has forked
            os._exit(0)
        send(CONTROL, done)


def execute(code, namespace):
    """Like a notebook's cell: the value of a last expression is printed, a text as it is."""
    tree = ast.parse(code, "<code>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<code>", "exec"), namespace)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<code>", "eval"), namespace)
        if value is not None:
            print(value if isinstance(value, str) else repr(value))


# The process that talks


class Child:
    """The process that runs code, with its pipes."""

    def __init__(self):
        command_read, command_write = os.pipe()
        control_read, control_write = os.pipe()
        output_read, output_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            global COMMANDS, CONTROL
            closed_to_others(False)
            os.setpgid(0, 0)
            null = os.open(os.devnull, os.O_RDONLY)
            for old, new in ((null, 0), (output_write, 1), (output_write, 2)):
                os.dup2(old, new)
            COMMANDS, CONTROL = os.fdopen(command_read, "rb"), os.fdopen(control_write, "wb")
            for unused in (command_write, control_read, output_read, output_write, null, TALK_IN, TALK_OUT):
                os.close(unused)
            sys.stdout = os.fdopen(1, "w", buffering=1, errors="backslashreplace", closefd=False)
            sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
            try:
                serve_code()
            finally:
                os._exit(0)
        for used in (command_read, control_write, output_write):
            os.close(used)
        self.commands, self.control, self.output = os.fdopen(command_write, "wb"), control_read, output_read

    def end(self):
        for kill in (lambda: os.killpg(self.pid, signal.SIGKILL), lambda: os.kill(self.pid, signal.SIGKILL)):
            try:
                kill()
            except OSError:
                pass
        os.waitpid(self.pid, 0)
        for descriptor in (self.control, self.output):
            os.close(descriptor)
        try:
            self.commands.close()
        except OSError:
            pass


class Output:
    """Head and tail of what was printed, so many characters in all, in bounded memory."""

    def __init__(self, characters):
        self.characters, self.keep = characters, 4 * characters  # no character of UTF-8 takes more bytes
        self.head, self.tail, self.total = b"", b"", 0

    def add(self, data):
        self.total += len(data)
        room = self.keep - len(self.head)
        self.head, self.tail = self.head + data[:room], (self.tail + data[room:])[-self.keep:]

    def text(self):
        text = (self.head + self.tail).decode(errors="replace")
        missing = len(text) - self.characters + self.total - len(self.head) - len(self.tail)
        if missing <= 0:
            return text
        half = self.characters // 2
        return f"{text[:self.characters - half]}\n... [{missing} left out] ...\n{text[len(text) - half:]}"


def run_block(child, code, timeout):
    """Let the child run a block. -> the message for the trainer, and whether the child is still usable."""
    output, line, deadline = Output(OPTIONS["output"]), b"", time.monotonic() + timeout

    def drain():
        # What was printed is in the pipe, which holds no more than this; what still runs may go on printing.
        for _ in range(16):
            if not select_now(child.output) or not (data := os.read(child.output, 65536)):
                break
            output.add(data)

    def lost(what):
        drain()
        note = f"{what}; a new interpreter was started, files are as they are"
        return {"op": "done", "output": output.text(), "note": note}, False

    try:
        send(child.commands, {"code": code})
    except OSError:
        return lost("not run, as the interpreter had ended")
    with selectors.DefaultSelector() as ready:
        ready.register(child.output, selectors.EVENT_READ)
        ready.register(child.control, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return lost(f"stopped after {timeout:g} s")
            for key, _ in ready.select(left):
                data = os.read(key.fd, 65536)
                if key.fd == child.output:
                    output.add(data)
                    if not data:
                        ready.unregister(child.output)
                    continue
                line += data
                if not data or len(line) > MOST_LINE:
                    return lost("the code ended the interpreter")
                while b"\n" in line:
                    text, _, line = line.partition(b"\n")
                    try:
                        message = json.loads(text)
                        done = message["op"] == "done"
                    except (ValueError, TypeError, KeyError, RecursionError):
                        return lost("the code wrote to a pipe that is not its own")
                    if done:
                        drain()
                        return {**message, "output": output.text(), "note": ""}, True
                    asked = time.monotonic()
                    send(TALK, message)
                    answer = converse({"op": "answer"})
                    try:
                        send(child.commands, answer)
                    except OSError:
                        return lost("the code ended the interpreter")
                    if "error" not in answer:
                        deadline += time.monotonic() - asked  # the sub-agents' time is not this block's


def select_now(descriptor):
    with selectors.DefaultSelector() as ready:
        ready.register(descriptor, selectors.EVENT_READ)
        return bool(ready.select(0))


def send_tree():
    """Say which files the folder has, [[path, size], ...], and then what is in them; null for too many."""
    names, parts, size = [], [], 0
    for name in files_under("."):
        if os.path.islink(name) or not os.path.isfile(name):
            continue
        try:
            if len(names) == MOST_FILES or size + os.path.getsize(name) > MOST_BYTES:
                names = None
                break
            with open(name, "rb") as file:
                parts.append(file.read(MOST_BYTES - size))
        except OSError:
            continue
        size += len(parts[-1])
        names.append([name, len(parts[-1])])
    send(TALK, {"op": "tree", "files": names})
    if names is not None:
        TALK.write(b"".join(parts))
        TALK.flush()


def converse(waiting_for=None):
    """Serve the trainer until it hands over a message of the kind waited for; None at its end."""
    while (message := receive(ASKED)) is not None:
        if message["op"] == "tree":
            send_tree()
        elif waiting_for is None or message["op"] == waiting_for["op"]:
            return message
    sys.exit()


def closed_to_others(closed):
    """Close this process's memory and pipes to those of its user, or open them again (PR_SET_DUMPABLE)."""
    import _ctypes  # a tenth of the time that ctypes takes to load

    prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")
    _ctypes.call_function(prctl, (4, 0 if closed else 1, 0, 0, 0))


def main():
    closed_to_others(True)
    child = Child()
    while True:
        message = converse()
        answer, usable = run_block(child, message["code"], message["timeout"])
        if not usable:
            child.end()
            child = Child()
        send(TALK, answer)


if __name__ == "__main__":
    OPTIONS = json.loads(sys.argv[1])
    COMMANDS = CONTROL = None
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    TALK_IN, TALK_OUT = os.dup(0), os.dup(1)
    ASKED, TALK = os.fdopen(TALK_IN, "rb"), os.fdopen(TALK_OUT, "wb")
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    os.dup2(0, 2)
    main()
