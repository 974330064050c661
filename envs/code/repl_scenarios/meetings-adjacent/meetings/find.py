def first_common_slot(rooms, length):
    """(start, rooms) of the earliest slot of so many minutes in which every room is free, or None."""
    starts = sorted({gap.start for room in rooms for gap in room.free(length)})
    for start in starts:
        if all(any(gap.start <= start and start + length <= gap.end for gap in room.free(length))
               for room in rooms):
            return start
    return None
