"""The child process in which a target runs, and the messages it sends."""

import json
import os
import selectors
import signal
import subprocess
import sys
from contextlib import suppress
from hmac import compare_digest
from secrets import token_hex
from typing import Any

from lab.certification.deadline import Deadline
from lab.certification.guard import INTERVAL, TOO_MUCH, add_mark, kill_marked
from lab.certification.request import KEY, Request, sign_frame
from lab.files import clean_all, escape_controls

START_SECONDS = 120
"""Maximum time to import torch, and then the target: cold disks are slow."""
END_SECONDS = 10
"""Maximum time that a child may take to end once it has closed its pipe."""
MOST_BYTES = 2**24
"""Maximum number of bytes of a message: a target that writes into the pipe must not fill memory."""
KEPT_BYTES = 4096
"""Bytes kept of the child's standard error."""
FORGED = "something else than the worker wrote into the pipe of its verdicts"
FOUND = {"notes", "lengths", "d_model", "laws"}
"""What a worker says before the first law."""
GUARD = "lab.certification.guard"
SAFE = ("-P", "-m")
"""-P: files in the working directory must not take the place of the lab's packages."""

Message = dict[str, Any]


class RefusedError(ValueError):
    """A target cannot be certified at all; the message says why."""


class StoppedError(Exception):
    """A child sent nothing for too long, or has ended; the message says which."""


class Child:
    """A process that certifies a target, and its messages."""

    def __init__(self, request: Request):
        self._request = request
        events, theirs = os.pipe()
        self._mark = token_hex(16)
        self._process = subprocess.Popen(
            [sys.executable, *SAFE, GUARD, str(request.memory), str(theirs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(theirs,),
            env=add_mark(self._mark),
            # A session of its own: the target's own children end with it, and Ctrl-C reaches only
            # the parent.
            start_new_session=True,
        )
        os.close(theirs)
        assert self._process.stdin is not None
        assert self._process.stderr is not None
        self._events, self._error = events, self._process.stderr.fileno()
        self._received, self._error_text = b"", b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._events, selectors.EVENT_READ)
        self._selector.register(self._error, selectors.EVENT_READ)
        self.runs = True
        self._worker = 0
        self._key, self._count = token_hex(32), 0
        # The pipe stays open: the child ends when it closes, however this process ends.
        with suppress(BrokenPipeError):
            content = {**request.to_json(), KEY: self._key}
            self._process.stdin.write(json.dumps(content).encode() + b"\n")
            self._process.stdin.flush()

    def receive_start(self) -> Message:
        """Return what the child found out about the target before the first law.

        Raises:
            RefusedError: when the target cannot be certified, or the child does not get that far.
        """
        message: Message = {}
        for doing, seconds in (
            ("starting", START_SECONDS),
            ("importing it", START_SECONDS),
            ("probing it", self._request.seconds),
        ):
            try:
                message = self.receive(seconds)
            except StoppedError as error:
                self.kill()
                raise RefusedError(f"target={self._request.target}, {doing}: {error}") from error
            if "refused" in message:
                self.kill()
                raise RefusedError(message["refused"])
            self._worker = message.get("worker", self._worker)
        if not message.keys() >= FOUND:
            self.kill()
            raise RefusedError(f"target={self._request.target}: {FORGED}")
        return message

    def receive(self, seconds: int | float) -> Message:
        """Return the child's next message.

        Raises:
            StoppedError: when the child ends before, or takes longer than this.
        """
        deadline = Deadline(seconds, self._worker)
        while b"\n" not in self._received:
            # What the child started may hold the pipe open after the child has ended.
            ended = self._process.poll() is not None
            left = deadline.count_left()
            if left <= 0 and not ended:
                raise StoppedError(f"took longer than {seconds:g} s and was stopped")
            came = left > 0 and self._read(0.0 if ended else min(left, INTERVAL))
            if ended and not came:
                raise StoppedError(self._describe_end())
        line, _, self._received = self._received.partition(b"\n")
        return self._open_frame(line)

    def _open_frame(self, line: bytes) -> Message:
        """Return the message in a line that the worker has signed.

        Raises:
            StoppedError: when it is not the worker's next one.
        """
        signature, _, content = line.decode(errors="replace").partition(" ")
        expected = sign_frame(self._key, self._count, content)
        if not compare_digest(signature.encode(), expected.encode()):
            raise StoppedError(FORGED)
        self._count += 1
        message = clean_all(json.loads(content))
        if not isinstance(message, dict):
            raise StoppedError(FORGED)
        return message

    def kill(self) -> None:
        """End the child and all processes that it has started."""
        if not self.runs:
            return
        self.runs = False
        # The guard kills the worker and its descendants when its input closes.
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        kill_marked(self._mark)
        self._selector.close()
        os.close(self._events)
        for pipe in (self._process.stdin, self._process.stderr):
            with suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]

    def _read(self, seconds: float) -> bool:
        """Take what comes within some seconds; return whether anything came.

        Raises:
            StoppedError: when nothing more can come, or far too much has.
        """
        ready = self._selector.select(seconds)
        for key, _ in ready:
            data = os.read(key.fd, 2**16)
            if key.fd == self._error:
                self._error_text = (self._error_text + data)[-KEPT_BYTES:]
                if not data:
                    self._selector.unregister(key.fd)
            elif data:
                self._received += data
                if len(self._received) > MOST_BYTES:
                    raise StoppedError(FORGED)
            else:
                raise StoppedError(self._describe_end())
        return bool(ready)

    def _describe_end(self) -> str:
        """Describe how the process ended."""
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "the process closed its pipe"
        if code == -signal.SIGKILL:
            return "the process was killed (SIGKILL), perhaps because memory ran out"
        if code < 0:
            return f"the process died with signal {signal.Signals(-code).name}"
        last = escape_controls(self._error_text.decode(errors="replace"))
        last = last.strip().rpartition("\n")[2]
        if code == TOO_MUCH:
            return last
        return f"the process ended with code {code}" + (f": {last}" if last else "")
