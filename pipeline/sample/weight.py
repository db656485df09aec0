"""Weight: writes FP16 tensors as one safetensors file. Equal tensors give equal bytes.

Format: https://huggingface.co/docs/safetensors (header length, JSON header padded to 8 bytes, raw data).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def save(tensors: Mapping[str, NDArray[np.float16]], path: Path) -> None:
    """Write `tensors` to `path`, in the order of their names."""
    names = sorted(tensors)
    # transformers refuses a file that does not say which framework's layout it has.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": "F16", "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(np.ascontiguousarray(tensors[name], "<f2").data)
