from urllib.parse import unquote


def split_path(path):
    """The decoded segments of a path, without its query."""
    path, _, _ = unquote(path).partition("?")
    return [part for part in path.split("/") if part]


def parse_query(path):
    _, _, query = path.partition("?")
    pairs = (item.partition("=") for item in query.split("&") if item)
    return {unquote(key.replace("+", " ")): unquote(value.replace("+", " ")) for key, _, value in pairs}
