"""Record when each storage of a computation appears and disappears, and which unit was running."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ronde.world.tensors import tensors_in


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of its elements, also if it shares them."""
    return int(tensor.numel()) * tensor.element_size()


def storages(value: Any) -> Iterator[tuple[torch.UntypedStorage, torch.Tensor]]:
    """Every storage in a value, each with a tensor that uses it."""
    for tensor in tensors_in(value):
        if tensor.layout is torch.strided:
            yield tensor.untyped_storage(), tensor
        elif tensor.layout is torch.sparse_coo:
            with torch.no_grad():
                for part in (tensor._indices(), tensor._values()):
                    yield part.untyped_storage(), part


def _workspace(func: Any, args: Any, result: Any) -> int:
    """Bytes that a kernel allocates for itself, as far as known.

    Convolutions on CPUs (oneDNN) reorder input and output into blocks of channels.
    """
    name = getattr(func, "__name__", "")
    if not name.startswith("convolution") or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return 0
    tensors = [t for t in args[:3] if isinstance(t, torch.Tensor)]
    if not tensors or tensors[0].device.type != "cpu" or tensors[0].dtype != torch.float32:
        return 0
    if name.startswith("convolution_backward"):
        return bytes_of(args[0]) + bytes_of(args[1])
    return bytes_of(args[0]) + sum(bytes_of(t) for t in tensors_in(result))


@dataclass(slots=True)
class LedgerEntry:
    """One storage.

    Attributes:
        size: bytes.
        unit, phase: that created it.
        floating: whether it can take gradients.
        last_read: the last unit that reads it in the forward pass, or its creator.
        read_bytes: of the largest tensor read from it.
        alive: whether it still exists.
    """

    size: int
    unit: int
    phase: str
    floating: bool
    last_read: int
    read_bytes: int = 0
    alive: bool = True


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every storage that appears, and the peak of live bytes in each unit and phase."""

    def __init__(self, known: Iterator[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unit, self.phase = 0, "forward"
        self.live = 0
        self.peaks: dict[tuple[str, int], int] = {}
        self.entries: list[LedgerEntry] = []
        # A known storage -> units that read it in the forward pass.
        self.readers: dict[int, set[int]] = {}
        self._by_key: dict[int, LedgerEntry] = {}
        self._refs: dict[int, Any] = {}
        self._known = {s._cdata: s for t in known for s, _ in storages(t)}

    def enter(self, unit: int, phase: str) -> None:
        """``unit`` starts."""
        self.unit, self.phase = unit, phase
        self._mark()

    def _mark(self, workspace: int = 0) -> None:
        key = (self.phase, self.unit)
        if self.live + workspace > self.peaks.get(key, -1):
            self.peaks[key] = self.live + workspace

    def _gone(self, key: int, entry: LedgerEntry) -> Callable[[Any], None]:
        def callback(_: Any) -> None:
            if entry.alive:
                entry.alive = False
                self.live -= entry.size
            if self._by_key.get(key) is entry:
                del self._by_key[key]
                self._refs.pop(key, None)

        return callback

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.phase == "forward":
            self._note_reads((args, kwargs))
        result = func(*args, **kwargs)
        self._note_writes(func, args, result)
        self._mark(_workspace(func, args, result))
        return result

    def _note_reads(self, arguments: Any) -> None:
        for storage, tensor in storages(arguments):
            key = storage._cdata
            entry = self._by_key.get(key)
            if entry is not None:
                # Tensors that a later unit reads are what a cut between the two has to send.
                if self.unit > entry.unit:
                    entry.last_read = max(entry.last_read, self.unit)
                    entry.read_bytes = max(entry.read_bytes, min(entry.size, bytes_of(tensor)))
            elif key in self._known:
                self.readers.setdefault(key, set()).add(self.unit)

    def _note_writes(self, func: Any, args: Any, result: Any) -> None:
        for storage, tensor in storages(result):
            key = storage._cdata
            if key in self._known:
                continue
            known = self._by_key.get(key)
            if known is not None:
                if storage.nbytes() > known.size and known.alive:
                    self.live += storage.nbytes() - known.size
                    known.size = storage.nbytes()
                continue
            size = storage.nbytes()
            if not size and "mkldnn_rnn_layer.default" in str(func):
                # A fake one reserves nothing. A real one (oneDNN) fills the gates, the cells and a
                # copy of the input, as measured.
                size = bytes_of(args[0]) + 5 * bytes_of(result[0])
            floating = tensor.is_floating_point() or tensor.is_complex()
            entry = LedgerEntry(size, self.unit, self.phase, floating, self.unit)
            self._by_key[key] = entry
            self._refs[key] = weakref.ref(storage, self._gone(key, entry))
            self.entries.append(entry)
            self.live += entry.size
