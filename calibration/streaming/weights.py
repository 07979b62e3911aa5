"""Parameters read from a checkpoint, plain or MXFP4, into the shapes the model wants."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

import numpy as np
import torch

from mxfp4.calibration.streaming.layout import PACKED, SCALES, Layout, weight_module
from mxfp4.converters.checkpoint import Checkpoint
from mxfp4.converters.header import StoredTensor
from mxfp4.converters.reader import ShardReader, SlabBuffer
from mxfp4.errors import DtypeError, ShapeError
from mxfp4.kernels.codec import dequantize
from mxfp4.tensor import MXTensor

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


class Weights:
    """Reads whole tensors of an open checkpoint by the names of model parameters.

    Use as a context manager. `layout` says how a stacked parameter is stored; None takes the
    checkpoint's own names.
    """

    def __init__(self, checkpoint: Checkpoint, layout: Layout | None = None) -> None:
        self._stored = {tensor.info.name: (shard, tensor) for shard, tensor in checkpoint.located()}
        self._checkpoint = checkpoint
        self.layout = layout or Layout(self._stored.keys(), {})
        self._buffer = SlabBuffer()
        self._stack = ExitStack()
        self._open: dict[int, ShardReader] = {}

    def __enter__(self) -> Weights:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.clear()
        self._stack.close()

    def holds(self, name: str) -> bool:
        """Whether a parameter can be read without knowing its shape."""
        return name in self._stored or weight_module(name) + PACKED in self._stored

    def parameter(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A model parameter in the given dtype.

        Raises `TensorNotFoundError` and `ShapeError` when the checkpoint does not fit the model.
        """
        if self.holds(name):
            found = (
                self._module(weight_module(name)) if name not in self._stored else self.raw(name)
            )
            if found.shape != shape:
                raise ShapeError(
                    f"the checkpoint has {list(found.shape)}, the model wants {list(shape)}",
                    tensor=name,
                )
            return found.to(dtype) if found.is_floating_point() else found
        result = torch.empty(shape, dtype=dtype)
        layout = self.layout
        slots = layout.slots(name, shape) if name in layout.names else layout.bank(name, shape)
        for slot in slots:
            slot.of(result).copy_(self.module(slot.module))
        return result

    def module(self, module: str) -> torch.Tensor:
        """The weight [N, K] of a module, dequantized if it is stored packed."""
        name = f"{module}.weight"
        return self.raw(name) if name in self._stored else self._module(module)

    def raw(self, name: str) -> torch.Tensor:
        """A stored tensor as it is."""
        shard, tensor = self._stored[name]
        return self._read(shard, tensor)

    def _module(self, module: str) -> torch.Tensor:
        codes, scales = self.raw(module + PACKED), self.raw(module + SCALES)
        rows, half = codes.shape
        packed = MXTensor(codes, scales, (rows, half * 2))
        return dequantize(packed, dtype=torch.float32)

    def _read(self, shard: int, tensor: StoredTensor) -> torch.Tensor:
        dtype = _DTYPES.get(tensor.info.dtype)
        if dtype is None:
            raise DtypeError(
                f"{tensor.info.dtype} tensors cannot be run here",
                tensor=tensor.info.name,
                hint="start from a BF16, FP16, FP32 or MXFP4 checkpoint",
            )
        if shard not in self._open:
            reader = ShardReader(self._checkpoint.shards[shard], self._buffer)
            self._open[shard] = self._stack.enter_context(reader)
        data = np.empty(tensor.info.byte_count, np.uint8)
        position = 0
        for piece in self._open[shard].pieces(tensor):
            data[position : position + len(piece)] = np.frombuffer(piece, np.uint8)
            position += len(piece)
        return torch.from_numpy(data).view(dtype).reshape(tensor.info.shape)
