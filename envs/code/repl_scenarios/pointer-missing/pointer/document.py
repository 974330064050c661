from pointer.errors import PointerError
from pointer.path import parse, step

MISSING = object()


class Document:
    def __init__(self, data):
        self.data = data

    def resolve(self, pointer):
        """What the pointer leads to. PointerError where it leads nowhere."""
        value = self.data
        for depth, part in enumerate(parse(pointer)):
            try:
                value = step(value, part)
            except (KeyError, TypeError):
                raise PointerError(pointer, depth) from None
        return value

    def get(self, pointer, default=None):
        try:
            return self.resolve(pointer)
        except PointerError:
            return default

    def __contains__(self, pointer):
        return self.get(pointer, MISSING) is not MISSING

    def first(self, *pointers):
        """What the first of several pointers that leads anywhere leads to."""
        for pointer in pointers:
            if pointer in self:
                return self.resolve(pointer)
        raise PointerError(pointers[-1], 0)
