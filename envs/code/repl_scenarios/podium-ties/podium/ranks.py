def ranks(entries):
    """The rank of each entry of a sorted list: equal points share a rank, and the next one is skipped."""
    found = []
    for index, entry in enumerate(entries):
        if index and entry.points == entries[index - 1].points:
            found.append(found[-1])
        else:
            found.append(index + 1)
    return found
