from timesheet.zone import zone


def hours(duration):
    return round(duration.total_seconds() / 3600, 2)


def by_day(shifts, zone_name="+00:00"):
    """{date as text: hours} in the order of the days."""
    sums = {}
    for shift in shifts:
        for day, duration in shift.pieces(zone(zone_name)):
            sums[day] = sums.get(day, 0) + hours(duration)
    return {day.isoformat(): round(sums[day], 2) for day in sorted(sums)}


def by_week(shifts, zone_name="+00:00"):
    """{(year, week): hours} as ISO counts weeks."""
    sums = {}
    for shift in shifts:
        for day, duration in shift.pieces(zone(zone_name)):
            week = tuple(day.isocalendar())[:2]
            sums[week] = round(sums.get(week, 0) + hours(duration), 2)
    return dict(sorted(sums.items()))
