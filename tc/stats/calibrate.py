"""One pass over the calibration tokens: what every init needs of the teacher, on disk.

The statistics of the attention are a few numbers a head. Inputs and contexts of each layer go to
one file a layer as they come, so that memory holds one batch whatever the number of tokens.

Shape letters: N sequences, B batch, T tokens, L layers, H query heads, V value dim, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tc.artifacts import StreamedTensors, disk_errors, load_tensors, require_space, save_tensors
from tc.data import Packed
from tc.errors import TCError
from tc.stats.attention import AttentionStatistics
from tc.teacher.capture import capture

BATCH = 4
"""Sequences of a forward pass."""

PARTS = ("calibration", "selection")


@dataclass
class LayerBatch:
    """What one teacher layer saw and said on some sequences.

    Attributes:
        x: the attention module's input `[N, T, D]`.
        context: the heads' weighted values `[N, T, H V]`, which its o_proj reads.
        starts: bool `[N, T]`, True at the first token of a packed document.
    """

    x: torch.Tensor
    context: torch.Tensor
    starts: torch.Tensor

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: slice) -> LayerBatch:
        return LayerBatch(self.x[rows], self.context[rows], self.starts[rows])

    def to(self, device: torch.device | str) -> LayerBatch:
        """Moves everything to a device, activations in float32."""
        return LayerBatch(
            self.x.to(device, torch.float32),
            self.context.to(device, torch.float32),
            self.starts.to(device),
        )


class Recorder:
    """Writes a capture to the layers' files, and gathers statistics where it is told to."""

    def __init__(
        self, files: list[StreamedTensors], part: str, statistics: AttentionStatistics | None
    ) -> None:
        self.files, self.part, self.statistics = files, part, statistics

    def on_input(self, layer: int, hidden_states: torch.Tensor) -> None:
        """Appends x."""
        self.files[layer].append(f"{self.part}_x", hidden_states)

    def on_context(self, layer: int, context: torch.Tensor) -> None:
        """Appends the context."""
        self.files[layer].append(f"{self.part}_context", context)

    def on_final(self, hidden_states: torch.Tensor) -> None:
        """Appends what the final norm says, as the input of a layer behind the last."""
        self.files[-1].append(f"{self.part}_x", hidden_states)

    def on_attention(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float,
    ) -> None:
        """Adds to the statistics."""
        if self.statistics is not None:
            self.statistics.add(layer, query, key, mask, scaling)


def calibrate(
    model: PreTrainedModel,
    parts: dict[str, Packed],
    folder: Path,
    progress: Callable[[int], None] = lambda tokens: None,
) -> dict[str, int]:
    """Runs the teacher over calibration and selection tokens and writes what its layers did.

    Args:
        model: the teacher.
        parts: the packed tokens of `PARTS`; statistics come from `calibration` alone.
        folder: an existing folder to write into.
        progress: told how many tokens each step has done.

    Returns:
        The number of tokens of each part.

    Raises:
        TCError: for NaN or infinity in the teacher, or a disk without room.
    """
    config = model.config
    layout = _layout(model, parts)
    behind = {name: size for name, size in layout.items() if name.endswith("_x")}
    layouts = [layout] * config.num_hidden_layers + [behind]
    require_space(folder, sum(map(_bytes, layouts)), "calibration")
    statistics = AttentionStatistics(config.num_hidden_layers, config.num_attention_heads)
    with disk_errors(folder), ExitStack() as stack:
        files = [
            stack.enter_context(closing(StreamedTensors(layer_file(folder, i), layout)))
            for i, layout in enumerate(layouts)
        ]
        for part in PARTS:
            gather = statistics if part == "calibration" else None
            _run(model, parts[part], Recorder(files, part, gather), progress)
        assert all(file.is_complete for file in files)
        save_tensors(folder / "statistics.safetensors", statistics.means())
        starts = {part: _starts(parts[part]).to(torch.uint8) for part in PARTS}
        save_tensors(folder / "starts.safetensors", starts)
    return {f"{part}_tokens": parts[part].input_ids.numel() for part in PARTS}


def _layout(
    model: PreTrainedModel, parts: dict[str, Packed]
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    width = model.model.layers[0].self_attn.o_proj.in_features
    dims = {"x": model.config.hidden_size, "context": width}
    return {
        f"{part}_{name}": (model.dtype, (*parts[part].input_ids.shape, dim))
        for part in PARTS
        for name, dim in dims.items()
    }


def _bytes(layout: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in layout.values())


def _run(
    model: PreTrainedModel, tokens: Packed, recorder: Recorder, progress: Callable[[int], None]
) -> None:
    for start in range(0, len(tokens.input_ids), BATCH):
        ids = tokens.input_ids[start : start + BATCH].to(model.device)
        positions = tokens.position_ids[start : start + BATCH].to(model.device)
        capture(model, ids, recorder, position_ids=positions)
        progress(ids.numel())


def _starts(tokens: Packed) -> torch.Tensor:
    return tokens.position_ids == 0


def layer_file(folder: Path, layer: int) -> Path:
    """Where a layer's activations are; of a layer behind the last, only its input."""
    return Path(folder) / f"layer_{layer:03d}.safetensors"


@dataclass
class Calibration:
    """A finished calibration on disk."""

    folder: Path

    def statistics(self, layer: int) -> dict[str, torch.Tensor]:
        """A layer's attention statistics, each `[H]` float64 (see `tc.stats.attention`)."""
        means = load_tensors(self.folder / "statistics.safetensors")
        return {name: value[layer] for name, value in means.items()}

    def layer(self, layer: int) -> dict[str, LayerBatch]:
        """A layer's activations by part.

        Raises:
            TCError: if they hold NaN or infinity.
        """
        tensors = self._tensors(layer)
        starts = load_tensors(self.folder / "starts.safetensors")
        return {
            p: LayerBatch(tensors[f"{p}_x"], tensors[f"{p}_context"], starts[p].bool())
            for p in PARTS
        }

    def inputs(self, layer: int) -> dict[str, torch.Tensor]:
        """What a layer reads, `[N, T, D]` by part: the stream behind the layer's norm.

        The layer behind the last is the head, and its norm the final one.

        Raises:
            TCError: if they hold NaN or infinity.
        """
        tensors = self._tensors(layer)
        return {part: tensors[f"{part}_x"] for part in PARTS}

    def _tensors(self, layer: int) -> dict[str, torch.Tensor]:
        tensors = load_tensors(layer_file(self.folder, layer))
        for name, value in tensors.items():
            if not value.isfinite().all():
                raise TCError(
                    f"the teacher's activations {name!r} hold NaN or infinity in layer {layer}. "
                    "Try teacher.dtype=float32, or another checkpoint."
                )
        return tensors
