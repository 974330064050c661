from datetime import datetime, timedelta, timezone


def zone(text):
    """"+02:00" -> a timezone."""
    sign = -1 if text.startswith("-") else 1
    hours, _, minutes = text.lstrip("+-").partition(":")
    return timezone(sign * timedelta(hours=int(hours), minutes=int(minutes or 0)))


def parse_utc(text):
    """"2024-03-01T22:30" -> a datetime in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)
