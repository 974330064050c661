"""A Game Boy ROM of our own: a dark block that follows the D-pad over a light grid.

    python tests/make_rom.py OUT.gb

Once a frame it reads the buttons and moves the sprite by two pixels for each direction that is held. A turns
the sprite's shade light, B dark again, START swaps the background's shades: every button can be seen.
"""

import sys
from pathlib import Path

START_X, START_Y = 80, 80  # of the sprite in hardware coordinates: the pixel's plus 8 and 16

# At 0150. The last byte of a jump is relative to what follows it. D = x, E = y; B and C are 0 where held.
PROGRAM = f"""
F3 31 FE FF CD FB 01                no interrupts, the stack at FFFE, wait for the vertical blank
AF E0 40                            screen off, to write video memory at leisure
21 00 80 06 10 3E FF 22 AF 22       tile 0, a corner line, shade 1 on 0: its first row,
3E 80 22 AF 22 05 78 FE 09 20 F5    and the left edge in the seven others
3E FF 06 10 22 05 20 FC             tile 1: a full block of colour 3
21 00 98 01 00 04                   background map:
AF 22 0B 78 B1 20 F9                all tile 0
21 00 FE 06 A0 AF 22 05 20 FC       no sprites
3E {START_X:02X} 57 3E {START_Y:02X} 5F                   where the block begins
3E E4 E0 47 E0 48 3E 93 E0 40       shades in their order; screen, background and sprites on
CD FB 01 21 00 FE                   each frame: wait for the blank,
7B 22 7A 22 3E 01 22 AF 22          sprite 0 is y, x, tile 1, no flags
3E 20 E0 00 F0 00 F0 00 47          B = directions
3E 10 E0 00 F0 00 F0 00 4F          C = buttons
CB 40 20 04 7A C6 02 57             right: x + 2
CB 48 20 04 7A C6 FE 57             left
CB 50 20 04 7B C6 FE 5F             up
CB 58 20 04 7B C6 02 5F             down
CB 41 20 04 3E 40 E0 48             A: colour 3 is shade 1
CB 49 20 04 3E E4 E0 48             B: shade 3
3E E4 CB 59 20 02 3E 1B E0 47       START held: the background's shades swap
18 A3                               the next frame
F0 44 FE 90 30 FA                   at 01FB: leave this blank,
F0 44 FE 90 38 FA C9                then wait for the next
"""


def rom() -> bytes:
    """The whole 32 KiB file, with a header whose checksum holds."""
    data = bytearray(0x8000)
    data[0x100:0x104] = (0x00, 0xC3, 0x50, 0x01)  # NOP; JP 0150
    data[0x134:0x13D] = b"FOLLOWPAD"
    code = bytes.fromhex("".join(line.split("  ")[0] for line in PROGRAM.splitlines()))
    data[0x150:0x150 + len(code)] = code
    data[0x14D] = -sum(value + 1 for value in data[0x134:0x14D]) & 0xFF
    data[0x14E:0x150] = (sum(data) & 0xFFFF).to_bytes(2, "big")
    return bytes(data)


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(rom())
