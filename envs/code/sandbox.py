"""Code that a model wrote, run apart from everything: bubblewrap, plain namespaces, or an HTTP executor.

    result = sandbox.run(["python3", "main.py"], {"main.py": "print(6 * 7)"}, timeout=5)
    result.output, result.exit_code, result.elapsed, result.timed_out

The code has a process tree, a network (without a way out), a user and a file system of its own. It reads
the system's programs and this Python, and writes to its work folder and /tmp, which live in memory: when the
sandbox ends, or the process that started it dies, by whatever signal, no process and no file is left.
docs/sandbox.md says what this protects, and what not.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import errno
import fcntl
import functools
import io
import os
import platform
import re
import secrets
import selectors
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Literal

from envs import BadInput

WORK = "/testbed"  # the folder that the code starts in
MIB = 2**20
PATIENCE = 30  # with an executor beyond the time that the command may take [s]
MOST_OUTPUT = 64 * MIB  # a process that writes more is ended [bytes]
READABLE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives",
            "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime")
PYTHON_PARTS = ("bin", "lib", "lib64", "include", "pyvenv.cfg")
Backend = Literal["auto", "bubblewrap", "namespaces", "unconfined"]


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


def run(argv, files=None, cwd=".", stdin=b"", backend: Backend = "auto", **limits) -> Result:
    """Run a command over `files` and return what it printed. Never raises for what the command does.

    files: relative path -> str or bytes, laid into the work folder; cwd: a folder within it. Limits are
    those of `Limits`. Raises BadInput where nothing can confine the command, SandboxError where it could not
    be started.
    """
    limits = Limits(**limits)
    start = time.monotonic()
    deadline = start + limits.timeout
    with Sandbox(argv, files, limits, cwd, backend) as box:
        output, finished = box.talk(stdin, deadline)
        exit_code = box.wait(deadline - time.monotonic() if finished else 0.0)
    text = clip(output, limits.output)
    return Result(text, exit_code, time.monotonic() - start, box.killed and not output.flooded)


class Sandbox:
    """A confined process with pipes: .process.stdin, .process.stdout (standard error goes there too)."""

    def __init__(self, argv, files=None, limits: Limits | None = None, cwd=".", backend: Backend = "auto"):
        self.limits = limits or Limits()
        self.backend = choose(backend)
        self._start(argv, files or {}, cwd)

    def _start(self, argv, files, cwd):
        self.killed = False  # by `wait`, which ran out of patience
        self.process = self.folder = None  # folder: unconfined only, on disk
        packed, limits = tar(files), self.limits
        if len(packed) > limits.disk * MIB:
            raise SandboxError(f"the sandbox did not start: {len(packed) / MIB:.1f} MiB of files, the limit "
                               f"on its disk is {limits.disk} MiB")
        with _memory_file() as script, _memory_file() as seccomp:
            script.write(packed)  # and behind the files comes what goes wrong before the command runs
            script.seek(0)
            seccomp.write(_filter())
            seccomp.seek(0)
            # Standard error is that file until the command takes over, which the first byte printed tells.
            # Where memory runs out, the kernel is to end this before it ends the trainer.
            here = "." if self.backend == "unconfined" else WORK
            start = ("(echo 1000 > /proc/$$/oom_score_adj) 2> /dev/null; "
                     f"cd {here} && tar -xf - --no-same-owner <&2 && "
                     f"cd {_shell(cwd)} && ulimit -f {limits.disk * 2048} && printf '\\006' && "
                     "exec 2>&1 && exec \"$@\"")
            try:
                self._launch(["/bin/sh", "-c", start, "sh", *map(os.fspath, argv)], script, seccomp.fileno())
                if not self._started():
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

    def _launch(self, command, errors, seccomp: int):
        command, here = self._confine(command, seccomp)
        # A child is killed when the *thread* that started it ends, so one thread starts them all.
        self.process = _starter().submit(
            subprocess.Popen, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            bufsize=0, env=environment(), cwd=here, start_new_session=True,
            pass_fds=[seccomp] if self.backend == "bubblewrap" else []).result()

    def _started(self) -> bool:
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            return bool(ready.select(60)) and os.read(self.process.stdout.fileno(), 1) == b"\6"

    def _confine(self, command, seccomp: int):
        """-> the command that runs `command` in the sandbox, and the folder to start it in.

        seccomp: number of a file with a filter of system calls, for bubblewrap.
        """
        limits, user = self.limits, []
        if os.geteuid() == 0:
            # A user for each sandbox: processes are counted by user, and no limit on them holds for root.
            number = str(_new_user())
            user = ["--reuid", number, "--regid", number, "--clear-groups"]
        # A core dump of 1 byte is none; with 0, a program that collects dumps would still get one.
        capped = ["prlimit", f"--as={limits.memory * MIB}", f"--nproc={limits.processes}",
                  f"--cpu={limits.cpu}", f"--nofile={limits.open_files}", "--core=1", "--", *command]
        dropped = ["setpriv", *user, "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all",
                   "--no-new-privs", "--", *capped]
        if self.backend == "bubblewrap":
            return [*_bubblewrap(limits, seccomp), *dropped], "/"
        if self.backend == "namespaces":
            return [*_namespaces(limits), *dropped], "/"
        self.folder = tempfile.mkdtemp(prefix="envs-")
        # Limits on processes count everything that the user runs, so here there is none.
        return [part for part in capped if not part.startswith("--nproc")], self.folder

    def talk(self, stdin=b"", deadline=float("inf")):
        """Write stdin, close it, read to the end of the output. -> output, whether it ended in time."""
        output, process = Output(self.limits.output), self.process
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            os.set_blocking(process.stdin.fileno(), False)
            ready.register(process.stdin, selectors.EVENT_WRITE)
            while ready.get_map():
                left = deadline - time.monotonic()
                events = ready.select(max(0.0, min(left, 3600.0)))
                if left <= 0 and time.monotonic() >= deadline or output.flooded:
                    return output, False
                for key, _ in events:
                    if key.fileobj is process.stdin:
                        try:
                            stdin = stdin[os.write(key.fd, stdin[:65536]):] if stdin else stdin
                        except OSError:
                            stdin = b""
                        if not stdin:
                            ready.unregister(process.stdin)
                            process.stdin.close()
                    elif data := os.read(key.fd, 65536):
                        output.add(data)
                    else:
                        ready.unregister(process.stdout)
        return output, True

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
            if self.folder or self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self):
        """End it and leave nothing behind. A second time does nothing."""
        if self.process is None or self.process.stdout.closed:
            self._remove_folder()
            return
        self.kill()
        self.process.wait()
        # The end of the output is the end of the last process that could write to it.
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline and ready.select(1.0):
                if not os.read(self.process.stdout.fileno(), MIB):
                    break
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()
        self._remove_folder()

    def _remove_folder(self):
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def environment() -> dict[str, str]:
    """The environment variables in a sandbox: nothing of the trainer's."""
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    return dict(PATH=path, HOME="/tmp", USER="user", LOGNAME="user", LANG="C.UTF-8", TERM="dumb",
                PYTHONDONTWRITEBYTECODE="1", PYTHONHASHSEED="0")


@contextlib.contextmanager
def _memory_file():
    """A file without a name; what is written to it always goes to its end."""
    if hasattr(os, "memfd_create"):
        file = os.fdopen(os.memfd_create("files"), "w+b", buffering=0)
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    else:
        file = tempfile.TemporaryFile("a+b", buffering=0)
    with file:
        yield file


class Output:
    """The head and the tail of what a process prints, in bounded memory."""

    def __init__(self, characters: int):
        self.keep = 4 * characters + 8  # bytes: no character of UTF-8 takes more than four
        self.head, self.tail, self.total = b"", bytearray(), 0

    @property
    def flooded(self) -> bool:
        return self.total > MOST_OUTPUT

    def add(self, data: bytes):
        self.total += len(data)
        if len(self.head) < self.keep:
            self.head, data = (self.head + data)[:self.keep], data[self.keep - len(self.head):]
        self.tail += data
        if len(self.tail) > 2 * self.keep:  # not each time: it moves what stays
            del self.tail[:-self.keep]


def clip(output: Output | str, characters: int) -> str:
    """At most so many characters and a line in their middle that says how much was left out."""
    if isinstance(output, str):
        head = tail = output
        missing, whole = max(0, len(output) - characters), len(output) <= characters
    else:
        whole = output.total <= len(output.head) + len(output.tail)
        head = (output.head + output.tail if whole else output.head).decode(errors="replace")
        tail = head if whole else output.tail.decode(errors="replace")
        whole, missing = whole and len(head) <= characters, output.total - characters
    if whole:
        return head
    half = characters // 2
    return f"{head[:characters - half]}\n... [{missing} left out] ...\n{tail[len(tail) - half:]}"


def tar(files: dict) -> bytes:
    """An archive of relative path -> str or bytes. BadInput for a path that leads out of it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in files.items():
            # Half of a surrogate pair has no UTF-8, but a file may hold anything.
            content = content.encode(errors="surrogatepass") if isinstance(content, str) else content
            entry = tarfile.TarInfo(str(_inside(path, "file")))
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def read_tree(folder: Path) -> dict[str, bytes]:
    """The regular files of a folder, by relative path; links and .git are left out."""
    return {path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(Path(folder).rglob("*"))
            if path.is_file() and not path.is_symlink() and ".git" not in path.relative_to(folder).parts
            and "__pycache__" not in path.parts}


def _shell(folder) -> str:
    return shlex.quote(f"./{_inside(folder, 'cwd')}")


def _inside(path, what: str) -> PurePosixPath:
    pure = PurePosixPath(path)
    plain = not re.search("[\0\ud800-\udfff]", str(path)) and (pure.parts or what == "cwd")
    if pure.is_absolute() or ".." in pure.parts or not plain:
        raise BadInput(f"sandbox: {what} {str(path)[:200]!r}: expected a relative path without '..'")
    return pure


# Ways to confine


def choose(backend: Backend = "auto") -> str:
    """The backend to use: the one asked for, or the best that works here. BadInput where there is none."""
    if backend == "unconfined":
        return backend
    wanted = ("bubblewrap", "namespaces") if backend == "auto" else (backend,)
    reasons = []
    for name in wanted:
        if reason := _unusable(name):
            reasons.append(f"{name}: {reason}")
        else:
            return name
    raise BadInput(f"no sandbox for untrusted code ({'; '.join(reasons)}). Install bubblewrap, allow user "
                   "namespaces, name an executor with executor_url, or set allow_unconfined=true to run it "
                   "with nothing but limits of time and memory")


@functools.cache
def _unusable(name: str) -> str:
    """Why a backend does not work here; empty if it does."""
    needed = {"bubblewrap": ("bwrap", "setpriv", "prlimit", "tar"),
              "namespaces": ("unshare", "setpriv", "prlimit", "tar", "mount", "pivot_root", "chroot")}[name]
    if missing := [tool for tool in needed if not _which(tool)]:
        return f"{', '.join(missing)} not installed"
    box = Sandbox.__new__(Sandbox)
    box.limits, box.backend = Limits(), name
    try:
        box._start(["true"], {}, ".")
    except SandboxError as error:
        return str(error).removeprefix("the sandbox did not start: ")
    with box:
        return "" if box.wait(30) == 0 else "true failed"


def _which(tool):
    return shutil.which(tool) or shutil.which(tool, path="/usr/sbin:/sbin")


@functools.cache
def _readable() -> tuple[str, ...]:
    """What code in a sandbox can read of this machine: the system's programs, and this Python."""
    python = {sys.prefix, *(os.path.realpath(path) for path in (sys.prefix, sys.base_prefix))}
    # Not the whole folder, which may also be that of a project, or someone's home.
    parts = [f"{folder}/{name}" for folder in sorted(python) for name in PYTHON_PARTS]
    return READABLE + tuple(path for path in parts if not path.startswith("/usr/") and os.path.exists(path))


def _bubblewrap(limits, seccomp: int):
    command = [_which("bwrap"), "--die-with-parent", "--seccomp", str(seccomp), "--unshare-pid",
               "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
               "--hostname", "sandbox"]
    if os.geteuid() == 0:  # needs no user namespace; gives these up once it has become the sandbox's user
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
            command += ["--cap-add", capability]
        first = []
    else:
        command += ["--unshare-user", *(["--disable-userns"] if _can_disable_userns() else [])]
        # The first process has a right that the code has not, or that could trace it, and through it undo
        # what ends them all.
        command += ["--as-pid-1", "--cap-add", "CAP_SETPCAP"]
        first = ["/bin/sh", "-c", '"$@"; exit $?', "sh"]
    command += ["--proc", "/proc", "--dev", "/dev"]
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


@functools.cache
def _can_disable_userns() -> bool:
    told = subprocess.run([_which("bwrap"), "--help"], capture_output=True, text=True)
    return "--disable-userns" in told.stdout


# What bubblewrap refuses beyond its own walls: namespaces and mounts (a user namespace would allow writable
# memory without limit), keys, memory that belongs to no process, and parts of the kernel with a history.
# Numbers on x86-64 and arm64.
REFUSED = {
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "shmget": (29, 194), "msgget": (68, 186), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425)}
CLONE = (56, 220)
CLONE3 = 435
NEW_NAMESPACES = 0x7E020000  # flags of clone: NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET


@functools.cache
def _filter() -> bytes:
    """A seccomp filter that refuses REFUSED, as a program of classic BPF; on other processors, of nothing."""
    load, equal, at_least, has_bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    which = {"x86_64": 0, "aarch64": 1}.get(platform.machine())
    if which is None:
        return struct.pack("=HBBI", answer, 0, 0, allow)
    numbers = [pair[which] for pair in REFUSED.values()]
    steps = [(load, 0, 0, 4), (equal, 1, 0, (0xC000003E, 0xC00000B7)[which]), (answer, 0, 0, unknown),
             (load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (answer, 0, 0, unknown)]  # x32 has other numbers
    for number in numbers:
        steps += [(equal, 0, 1, number), (answer, 0, 0, refuse)]
    # The flags of clone3 are out of sight; without it, the C library takes clone.
    steps += [(equal, 0, 1, CLONE3), (answer, 0, 0, unknown), (equal, 0, 3, CLONE[which]), (load, 0, 0, 16),
              (has_bits, 0, 1, NEW_NAMESPACES), (answer, 0, 0, refuse), (answer, 0, 0, allow)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


# The new root is built over /sys, which nothing that is to be seen lies under. {places} are paths in it.
BUILD_ROOT = r"""
set -e
# Memory that belongs to no process: none of it.
for limit in shmall msgmni; do (echo 0 > /proc/sys/kernel/$limit) 2> /dev/null || true; done
mount -t tmpfs -o size=16m,mode=755 sandbox /sys
cd /sys
mkdir -p testbed tmp dev/shm proc old same
printf '%s' {writable} > fstab
mount --all --fstab fstab
mkdir -p {folders}
touch dev/null dev/zero dev/full dev/random dev/urandom {files}
ln -s /proc/self/fd dev/fd; ln -s fd/0 dev/stdin; ln -s fd/1 dev/stdout; ln -s fd/2 dev/stderr
{links}
printf '%s' {readable} > fstab
mount --all --fstab fstab
{below}
rm fstab
pivot_root . old
cd /
umount -l /old
rmdir /old
mount -o remount,bind,ro /
# The same once more, to change the root to: who has done so can make no user namespace, in which it could
# mount writable memory without limit.
mount --rbind / /same
set +e
chroot /same "$@"  # not exec: the first process of a namespace reaps orphans, and no signal ends it
exit $?
"""


def _namespaces(limits):
    outer = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["setpriv", "--pdeathsig", "KILL", "--", "unshare", *outer, "--mount", "--pid", "--net", "--ipc",
            "--uts", "--cgroup", "--fork", "--kill-child", "--", "/bin/sh", "-c", _build_root(limits), "sh"]


def _build_root(limits) -> str:
    """Its shell script. A call of mount for each place would take most of a sandbox's time."""
    def words(paths):
        return " ".join(shlex.quote(f".{path}") for path in paths)

    def fstab(rows):
        return shlex.quote("".join(" ".join(re.sub(r"[\s\\]", lambda c: f"\\{ord(c[0]):03o}", column)
                                            for column in row) + "\n" for row in rows))

    options = f"nosuid,nodev,size={limits.disk * MIB},nr_inodes=100k,mode=1777"
    devices = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
    paths = [path for path in _readable() if os.path.lexists(path)]
    links = [path for path in paths if os.path.islink(path)]
    folders = [path for path in paths if os.path.isdir(path) and path not in links]
    files = [path for path in paths if path not in links and path not in folders]
    # A bind mount is made read-only without what is mounted below it.
    mounts = [line.split()[4].encode().decode("unicode_escape").encode("latin-1").decode(errors="replace")
              for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    below = [mount for mount in dict.fromkeys(mounts)
             if any(mount.startswith(f"{folder}/") for folder in folders)]
    return BUILD_ROOT.format(
        writable=fstab(("sandbox", f"/sys{path}", "tmpfs", options) for path in (WORK, "/tmp", "/dev/shm")),
        folders=words([*folders, *(os.path.dirname(path) for path in files + links)]), files=words(files),
        links="".join(f"ln -s {shlex.quote(os.readlink(path))} {words([path])}\n" for path in links),
        readable=fstab([*((path, f"/sys{path}", "none", "rbind,ro,nosuid,nodev") for path in folders + files),
                        *((path, f"/sys{path}", "none", "bind") for path in devices),
                        ("proc", "/sys/proc", "proc", "nosuid,nodev,noexec")]),
        below="".join(f"mount -o remount,bind,ro {words([mount])}\n" for mount in below))


def _new_user() -> int:
    """A user that nobody else is, as far as this machine or container maps them."""
    with contextlib.suppress(OSError):
        inner, _, count = map(int, Path("/proc/self/uid_map").read_text().split()[:3])
        if inner + count < 2**31:
            return inner + count // 2 + secrets.randbelow(max(1, count // 2))
    return 2**30 + secrets.randbelow(2**30)


@functools.cache
def _starter() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="sandbox")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_starter.cache_clear)


# Somewhere else: containers behind HTTP


class HttpExecutor:
    """A service that runs a test command over a container image with some files laid over it.

    POST /test {docker_image, patch_tar_b64, test_cmd, timeout} -> {test_output, exit_code, elapsed_seconds,
    container_id}; GET /health and /ping. tools/executor_server.py is a small one.
    """

    def __init__(self, url: str, retries: int = 3):
        import requests  # takes a while, and only an executor needs it

        if not re.fullmatch(r"https?://[^/\s]+(/[^\s?#]*)?", url):
            raise BadInput(f"executor_url={url}: expected the form http://host:port")
        self.requests, self.url, self.retries = requests, url.rstrip("/"), retries

    def healthy(self) -> bool:
        try:
            return self.requests.get(f"{self.url}/health", timeout=10).ok
        except self.requests.RequestException:
            return False

    def test(self, docker_image: str, files: dict, test_cmd: str, timeout: float = 300.0) -> Result:
        """Raises SandboxError when the service gives no answer, or none of the right form."""
        body = dict(docker_image=docker_image, patch_tar_b64=base64.b64encode(tar(files)).decode(),
                    test_cmd=test_cmd, timeout=timeout)
        reason = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(min(0.5 * 2 ** (attempt - 1), 30.0))
            try:
                answer = self.requests.post(f"{self.url}/test", json=body, timeout=(10, timeout + PATIENCE))
            except self.requests.RequestException as error:
                reason = f"{type(error).__name__}"
                continue
            if answer.status_code == 429 or answer.status_code >= 500:
                reason = f"answered {answer.status_code}"
                continue
            try:
                data = answer.json() if answer.ok else {}
                code = int(data["exit_code"])
                return Result(str(data["test_output"]), code, float(data["elapsed_seconds"]), code == 124)
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                raise SandboxError(f"{self.url}/test answered {answer.status_code}: {answer.text[:200]!r}, "
                                   "expected test_output, exit_code, elapsed_seconds") from error
        raise SandboxError(f"{self.url}/test {reason}, after {self.retries + 1} tries")
