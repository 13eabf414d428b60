"""XGBoost and LightGBM, driven round by round with shared cut points and given gradients."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ronde.algorithms.table_rows import TableRows, largest_codes
from ronde.algorithms.tree_model import TreeModel, import_library
from ronde.world import ArgumentError, World, identify, threads_per_worker
from ronde.world.consensus import broadcast_json, gather_json
from ronde.world.network import own_address

__all__ = ["ALLOWED", "LIBRARIES", "Booster", "TreeSettings"]

F64 = npt.NDArray[np.float64]
Gradients = Callable[[int, F64], tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]
"""(round, margins of this worker's rows) -> gradients and hessians."""

ALLOWED = {
    "xgboost": (
        "alpha",
        "colsample_bylevel",
        "colsample_bynode",
        "colsample_bytree",
        "gamma",
        "grow_policy",
        "interaction_constraints",
        "lambda",
        "max_cat_threshold",
        "max_cat_to_onehot",
        "max_delta_step",
        "max_leaves",
        "min_child_weight",
        "monotone_constraints",
    ),
    "lightgbm": (
        "cat_l2",
        "cat_smooth",
        "lambda_l1",
        "lambda_l2",
        "max_cat_threshold",
        "max_cat_to_onehot",
        "max_delta_step",
        "min_data_in_leaf",
        "min_data_per_group",
        "min_gain_to_split",
        "min_sum_hessian_in_leaf",
        "monotone_constraints",
        "num_leaves",
    ),
}
"""The libraries' parameters that give the same model on any number of workers."""


@dataclass(frozen=True)
class TreeSettings:
    """What to train.

    Attributes:
        base: margin of every row before the first tree, one a class.
        prior: the same as XGBoost's ``base_score``.
    """

    objective: str
    native: str
    classes: int
    base: list[float]
    prior: list[float]
    depth: int
    rate: float
    bins: int
    seed: int
    params: dict[str, Any]


class Booster(Protocol):
    """A library's booster in the middle of a training."""

    def validation_margins(self) -> F64:
        """Margins of this worker's validation rows."""

    def rounds(self) -> int:
        """How many rounds of trees it has."""

    def content(self) -> bytes:
        """The model so far, for a checkpoint."""

    def model(self, rounds: int) -> TreeModel:
        """The model of the first rounds."""


AfterRound = Callable[[int, Booster], bool]
"""(rounds done, booster) -> whether the training is over."""


def _address(me: World) -> str:
    """This worker's address for the others."""
    if len(set(gather_json(me, me.host))) == 1:
        return "127.0.0.1"
    identity = identify(os.environ)
    interface = identity.interface or os.environ.get("GLOO_SOCKET_IFNAME")
    return own_address(identity.address or me.host, interface)


def _threads(me: World) -> int:
    return int(os.environ.get("OMP_NUM_THREADS") or threads_per_worker(me.local_size))


def _shape(margin: Any, settings: TreeSettings) -> F64:
    values = np.asarray(margin, dtype=np.float64)
    return values.reshape(-1, settings.classes) if settings.classes > 1 else values


@contextlib.contextmanager
def _signals(how: signal.Sigmasks) -> Iterator[None]:
    """Block or unblock this thread's signals.

    A wait on a socket with a time limit ends at any signal that has a handler, the hang watch's
    question for a stack too; both libraries take that for a lost connection.
    """
    before = signal.pthread_sigmask(how, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _communicator(me: World) -> Iterator[None]:
    """XGBoost's own connections. Its tracker listens on the run's address."""
    if me.size == 1:
        yield
        return
    import xgboost as xgb
    from xgboost.collective import CommunicatorContext
    from xgboost.tracker import RabitTracker

    tracker, arguments = None, None
    address = _address(me)
    if me.is_main:
        tracker = RabitTracker(n_workers=me.size, host_ip=address, sortby="task")
        tracker.start()
        arguments = tracker.worker_args()
    arguments = broadcast_json(me, arguments)
    # Tasks are sorted as text, and a rank is the place of its task.
    with xgb.config_context(verbosity=0):  # it prints each rank
        context = CommunicatorContext(**arguments, dmlc_task_id=f"{me.rank:09d}")
        with _signals(signal.SIG_BLOCK), context, _signals(signal.SIG_UNBLOCK):
            yield
    if tracker is not None:
        tracker.wait_for()


class _XGBoost:
    def __init__(
        self,
        settings: TreeSettings,
        rows: TableRows,
        sample: TableRows,
        validate: TableRows | None,
        start: bytes | None,
        me: World,
    ) -> None:
        xgb = import_library("xgboost")
        self._xgb, self._settings, self._rows = xgb, settings, rows
        self._shared = {
            "feature_names": rows.names,
            "feature_types": ["c" if name in rows.levels else "q" for name in rows.names],
            "enable_categorical": True,
            "nthread": _threads(me),
        }
        params = {
            "objective": settings.native,
            "max_depth": settings.depth,
            "eta": settings.rate,
            "tree_method": "hist",
            "max_bin": settings.bins,
            "nthread": _threads(me),
            "seed": settings.seed,
            "seed_per_iteration": True,
            "base_score": settings.prior if settings.classes > 1 else settings.prior[0],
            "disable_default_eval_metric": True,
            **({"num_class": settings.classes} if settings.classes > 1 else {}),
            **settings.params,
        }
        # Cut points of a category reach up to the largest code; missing values move no others.
        codes = largest_codes(rows, me)
        last = np.full((1, len(rows.names)), np.nan, np.float32)
        for name, code in codes.items():
            last[0, rows.names.index(name)] = max(code, 0)
        weight = None if sample.weight is None else np.append(sample.weight, 1.0)
        bins = {"max_bin": settings.bins, **self._shared}
        reference = xgb.QuantileDMatrix(np.append(sample.x, last, axis=0), weight=weight, **bins)
        self._train = xgb.QuantileDMatrix(rows.x, rows.y, ref=reference, **bins)
        cache = [self._train]
        self._validation = None
        if validate is not None and len(validate.y):
            self._validation = xgb.DMatrix(validate.x, **self._shared)
            cache.append(self._validation)
        # Matrices are made before: making one in there is a collective, and not all ranks make all.
        self._exit = contextlib.ExitStack()
        self._exit.enter_context(_communicator(me))
        self._booster = xgb.Booster(params, cache, bytearray(start) if start else None)

    def run(self, start: int, rounds: int, gradients: Gradients, after: AfterRound) -> None:
        with self._exit:
            for number in range(start, rounds):
                self._booster.boost(
                    self._train,
                    number,
                    fobj=lambda margin, _: gradients(number, _shape(margin, self._settings)),  # noqa: B023
                )
                if after(number + 1, self):
                    return

    def validation_margins(self) -> F64:
        if self._validation is None:
            return _shape(np.empty(0), self._settings)
        margins = self._booster.predict(self._validation, output_margin=True)
        return _shape(margins, self._settings)

    def rounds(self) -> int:
        return int(self._booster.num_boosted_rounds())

    def content(self) -> bytes:
        return bytes(self._booster.save_raw("ubj"))

    def model(self, rounds: int) -> TreeModel:
        booster = self._booster[:rounds]
        return TreeModel.of_xgboost(booster, self._rows.levels)


@contextlib.contextmanager
def _without_info() -> Iterator[None]:
    """Drop what LightGBM's network says: its threads know no verbosity."""
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)
            file.seek(0)
            for line in file:
                if not line.startswith(b"[LightGBM] [Info]"):
                    os.write(1, line)


class _LightGBM:
    """One machine of LightGBM on each worker; two on one worker alone, the second with one row.

    LightGBM counts the rows of a leaf on one machine, and estimates them from hessians on several.
    Its limits on leaves use these counts. With at least two machines, any number of workers has the
    same estimate. Its network belongs to a thread, so a thread can be a machine.
    """

    def __init__(
        self,
        settings: TreeSettings,
        rows: TableRows,
        sample: TableRows,
        validate: TableRows | None,
        start: bytes | None,
        me: World,
    ) -> None:
        lgb = import_library("lightgbm")
        self._lgb, self._settings, self._rows, self._validate = lgb, settings, rows, validate
        data: dict[str, Any] = {
            "max_bin": settings.bins,
            "bin_construct_sample_cnt": max(1, len(sample.y)),
            "feature_pre_filter": False,
            "num_threads": _threads(me),
            "verbosity": -1,
        }
        self._params = {
            **data,
            "num_class": settings.classes,
            "max_depth": settings.depth,
            "num_leaves": min(2**settings.depth, 131_072),
            "learning_rate": settings.rate,
            "deterministic": True,
            "force_row_wise": True,
            "seed": settings.seed,
            **settings.params,
        }
        named = {"feature_name": rows.names, "categorical_feature": list(rows.levels)}
        shared = lgb.Dataset(sample.x, params=dict(data), free_raw_data=False, **named).construct()
        cut = len(rows.y) if me.size > 1 else len(rows.y) - 1
        if not cut:
            raise ArgumentError("library='lightgbm' needs two rows at least.")
        self._parts = [slice(0, cut), slice(cut, None)][: 2 if me.size == 1 else 1]
        self._sets = [
            lgb.Dataset(
                rows.x[part],
                rows.y[part],
                reference=shared,
                params=dict(data),
                free_raw_data=False,
                **named,
            )
            for part in self._parts
        ]
        self._start = start.decode() if start else None
        self._margins = np.tile(settings.base, (0 if validate is None else len(validate.y), 1))
        self._counted = 0
        self._machines = self._network(me)

    def _network(self, me: World) -> list[dict[str, Any]]:
        """The network parameters of this worker's machines. LightGBM listens on all addresses."""
        address = _address(me)
        reserved = [socket.socket() for _ in self._parts]
        for each in reserved:
            each.bind((address, 0))  # not listening: a rank that is early would meet this socket
        ports = [each.getsockname()[1] for each in reserved]
        own = [f"{address}:{port}" for port in ports]
        every = [place for places in gather_json(me, own) for place in places]
        for each in reserved:
            each.close()
        return [
            {
                "machines": ",".join(every),
                "local_listen_port": port,
                "num_machines": len(every),
                "tree_learner": "data",
                "pre_partition": True,
                "time_out": 5,
            }
            for port in ports
        ]

    def run(self, start: int, rounds: int, gradients: Gradients, after: AfterRound) -> None:
        if start >= rounds:
            self._booster = self._lgb.Booster(model_str=self._start)
            return
        base = np.asarray(self._settings.base)
        meeting = _Meeting(len(self._parts))
        joining = contextlib.ExitStack()

        def machine(number: int) -> None:
            at = start

            def objective(margin: Any, _: Any) -> Any:
                def all_rows(parts: list[F64]) -> Any:
                    joining.close()
                    margins = np.concatenate(parts) + (base if len(base) > 1 else base[0])
                    with _signals(signal.SIG_UNBLOCK):
                        return gradients(at, margins)

                pair = meeting.at(number, _shape(margin, self._settings), all_rows)
                return tuple(each[self._parts[number]] for each in pair)

            def after_round(env: Any) -> None:
                nonlocal at
                at += 1
                if number == 0:
                    self._booster = env.model
                # Where no leaf can be split there is no further round.
                more = env.model.current_iteration() == at

                def over(_: Any) -> bool:
                    with _signals(signal.SIG_UNBLOCK):
                        return not more or after(at, self)

                if meeting.at(number, None, over):
                    raise self._lgb.callback.EarlyStopException(at - 1, [])

            booster = self._lgb.train(
                {**self._params, **self._machines[number], "objective": objective},
                self._sets[number],
                rounds - start,
                init_model=self._lgb.Booster(model_str=self._start) if self._start else None,
                callbacks=[after_round],
                keep_training_booster=True,
            )
            booster.free_network()

        with warnings.catch_warnings(), joining:
            joining.enter_context(_without_info())
            warnings.filterwarnings("ignore", "Overriding the parameters from Reference")
            with _signals(signal.SIG_BLOCK):
                meeting.run(machine)

    def validation_margins(self) -> F64:
        if self._validate is not None and len(self._validate.y):
            for number in range(self._counted, self._booster.current_iteration()):
                added = self._booster.predict(
                    self._validate.x, raw_score=True, start_iteration=number, num_iteration=1
                )
                self._margins = self._margins + added.reshape(self._margins.shape)
                self._counted = number + 1
        return _shape(
            self._margins if self._settings.classes > 1 else self._margins[:, 0], self._settings
        )

    def rounds(self) -> int:
        return int(self._booster.current_iteration())

    def content(self) -> bytes:
        return bytes(self._booster.model_to_string(num_iteration=-1).encode())

    def model(self, rounds: int) -> TreeModel:
        settings = self._settings
        text = self._booster.model_to_string(num_iteration=rounds)
        return TreeModel.of_lightgbm(text, settings.native, settings.base, self._rows.levels)


class _Meeting:
    """Where the machines of one worker put what they have together."""

    def __init__(self, machines: int) -> None:
        self._parts: list[Any] = [None] * machines
        self._barrier = threading.Barrier(machines)
        self._result: Any = None

    def at(self, number: int, part: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """``combine`` of all machines' parts, which machine 0 calls."""
        self._parts[number] = part
        self._barrier.wait()
        if number == 0:
            self._result = combine(self._parts)
        self._barrier.wait()
        return self._result

    def run(self, machine: Callable[[int], None]) -> None:
        """Machine 0 in this thread, the others in threads of their own."""
        failures: list[BaseException] = []

        def other(number: int) -> None:
            try:
                machine(number)
            except BaseException as error:
                failures.append(error)
                self._barrier.abort()

        threads = [
            threading.Thread(target=other, args=(n,), daemon=True)
            for n in range(1, len(self._parts))
        ]
        for each in threads:
            each.start()
        try:
            machine(0)
        except threading.BrokenBarrierError:
            raise failures[0] from None
        except BaseException:
            self._barrier.abort()
            raise
        for each in threads:
            each.join()


LIBRARIES: dict[str, Any] = {"xgboost": _XGBoost, "lightgbm": _LightGBM}
