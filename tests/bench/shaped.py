"""What tests of a shaped link need of the machine, asked once: the question makes a namespace and removes it."""

from __future__ import annotations

import pytest

from bench import link

_WHY = link.missing()
needs_link = pytest.mark.skipif(bool(_WHY), reason=f"no shaped link here: {_WHY}")
