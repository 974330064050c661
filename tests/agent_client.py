"""An agent's client, of nothing but Python, and agents for the tests. Programs import it, too."""

import concurrent.futures
import http.client
import json
import os
import sys
import urllib.parse


class ServerError(Exception):
    pass


def post(base_url, api_key, body, path="/chat/completions"):
    """-> status, the text of the answer"""
    place = urllib.parse.urlsplit(base_url)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    data = body if isinstance(body, str | bytes | None) else json.dumps(body)
    connection.request("GET" if body is None else "POST", place.path + path, data,
                       {"Authorization": f"Bearer {api_key}"})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


class Client:
    """What an agent has of a library."""

    def __init__(self, base_url, api_key):
        self.server = base_url, api_key

    def __call__(self, messages, **more):
        """-> the assistant's message"""
        status, text = post(*self.server, dict(model="any", messages=messages) | more)
        if status != 200:
            raise ServerError(status, json.loads(text)["error"])
        (choice,) = json.loads(text)["choices"]
        self.finish_reason = choice["finish_reason"]
        return choice["message"]

    def together(self, *conversations):
        """The answers to several questions that are asked at once."""
        with concurrent.futures.ThreadPoolExecutor(len(conversations)) as pool:
            return [*pool.map(self, conversations)]


def run(task, base_url, api_key):
    """An agent that asks the task's prompt, and lets a check judge the reply."""
    Client(base_url, api_key)([{"role": "user", "content": task["prompt"]}])


if __name__ == "__main__":  # the lines of a program, which know `task` and `client`
    task = json.load(sys.stdin)
    client = Client(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    exec(sys.argv[1])
