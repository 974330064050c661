"""Assembles a Game Boy ROM of our own: a dark block that follows the D-pad over a light grid.

    python tests/make_rom.py OUT.gb

Once a frame, while the screen is not being drawn, it reads the buttons and moves the sprite by two pixels
for each direction that is held. A turns the sprite's shade light, B dark again, START swaps the background's
shades while it is held: every button can be seen on the screen. It holds no logo, and PyBoy's own boot
program asks for none.
"""

import sys
from pathlib import Path

BGP, OBP0, LCDC, LY, JOYPAD = 0x47, 0x48, 0x40, 0x44, 0x00  # registers at 0xFF00 + n
START_X, START_Y = 80, 80  # of the sprite in hardware coordinates: the pixel's plus 8 and 16
SPEED = 2  # [pixels a frame]


class Assembler:
    """Bytes with labels: relative jumps (JR) are filled in at the end."""

    def __init__(self, origin: int):
        self.code, self.labels, self.jumps, self.origin = bytearray(), {}, [], origin

    def emit(self, *values: int) -> None:
        self.code += bytes(values)

    def label(self, name: str) -> None:
        self.labels[name] = len(self.code)

    def jump(self, opcode: int, name: str) -> None:
        self.emit(opcode, 0)
        self.jumps.append((len(self.code), name))

    def call(self, name: str) -> None:
        self.emit(0xCD, 0, 0)
        self.jumps.append((-len(self.code), name))

    def assemble(self) -> bytes:
        for place, name in self.jumps:
            if place < 0:  # a call, absolute
                self.code[-place - 2:-place] = (self.origin + self.labels[name]).to_bytes(2, "little")
            else:
                self.code[place - 1] = (self.labels[name] - place) & 0xFF
        return bytes(self.code)


JR, JR_NZ, JR_Z, JR_C, JR_NC = 0x18, 0x20, 0x28, 0x38, 0x30


def program() -> bytes:
    a = Assembler(0x150)
    a.emit(0xF3, 0x31, 0xFE, 0xFF)                        # DI; LD SP,FFFE
    a.call("vblank")
    a.emit(0xAF, 0xE0, LCDC)                              # screen off, to write video memory at leisure
    a.emit(0x21, 0x00, 0x80, 0x06, 0x10)                  # HL=8000: tile 0, a corner line: shade 1 on 0
    a.emit(0x3E, 0xFF, 0x22, 0xAF, 0x22)
    a.label("grid")
    a.emit(0x3E, 0x80, 0x22, 0xAF, 0x22)                  # its left edge
    a.emit(0x05)
    a.emit(0x78, 0xFE, 0x09)                              # seven rows: B from 16 down to 9
    a.jump(JR_NZ, "grid")
    a.emit(0x3E, 0xFF, 0x06, 0x10)                        # tile 1: a full block of colour 3
    a.label("block")
    a.emit(0x22, 0x05)
    a.jump(JR_NZ, "block")
    a.emit(0x21, 0x00, 0x98, 0x01, 0x00, 0x04)            # background map: all tile 0
    a.label("map")
    a.emit(0xAF, 0x22, 0x0B, 0x78, 0xB1)
    a.jump(JR_NZ, "map")
    a.emit(0x21, 0x00, 0xFE, 0x06, 0xA0, 0xAF)            # no sprites
    a.label("sprites")
    a.emit(0x22, 0x05)
    a.jump(JR_NZ, "sprites")
    a.emit(0x3E, START_X, 0x57, 0x3E, START_Y, 0x5F)      # D = x, E = y
    a.emit(0x3E, 0xE4, 0xE0, BGP, 0xE0, OBP0)             # shades in their order
    a.emit(0x3E, 0x93, 0xE0, LCDC)                        # screen, background and sprites on
    a.label("frame")
    a.call("vblank")
    a.emit(0x21, 0x00, 0xFE)                              # sprite 0: y, x, tile 1, no flags
    a.emit(0x7B, 0x22, 0x7A, 0x22, 0x3E, 0x01, 0x22, 0xAF, 0x22)
    a.emit(0x3E, 0x20, 0xE0, JOYPAD, 0xF0, JOYPAD, 0xF0, JOYPAD, 0x47)   # B = directions, 0 where held
    a.emit(0x3E, 0x10, 0xE0, JOYPAD, 0xF0, JOYPAD, 0xF0, JOYPAD, 0x4F)   # C = buttons, 0 where held
    for bit, register, step in ((0, 0x57, SPEED), (1, 0x57, -SPEED), (2, 0x5F, -SPEED), (3, 0x5F, SPEED)):
        a.emit(0xCB, 0x40 | bit << 3)                     # BIT bit,B: right, left, up, down
        a.jump(JR_NZ, f"no{bit}")
        a.emit(0x7A if register == 0x57 else 0x7B, 0xC6, step & 0xFF, register)
        a.label(f"no{bit}")
    for bit, palette in ((0, 0x40), (1, 0xE4)):           # A: colour 3 is shade 1; B: shade 3
        a.emit(0xCB, 0x41 | bit << 3)                     # BIT bit,C
        a.jump(JR_NZ, f"button{bit}")
        a.emit(0x3E, palette, 0xE0, OBP0)
        a.label(f"button{bit}")
    a.emit(0x3E, 0xE4, 0xCB, 0x59)                        # START held: the background's shades swap
    a.jump(JR_NZ, "normal")
    a.emit(0x3E, 0x1B)
    a.label("normal")
    a.emit(0xE0, BGP)
    a.jump(JR, "frame")
    a.label("vblank")                                     # wait for the next one: leave this one first
    a.emit(0xF0, LY, 0xFE, 0x90)
    a.jump(JR_NC, "vblank")
    a.label("drawing")
    a.emit(0xF0, LY, 0xFE, 0x90)
    a.jump(JR_C, "drawing")
    a.emit(0xC9)
    return a.assemble()


def rom() -> bytes:
    """The whole 32 KiB file, with a header whose checksum holds."""
    data = bytearray(0x8000)
    data[0x100:0x104] = (0x00, 0xC3, 0x50, 0x01)  # NOP; JP 0150
    data[0x134:0x13D] = b"FOLLOWPAD"
    code = program()
    data[0x150:0x150 + len(code)] = code
    data[0x14D] = -sum(value + 1 for value in data[0x134:0x14D]) & 0xFF
    data[0x14E:0x150] = (sum(data) & 0xFFFF).to_bytes(2, "big")
    return bytes(data)


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(rom())
