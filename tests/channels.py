"""Ways for one program to tell another something, through what the kernel has only once.

    python tests/channels.py outside        # 16 bits by each, between two processes that nothing confines
    python tests/channels.py sandboxes      # between two sandboxes

prints {channel: [what was sent, what was received, errors]}. Both sides run this file and read lines "phase
channel". For each bit the receiver does `before`, the sender `act` if it is 1, the receiver `after`, which
says whether it has noticed, and the sender `undo`. Nothing measures time.
"""

import array
import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

BITS = 16
TRIES = 20  # outside, where everything else on the machine is counted, too
C = ctypes.CDLL(None, use_errno=True)
C.mmap.restype = ctypes.c_void_p
ARM = os.uname().machine == "aarch64"
FILE = os.path.realpath("/usr/bin/env")  # in every sandbox
CHANNELS = {}


def channel(name, **values):
    """The class below, with these values, is the channel of that name."""
    def note(kind):
        CHANNELS[name] = type(kind.__name__, (kind,), values)()
        return kind
    return note


def call(x86, arm, *values):
    """A system call by its two numbers."""
    done = C.syscall(arm if ARM else x86, *values)
    if done < 0:
        raise OSError(ctypes.get_errno(), f"system call {x86}")
    return done


def opened(path, mode=os.O_RDWR):
    return owned(os.open(path, mode))


def owned(number):
    """A file that is closed when nobody holds it."""
    return os.fdopen(number, "rb", buffering=0)


def read(path=FILE):
    with open(path, "rb") as file:
        return file.read(1)


def taken(function, *values, error=BlockingIOError):
    """Whether a call says that somebody was there before."""
    try:
        function(*values)
    except error:
        return True
    return False


class Channel:
    held = None  # by the sender until it undoes it

    def before(self):
        pass

    def act(self):
        pass

    def after(self):
        pass

    def undo(self):
        self.held = None


class Children(Channel):
    """The sender starts processes, which say when they have done what `child` does, and wait."""
    many = 1

    def act(self):
        self.held = []
        for _ in range(self.many):
            reader, writer = os.pipe()
            self.held.append(os.fork())
            if not self.held[-1]:
                try:
                    self.child(writer)
                finally:
                    os._exit(0)
            os.close(writer)
            os.read(reader, 1)
            os.close(reader)

    def child(self, writer):
        os.write(writer, b"x")
        signal.pause()

    def undo(self):
        for pid in self.held or ():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.held = None


class Count(Channel):
    """A number that grows by `step` when the sender acts."""
    path, step = None, 1

    def count(self):
        return self.number(Path(self.path).read_text())

    def before(self):
        self.start = self.count()

    def after(self):
        return self.count() - self.start >= 0.5 * self.step


# ---- Locks


@channel("flock of a file", path=FILE)
@channel("flock of a device", path="/dev/null")
class Flock(Channel):
    def act(self):
        self.held = opened(self.path, os.O_RDONLY)
        fcntl.flock(self.held, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def after(self):
        return taken(fcntl.flock, opened(self.path, os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)


@channel("list of locks", path=FILE)
class ListedLock(Flock):
    def after(self):
        return f":{os.stat(self.path).st_ino} " in Path("/proc/locks").read_text()


def record_lock(file, command, kind):
    """-> the kind of lock that is said to be there"""
    return struct.unpack_from("h", fcntl.fcntl(file, command, struct.pack("hhqqi4x", kind, 0, 0, 1, 0)))[0]


@channel("record lock, asked for", take=fcntl.F_SETLK, ask=fcntl.F_GETLK)
@channel("record lock of an open file, asked for", take=37, ask=36)  # F_OFD_SETLK, F_OFD_GETLK
class ReadLock(Channel):
    def act(self):
        self.held = opened(FILE, os.O_RDONLY)
        record_lock(self.held, self.take, fcntl.F_RDLCK)

    def after(self):
        return record_lock(opened(FILE, os.O_RDONLY), self.ask, fcntl.F_WRLCK) != fcntl.F_UNLCK


@channel("record lock of a device", take=fcntl.F_SETLK)
@channel("record lock of a device, by an open file", take=37)
class WriteLock(Channel):
    def act(self):
        self.held = opened("/dev/zero")
        record_lock(self.held, self.take, fcntl.F_WRLCK)

    def after(self):
        return taken(record_lock, opened("/dev/zero"), self.take, fcntl.F_WRLCK)


@channel("record lock of a device, waited for", take=fcntl.F_SETLKW)
@channel("record lock of a device, waited for by an open file", take=38)
class AwaitedLock(WriteLock):
    def after(self):
        def late(*_):
            raise TimeoutError
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        found = taken(record_lock, opened("/dev/zero"), self.take, fcntl.F_WRLCK, error=TimeoutError)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return found


@channel("lease")
class Lease(Channel):
    def act(self):
        self.held = opened(FILE, os.O_RDONLY)

    def after(self):  # given to the only one that has the file open
        return taken(fcntl.fcntl, opened(FILE, os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_WRLCK)


@channel("hint of a file")
class Hint(Channel):
    """How long what is written is to live: F_SET_RW_HINT, F_GET_RW_HINT."""
    def set(self, value):
        fcntl.fcntl(opened(FILE, os.O_RDONLY), 1036, struct.pack("Q", value))

    def act(self):
        self.set(2)

    def after(self):
        return struct.unpack("Q", fcntl.fcntl(opened(FILE, os.O_RDONLY), 1035, bytes(8)))[0] == 2

    def undo(self):
        self.set(0)


# ---- What others do with files


@channel("inotify of a file", path=FILE)
@channel("inotify of a device", path="/dev/zero")
class Watch(Channel):
    def before(self):
        self.queue = None
        self.queue = owned(call(294, 26, os.O_NONBLOCK))
        call(254, 27, self.queue.fileno(), self.path.encode(), 1)  # IN_ACCESS

    def act(self):
        read(self.path)

    def after(self):
        return bool(self.queue.read(1000))


@channel("signal for a read in a folder")
class FolderSignal(Channel):
    def before(self):
        self.seen = False

        def note(*_):
            self.seen = True
        signal.signal(signal.SIGIO, note)
        self.folder = os.open(os.path.dirname(FILE), os.O_RDONLY)
        fcntl.fcntl(self.folder, fcntl.F_NOTIFY, 1)  # DN_ACCESS

    def act(self):
        read()

    def after(self):
        os.close(self.folder)
        return self.seen


@channel("times of a device")
class Touch(Channel):
    def before(self):
        time.sleep(0.01)  # the clock of files ticks every few milliseconds
        self.then = os.stat("/dev/full").st_mtime_ns

    def act(self):
        os.utime("/dev/full")

    def after(self):
        return os.stat("/dev/full").st_mtime_ns != self.then


class Cache(Channel):
    """The receiver drops a page of a large file from memory, the sender reads it."""
    at = 640 * 1024

    def __init__(self):
        files = [entry for entry in os.scandir("/usr/bin") if entry.is_file(follow_symlinks=False)]
        self.path = max(files, key=lambda entry: entry.stat().st_size).path

    def file(self):
        file = opened(self.path, os.O_RDONLY)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        return file

    def before(self):
        file = self.file()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def act(self):
        file = self.file()
        os.pread(file.fileno(), 1, self.at)


@channel("mincore")
class Mincore(Cache):
    def after(self):
        size, file, answer = ctypes.c_size_t(4096), self.file(), ctypes.create_string_buffer(1)
        start = ctypes.c_void_p(C.mmap(None, size, 1, 1, file.fileno(), ctypes.c_long(self.at)))
        call(27, 232, start, size, answer)
        C.munmap(start, size)
        return answer.raw[0] & 1


@channel("a read that does not wait")
class NoWait(Cache):
    def after(self):
        file = self.file()
        return not taken(os.preadv, file.fileno(), [bytearray(1)], self.at, os.RWF_NOWAIT)


@channel("cachestat")
class Cachestat(Cache):
    def after(self):
        file, found = self.file(), (ctypes.c_uint64 * 5)()
        call(451, 451, file.fileno(), (ctypes.c_uint64 * 2)(self.at, 4096), found, 0)
        return found[0]


@channel("faults of a page")
class Faults(Cache):
    def after(self):
        file, before = self.file(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        with mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ, offset=self.at) as page:
            page[0]
        return resource.getrusage(resource.RUSAGE_SELF).ru_majflt == before


@channel("number of those that map a page")
class Mapped(Channel):
    def page(self):
        file = opened(FILE, os.O_RDONLY)
        page = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ, offset=4096 * 4)
        page[0]
        return page

    def act(self):
        self.held = self.page()

    def after(self):
        with self.page():
            part = Path("/proc/self/smaps").read_text().split(f" {FILE}\n")[1]
            return int(part.split("Shared_Clean:")[1].split()[0])


@channel("futex in a file")
class Futex(Children):
    def page(self):
        file = opened(FILE, os.O_RDONLY)
        return ctypes.c_void_p(C.mmap(None, ctypes.c_size_t(4096), 1, 1, file.fileno(), ctypes.c_long(0)))

    def child(self, writer):
        page = self.page()
        os.write(writer, b"x")
        call(202, 98, page, 0, ctypes.c_uint32.from_address(page.value).value, None)  # FUTEX_WAIT

    def act(self):
        super().act()
        with contextlib.suppress(OSError):  # /proc may be that of another namespace
            for _ in range(1000):
                if Path(f"/proc/{self.held[0]}/stat").read_text().rpartition(") ")[2].startswith("S"):
                    break  # it waits
                time.sleep(0.001)

    def after(self):
        for _ in range(20):  # it is about to wait
            if call(202, 98, self.page(), 1, 1):  # FUTEX_WAKE
                return True
            time.sleep(0.001)


# ---- What the kernel counts


class Sockets(Count):
    step = 100

    def act(self):
        self.held = [socket.socket() for _ in range(self.step)]


@channel("number of open files")
class FileNr(Sockets):
    path = "/proc/sys/fs/file-nr"

    def number(self, text):
        return int(text.split()[0])


CHANNELS["number of inodes"] = type("", (FileNr,), dict(path="/proc/sys/fs/inode-nr"))()


@channel("number of TCP sockets", path="/proc/net/sockstat")
class Sockstat(Sockets):
    def number(self, text):
        return int(text.partition("TCP:")[2].partition("alloc ")[2].split()[0])


@channel("number of names in memory", path="/proc/sys/fs/dentry-state", step=300)
class DentryState(Count):
    def number(self, text):
        return int(text.split()[0])

    def act(self):
        for _ in range(self.step):
            os.path.exists(f"/tmp/{random.random()}")


class Memory(Count):
    size = 64 << 20

    def act(self):
        self.held = bytearray(b"x") * self.size


@channel("memory in use", path="/proc/meminfo", word="AnonPages:", step=64 << 10)
@channel("pages in use", path="/proc/vmstat", word="nr_anon_pages ", step=16 << 10)
class MemoryFile(Memory):
    def number(self, text):
        return int(text.split(self.word)[1].split()[0])


class Processes(Children, Count):
    many = step = 20


@channel("number of processes", path="/proc/loadavg")
class Loadavg(Processes):
    def number(self, text):
        return int(text.split()[3].split("/")[1])


@channel("number of processes, by sysinfo")
class Sysinfo(Processes):
    def count(self):
        found = (ctypes.c_uint16 * 80)()
        call(99, 179, found)
        return found[40]


@channel("number of forks", path="/proc/stat")
class Forks(Processes):
    def number(self, text):
        return int(text.split("\nprocesses ")[1].split()[0])


@channel("last process", path="/proc/sys/kernel/ns_last_pid")
class LastPid(Processes):
    def number(self, text):
        return int(text)


@channel("number of a process's file")
class Pidfd(Processes):
    def count(self):
        child = os.fork()
        if not child:
            os._exit(0)
        try:
            file = owned(call(434, 434, child, 0))
            return os.fstat(file.fileno()).st_ino
        finally:
            os.waitpid(child, 0)


@channel("number of terminals", path="/proc/sys/kernel/pty/nr", step=20)
class Terminals(Count):
    def number(self, text):
        return int(text)

    def act(self):
        self.held = [owned(number) for _ in range(self.step) for number in os.openpty()]


@channel("number of a pipe", step=90)
class Pipe(Count):
    def count(self):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # each processor has its own numbers
        reader, writer = map(owned, os.pipe())
        return os.fstat(reader.fileno()).st_ino

    def act(self):
        for _ in range(self.step):
            self.count()


@channel("size of a new pipe")
class PipeSize(Channel):
    def act(self):
        self.held = [owned(number) for _ in range(110) for number in os.pipe()]
        for power in range(20, 15, -1):
            for pipe in self.held[::2]:
                with contextlib.suppress(OSError):
                    if fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) < 1 << power:
                        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 1 << power)

    def after(self):
        return fcntl.fcntl([owned(number) for number in os.pipe()][0], fcntl.F_GETPIPE_SZ) < 65536


@channel("files in flight")
class InFlight(Channel):
    def send(self, pair, many):
        with open("/dev/null") as file:
            rights = array.array("i", [file.fileno()] * many)
            pair[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

    def act(self):
        self.held = []
        with contextlib.suppress(OSError):
            for _ in range(20):
                self.held.append(socket.socketpair())
                for _ in range(9):
                    self.send(self.held[-1], 200)

    def after(self):
        return taken(self.send, socket.socketpair(), 1, error=OSError)


@channel("number of queued signals")
class Signals(Children):
    def queue(self, number):
        signal.pthread_sigmask(signal.SIG_BLOCK, [number])
        return C.sigqueue(os.getpid(), number, ctypes.c_void_p(0)) == 0

    def child(self, writer):
        while self.queue(40):
            pass
        super().child(writer)

    def after(self):
        if not self.queue(41):
            return True
        signal.sigtimedwait([41], 0)


@channel("number of inotify queues")
class Instances(Channel):
    def act(self):
        self.held = []
        with contextlib.suppress(OSError):
            for _ in range(200):
                self.held.append(owned(call(294, 26, 0)))

    def after(self):
        try:
            owned(call(294, 26, 0))
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            return True


@channel("free space", step=1 << 20)
class Space(Count):
    def count(self):
        return -os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize

    def act(self):
        self.held = Path(f"/dev/shm/channel-{os.getpid()}")
        self.held.write_bytes(b"x" * 2 * self.step)

    def undo(self):
        if self.held:
            self.held.unlink()
        self.held = None


# ---- Names


@channel("abstract socket", family=socket.AF_UNIX, address="\0channel")
@channel("port", family=socket.AF_INET, address=("127.0.0.1", 45671))
class Address(Channel):
    def bound(self):
        one = socket.socket(self.family)
        one.bind(self.address)
        return one

    def act(self):
        self.held = self.bound()

    def after(self):
        return taken(self.bound, error=OSError)


class Named(Channel):
    """A thing that `make` makes and `find` finds, or raises `missing`; `remove` removes it."""
    missing = FileNotFoundError

    def act(self):
        self.held = [self.make()]

    def after(self):
        return not taken(self.find, error=self.missing)

    def undo(self):
        if self.held:
            self.remove(*self.held)
        self.held = None


@channel("System V memory")
class SystemV(Named):
    def make(self):
        return call(29, 194, 0x5A17, 4096, 0o1666)

    def find(self):
        call(29, 194, 0x5A17, 0, 0)

    def remove(self, number):
        call(31, 195, number, 0, None)


@channel("message queue")
class Queue(Named):
    def make(self):
        return owned(call(240, 180, b"channel", os.O_CREAT | os.O_RDWR, 0o666, None))

    def find(self):
        owned(call(240, 180, b"channel", os.O_RDWR, 0, None))

    def remove(self, queue):
        call(241, 181, b"channel")


class NoKey(OSError):
    pass


@channel("key")
class Key(Named):
    missing = NoKey

    def make(self):
        return call(248, 217, b"user", b"channel", b"x", 1, -4)

    def find(self):
        try:
            call(250, 219, 10, -4, b"user", b"channel", 0)
        except OSError as error:
            raise NoKey if error.errno == errno.ENOKEY else error from None

    def remove(self, number):
        call(250, 219, 9, number, -4)


@channel("file in /tmp", path="/tmp/channel")
@channel("file in /dev/shm", path="/dev/shm/channel")
class File(Named):
    def make(self):
        Path(self.path).touch()

    def find(self):
        os.stat(self.path)

    def remove(self, _):
        os.unlink(self.path)


@channel("names of processes")
class Names(Children):
    def child(self, writer):
        C.prctl(15, b"channel")
        super().child(writer)

    def after(self):
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text() == "channel\n":
                    return True


# ---- Two sides


def side():
    for line in sys.stdin:
        phase, name = line.strip().split(" ", 1)
        try:
            answer = bool(getattr(CHANNELS[name], phase)())
        except Exception as error:
            answer = f"{phase}: {error!r}"
        print(json.dumps(answer), flush=True)


def ask(process, phase, name):
    process.stdin.write(f"{phase} {name}\n".encode())
    process.stdin.flush()
    return json.loads(process.stdout.readline() or '"it died"')


def send(name, sender, receiver):
    """-> bits sent, bits received, errors"""
    sent = random.sample([0, 1] * (BITS // 2), BITS)
    received, errors = [], set()
    for bit in sent:
        answers = [ask(receiver, "before", name), bit and ask(sender, "act", name)]
        seen = ask(receiver, "after", name)
        received.append(int(seen is True))
        answers += [seen, ask(sender, "undo", name)]
        errors |= {answer for answer in answers if isinstance(answer, str)}
    return [sent, received, sorted(errors)]


def start_sides(where, stack):
    """The sender's and the receiver's process."""
    command = [sys.executable, "-I", "-S", "channels.py", "side"]
    for _ in range(2):
        if where == "outside":
            resource.setrlimit(resource.RLIMIT_SIGPENDING, (2000, 2000))  # fewer are sooner queued
            yield stack.enter_context(subprocess.Popen(
                command, stdin=-1, stdout=-1, cwd=Path(__file__).parent))
        else:
            sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
            from envs.code.sandbox import Sandbox
            files = {"channels.py": Path(__file__).read_text()}
            yield stack.enter_context(Sandbox(command, files)).process


def main(where):
    done = {}
    with contextlib.ExitStack() as stack:
        sides = list(start_sides(where, stack))
        for name in CHANNELS:
            for _ in range(TRIES if where == "outside" else 1):
                done[name] = send(name, *sides)
                if done[name][0] == done[name][1]:
                    break
        for one in sides:
            one.stdin.close()
    print(json.dumps(done))


if __name__ == "__main__":
    side() if sys.argv[1] == "side" else main(sys.argv[1])
