"""Corpus: a small deterministic text to train the tiny tokenizer on. Sentences from a word list, and invented words.

Real words make chat prompts tokenise into a sensible number of ids; the invented ones bring enough different pairs
to fill a vocabulary of about 1024.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

_WORDS = """
the a of and to in is it that was for on are with as his they be at one have this from or had by hot but some what
there we can out other were all your when up use word how said each she which their time will way about many then
them would write like so these her long make thing see him two has look more day could go come did my sound no most
number who over know water than call first people may down side been now find any new work part take get place made
live where after back little only round man year came show every good me give our under name very through just form
much great think say help low line before turn cause same mean differ move right boy old too does tell sentence set
three want air well also play small end put home read hand port large spell add even land here must big high such
follow act why ask men change went light kind off need house picture try us again animal point mother world near
build self earth father head stand own page should country found answer school grow study still learn plant cover
food sun four thought let keep eye never last door between city tree cross since hard start might story saw far sea
draw left late run while press close night real life few stop open seem together next white children begin got walk
example ease paper often always music those both mark book letter until mile river car feet care second group carry
took rain eat room friend began idea fish mountain north once base hear horse cut sure watch color face wood main
user assistant system model token prompt engine memory cache decode prefill question capital France Paris
"""
_ONSETS = "b br c ch d dr f fl g gr h j k l m n p pl qu r s sh st t th tr v w z"
_RIMES = "a ab ack ail an ar ash at e ed el en er est i ick id ill in ing ip ish o ock on or ost u ub ull um un ur"
_MARKS = (".", ".", ".", "?", "!", ",", ";", ":", " -", "\n")


def lines(count: int = 3000) -> Iterator[str]:
    """`count` lines; the same on every call and every platform."""
    draws = _draws()
    words, onsets, rimes = _WORDS.split(), _ONSETS.split(), _RIMES.split()

    def word() -> str:
        if next(draws) % 3:
            return _pick(words, draws)
        return "".join(_pick(onsets, draws) + _pick(rimes, draws) for _ in range(1 + next(draws) % 3))

    for number in range(count):
        line = [word() for _ in range(4 + next(draws) % 9)]
        line[0] = line[0].capitalize()
        yield f"{' '.join(line)}{_pick(_MARKS, draws)} {number * number}"


def _pick(choices: Sequence[str], draws: Iterator[int]) -> str:
    return choices[next(draws) % len(choices)]


def _draws() -> Iterator[int]:
    """16-bit numbers out of a SHA-256 counter: no generator whose stream a library update may change."""
    counter = 0
    while True:
        block = hashlib.sha256(f"corpus/{counter}".encode()).digest()
        yield from (int.from_bytes(block[at : at + 2], "little") for at in range(0, 32, 2))
        counter += 1
