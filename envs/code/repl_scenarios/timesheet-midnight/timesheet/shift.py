from dataclasses import dataclass
from datetime import datetime, timedelta

from timesheet.zone import parse_utc


@dataclass(frozen=True)
class Shift:
    start: datetime
    end: datetime

    @classmethod
    def parse(cls, start, end):
        shift = cls(parse_utc(start), parse_utc(end))
        if shift.end <= shift.start:
            raise ValueError("a shift must end after it starts")
        return shift

    def pieces(self, zone):
        """(date, duration) of each day that the shift touches, days as they are in a zone."""
        start = self.start
        while start < self.end:
            midnight = datetime(start.year, start.month, start.day, tzinfo=start.tzinfo) + timedelta(days=1)
            stop = min(midnight, self.end)
            yield start.astimezone(zone).date(), stop - start
            start = stop
