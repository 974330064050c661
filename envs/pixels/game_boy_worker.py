"""One Game Boy (PyBoy), and the process that steps a share of them for envs/pixels/game_boy.py.

It imports neither torch nor the environments: a worker starts in half a second and holds 70 MB.
"""

from __future__ import annotations

import io
import mmap
import sys
import warnings
from multiprocessing.connection import Connection

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # which SDL it found; no window is opened
    from pyboy import PyBoy
    from pyboy.utils import PyBoyException

HEIGHT, WIDTH = 72, 80
ACTIONS = ("NOOP", "A", "B", "START", "UP", "DOWN", "LEFT", "RIGHT")
BUTTONS = ("a", "b", "start", "select", "up", "down", "left", "right")
GREYS = (0xFFFFFF, 0xAAAAAA, 0x555555, 0x000000)


class Emulator:
    """A Game Boy without window, sound or clock. ValueError: a ROM or state that PyBoy cannot load."""

    def __init__(self, rom: bytes, emulate_sound: bool):
        try:  # as a stream: beside a path, PyBoy would look for the game's saved memory, and later write it
            self.boy = PyBoy(io.BytesIO(rom), window="null", sound_emulated=emulate_sound, sound_volume=0,
                             color_palette=GREYS, log_level=5)  # above all levels: it prints to our output
        except Exception as error:
            raise ValueError(f"PyBoy cannot load it ({_line(error)})") from error
        self.boy.set_emulation_speed(0)  # as fast as it goes
        self.colour = rom[0x143] & 0x80  # its header asks for a Game Boy Color
        try:  # a cartridge's clock stands at zero: otherwise loading a state would move it on by real time
            self.boy.rtc_lock_experimental(True)
        except PyBoyException:
            pass

    def begin(self, state: bytes | None, boot_frames: int) -> bytes:
        """Start from a save state, or by switching on and waiting.  -> the state in which episodes begin

        That is one frame later than `state`, which may hold a screen that was never drawn, and buttons that
        are held down and that nobody would release.
        """
        if state is None:
            self.boy.tick(boot_frames, False, False)
        else:
            self.load(state)
        for button in BUTTONS:
            self.boy.button_release(button)
        self.boy.tick(1, True, False)
        return self.save()

    def step(self, action: int, frames: int, release_after: int) -> None:
        """Hold a button for release_after frames, wait until `frames` have passed; draw the last of them."""
        if action:
            self.boy.button_press(ACTIONS[action])
            self.boy.tick(release_after, False, False)
            self.boy.button_release(ACTIONS[action])
            frames -= release_after
        self.boy.tick(frames, True, False)  # at least one frame, so that the release is not left for later

    def shades(self) -> np.ndarray:
        """The screen as (72, 80) uint8 shades, 0 lightest: each the rounded mean of 2 x 2 pixels."""
        screen = self.boy.screen.ndarray  # (144, 160, 4) uint8: red, green, blue, alpha
        grey = screen[..., 0].astype(np.int16)
        if self.colour:  # luminance
            grey = screen[..., :3] @ np.array([77, 150, 29], np.int32) >> 8
        fine = (255 - grey + 42) // 85
        blocks = fine[0::2, 0::2] + fine[0::2, 1::2] + fine[1::2, 0::2] + fine[1::2, 1::2]
        return ((blocks + 2) // 4).astype(np.uint8)

    def save(self) -> bytes:
        stream = io.BytesIO()
        self.boy.save_state(stream)
        return stream.getvalue()

    def load(self, state: bytes) -> None:
        stream = io.BytesIO(state)
        try:
            self.boy.load_state(stream)
        except Exception as error:
            raise ValueError(f"PyBoy cannot load it ({_line(error)})") from error
        if stream.read(1):
            raise ValueError(f"PyBoy read {stream.tell() - 1} of its {len(state)} bytes")

    def close(self) -> None:
        self.boy.stop(save=False)


def shared_size(num_envs: int) -> int:
    return num_envs * (HEIGHT * WIDTH + 2)


def shared_views(memory: mmap.mmap, num_envs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """frames (num_envs, 72, 80), actions and resets (num_envs,), all uint8, in the memory that all share."""
    array = np.frombuffer(memory, np.uint8)
    frames = array[:num_envs * HEIGHT * WIDTH].reshape(num_envs, HEIGHT, WIDTH)
    actions, resets = array[num_envs * HEIGHT * WIDTH:].reshape(2, num_envs)
    return frames, actions, resets


def work(connection: Connection, memory: mmap.mmap, num_envs: int, rows: range) -> None:
    """Serve commands until the other end of the connection is gone, whatever became of the parent."""
    frames, actions, resets = shared_views(memory, num_envs)
    emulators, options = {}, {}

    def serve(command, payload):
        if command == "start":
            options.update(payload)
            emulators.update({row: Emulator(options["rom"], options["emulate_sound"]) for row in rows})
            return None
        for row, emulator in emulators.items():
            if command == "load":
                emulator.load(payload[row])
            elif resets[row]:  # of the step before; doing it again after a save changes nothing
                emulator.load(options["state"])
        if command == "step":
            for row, emulator in emulators.items():
                emulator.step(int(actions[row]), options["frames_per_step"], options["release_after_frames"])
                frames[row] = emulator.shades()
        return {row: emulator.save() for row, emulator in emulators.items()} if command == "save" else None

    while True:
        try:
            command, payload = connection.recv()
        except (EOFError, OSError):
            return
        try:
            reply = ("done", serve(command, payload))
        except Exception as error:
            reply = ("failed", _line(error))
        try:
            connection.send(reply)
        except OSError:
            return


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


if __name__ == "__main__":
    socket_fd, memory_fd, count, first, last = map(int, sys.argv[1:])
    work(Connection(socket_fd), mmap.mmap(memory_fd, shared_size(count)), count, range(first, last))
