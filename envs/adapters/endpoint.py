"""A server on loopback that speaks OpenAI's chat completions, behind which somebody else answers.

    endpoint = Endpoint()
    endpoint.sessions[key] = session     # session.take(request) gets what comes with this key
    request.answer(message, "stop")      # from any thread, whenever the reply is there

What clients write in different ways (content null, parts, calls serialised anew) is read into one form,
messages as a chat template takes them. What cannot be served is refused with a reason, in OpenAI's form.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import threading
import time

import tornado.httpserver
import tornado.netutil
import tornado.web

from envs import BadInput, Message, first_line

MAX_BODY = 16 * 2**20  # of a request [bytes]
MAX_MESSAGES = 10_000  # of a request
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TEXT_PARTS = ("text", "input_text", "output_text")
# What would make the sampler another distribution than the policy: nothing of it is done.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "seed", "logit_bias", "max_tokens", "max_completion_tokens",
            "response_format", "reasoning_effort", "parallel_tool_calls", "verbosity", "prediction")
# What would change the form of the answer, and is not there: one reply, of text and calls, without an end
# of its own.
NOT_SERVED = {"n": (None, 1), "stop": (None, [], ""), "logprobs": (None, False), "top_logprobs": (None, 0),
              "functions": (None, []), "function_call": (None, "none", "auto"), "audio": (None,),
              "modalities": (None, ["text"]), "web_search_options": (None,)}


class Refusal(Exception):
    """An answer of OpenAI's form of errors."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def body(self) -> dict:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


# What a client says, in one form


def text_of(content) -> str:
    """The text of a message's content. Raises Refusal for other parts than text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal(400, f"messages: content: expected a text or parts of text, got {content!r:.80}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise Refusal(400, f"messages: content: a part of type {kind!r:.80}: only text is served")
        texts.append(part["text"])
    return "".join(texts)


def call_of(call) -> dict:
    """A call as chat templates take it: its arguments as an object. Raises Refusal."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refusal(400, f"messages: tool_calls: expected a function with a name, got {call!r:.80}")
    arguments = function.get("arguments") or "{}"
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"messages: tool_calls: arguments: expected JSON ({error})") from error
    if not isinstance(arguments, dict):
        raise Refusal(400, f"messages: tool_calls: arguments: expected an object, got {arguments!r:.80}")
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def messages_of(given) -> list[Message]:
    """Messages as a chat template takes them. Raises Refusal.

    Answers of tools are put into the order of their calls, and have the function's name in place of an id.
    """
    if not isinstance(given, list) or not 0 < len(given) <= MAX_MESSAGES:
        raise Refusal(400, f"messages: expected a list of 1 to {MAX_MESSAGES:,} messages")
    result = []
    calls = {}  # id of a call -> (its place among all, its function)
    for message in given:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise Refusal(400, f"messages: role: expected one of {', '.join(ROLES)}, got {role!r:.80}")
        made = {"role": ROLES[role], "content": text_of(message.get("content"))}
        place = 0
        if role == "assistant" and message.get("tool_calls"):
            if not isinstance(message["tool_calls"], list):
                raise Refusal(400, "messages: tool_calls: expected a list")
            made["tool_calls"] = [call_of(call) for call in message["tool_calls"]]
            for call, read in zip(message["tool_calls"], made["tool_calls"], strict=True):
                calls[str(call.get("id"))] = (len(calls), read["function"]["name"])
        if role == "tool":
            place, name = calls.get(str(message.get("tool_call_id")), (len(calls), message.get("name")))
            made["name"] = str(name or "tool")
        result.append((place, made))
    if result[-1][1]["role"] == "assistant":
        raise Refusal(400, "messages: the last one is the assistant's: expected what it shall reply to")
    ordered = []
    for is_tool, group in itertools.groupby(result, lambda pair: pair[1]["role"] == "tool"):
        pairs = [*group]
        if is_tool:
            pairs.sort(key=lambda pair: pair[0])
        ordered += [made for _, made in pairs]
    return ordered


def tools_of(given, choice) -> list[dict] | None:
    """Schemas of functions as a chat template takes them. Raises Refusal for tools of another kind."""
    if not given or choice == "none":
        return None
    if not isinstance(given, list):
        raise Refusal(400, "tools: expected a list")
    tools = []
    for tool in given:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refusal(400, f"tools: expected functions with a name, got {tool!r:.80}")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        description = function.get("description") or ""
        tools.append({"type": "function", "function": {
            "name": function["name"], "description": description, "parameters": parameters}})
    return tools


def fingerprint(message: Message) -> tuple:
    """What tells a message from others, however a client writes spaces and arguments."""
    calls = [(call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True))
             for call in message.get("tool_calls", ())]
    return message["role"], " ".join(message["content"].split()), tuple(calls)


class Request:
    """One question of a client: messages and tools as a chat template takes them. It waits for an answer."""

    def __init__(self, body: dict):
        """Raises Refusal."""
        for name, served in NOT_SERVED.items():
            if body.get(name) not in served:
                raise Refusal(400, f"{name}: {json.dumps(body[name])[:80]}: not served", "unsupported_value")
        self.messages = messages_of(body.get("messages"))
        self.tools = tools_of(body.get("tools"), body.get("tool_choice"))
        self.history = [fingerprint(message) for message in self.messages]
        self.model = str(body.get("model") or "policy")
        self.stream = bool(body.get("stream"))
        options = body.get("stream_options")
        self.wants_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        self.ignored = [name for name in SAMPLING if body.get(name) is not None]
        if body.get("tool_choice") not in (None, "auto", "none"):
            self.ignored.append("tool_choice")
        self.loop = asyncio.get_running_loop()
        self.future = self.loop.create_future()
        self.gone = False  # the client does not wait any more

    def answer(self, message: Message, finish_reason: str) -> None:
        self._settle((message, finish_reason))

    def refuse(self, refusal: Refusal) -> None:
        self._settle(refusal)

    def _settle(self, result) -> None:
        self.loop.call_soon_threadsafe(lambda: self.future.done() or self.future.set_result(result))

    def usage(self, message: Message) -> dict:
        """A guess: here nobody knows of tokens. Clients add these up, or fail where they are missing."""
        asked = sum(len(said["content"]) for said in self.messages) // 4
        said = len(json.dumps(message)) // 4
        return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}


# The server


class Endpoint:
    """Serves /v1/chat/completions and /v1/models on a free port, in a thread and a loop of its own."""

    def __init__(self):
        """BadInput where no port can be bound."""
        self.sessions = {}  # key -> what has a method take(request), which may raise Refusal
        try:
            sockets = tornado.netutil.bind_sockets(0, "127.0.0.1")
        except OSError as error:
            raise BadInput(f"a server on 127.0.0.1 cannot be started ({first_line(error)})") from error
        self.url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}/v1"
        started = threading.Event()

        async def serve():
            web = tornado.web.Application(
                [(r"/v1/chat/completions", Completions, {"endpoint": self}),
                 (r"/v1/models(?:/.*)?", Models, {"endpoint": self})],
                default_handler_class=Unknown, default_handler_args={"endpoint": self},
                log_function=lambda handler: None)
            server = tornado.httpserver.HTTPServer(web, max_body_size=MAX_BODY, max_buffer_size=2 * MAX_BODY)
            server.add_sockets(sockets)
            started.set()
            await asyncio.Event().wait()

        threading.Thread(target=asyncio.run, args=(serve(),), daemon=True).start()
        started.wait()


@functools.cache
def endpoint() -> Endpoint:
    """The one of this process."""
    return Endpoint()


class Handler(tornado.web.RequestHandler):
    def initialize(self, endpoint: Endpoint):
        self.endpoint = endpoint

    def session(self):
        """Of the request's key. Raises Refusal."""
        scheme, _, key = self.request.headers.get("Authorization", "").partition(" ")
        session = self.endpoint.sessions.get(key.strip()) if scheme.lower() == "bearer" else None
        if session is None:
            raise Refusal(401, "no episode has this key, or it is over", "invalid_api_key")
        return session

    def say(self, status: int, body: dict) -> None:
        self.set_status(status)
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps(body))

    def write_error(self, status: int, exc_info=None, **_) -> None:
        error = exc_info[1] if exc_info else None
        if not isinstance(error, Refusal):
            error = Refusal(status, f"{self.request.method} {self.request.path}: {self._reason}")
        self.say(error.status, error.body)

    def log_exception(self, kind, error, trace) -> None:
        if not isinstance(error, (Refusal, tornado.web.HTTPError)):
            super().log_exception(kind, error, trace)


class Unknown(Handler):
    def prepare(self):
        raise Refusal(404, f"{self.request.path}: served are /v1/chat/completions and /v1/models (an agent "
                      "library may need a setting to use chat completions)")


class Models(Handler):
    def get(self):
        self.session()
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "policy"}
        if self.request.path.rstrip("/").endswith("/models"):
            self.say(200, {"object": "list", "data": [model]})
        else:
            self.say(200, model | {"id": self.request.path.rpartition("/")[2]})


class Completions(Handler):
    asked: Request | None = None

    async def post(self):
        session = self.session()
        try:
            body = json.loads(self.request.body)
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the body: expected JSON ({first_line(error)})") from error
        if not isinstance(body, dict):
            raise Refusal(400, f"the body: expected an object, got {body!r:.80}")
        self.asked = Request(body)
        session.take(self.asked)
        result = await self.asked.future
        if self.asked.gone:
            return
        if isinstance(result, Refusal):
            raise result
        self.tell(*result)

    def on_connection_close(self):
        if self.asked:
            self.asked.gone = True

    def tell(self, message: Message, finish_reason: str) -> None:
        head = {"id": f"chatcmpl-{id(self.asked):x}", "created": int(time.time()), "model": self.asked.model}
        usage = self.asked.usage(message)
        if not self.asked.stream:
            choice = {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}
            self.say(200, head | {"object": "chat.completion", "choices": [choice], "usage": usage})
            return
        head["object"] = "chat.completion.chunk"
        self.set_header("Content-Type", "text/event-stream")
        for delta in deltas(message):
            self.send(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        self.send(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason}]})
        if self.asked.wants_usage:
            self.send(head | {"choices": [], "usage": usage})
        self.finish("data: [DONE]\n\n")

    def send(self, chunk: dict) -> None:
        self.write(f"data: {json.dumps(chunk)}\n\n")


def deltas(message: Message) -> list[dict]:
    """A message in the pieces of a stream."""
    pieces = [{"role": "assistant", "content": ""}]
    for name in ("reasoning_content", "content"):
        if message.get(name):
            pieces.append({name: message[name]})
    for index, call in enumerate(message.get("tool_calls", ())):
        pieces.append({"tool_calls": [{"index": index} | call]})
    return pieces
