"""Reading a GGUF file: its header as plain values, its tensors, and what can be wrong with it."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tc.artifacts import hash_file
from tc.errors import TCError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from gguf import GGUFReader, ReaderTensor

MAGIC = b"GGUF"


@dataclass
class GgufFile:
    """An open GGUF file.

    Attributes:
        path: where it is.
        header: its metadata, decoded.
        tensors: by GGUF name, memory-mapped and still quantized.
    """

    path: Path
    header: dict[str, Any]
    tensors: dict[str, ReaderTensor]

    @property
    def architecture(self) -> str:
        """What `general.architecture` says, such as `llama`."""
        return str(self.header.get("general.architecture", "not stated"))

    @functools.cached_property
    def model_header(self) -> dict[str, Any]:
        """The model's own part of the header, by keys such as `block_count`."""
        prefix = f"{self.architecture}."
        own = {key: value for key, value in self.header.items() if key.startswith(prefix)}
        return {key.removeprefix(prefix): value for key, value in own.items()}

    @property
    def parameters(self) -> int:
        """All parameters; the rotary factors are constants, and tied embeddings are stored once."""
        tensors = self.tensors.items()
        return sum(int(t.n_elements) for name, t in tensors if name != "rope_freqs.weight")


def checked_hash(path: Path, expected: str | None) -> str:
    """The SHA-256 of a file.

    Raises:
        TCError: if there is no such file, or its hash is not the expected one.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise TCError(f"{path} {what}; teacher.path must name a GGUF file.")
    found = hash_file(path)
    if expected is not None and found != expected.lower():
        raise TCError(
            f"{path} ({path.stat().st_size} bytes) has the SHA-256 {found}, but teacher.sha256 is "
            f"{expected}: it is damaged or another file. Get it again, or state its hash "
            "(teacher.sha256=null to accept any)."
        )
    return found


def open_gguf(path: Path) -> GgufFile:
    """Opens a GGUF file and decodes its header; tensors stay on disk until they are asked for.

    Raises:
        TCError: if it is no GGUF file, truncated, damaged, big-endian, or one part of several.
    """
    _check_magic(path)
    try:
        reader = _strict_reader(path)
        header = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise TCError(
            f"{path} ({path.stat().st_size} bytes) is truncated or damaged: its header or tensors "
            f"cannot be read ({error}). Get the file again and compare its hash (teacher.sha256)."
        ) from error
    _check_readable(path, reader, header)
    return GgufFile(path, header, tensors)


def _check_magic(path: Path) -> None:
    if not path.is_file():
        raise TCError(f"{path} is not a file; teacher.path must name a GGUF file.")
    with open(path, "rb") as file:
        start = file.read(16)
    if start[:4] != MAGIC:
        raise TCError(
            f"{path} is not a GGUF file: it begins with {start!r}, not with {MAGIC!r}. Give a "
            ".gguf file (a Git LFS pointer must be fetched first), or use teacher.source=hf for a "
            "folder of safetensors."
        )


def _strict_reader(path: Path) -> GGUFReader:
    """The reader of gguf, but a read past the end of the file is an error.

    Its own slices come back short there, and a damaged array length could then loop for ever.
    """
    from gguf import GGUFReader

    class StrictReader(GGUFReader):
        def _get(
            self,
            offset: int,
            dtype: npt.DTypeLike,
            count: int = 1,
            override_order: Literal["I", "S", "<"] | None = None,
        ) -> np.ndarray:
            values = super()._get(offset, dtype, count, override_order)
            if len(values) < int(count):
                raise ValueError(f"the file ends inside a value at byte {offset}")
            return values

    return StrictReader(path)


def _check_readable(path: Path, reader: GGUFReader, header: dict[str, Any]) -> None:
    if reader.endianess.name.lower() != sys.byteorder:
        raise TCError(
            f"{path} is {reader.endianess.name.lower()}-endian and this machine is "
            f"{sys.byteorder}-endian; convert it with gguf-py's gguf_convert_endian."
        )
    parts = header.get("split.count", 0)
    if parts > 1:
        raise TCError(
            f"{path} is one of {parts} parts; join them with `llama-gguf-split --merge` and give "
            "the joined file."
        )


def dequantized(file: GgufFile, name: str) -> np.ndarray:
    """A tensor as writable float32, in the row-major shape that torch uses.

    Raises:
        TCError: if gguf cannot read its quantization.
    """
    import numpy as np
    from gguf.quants import dequantize

    tensor = file.tensors[name]
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        raise TCError(
            f"{file.path}: tensor {name} is stored as {tensor.tensor_type.name}, which gguf cannot "
            "read. Allowed: F32, F16, BF16, Q4_0 to Q8_0, the K and the IQ types; requantize it."
        ) from error
    return np.require(values, np.float32, ["C", "W"])
