"""Widths of Kimi-K3 (and DeepSeek) multi-head latent attention that the kernels are compiled for.

Head count, token count, block size and the number of blocks are run-time values and not here.
"""

from __future__ import annotations

from typing import Final

Q_LORA_RANK: Final = 1536
"""Width of the low-rank query, what w_q_b multiplies."""

KV_LORA_RANK: Final = 512
"""Width of the latent part of a cache row, the part without position."""

QK_ROPE_HEAD_DIM: Final = 64
"""Width of the part that carries the rotary position embedding."""

QK_NOPE_HEAD_DIM: Final = 128
"""Width of a head's query and key without position, in prefill."""

QK_HEAD_DIM: Final = QK_NOPE_HEAD_DIM + QK_ROPE_HEAD_DIM
"""Width of a head's query and key in prefill: 192."""

V_HEAD_DIM: Final = 128
"""Width of a head's value in prefill."""

LATENT_DIM: Final = KV_LORA_RANK + QK_ROPE_HEAD_DIM
"""Width of one cache row and of one absorbed query head: 576."""

DS_MLA_TILE: Final = 128
"""Elements that share one scale in the 656-byte cache row."""

DS_MLA_SCALE_OFFSET: Final = KV_LORA_RANK
"""Byte at which the four fp32 tile scales of a 656-byte row begin."""

DS_MLA_ROPE_OFFSET: Final = DS_MLA_SCALE_OFFSET + 4 * (KV_LORA_RANK // DS_MLA_TILE)
"""Byte at which the 16-bit RoPE part of a 656-byte row begins: 528."""

DS_MLA_ROW_BYTES: Final = DS_MLA_ROPE_OFFSET + 2 * QK_ROPE_HEAD_DIM
"""Bytes of one fp8_ds_mla cache row: 656."""

CHUNK_ELEMENTS: Final = 8
"""Elements that one thread moves at a time (16 bytes of a 16-bit type)."""

CTYPES: Final = {"bfloat16": "__nv_bfloat16", "float16": "__half"}
"""The types of the inputs, and what CUDA calls them."""
