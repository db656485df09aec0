"""The BLAS shim, built and called as MLX calls it, against numpy."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from ops.cpu import build_blas_shim

ROW_MAJOR, NO_TRANS, TRANS = 101, 111, 112
TYPES = {"cblas_sgemm": (np.float32, ctypes.c_float, 1e-5), "cblas_dgemm": (np.float64, ctypes.c_double, 1e-13)}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    try:
        path = build_blas_shim.build(tmp_path_factory.mktemp("blas") / "shim.so")
    except build_blas_shim.CannotBuildError as error:
        pytest.skip(str(error))
    return ctypes.CDLL(str(path))


def matrix(rows: int, columns: int, spare: int, dtype: DTypeLike, seed: int) -> NDArray[np.float64]:
    """`(rows, columns + spare)`: the leading dimension is larger than the row."""
    return np.random.default_rng(seed).normal(size=(rows, columns + spare)).astype(dtype)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("trans_a", [NO_TRANS, TRANS])
@pytest.mark.parametrize("trans_b", [NO_TRANS, TRANS])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 7, 5), (1, 300, 64), (2, 7, 5), (65, 33, 17), (3, 1, 9)])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (0.5, 1.0), (2.0, -0.25)])
def test_products(
    library: ctypes.CDLL, name: str, trans_a: int, trans_b: int, m: int, n: int, k: int, alpha: float, beta: float
) -> None:
    dtype, scalar, tolerance = TYPES[name]
    a = matrix(*((m, k) if trans_a == NO_TRANS else (k, m)), 3, dtype, 1)
    b = matrix(*((k, n) if trans_b == NO_TRANS else (n, k)), 2, dtype, 2)
    c = matrix(m, n, 4, dtype, 3)
    if beta == 0.0:
        c[:, :n] = np.nan  # beta 0 means that c is not read
    before = c.copy()
    left = a[:, : a.shape[1] - 3] if trans_a == NO_TRANS else a[:, : a.shape[1] - 3].T
    right = b[:, : b.shape[1] - 2] if trans_b == NO_TRANS else b[:, : b.shape[1] - 2].T
    expected = alpha * (left.astype(np.float64) @ right.astype(np.float64))
    if beta != 0.0:
        expected += beta * before[:, :n]
    call = getattr(library, name)
    call.restype = None
    sizes = [ctypes.c_int(size) for size in (ROW_MAJOR, trans_a, trans_b, m, n, k)]
    call(
        *sizes,
        scalar(alpha), a.ctypes.data_as(ctypes.c_void_p), ctypes.c_int(a.shape[1]),
        b.ctypes.data_as(ctypes.c_void_p), ctypes.c_int(b.shape[1]),
        scalar(beta), c.ctypes.data_as(ctypes.c_void_p), ctypes.c_int(c.shape[1]),
    )  # fmt: skip
    np.testing.assert_allclose(c[:, :n], expected, rtol=tolerance * 10, atol=tolerance * 10)
    np.testing.assert_array_equal(c[:, n:], before[:, n:])


def test_without_a_compiler_it_says_so_and_succeeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert build_blas_shim.main([str(tmp_path / "shim.so")]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "no fast BLAS for MLX" in err
    assert not (tmp_path / "shim.so").exists()


def test_a_failed_build_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("only built on Linux")
    broken = tmp_path / "broken.c"
    broken.write_text("this is not C\n")
    monkeypatch.setattr(build_blas_shim, "SOURCE", broken)
    with pytest.raises(build_blas_shim.CannotBuildError):
        build_blas_shim.build(tmp_path / "out" / "shim.so")
    assert list((tmp_path / "out").iterdir()) == []
