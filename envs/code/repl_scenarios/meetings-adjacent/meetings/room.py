from meetings.interval import Span


class Conflict(Exception):
    pass


class Room:
    def __init__(self, name, opens="08:00", closes="18:00"):
        self.name = name
        self.hours = Span.parse(f"{opens}-{closes}")
        self.booked = {}

    def book(self, text, title):
        """Book the room for "09:00-10:00"; Conflict where it is taken or closed."""
        span = Span.parse(text)
        if span.start < self.hours.start or span.end > self.hours.end:
            raise Conflict(f"{self.name} is closed")
        for other, taken_by in self.booked.items():
            if span.overlaps(other):
                raise Conflict(f"{self.name} is taken by {taken_by}")
        self.booked[span] = title
        return span

    def free(self, at_least=1):
        """The spans in which nothing is booked, of at least so many minutes."""
        gaps, now = [], self.hours.start
        for span in sorted(self.booked):
            if span.start - now > at_least:
                gaps.append(Span(now, span.start))
            now = span.end
        if self.hours.end - now > at_least:
            gaps.append(Span(now, self.hours.end))
        return gaps
