"""Code that a model wrote, run apart from everything, by bubblewrap.

    result = sandbox.run(["python3", "main.py"], {"main.py": "print(6 * 7)"}, timeout=5)
    result.output, result.exit_code, result.elapsed, result.timed_out

The code has a process tree, a network (without a way out), a user and a file system of its own, and a list
of system calls. It reads the system's programs and this Python, and writes to its work folder and /tmp, which
live in memory: when the sandbox ends, or the process that started it dies, by whatever signal, no process and
no file is left. docs/sandbox.md says what this protects, and what not.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import os
import platform
import secrets
import selectors
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from envs import BadInput
from envs.code import cgroups, syscalls, trees

WORK = "/testbed"  # the folder that the code starts in
MIB = 2**20
MOST_OUTPUT = 64 * MIB  # a process that writes more is ended [bytes]
READABLE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives",
            "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime")
PYTHON_PARTS = ("bin", "lib", "lib64", "include", "pyvenv.cfg")
# In /proc: what belongs to the code, or is the same whatever others do. The rest is COPIED or hidden.
STEADY = ("bus", "cmdline", "config.gz", "consoles", "cpuinfo", "devices", "dma", "execdomains", "iomem",
          "filesystems", "ioports", "kallsyms", "misc", "mounts", "mtrr", "net", "partitions", "self", "sys",
          "sysvipc", "thread-self", "tty", "uptime", "version")
COPIED = ("/proc/loadavg", "/proc/meminfo", "/proc/stat")  # ps, free and psutil need them
COUNTS = ("/proc/sys/fs", "/proc/sys/kernel/pty", "/proc/sys/kernel/random/entropy_avail")


class SandboxError(RuntimeError):
    """The sandbox itself failed, whatever the code in it did."""


@dataclasses.dataclass(frozen=True)
class Limits:
    timeout: float = 60.0  # wall clock; then all of it is killed [s]
    cpu: int = 60  # processor time of a process [s]
    memory: int = 1024  # address space of a process [MiB]
    processes: int = 64  # processes and threads
    disk: int = 128  # work folder, /tmp and /dev/shm, each [MiB]
    open_files: int = 256  # of a process
    output: int = 20_000  # characters of output kept, half of them from its end


@dataclasses.dataclass(frozen=True)
class Result:
    output: str  # standard output and standard error as they came, in the middle cut to Limits.output
    exit_code: int  # 128 + n: ended by signal n
    elapsed: float  # [s]
    timed_out: bool = False


def run(argv, files=None, stdin=b"", **limits) -> Result:
    """Run a command over `files` and return what it printed. Never raises for what the command does.

    files: relative path -> str or bytes, laid into the work folder; limits: those of `Limits`. Raises
    SandboxError where the command could not be started.
    """
    limits = Limits(**limits)
    start = time.monotonic()
    deadline = start + limits.timeout
    with Sandbox(argv, files, limits) as box:
        output, finished = box.talk(stdin, deadline)
        exit_code = box.wait(deadline - time.monotonic() if finished else 0.0)
    return Result(output.text(), exit_code, time.monotonic() - start, box.killed and not output.flooded)


class Sandbox(contextlib.AbstractContextManager):
    """A confined process with pipes: .process.stdin, .process.stdout (standard error goes there too)."""

    def __init__(self, argv, files=None, limits: Limits | None = None):
        self.limits = limits or Limits()
        self.killed = False  # by `wait`, which ran out of patience
        self.process, self.groups = None, []
        packed = trees.tar(files or {})
        if len(packed) > self.limits.disk * MIB:
            raise SandboxError(f"the sandbox did not start: {len(packed) / MIB:.1f} MiB of files, the limit "
                               f"on its disk is {self.limits.disk} MiB")
        # Standard error is a file of what is laid out, and then of what goes wrong until the command takes
        # over, which a first byte tells. If memory runs out, this is to end before the trainer.
        start = ("(echo 1000 > /proc/$$/oom_score_adj) 2> /dev/null; "
                 f"cd {WORK} && tar -xf - --no-same-owner <&2 && "
                 f"ulimit -f {self.limits.disk * 2048} && printf '\\006' && exec 2>&1 && exec \"$@\"")
        with contextlib.ExitStack() as stack:
            script, *given = [stack.enter_context(_memory_file(content)) for content in (
                packed, syscalls.program(), *_copies().values())]
            given = [file.fileno() for file in given]
            try:
                command = ["/bin/sh", "-c", start, "sh", *map(os.fspath, argv)]
                if not self._launch(self._confined(command, given), script, given):
                    self.close()
                    script.seek(len(packed))
                    said = script.read().decode(errors="replace").strip().splitlines()
                    raise SandboxError("the sandbox did not start: " + (
                        said[0] if said else f"exit code {self.process.returncode}, and no reason given"))
            except BaseException as error:
                self.close()
                if isinstance(error, OSError):
                    raise SandboxError(f"the sandbox did not start: {error}") from error
                if isinstance(error, ValueError):  # a NUL, or half of a surrogate pair
                    raise BadInput(f"sandbox: a command that cannot be started ({error})") from error
                raise

    def _launch(self, command, errors, given: list[int]) -> bool:
        """Start it. -> whether the files were laid out and the command took over"""
        self.process = STARTER.submit(
            subprocess.Popen, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            bufsize=0, env=environment(), cwd="/", start_new_session=True, pass_fds=given).result()
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            return bool(ready.select(60)) and os.read(self.process.stdout.fileno(), 1) == b"\6"

    def _confined(self, command, given: list[int]) -> list[str]:
        """The command that runs `command` in the sandbox; given: files with the filter and what is COPIED."""
        limits, user = self.limits, []
        if os.geteuid() == 0:
            # A user for each sandbox: processes are counted by user, and no limit on them holds for root.
            number = str(_new_user())
            user = ["--reuid", number, "--regid", number, "--clear-groups"]
        dropped = ["setpriv", *user, "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all",
                   "--no-new-privs", "--"]
        # A core dump of 1 byte is none; with 0, a program that collects dumps would still get one.
        capped = ["prlimit", f"--as={limits.memory * MIB}", f"--nproc={limits.processes}", "--core=1",
                  f"--cpu={limits.cpu}", f"--nofile={limits.open_files}", "--sigpending=1024", "--"]
        return [*self._grouped(), *_bubblewrap(limits, *given), *dropped, *capped, *command]

    def _grouped(self) -> list[str]:
        """What starts a command in control groups of its own, which bound all of the sandbox together."""
        memory = (self.limits.memory + 3 * self.limits.disk) * MIB
        self.groups = cgroups.make(memory, self.limits.processes + 8)  # with bubblewrap's own
        enter = [f"echo $$ > {shlex.quote(str(group / 'cgroup.procs'))} && " for group in self.groups]
        return ["/bin/sh", "-c", "".join(enter) + 'exec "$@"', "sh"] if enter else []

    def talk(self, stdin=b"", deadline=float("inf")):
        """Write stdin, close it, read to the end of the output. -> output, whether it ended in time."""
        output, process = Output(self.limits.output), self.process
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            if not process.stdin.closed:
                os.set_blocking(process.stdin.fileno(), False)
                ready.register(process.stdin, selectors.EVENT_WRITE)
            while ready.get_map() and not output.flooded:
                if (left := deadline - time.monotonic()) <= 0:
                    return output, False
                for key, _ in ready.select(min(left, 3600.0)):
                    if key.fileobj is process.stdout:
                        output.add(data := os.read(key.fd, 65536))
                        if not data:
                            ready.unregister(process.stdout)
                        continue
                    try:
                        stdin = stdin[os.write(key.fd, stdin[:65536]):]
                    except OSError:
                        stdin = b""
                    if not stdin:
                        ready.unregister(process.stdin)
                        process.stdin.close()
        return output, not output.flooded

    def wait(self, patience=0.0) -> int:
        """The exit code, after at most `patience` seconds and then a kill; 128 + n for signal n."""
        try:
            code = self.process.wait(max(0.0, patience))
        except subprocess.TimeoutExpired:
            self.killed = True
            self.kill()
            code = self.process.wait()
        return code if code >= 0 else 128 - code

    def kill(self):
        """End every process in it: the first one's death takes its namespace with it. From any thread."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self):
        """End it and leave nothing behind. A second time does nothing."""
        if self.process is not None and not self.process.stdout.closed:
            self.kill()
            self.process.wait()
            self.talk(deadline=time.monotonic() + 5)  # to the end of the last process that could write
            self.process.stdin.close()
            self.process.stdout.close()
        cgroups.remove(self.groups)

    def __exit__(self, *exc):
        self.close()


def environment() -> dict[str, str]:
    """The environment variables in a sandbox: nothing of the trainer's."""
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    return dict(PATH=path, HOME="/tmp", USER="user", LOGNAME="user", LANG="C.UTF-8", TERM="dumb",
                PYTHONDONTWRITEBYTECODE="1", PYTHONHASHSEED="0")


@contextlib.contextmanager
def _memory_file(content: bytes):
    """A file without a name; what is written to it later goes to its end."""
    with os.fdopen(os.memfd_create("files"), "w+b", buffering=0) as file:
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
        file.write(content)
        file.seek(0)
        yield file


class Output:
    """The head and the tail of what a process prints, in bounded memory."""

    def __init__(self, characters: int):
        self.characters, self.keep = characters, 4 * characters + 8  # bytes: a character has at most four
        self.head, self.tail, self.total = bytearray(), bytearray(), 0

    @property
    def flooded(self) -> bool:
        return self.total > MOST_OUTPUT

    def add(self, data: bytes):
        self.total += len(data)
        room = self.keep - len(self.head)
        self.head += data[:room]
        self.tail += data[room:]
        if len(self.tail) > 2 * self.keep:  # not each time: it moves what stays
            del self.tail[:-self.keep]

    def text(self) -> str:
        kept = self.head + self.tail
        return clip(kept.decode(errors="replace"), self.characters, self.total - len(kept))


def clip(text: str, characters: int, lost: int = 0) -> str:
    """At most so many characters; a line in their middle says how many are missing, with `lost` before."""
    missing = max(0, len(text) - characters) + lost
    if not missing:
        return text
    half = characters // 2
    return f"{text[:characters - half]}\n... [{missing} left out] ...\n{text[len(text) - half:]}"


# How it is confined


@functools.cache
def check() -> None:
    """BadInput where there is no sandbox on this machine, with what to do about it."""
    missing = [tool for tool in ("bwrap", "setpriv", "prlimit", "tar") if not shutil.which(tool)]
    try:
        if missing:
            raise SandboxError(f"{', '.join(missing)} not installed")
        if platform.machine() not in syscalls.PROCESSORS:
            raise SandboxError(f"no filter of system calls for {platform.machine()}")
        with Sandbox(["true"]) as box:
            if box.wait(30) != 0:
                raise SandboxError("true failed")
    except SandboxError as error:
        raise BadInput(f"no sandbox for code that a model wrote: {error} (apt-get install bubblewrap, or "
                       "name an executor with executor_url; docs/sandbox.md says what it needs)") from error


def works() -> bool:
    """Whether a sandbox can be started now: then one that could not be was at fault itself."""
    try:
        run(["true"])
    except SandboxError:
        return False
    return True


@functools.cache
def _readable() -> tuple[str, ...]:
    """What code in a sandbox can read of this machine: the system's programs, and this Python."""
    python = {sys.prefix, *(os.path.realpath(path) for path in (sys.prefix, sys.base_prefix))}
    # Not the whole folder, which may also be that of a project, or someone's home.
    parts = [f"{folder}/{name}" for folder in sorted(python) for name in PYTHON_PARTS]
    return READABLE + tuple(path for path in parts if not path.startswith("/usr/") and os.path.exists(path))


@functools.cache
def _copies() -> dict[str, bytes]:
    """What is COPIED, as it was for the first sandbox, so that none learns what the others do."""
    return {path: Path(path).read_bytes() for path in COPIED if os.path.exists(path)}


@functools.cache
def _hidden() -> tuple[list[str], list[str]]:
    """Files and folders of /proc that tell what others do."""
    names = sorted(name for name in os.listdir("/proc") if not name.isdigit() and name not in STEADY)
    files, folders = [], []
    for path in (*(f"/proc/{name}" for name in names), *COUNTS):
        if os.path.isdir(path):
            folders.append(path)
        elif path not in COPIED and os.path.exists(path) and os.stat(path).st_mode & stat.S_IROTH:
            files.append(path)
    return files, folders


def _bubblewrap(limits, seccomp: int, *copies: int):
    command = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--seccomp", str(seccomp),
               "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
               "--hostname", "sandbox"]
    if os.geteuid() == 0:  # needs no user namespace; gives these up once it has become the sandbox's user
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
            command += ["--cap-add", capability]
        first = []
    else:
        # The first process has a right that the code has not, or that could reach into it, and undo what ends
        # them all.
        command += ["--unshare-user", "--as-pid-1", "--cap-add", "CAP_SETPCAP"]
        first = ["/bin/sh", "-c", '"$@"; exit $?', "sh"]
    command += ["--proc", "/proc", "--dev", "/dev"]
    for path, copy in zip(_copies(), copies, strict=True):
        command += ["--perms", "0444", "--ro-bind-data", str(copy), path]
    files, folders = _hidden()
    for path in files:
        command += ["--ro-bind", "/dev/null", path]
    for path in folders:
        command += ["--perms", "0555", "--size", "4096", "--tmpfs", path]
    for path in (WORK, "/tmp", "/dev/shm"):
        command += ["--perms", "1777", "--size", str(limits.disk * MIB), "--tmpfs", path]
    for path in _readable():  # after the writable folders, since this Python may lie in one
        for parent in reversed(PurePosixPath(path).parents[:-1]):
            command += ["--perms", "0755", "--dir", str(parent)]
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind-try", path, path]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--", *first]


def _new_user() -> int:
    """A user that nobody else is, as far as this machine or container maps them."""
    with contextlib.suppress(OSError):
        inner, _, count = map(int, Path("/proc/self/uid_map").read_text().split()[:3])
        if inner + count < 2**31:
            return inner + count // 2 + secrets.randbelow(max(1, count // 2))
    return 2**30 + secrets.randbelow(2**30)


def _protect_devices():
    """Make /dev read-only for what this thread starts, as root can: else code sets the times of /dev/null,
    which are the same for all."""
    read_only, no_setuid, remount, bind, recursive, slave = 2**0, 2**1, 2**5, 2**12, 2**14, 2**19
    steps = [(b"/", recursive | slave), (b"/dev", recursive | bind),
             (b"/dev", remount | bind | read_only | no_setuid)]
    C = ctypes.CDLL(None)
    if os.geteuid() == 0 and C.unshare(2**17) == 0:  # from here on this thread's mounts are its own
        for path, flags in steps:
            if C.mount(path, path, None, ctypes.c_ulong(flags), None) != 0:
                break


# A child is killed when the *thread* that started it ends, so one thread starts them all.
STARTER = ThreadPoolExecutor(1, "sandbox", _protect_devices)
os.register_at_fork(after_in_child=lambda: STARTER.__init__(1, "sandbox", _protect_devices))
