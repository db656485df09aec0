"""Who probably holds a prefix."""

from __future__ import annotations

from pipeline import prefix
from pipeline.affinity import Affinity


def _keys(*pages: int) -> list[bytes]:
    """Addresses of a prompt whose pages hold one token id each."""
    return prefix.chain(prefix.seed("c", ""), [page for page in pages for _ in range(64)])


def test_leading_pages_count_and_a_different_one_ends_them() -> None:
    hints = Affinity()
    hints.note("d-0", _keys(1, 2, 3))
    assert hints.held_tokens("d-0", _keys(1, 2, 3, 4)) == 192
    assert hints.held_tokens("d-0", _keys(1, 2, 9, 3)) == 128
    assert hints.held_tokens("d-0", _keys(9, 2, 3)) == 0
    assert hints.held_tokens("d-1", _keys(1, 2, 3)) == 0


def test_a_prefix_may_be_held_twice_and_leaves_with_its_replica() -> None:
    hints = Affinity()
    for name in ("d-0", "d-1"):
        hints.note(name, _keys(1, 2))
    hints.forget({"d-1"})
    assert [hints.held_tokens(name, _keys(1, 2)) for name in ("d-0", "d-1")] == [0, 128]
    hints.forget(set())
    assert hints.held_tokens("d-1", _keys(1, 2)) == 0


def test_what_was_not_noted_for_longest_is_forgotten_from_its_end() -> None:
    hints = Affinity(capacity=4)
    hints.note("d-0", _keys(1, 2, 3))
    hints.note("d-0", _keys(7, 8))
    assert hints.held_tokens("d-0", _keys(1, 2, 3)) == 128
    assert hints.held_tokens("d-0", _keys(7, 8)) == 128
