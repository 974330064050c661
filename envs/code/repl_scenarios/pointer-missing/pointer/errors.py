class PointerError(LookupError):
    """A pointer that leads nowhere. `depth` is the number of steps that were fine."""

    def __init__(self, pointer, depth):
        super().__init__(f"{pointer!r} leads nowhere after {depth} steps")
        self.pointer, self.depth = pointer, depth
