from timesheet.report import by_day, by_week
from timesheet.shift import Shift

__all__ = ["Shift", "by_day", "by_week"]
