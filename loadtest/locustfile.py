"""Chat users for locust: ``make loadtest``, or ``locust -f loadtest/locustfile.py --headless --host ...``.

Closed loop (the default): each user asks, reads the answer, and asks again. Open loop (``--rate``): requests go out at
random instants at that mean rate, whether or not the earlier ones were answered, as those of independent people do.
docs/loadtest.md says which to use for what.
"""

from __future__ import annotations

import ipaddress
import itertools
import random
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gevent
import msgspec
from gevent.pool import Group
from locust import FastHttpUser, events, task
from locust.argument_parser import LocustArgumentParser
from locust.contrib.fasthttp import ResponseContextManager
from locust.env import Environment
from locust.runners import WorkerRunner

from loadtest.records import Record, read_chat, summarise, table, write
from loadtest.sse import events as sse_events
from loadtest.sse import lines
from loadtest.workload import Workload

RECORDS: list[Record] = []
"""Of this process. A worker hands its own to the master, which has all at the end."""
_USERS = itertools.count()
_BACK_OFF = 1.0  # seconds that a user of the closed loop waits after a failure, as a client would, before it asks again


@events.init_command_line_parser.add_listener
def _options(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("chat")
    add = group.add_argument
    add("--model", env_var="LOADTEST_MODEL", default="smollm2-135m-instruct", help="model name sent in each request")
    add("--prompt-words", env_var="LOADTEST_PROMPT_WORDS", default="16,64,256", help="lengths to choose from")
    add("--max-tokens", env_var="LOADTEST_MAX_TOKENS", default="32,64,128", help="output limits to choose from")
    add("--shared-words", env_var="LOADTEST_SHARED_WORDS", type=int, default=0, help="length of a shared system prompt")
    add("--groups", env_var="LOADTEST_GROUPS", type=int, default=4, help="how many such prompts there are")
    add("--rate", env_var="LOADTEST_RATE", type=float, default=0.0, help="open loop: requests per second, of each user")
    add("--seed", env_var="LOADTEST_SEED", type=int, default=0, help="of lengths, texts and arrivals")
    add("--api-key", env_var="LOADTEST_API_KEY", default="", help="sent as a bearer token")
    add("--records", env_var="LOADTEST_RECORDS", default="", help="JSONL file, default loadtest-results/<time>.jsonl")
    add("--allow-remote", action="store_true", help="load a host that is not this machine")


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _is_loopback(host: str | None) -> bool:
    name = urlsplit(host or "").hostname or ""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class ChatUser(FastHttpUser):
    """Streams chat completions, and records when each piece of text arrived."""

    network_timeout = 600.0
    connection_timeout = 10.0
    concurrency = 4096  # connections of one user: with a rate it holds many requests open

    def on_start(self) -> None:
        options: Namespace = self.environment.parsed_options
        self._workload = Workload(
            options.model,
            _lengths(options.prompt_words),
            _lengths(options.max_tokens),
            options.shared_words,
            options.groups,
        )
        worker = getattr(self.environment.runner, "worker_index", 0)
        self._rng = random.Random(f"{options.seed}/{worker}/{next(_USERS)}")
        self._headers = {"Accept-Encoding": "identity"} | (
            {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        )
        self._rate = options.rate
        self._open = Group()

    def on_stop(self) -> None:
        self._open.kill()

    @task
    def chat(self) -> None:
        if not self._rate:
            if not self._request(time.perf_counter()):
                gevent.sleep(_BACK_OFF)
            return
        at = time.perf_counter()
        while True:
            at += self._rng.expovariate(self._rate)
            gevent.sleep(max(0.0, at - time.perf_counter()))
            self._open.spawn(self._request, at)

    def _request(self, scheduled: float) -> bool:
        """One request, recorded; whether it went well."""
        body = self._workload.request(self._rng)
        record = Record(scheduled=scheduled, sent=time.perf_counter(), ended=0.0, outcome="unfinished")
        try:
            with self.client.post(
                "/v1/chat/completions", json=body, headers=self._headers, stream=True, catch_response=True, name="chat"
            ) as response:
                record.error = self._answer(record, response)
                record.outcome = "failed" if record.error else "ok"
                # Locust's own time would end at the headers.
                response.request_meta["response_time"] = 1000 * (time.perf_counter() - scheduled)
                if record.error:
                    response.failure(record.error)
                else:
                    response.success()
        finally:  # also where the end of the test kills this greenlet
            record.ended = time.perf_counter()
            RECORDS.append(record)
        return not record.error

    def _answer(self, record: Record, response: ResponseContextManager) -> str:
        """Fill ``record`` from the response. Returns what went wrong, or nothing."""
        record.status = response.status_code
        if response.status_code != 200:
            return f"HTTP {response.status_code}: {response.text or response.error}"[:300]
        record.request_id = response.headers.get("x-request-id", "")
        try:
            return read_chat(record, sse_events(lines(response._response)), [])  # past locust's helper, see sse.py
        except (OSError, ValueError) as error:  # a broken connection, or no JSON
            return f"{type(error).__name__}: {error}"


@events.init.add_listener
def _only_this_machine(environment: Environment, **_: Any) -> None:
    options = environment.parsed_options
    if options and not options.allow_remote and not _is_loopback(environment.host):
        # not an Exception, which locust would log and go on from
        sys.exit(f"error: host {environment.host} is not this machine: add --allow-remote if it is yours to load")


@events.report_to_master.add_listener
def _hand_over(client_id: str, data: dict[str, Any]) -> None:
    data["records"] = msgspec.msgpack.encode(RECORDS)
    RECORDS.clear()


@events.worker_report.add_listener
def _take_over(client_id: str, data: dict[str, Any]) -> None:
    RECORDS.extend(msgspec.msgpack.decode(data["records"], type=list[Record]))


@events.quitting.add_listener
def _report(environment: Environment, **_: Any) -> None:
    if isinstance(environment.runner, WorkerRunner):
        return
    options = environment.parsed_options
    path = Path(options.records or time.strftime("loadtest-results/%Y%m%d-%H%M%S.jsonl"))
    summary = summarise(RECORDS)
    write(RECORDS, summary, path)
    print(f"\n{table(summary)}\nrecords: {path}")
    environment.process_exit_code = 1 if summary.failed or not summary.ok else 0
