"""The tensor dtypes that a checkpoint file can hold."""

from __future__ import annotations

import torch

NATIVE: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
"""dtypes that safetensors knows, with their names in its header."""

AS_BYTES: dict[torch.dtype, str] = {
    getattr(torch, name): name
    for name in ("complex128", "complex32", "float8_e8m0fnu", "float4_e2m1fn_x2")
    if hasattr(torch, name)
}
"""dtypes stored as a flat row of bytes; the JSON tree remembers dtype and shape."""

BY_NATIVE_NAME: dict[str, torch.dtype] = {name: dtype for dtype, name in NATIVE.items()}
BY_BYTES_NAME: dict[str, torch.dtype] = {name: dtype for dtype, name in AS_BYTES.items()}
