"""A fit asks Narwhals for row-wise expressions, sums, counts, least and largest values, and nothing
else. Others differ between engines: rank (narwhals#3177), quantile (narwhals#3564), std, or
whatever depends on an order.
"""

from pathlib import Path

import pytest

nw = pytest.importorskip("narwhals")
pytest.importorskip("pyarrow")

from generated import generated  # noqa: E402

import ronde.tables  # noqa: E402
from ronde.tables import Recipe  # noqa: E402

ROW_WISE = {"abs", "alias", "cast", "floor", "is_null"}
REDUCED = {"sum", "min", "max"}
OF_FRAMES = {"select", "filter", "with_columns", "group_by", "rows"}


def watched(monkeypatch, kind, called):
    """Write down which public methods of a class are called."""
    for name, method in list(vars(kind).items()):
        if name[0] == "_" or not callable(method):
            continue

        def call(self, *args, _name=name, _method=method, **more):
            called.add(_name)
            return _method(self, *args, **more)

        monkeypatch.setattr(kind, name, call)


def test_a_fit_uses_few_methods_of_narwhals(monkeypatch):
    of_expressions, of_frames = set(), set()
    tables = [generated(seed) for seed in (3, 5)]
    with monkeypatch.context() as patched:
        watched(patched, nw.Expr, of_expressions)
        watched(patched, nw.DataFrame, of_frames)
        for table, given in tables:
            Recipe.of(given).fit(table)
    assert of_expressions <= ROW_WISE | REDUCED and "floor" in of_expressions
    assert of_frames <= OF_FRAMES | {"to_arrow", "lazy"} and "group_by" in of_frames


def test_isnan_is_never_emitted():
    """DuckDB 2.0.1 gives a wrong answer to it."""
    for file in Path(ronde.tables.__file__).parent.glob("*.py"):
        code = [line.split("#")[0] for line in file.read_text().splitlines()]
        assert not [line for line in code if "isnan(" in line and "np.isnan(" not in line], file
