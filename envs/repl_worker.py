"""The Python REPL of envs/repl.py, as it runs in the sandbox: `python3 -I -c <this file> OPTIONS`.

Two processes: one keeps the conversation with the trainer, a line of JSON each way on standard input and
output; its child runs the model's code, and is replaced when that code ends it or takes too long. The folder
stays.
"""

import ast
import json
import os
import selectors
import signal
import sys
import time

# re, subprocess and traceback are imported where they are used: they take as long to load as all of these.

MOST_FILES = 2_000  # of a tree that is handed back
MOST_BYTES = 32 * 2**20
SKIPPED = {".git", "__pycache__", ".pytest_cache"}


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
    lines = text.splitlines()
    return "\n".join(f"{number}: {lines[number - 1]}"
                     for number in range(max(1, start), min(end or len(lines), len(lines)) + 1))


def grep(pattern, path="."):
    """Lines of the files under path that a regular expression matches, as file:number: line."""
    import re

    found = []
    for name in files_under(path):
        try:
            with open(name, encoding="utf-8") as file:
                found += [f"{name}:{number}: {line.rstrip()}" for number, line in enumerate(file, 1)
                          if re.search(pattern, line)]
        except (OSError, UnicodeDecodeError):
            continue
    return "\n".join(found) or "no match"


def apply_patch(patch, old=None, new=None):
    """apply_patch(diff): a unified diff. apply_patch(path, old, new): the one place with `old` gets `new`."""
    if old is None:
        import subprocess

        done = subprocess.run(["git", "apply", "--recount", "--whitespace=nowarn", "-"], text=True,
                              input=patch.strip("\n") + "\n", capture_output=True)
        if done.returncode:
            raise ValueError(f"the patch does not apply: {done.stderr.strip()}")
        return True
    with open(patch, encoding="utf-8") as file:
        text = file.read()
    if text.count(old) != 1:
        raise ValueError(f"{patch} holds the text to replace {text.count(old)} times, expected once")
    with open(patch, "w", encoding="utf-8") as file:
        file.write(text.replace(old, new))
    return True


def bash(command, timeout=60):
    """What a shell command prints, and its exit code where that is not 0."""
    import subprocess

    try:
        done = subprocess.run(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        return (error.output or b"").decode(errors="replace") + f"\n(stopped after {timeout} s)"
    text = done.stdout.decode(errors="replace")
    return text if done.returncode == 0 else f"{text}\n(exit code {done.returncode})"


def run_tests(*paths):
    """What the tests say: all of them, or those of the files (or pytest's names) given."""
    command = OPTIONS["test_command"]
    return bash(f"{command} {' '.join(map(shell_quote, paths))}", timeout=OPTIONS["timeout"])


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
    send(CONTROL, {"op": "query", "prompts": prompts})
    return receive(COMMANDS)["texts"]


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
    while (message := receive(COMMANDS)) is not None:
        done = {"op": "done", "finished": False, "answer": ""}
        try:
            execute(message["code"], namespace)
        except Finished as finished:
            done.update(finished=True, answer=str(finished))
        except SystemExit as error:
            print(f"SystemExit: {error}")
        except BaseException as error:
            import traceback

            frames = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if frame.filename != "<string>"] or frames[-1:]
            print("Traceback (most recent call last):")
            print("".join(traceback.format_list(own) + traceback.format_exception_only(error)), end="")
        sys.stdout.flush()
        sys.stderr.flush()
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
    """Head and tail of what was printed, in bounded memory."""

    def __init__(self, keep):
        self.keep, self.head, self.tail, self.total = keep, b"", b"", 0

    def add(self, data):
        self.total += len(data)
        room = self.keep - len(self.head)
        self.head, self.tail = self.head + data[:room], (self.tail + data[room:])[-self.keep:]

    def text(self):
        missing = self.total - len(self.head) - len(self.tail)
        middle = f"\n... [{missing} bytes left out] ...\n".encode() if missing else b""
        return (self.head + middle + self.tail).decode(errors="replace")


def run_block(child, code, timeout):
    """Let the child run a block. -> the message for the trainer, and whether the child is still usable."""
    output, line, deadline = Output(OPTIONS["output"]), b"", time.monotonic() + timeout
    try:
        send(child.commands, {"code": code})
    except OSError:
        return {"op": "done", "output": "", "note": "the interpreter was gone; it was started again"}, False
    with selectors.DefaultSelector() as ready:
        ready.register(child.output, selectors.EVENT_READ)
        ready.register(child.control, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return {"op": "done", "output": output.text(), "note": f"stopped after {timeout:g} s; the "
                        "interpreter was started again, files are as they are"}, False
            for key, _ in ready.select(left):
                data = os.read(key.fd, 65536)
                if key.fd == child.output:
                    output.add(data)
                    if not data:
                        ready.unregister(child.output)
                    continue
                line += data
                if not data or len(line) > MOST_BYTES:
                    return {"op": "done", "output": output.text(), "note": "the interpreter ended; it was "
                            "started again, files are as they are"}, False
                while b"\n" in line:
                    text, _, line = line.partition(b"\n")
                    message = json.loads(text)
                    if message["op"] == "done":
                        while ready.get_map().get(child.output) and select_now(child.output):
                            if not (data := os.read(child.output, 65536)):
                                break
                            output.add(data)
                        return {**message, "output": output.text(), "note": ""}, True
                    asked = time.monotonic()
                    send(TALK, message)
                    send(child.commands, converse({"op": "answer"}))
                    deadline += time.monotonic() - asked  # the sub-agents' time is not this block's


def select_now(descriptor):
    with selectors.DefaultSelector() as ready:
        ready.register(descriptor, selectors.EVENT_READ)
        return bool(ready.select(0))


def tree():
    """The files of the folder as base64; None where they are too many or too large."""
    from binascii import b2a_base64

    files, size = {}, 0
    for name in files_under("."):
        if os.path.islink(name) or not os.path.isfile(name):
            continue
        try:
            size += os.path.getsize(name)
            if size > MOST_BYTES or len(files) == MOST_FILES:
                return None
            with open(name, "rb") as file:
                files[name] = b2a_base64(file.read(), newline=False).decode()
        except OSError:
            continue
    return files


def converse(waiting_for=None):
    """Serve the trainer until it hands over a message of the kind waited for; None at its end."""
    while (message := receive(ASKED)) is not None:
        if message["op"] == "tree":
            send(TALK, {"op": "tree", "files": tree()})
        elif waiting_for is None or message["op"] == waiting_for["op"]:
            return message
    sys.exit()


def main():
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
