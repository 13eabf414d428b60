"""The doctor's probe inside a dataset: what each stage costs per sample.

Works on any dataset. While a probe is installed, the functions that usually read, decode and
augment (see :mod:`ronde.profile.known_functions`) are replaced by versions that read two clocks,
but only in a thread that is making a sample; other threads reach the original after one comparison.
Time belongs to the innermost stage.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, IterableDataset, Subset

from ronde.data import named_stages
from ronde.introspect import nested_datasets, user_modules
from ronde.profile import known_functions as known
from ronde.profile import monkeypatch
from ronde.profile.function_hooks import (
    Named,
    image_convert,
    image_load,
    opener,
    timed_function,
)
from ronde.profile.shared_counters import FIELDS, SAMPLES, Slot
from ronde.profile.sqlite_hooks import timed_connect
from ronde.profile.stage_timer import StageTimer, local
from ronde.world import RondeError
from ronde.world.tensors import map_leaves, parts

__all__ = ["Probe"]

_KEPT_SAMPLES = 16  # that each process makes itself before it gives them out again
_KEPT_BYTES = 128 << 20

_active: Probe | None = None
_lock = threading.RLock()


def _forked() -> None:
    global _lock
    _lock = threading.RLock()  # a thread that is not here may have held it


os.register_at_fork(after_in_child=_forked)


class Probe:
    """Times the stages of any map-style dataset, in any threads and processes.

    It travels into loading processes by pickling and installs itself at the first sample. While it
    only times, samples are unchanged bit for bit.

    Args:
        board: folder in which all readers add up; see :func:`read_board`.
        replay: after its first samples, each process gives these out again and again: what is left
            is the cost of collating batches and handing them over.

    Example:
        >>> import tempfile
        >>> from ronde.profile import read_board
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     probe = Probe(Path(folder) / "board")
        ...     watched, collate = probe.attach([i * i for i in range(100)], sum)
        ...     total = collate([watched[i] for i in range(10)])
        ...     probe.uninstall()
        ...     print(total, read_board(probe.board)["python"].samples)
        285 10
    """

    def __init__(self, board: Path, replay: bool = False) -> None:
        self.board = board
        self.replay = replay
        self._reset()

    def _reset(self) -> None:
        """Forget the current process's state."""
        self._installed_in = 0  # process id
        self._token: object = None  # another one for each installation
        self._ended = False
        self._undo: list[Callable[[], Any]] = []
        self._patched: set[tuple[int, str]] = set()
        self._modules = 0
        self._watched: list[Any] = []
        self._kept: list[Any] = []  # samples to give out again
        self._turn = self._kept_bytes = 0
        self._before: named_stages.Listener | None = None

    def __reduce__(self) -> Any:
        return Probe, (self.board, self.replay)

    # Putting it in place

    def attach(
        self, dataset: Any, collate: Callable[[list[Any]], Any]
    ) -> tuple[Any, Callable[[list[Any]], Any]]:
        """Wrap a dataset and a collate function for observation. Installs nothing yet.

        Args:
            dataset: anything with ``__getitem__``, and maybe ``__getitems__``; or one that can only
                be iterated.
            collate: makes a batch of a list of samples.
        """
        kind: Any = _WatchedStream if isinstance(dataset, IterableDataset) else _Watched
        return kind(dataset, self), _WatchedCollate(collate, self)

    def install(self) -> None:
        """Install in this process; happens by itself at the first sample.

        Raises:
            RondeError: another probe is in place.
        """
        global _active
        with _lock:
            here = os.getpid()
            if self._token is not None and self._installed_in == here:
                return
            if _active is not None and _active is not self and _active._installed_in == here:
                raise RondeError("another probe is active: uninstall it first.")
            # inherited from the parent of this process, with what it has replaced
            if _active is not None:
                _active._undo_all()
            if self._installed_in != here:
                self._reset()
            self._installed_in, self._token, self._ended = here, object(), False
            _active = self
            self._before = named_stages.listen(self)
            self._patch()

    def uninstall(self) -> None:
        """Restore every function and attribute. Counts stay on the board."""
        with _lock:
            if self._token is not None and self._installed_in == os.getpid():
                self._undo_all()
            self._ended = True

    def _undo_all(self) -> None:
        global _active
        self._undo.append(functools.partial(named_stages.listen, self._before))
        while self._undo:
            # one that cannot be put back must not keep the others from it
            with suppress(Exception):
                self._undo.pop()()
        self._patched.clear()
        self._watched.clear()
        self._modules = 0
        self._token = None
        _active = None

    def account(self) -> StageTimer:
        """The calling thread's timer; installs the probe if needed."""
        account: StageTimer | None = getattr(local, "account", None)
        if account is None or account.probe is not self or account.token is not self._token:
            self.install()
            if account is not None and account.probe is self:
                account.token = self._token
            else:
                account = local.account = StageTimer(self, Slot(self.board), self._token)
        if len(sys.modules) != self._modules:
            self._patch()
        return account

    def watch(self, dataset: Any) -> object:
        """Observe this dataset's own transforms too; returns a token that marks it as done."""
        with _lock:
            self.install()
            if not any(dataset is one for one in self._watched):
                self._watched.append(dataset)
                for one in nested_datasets(dataset):
                    for owner, name, stage in known.find_transforms(one):
                        # an object that does not let itself be changed keeps what it has
                        with suppress(Exception):
                            self._name(owner, name, stage)
            return self._token

    # Replacing and putting back

    def _set(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` (or a dictionary item), to be undone later."""
        self._undo.append(monkeypatch.put(owner, name, lambda _: value))

    def _name(self, owner: Any, name: str, stage: str) -> None:
        value = owner[name] if isinstance(owner, dict) else getattr(owner, name)
        if type(value) is list:  # in place: items that the user adds meanwhile stay

            def put_back(items: list[Any] = value) -> None:
                items[:] = [v._ronde_value if type(v) is Named else v for v in items]

            self._undo.append(put_back)
            value[:] = [_in_stage(v, stage) for v in value]
        elif type(value) is tuple:
            self._set(owner, name, tuple(_in_stage(v, stage) for v in value))
        elif (replacement := _in_stage(value, stage)) is not value:
            self._set(owner, name, replacement)

    def _patch(self) -> None:
        """Replace the known functions imported so far."""
        with _lock:
            if self._installed_in != os.getpid() or self._token is None:
                return
            self._modules = len(sys.modules)
            replaced: Replaced = {}
            if (id(builtins), "open") not in self._patched:
                for module in (builtins, io):
                    self._replace(module, "open", opener, replaced)
            for owner, name, stage, first in known.find_functions():
                timed = functools.partial(timed_function, stage=stage, first=first)
                self._replace(owner, name, timed, replaced)
            if "sqlite3" in sys.modules:
                self._replace(sys.modules["sqlite3"], "connect", timed_connect, replaced)
            if "PIL.Image" in sys.modules:
                self._patch_pillow(replaced)
            if replaced:
                self._patch_imports(replaced)

    def _patch_imports(self, replaced: Replaced) -> None:
        """Replace names in the user's modules: ``from simplejpeg import decode_jpeg``."""
        for module in user_modules():
            for name, value in list(vars(module).items()):
                pair = replaced.get(id(value))
                if pair is not None and pair[0] is value:
                    self._set(module, name, pair[1])

    def _replace(
        self, owner: Any, name: str, make: Callable[[Any], Any], replaced: Replaced
    ) -> None:
        if (id(owner), name) in self._patched:
            return
        self._patched.add((id(owner), name))
        original = getattr(owner, name)
        with suppress(TypeError, AttributeError):  # a class written in C cannot be changed
            self._undo.append(monkeypatch.put(owner, name, make))
            replaced[id(original)] = (original, getattr(owner, name))

    def _patch_pillow(self, replaced: Replaced) -> None:
        from PIL import Image, ImageFile  # Pillow imports the second when it first opens a file

        image: Any = Image
        base = ImageFile.ImageFile
        self._replace(image, "open", functools.partial(timed_function, stage="decode"), replaced)
        self._replace(image.Image, "convert", functools.partial(image_convert, base=base), replaced)
        kinds, own = [base], []
        while kinds:
            kind = kinds.pop()
            kinds += kind.__subclasses__()
            if "load" in vars(kind) and kind not in own:
                own.append(kind)
        for kind in own:
            self._replace(kind, "load", functools.partial(image_load, plain=kind is base), replaced)

    # Looking on: ronde.data.named_stages.Listener

    def call(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a stage named by the user or a pipeline."""
        if self._token is None:
            return function(*args, **kwargs)
        account = self.account()
        number = account.slot.stage(name)
        if account.current == number:
            return function(*args, **kwargs)
        if name == "collate" and len(args) == 1:
            return self.batch(function, args[0])
        return account.run(number, function, *args, **kwargs)

    def enter(self, name: str) -> None:
        """A named block begins."""
        if self._token is None:
            return
        account = self.account()
        account.enter(account.slot.stage(name))

    def leave(self, name: str) -> None:
        """A named block ends."""
        account: StageTimer | None = getattr(local, "account", None)
        if account is not None and account.stack and account.probe is self:
            account.leave()

    # Making samples

    def make(self, function: Callable[[Any], Any], argument: Any, samples: int) -> Any:
        """Run ``function(argument)``, which makes a batch; time in no stage is Python's.

        Args:
            samples: how many are in it.
        """
        if self._ended:
            return function(argument)
        account = self.account()
        at = account.python * FIELDS + SAMPLES
        before = account.values[at]
        account.size = 0
        account.enter(account.python)
        try:
            return function(argument)
        finally:
            account.leave()
            if account.values[at] == before:
                account.values[at] += samples

    def one(self, function: Callable[[Any], Any], argument: Any, n: int, many: bool = False) -> Any:
        """Run ``function(argument)``, which makes one sample, or a list of ``n`` if ``many``."""
        account = self.account()
        outer = account.size
        account.begin(n)
        account.enter(account.python)
        try:
            if self.replay and len(self._kept) >= _KEPT_SAMPLES:
                kept = [self._again() for _ in range(n)]
                return kept if many else kept[0]
            made = function(argument)
            if self.replay:
                self._keep(made if many else [made])
            return made
        finally:
            account.leave()
            account.size = outer

    def _keep(self, samples: Any) -> None:
        with _lock:
            for sample in list(samples)[: _KEPT_SAMPLES - len(self._kept)]:
                self._kept_bytes += _size_of(sample)
                if self._kept and self._kept_bytes > _KEPT_BYTES:
                    # No room for more: those there are stand for the rest.
                    self._kept += [self._kept[0]] * (_KEPT_SAMPLES - len(self._kept))
                    return
                self._kept.append(_rebuilt(sample))

    def _again(self) -> Any:
        self._turn += 1
        return _rebuilt(self._kept[self._turn % _KEPT_SAMPLES])

    def batch(self, collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
        """Run ``collate(samples)``."""
        account = self.account()
        number = account.slot.stage("collate")
        if account.current == number:
            return collate(samples)
        outer = account.size
        account.begin(len(samples) if hasattr(samples, "__len__") else 1)
        try:
            return account.run(number, collate, samples)
        finally:
            account.size = outer


def _size_of(value: Any) -> int:
    """Bytes of a sample's tensors, arrays, and texts; other parts count little."""
    if (inner := parts(value)) is not None:
        return sum(map(_size_of, inner.values()))
    size = len(value) if isinstance(value, str | bytes) else getattr(value, "nbytes", 0)
    return size if isinstance(size, int) else 0


def _rebuilt(sample: Any) -> Any:
    """The sample in containers of its own, which a collate function may take apart."""
    return map_leaves(lambda leaf: leaf, sample)


Replaced = dict[int, tuple[Any, Any]]
"""id of a function -> the function, and its replacement."""


def _in_stage(value: Any, stage: str) -> Any:
    """A callable under a stage's name, unless it has one already."""
    return value if type(value) is Named or hasattr(value, "ronde_stage") else Named(value, stage)


def _one_by_one(dataset: Any) -> bool:
    """Whether ``__getitems__`` is only a loop, so that samples can be observed one by one."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
        if not hasattr(dataset, "__getitems__"):
            return True
    return False


class _Watched(Dataset[Any]):
    """An observed dataset."""

    def __init__(self, dataset: Any, probe: Probe) -> None:
        self.__dict__.update(_ronde_dataset=dataset, _ronde_probe=probe, _ronde_token=None)

    def _ready(self) -> bool:
        probe = self._ronde_probe
        if probe._ended:
            return False
        ready = probe._token is not None and self._ronde_token is probe._token
        if not ready or probe._installed_in != os.getpid():
            self.__dict__["_ronde_token"] = probe.watch(self._ronde_dataset)
        return True

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # whoever asks what it is means the data set
        return type(self.__dict__["_ronde_dataset"])

    def __len__(self) -> int:
        return len(self._ronde_dataset)

    def __getitem__(self, i: Any) -> Any:
        dataset = self._ronde_dataset
        return self._ronde_probe.one(dataset.__getitem__, i, 1) if self._ready() else dataset[i]

    def _ronde_many(self, function: Any, ids: Any) -> Any:
        if not self._ready():
            return function(ids)
        return self._ronde_probe.one(function, ids, len(ids), many=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__getitems__":
            raise AttributeError(name)
        if name == "__getitems__" and _one_by_one(self.__dict__["_ronde_dataset"]):
            raise AttributeError(name)
        value = getattr(self.__dict__["_ronde_dataset"], name)
        if name in ("__getitems__", "attempt") and callable(value):
            return functools.partial(self._ronde_many, value)
        return value

    def __reduce__(self) -> Any:
        return _Watched, (self._ronde_dataset, self._ronde_probe)


class _WatchedStream(IterableDataset[Any]):
    """An observed iterable dataset."""

    def __init__(self, dataset: Any, probe: Probe) -> None:
        self.dataset = dataset
        self.probe = probe

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        token = None
        stream = iter(self.dataset)
        end = object()
        while True:
            if self.probe._ended:
                value = next(stream, end)
            else:
                if token is None or token is not self.probe._token:
                    token = self.probe.watch(self.dataset)
                value = self.probe.one(lambda _: next(stream, end), None, 1)
            if value is end:
                return
            yield value


class _WatchedCollate:
    """An observed collate function."""

    def __init__(self, collate: Callable[[list[Any]], Any], probe: Probe) -> None:
        self.collate = collate
        self.probe = probe

    def __call__(self, samples: list[Any]) -> Any:
        if self.probe._ended:
            return self.collate(samples)
        return self.probe.batch(self.collate, samples)
