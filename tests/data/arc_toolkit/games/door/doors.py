"""A small game for the engine of the official toolkit: walk (ACTION1-4) to the green cell; a click (ACTION6)
opens a door; red ends the game."""

from arcengine import ARCBaseGame, Camera, Level, Sprite

COLOURS = {"P": 9, "G": 14, "#": 5, "D": 12, "T": 8}  # player, goal, wall, door, trap
MOVES = {1: (0, -1), 2: (0, 1), 3: (-1, 0), 4: (1, 0)}
SIDE = 8  # cells of the grid, of eight by eight cells of the screen each
MAPS = (
    ["P.G"],
    ["P.D.G", "#####"],
    ["P.D.T", "###.#", "  #.G"],
)


def level(rows):
    sprites = [Sprite([[COLOURS[letter]]], letter, x, y, layer=int(letter == "P"))
               for y, row in enumerate(rows) for x, letter in enumerate(row) if letter in COLOURS]
    return Level(sprites, grid_size=(SIDE, SIDE))


class Doors(ARCBaseGame):
    def __init__(self):
        camera = Camera(width=SIDE, height=SIDE, background=0)
        super().__init__("door-0001", [level(rows) for rows in MAPS], camera, available_actions=[*MOVES, 6])

    def step(self):
        number = self.action.id.value
        if number in MOVES:
            self.walk(*MOVES[number])
        elif number == 6:
            place = self.camera.display_to_grid(self.action.data["x"], self.action.data["y"])
            door = self.current_level.get_sprite_at(*place) if place else None
            if door and door.name == "D":
                self.current_level.remove_sprite(door)
        self.complete_action()

    def walk(self, dx, dy):
        (player,) = self.current_level.get_sprites_by_name("P")
        x, y = player.x + dx, player.y + dy
        there = self.current_level.get_sprite_at(x, y)
        met = there.name if there else ""
        if min(x, y) < 0 or max(x, y) >= SIDE or met in ("#", "D"):
            return
        player.set_position(x, y)
        if met == "G":
            self.next_level()
        elif met == "T":
            self.lose()
