"""The launcher's side of an agent: a process whose pipes lead to another host, or a thread here."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Sequence

from ronde.launch import messages as m
from ronde.launch.agent import Agent
from ronde.launch.child import Child
from ronde.launch.engine import Engine, Host
from ronde.launch.facts import Facts
from ronde.launch.messages import MARKER, Pipe, Silence, from_line, to_line

__all__ = ["SILENCE_SECONDS", "HereLink", "HostLink", "Link"]

SILENCE_SECONDS = 10.0


class Link:
    """An agent, as the launcher sees it.

    Args:
        host: where it is.
        arrived: called with this link and each answer, in a thread of the link's.

    Attributes:
        facts: what its host is and has; None before it has told.
        address: of its workers.
        closed: whether it has ended.
    """

    def __init__(self, host: Host, arrived: Callable[[Link, m.Message], None]) -> None:
        self.host, self._arrived = host, arrived
        self.facts: Facts | None = None
        self.address = ""
        self.closed = False

    def order(self, order: m.Message) -> None:
        """Give an order; one that cannot be given any more is told by :class:`Closed`."""
        raise NotImplementedError

    def close(self, seconds: float) -> None:
        """Wait until the agent has ended, and end it by force after some seconds."""
        raise NotImplementedError

    def meaning(self, status: int) -> str:
        """What its engine says about it, where it does."""
        return ""

    def why(self, status: int) -> str:
        """Why it has ended."""
        return "its thread has ended"


class HereLink(Link):
    """An agent in a thread of this process."""

    def __init__(self, host: Host, arrived: Callable[[Link, m.Message], None]) -> None:
        super().__init__(host, arrived)
        self._agent = Agent(lambda answer: arrived(self, answer))
        # Workers die with the thread that started them: it stays until they have ended.
        self._thread = threading.Thread(target=self._serve, name="ronde-agent", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._agent.serve()
        except BaseException as error:
            self._arrived(self, m.Failed(error))
        self.closed = True
        self._arrived(self, m.Closed(0))

    def order(self, order: m.Message) -> None:
        """See :meth:`Link.order`."""
        self._agent.take(order)

    def close(self, seconds: float) -> None:
        """See :meth:`Link.close`. Its workers have seconds of their own to end in."""
        self._thread.join(seconds + 15.0)


class HostLink(Link):
    """An agent on another host, through the process that leads there.

    Args:
        engine: starts the agent.
        python: the interpreter there.
    """

    def __init__(
        self,
        host: Host,
        arrived: Callable[[Link, m.Message], None],
        engine: Engine,
        python: str,
    ) -> None:
        super().__init__(host, arrived)
        self._silent = ""
        self._silence: Silence | None = None
        self._asked, self._asked_first = 0.0, 0.0  # when others were asked whether they hear it
        self._heard: dict[str, tuple[float, float]] = {}  # address -> when it answered, seconds
        self._engine, self._python = engine, python
        self._child = Child(engine.command(host, [python, "-P", "-u", "-m", "ronde.launch.agent"]))
        self._lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def order(self, order: m.Message) -> None:
        """See :meth:`Link.order`."""
        with self._lock:
            self._write(order)

    def _write(self, order: m.Message) -> None:
        self._child.write(to_line(order))

    def ping(self) -> None:
        """Show that the launcher lives, unless an order is on its way: then that does."""
        if self._lock.acquire(blocking=False):
            self._write(m.Ping())
            self._lock.release()

    def _read(self) -> None:
        pipe = Pipe(self._child.stdout.fileno(), closefd=False)
        stream = io.BufferedReader(pipe)
        seen = b""
        while not seen.endswith(MARKER) and (byte := stream.read(1)):
            seen += byte
        if not seen.endswith(MARKER):
            for line in seen.splitlines():
                self._child.note(line)
        for line in stream:
            try:
                answer = from_line(line)
            except (LookupError, TypeError, ValueError):  # what an engine says, or it was cut off
                self._child.note(line)
                continue
            if isinstance(answer, m.Heard):
                self._heard[answer.address] = time.monotonic(), answer.seconds
            elif not isinstance(answer, m.Alive):
                self._arrived(self, answer)
            elif self._silence is None:  # from now on it shows that it lives, four times a second
                self._silence = Silence(pipe)
        status = self._child.wait()
        self.closed = True
        self._arrived(self, m.Closed(status))

    def look(self, longest: float, every: Sequence[HostLink]) -> None:
        """Give the agent up if nothing has come from it for too long. Its link may carry too much:
        the kernels of other hosts know when something came from it, and are asked first.
        """
        if self._silence is None or self._silent:
            return
        seconds = self._silence.seconds()
        usual = 4 * self._silence.longest  # hosts and networks differ
        if seconds < min(max(longest, usual), SILENCE_SECONDS):
            self._asked_first = 0.0
        elif seconds >= SILENCE_SECONDS or not self._is_heard(every):
            self._silent = (
                f"nothing came from it for {seconds:.1f} s. Its network or the machine itself "
                "is down, or it is too busy to answer"
            )
            self._child.kill()

    def _is_heard(self, every: Sequence[HostLink]) -> bool:
        others = [link for link in every if link is not self and not link.closed]
        if not self.address or not others:
            return False
        now = time.monotonic()
        if now - self._asked >= 0.25:
            self._asked, self._asked_first = now, self._asked_first or now
            for other in others:
                other.order(m.IsHeard(self.address))
        heard = [o._heard.get(self.address, (0.0, 0.0)) for o in others]
        return any(at < self._asked_first or ago < 1.0 for at, ago in heard)

    def meaning(self, status: int) -> str:
        """See :meth:`Link.meaning`."""
        return self._engine.meaning(self.host, status, "\n".join(self._child.printed))

    def why(self, status: int) -> str:
        """See :meth:`Link.why`."""
        if said := self._silent or self.meaning(status):
            return said
        printed, python = "\n".join(self._child.printed), self._python
        for package in ("ronde", "torch"):
            if f"No module named '{package}" in printed or f"No module named {package}" in printed:
                return (
                    f"{package} is not installed for {python} there. Install it, or name another "
                    "Python with --python."
                )
        if status == 127 or (python in printed and "not found" in printed):
            return f"there is no {python}. Name the Python there with --python."
        lines = [line for line in printed.splitlines() if line.strip("-")]
        last = lines[-1] if lines else "it said nothing"
        return f"{self._engine.name} ended with status {status}: {last}"

    def close(self, seconds: float) -> None:
        """See :meth:`Link.close`."""
        self._child.close(seconds)
