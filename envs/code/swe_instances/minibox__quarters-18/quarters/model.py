"""A quarter and its days."""

from dataclasses import dataclass
from datetime import date, timedelta


@dataclass(frozen=True, order=True)
class Quarter:
    year: int
    number: int  # 1 to 4

    @property
    def first_day(self):
        return date(self.year, 3 * self.number - 2, 1)

    @property
    def last_day(self):
        return self.next().first_day - timedelta(days=1)

    def next(self):
        return Quarter(self.year + self.number // 4, self.number % 4 + 1)

    def __str__(self):
        return f"{self.year}-Q{self.number}"


def quarter_of(day):
    months = day.year * 12 + day.month
    return Quarter(months // 12, months % 12 // 3 + (months % 3 > 0))
