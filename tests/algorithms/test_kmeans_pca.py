"""K-means and principal components: equal bits in any world, and scikit-learn's numbers."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.datasets import load_wine
from sklearn.decomposition import PCA

import zygote
from processes import PATHS, TESTS
from ronde import algorithms
from ronde.tables.reading import read_share
from ronde.world import ArgumentError, SampleError


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(3000, 6)) * [1, 2, 0.1, 5, 1, 3] + 4 * rng.integers(0, 4, (3000, 1)) + 100
    x[:200] = x[200:400]  # some rows twice
    return x


def test_equal_bits_on_any_number_of_workers_and_in_any_order(rows, tmp_path):
    np.save(tmp_path / "rows.npy", rows)
    worlds = ["1/whole/0", "2/whole/1", "2/empty/2", "3/uneven/0", "4/even/3"]
    done = zygote.run(
        [
            sys.executable,
            str(TESTS / "kmeans_worker.py"),
            str(tmp_path),
            str(tmp_path / "rows.npy"),
            *worlds,
        ],
        env={**os.environ, "PYTHONPATH": PATHS},
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, *others = (np.load(tmp_path / f"{w.replace('/', '-')}.npz") for w in worlds)
    for other in others:
        for name in first.files:
            assert first[name].tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize("shipped", [False, True])
def test_the_numbers_are_those_of_scikit_learn(rows, shipped):
    x = load_wine().data if shipped else rows
    start = x[np.random.default_rng(0).choice(len(x), 5, replace=False)]
    mine = algorithms.kmeans(x, 5, start=start)
    theirs = KMeans(5, init=start, n_init=1, tol=0, algorithm="lloyd").fit(x)
    np.testing.assert_allclose(mine.centers, theirs.cluster_centers_, rtol=1e-10)
    assert mine.inertia == pytest.approx(theirs.inertia_, rel=1e-10)
    assert np.array_equal(mine.predict(x), theirs.labels_)
    parts = algorithms.pca(x, 3)
    expected = PCA(3, svd_solver="covariance_eigh").fit(x)
    signs = np.sign((expected.components_ * parts.components).sum(axis=1))
    np.testing.assert_allclose(parts.components, expected.components_ * signs[:, None], atol=1e-10)
    np.testing.assert_allclose(parts.variance, expected.explained_variance_, rtol=1e-10)
    np.testing.assert_allclose(parts.transform(x), expected.transform(x) * signs, atol=1e-8)


def test_a_start_is_drawn_by_distance(rows):
    drawn = algorithms.kmeans(rows, 4, rounds=1)
    best = KMeans(4, n_init=10, random_state=0).fit(rows)
    assert drawn.inertia < 3 * best.inertia_


def test_what_cannot_be_clustered_is_refused(rows):
    for bad, said in [
        (np.where(rows > 120, np.nan, rows), "missing or infinite"),
        (np.array(3.0), r"the shape \(1,\): it must be"),
        (rows[:, 0], "must be"),
        (np.ones((50, 2)), "k=2: there are 1 distinct rows"),
    ]:
        with pytest.raises(ArgumentError, match=said):
            algorithms.kmeans(bad, 2)
    with pytest.raises(ArgumentError, match="components=7: 3000 rows of 6 columns have at most 6"):
        algorithms.pca(rows, 7)
    with pytest.raises(ArgumentError, match=r"start has the shape \(1, 6\)"):
        algorithms.kmeans(rows, 2, start=rows[:1])


def test_files_give_what_arrays_give(rows, tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    for part, name in ((rows[:1000], "a"), (rows[1000:], "b")):
        table = pa.table({f"c{i}": column for i, column in enumerate(part.T)})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=300)
    assert np.array_equal(
        algorithms.kmeans(tmp_path, 4).centers, algorithms.kmeans(rows, 4).centers
    )
    shares = [read_share(tmp_path, part, 3) for part in range(3)]
    assert [(low, total) for _, low, total in shares] == [(0, 3000), (1000, 3000), (2000, 3000)]
    assert np.array_equal(np.concatenate([np.array(t.columns).T for t, *_ in shares]), rows)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(SampleError, match="cannot be read"):
        algorithms.kmeans(tmp_path, 4)
