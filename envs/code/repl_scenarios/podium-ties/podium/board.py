from podium.entry import Entry
from podium.ranks import ranks


class Board:
    """The best result of each player. Most points first; of equal points, who had them earlier."""

    def __init__(self):
        self.best = {}

    def add(self, player, points, time):
        entry = Entry(player, points, time)
        known = self.best.get(player)
        if known is None or points > known.points:
            self.best[player] = entry

    def standings(self):
        return sorted(self.best.values(), key=lambda entry: (entry.points, entry.time, entry.player), reverse=True)

    def top(self, count):
        return [entry.player for entry in self.standings()[:count]]

    def medals(self):
        """{"gold": [...], "silver": [...], "bronze": [...]} by rank."""
        names = {1: "gold", 2: "silver", 3: "bronze"}
        found = {name: [] for name in names.values()}
        entries = self.standings()
        for entry, rank in zip(entries, ranks(entries)):
            if rank in names:
                found[names[rank]].append(entry.player)
        return found

    def show(self):
        entries = self.standings()
        return "\n".join(f"{rank}. {entry.player} {entry.points}" for entry, rank in zip(entries, ranks(entries)))
